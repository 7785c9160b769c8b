"""What serves an operation on invented machines; which library counts among invented installs."""

from __future__ import annotations

import sys

import pytest

from deepinfer_ray.ops import registry
from deepinfer_ray.ops.libraries import LIBRARIES, Found, Library, import_apart, probe
from deepinfer_ray.ops.registry import OPERATIONS, Candidate, Operation, architecture, choose


def installed(module, *distributions, works=(True, ""), version="2.8.2"):
    return probe(
        LIBRARIES[module],
        distributions=distributions,
        importer=lambda library: works,
        version_of=lambda name: version,
    )


def test_every_reference_exists():
    for operation in OPERATIONS:
        (choice,) = [one for one in choose("cpu", {}) if one.operation == operation.name]
        assert choice.backend == "reference"
        assert callable(choice.load())
        assert choice.library is None


def test_every_passed_over_candidate_has_its_reason():
    for arch in ("cpu", "sm90", "sm100", "sm86"):
        for operation, choice in zip(OPERATIONS, choose(arch, {}), strict=True):
            assert len(choice.why_not) == len(operation.candidates)
            assert all(choice.why_not.values())


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (None, "cpu"),
        ((9, 0), "sm90"),
        ((10, 0), "sm100"),
        ((10, 3), "sm100"),
        ((8, 6), "sm86"),
        ((12, 0), "sm120"),
    ],
)
def test_architectures(capability, name):
    assert architecture(capability) == name


def test_installed_is_never_reason_enough():
    found = {name: Found(library, (name,), "9", True, True) for name, library in LIBRARIES.items()}
    for choice in choose("cpu", found):
        assert choice.backend == "reference"
        assert all("this device is cpu" in reason for reason in choice.why_not.values())
    (attention,) = [one for one in choose("sm100", found) if one.operation == "sparse_attention"]
    assert attention.why_not["flash_mla.flash_mla_sparse_fwd"] == "this version does not call it"
    (hopper,) = [one for one in choose("sm90", found) if one.operation == "sparse_attention"]
    assert hopper.why_not["flash_mla.flash_mla_sparse_fwd"] == "runs on sm100, this device is sm90"


def test_the_first_candidate_that_can_serve_is_taken(monkeypatch):
    vendor = Candidate("vendor", "deep_gemm", ("sm100",), "gemm", f"{__name__}:gemm")
    kernel = Candidate("tilelang", "tilelang", ("sm90", "sm100"), "double", "json:dumps")
    missing = Candidate("tilelang", "tilelang", ("sm90",), "gone", "deepinfer_ray.kernels.no_such_kernel:run")
    operation = Operation("double", "json:loads", (vendor, missing, kernel))
    monkeypatch.setattr(registry, "OPERATIONS", (operation,))
    tilelang = Found(LIBRARIES["tilelang"], ("tilelang",), "0.1.15", True, True)
    (choice,) = choose("sm90", {"tilelang": tilelang})
    assert (choice.backend, choice.library, choice.load().__name__) == ("tilelang", "tilelang", "dumps")
    assert choice.why_not == {
        "deep_gemm.gemm": "runs on sm100, this device is sm90",
        "tilelang.gone": "this version has no such kernel",
    }


@pytest.mark.parametrize(
    ("distributions", "works", "usable", "reason"),
    [
        ((), (True, ""), False, "not installed: pip install deepinfer-gemm (built from source after torch"),
        (("deepinfer-gemm",), (True, ""), True, ""),
        (
            ("deep-gemm",),
            (True, ""),
            False,
            "the wrong distribution: deep-gemm is another project with the same import name; pip uninstall",
        ),
        (("deep_gemm",), (True, ""), False, "the wrong distribution"),
        (
            ("deepinfer-gemm", "sgl-deep-gemm"),
            (True, ""),
            False,
            "deepinfer-gemm and sgl-deep-gemm both bring deep_gemm, which breaks both; keep deepinfer-gemm",
        ),
        (("sgl-deep-gemm",), (True, ""), True, "a third party's build: sgl-deep-gemm; the tested one is"),
        (("my-gemm",), (True, ""), True, "an unknown distribution: my-gemm"),
        (("deepinfer-gemm",), (False, "lacks fp8_fp4_mega_moe"), False, "lacks fp8_fp4_mega_moe"),
        (("deepinfer-gemm",), (False, "import fails: OSError: libcudart"), False, "import fails: OSError"),
    ],
)
def test_a_library_counts_by_its_distribution_and_what_it_can_do(distributions, works, usable, reason):
    found = installed("deep_gemm", *distributions, works=works)
    assert found.usable is usable
    assert found.reason.startswith(reason)
    assert found.importable == ((works[0] and usable) or works[1].startswith("lacks"))


def test_a_library_for_a_newer_python():
    (one,) = [library for library in LIBRARIES.values() if library.module == "tile_kernels"]
    found = probe(one, distributions=())
    if sys.version_info < (3, 12):
        assert found.reason == f"not installed: needs Python 3.12, this is 3.{sys.version_info.minor}"
    else:
        assert found.reason == "not installed: pip install tile-kernels (needs CUDA 13.1)"


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("wanted = 1\nprint('noise')\n", (True, "")),
        ("other = 1\n", (False, "lacks wanted")),
        ("raise ImportError('no libcuda')\n", (False, "import fails: ImportError: no libcuda")),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
            (False, "import ends its process with status"),
        ),
    ],
)
def test_imports_happen_in_a_process_of_their_own(tmp_path, monkeypatch, content, answer):
    (tmp_path / "probed_library.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    works, problem = import_apart(Library("probed_library", "probed", "nothing", ("wanted",)))
    assert works is answer[0]
    assert problem.startswith(answer[1])
    assert "probed_library" not in sys.modules
