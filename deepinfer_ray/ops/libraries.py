"""Optional libraries: whether each can be imported, and whether its distribution is the right one.

Knows: spec/distributed.md §7, §8 as a table. Does not know: operations, devices in use.

Three names on PyPI (`deep-gemm`, `deep-ep`, `flash-mla`) are abandoned first versions with the import names
of the official builds, so that a name says nothing: a library counts by its distribution and by what it can
do. Imports happen in a process of their own: a binary for another machine may end the process that loads it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Library:
    """module: import name. distribution: the right one. wrong: distributions of the same import name that are
    another project. others: builds by third parties, which may work. needs: attributes of the right version.
    """

    module: str
    distribution: str
    serves: str
    needs: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    hint: str = ""
    min_python: tuple[int, int] = (3, 11)


LIBRARIES: dict[str, Library] = {
    library.module: library
    for library in (
        Library("tilelang", "tilelang", "compiles our own GPU kernels", ("language", "compile")),
        Library(
            "tile_kernels",
            "tile-kernels",
            "casts, gate, hyper-connections, Engram, rotary embedding on SM90 and SM100",
            hint="needs CUDA 13.1",
            min_python=(3, 12),
        ),
        Library(
            "deep_gemm",
            "deepinfer-gemm",
            "matrix products, index scores, fused experts on SM100",
            ("fp8_fp4_gemm_nt", "fp8_fp4_mega_moe"),
            wrong=("deep-gemm",),
            others=("sgl-deep-gemm", "tokenspeed-deepgemm"),
            hint="built from source after torch, with build isolation off",
        ),
        Library(
            "flash_mla",
            "deepinfer-flashmla",
            "sparse attention on SM100",
            ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "fused_norm_rope_attn_rope_cast"),
            wrong=("flash-mla",),
            others=("sgl-flash-mla",),
            hint="this release has no kernels for Hopper",
        ),
        Library(
            "deep_ep",
            "deepinfer-ep",
            "expert exchange, context gather, Engram fetch over NVLink and RDMA",
            ("EPBuffer",),
            wrong=("deep-ep",),
            others=("sgl-deep-ep-v25",),
            hint="needs the CUDA toolkit 13.1 at run time and torch's own NCCL >= 2.32.3",
        ),
        Library(
            "deep_select",
            "tokenspeed-deepselect",
            "top-k selection on SM100",
            ("interface",),
        ),
        Library("xgrammar", "xgrammar", "structured output (CPU)", ("GrammarCompiler", "GrammarMatcher")),
    )
}


@dataclass(frozen=True)
class Found:
    """What a probe saw. usable: importable, from an acceptable distribution, with all that is needed of it.

    reason: why it is not usable, else a remark or nothing.
    """

    library: Library
    distributions: tuple[str, ...] = ()
    version: str | None = None
    importable: bool = False
    usable: bool = False
    reason: str = ""


Importer = Callable[[Library], tuple[bool, str]]
"""(whether the import works and `needs` are there, what went wrong)."""


def distributions_of(module: str) -> tuple[str, ...]:
    """Installed distributions that bring a top-level import name, sorted."""
    return tuple(sorted(set(importlib.metadata.packages_distributions().get(module, ()))))


def probe(
    library: Library,
    *,
    distributions: Sequence[str] | None = None,
    importer: Importer | None = None,
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> Found:
    """Look at one library. distributions, importer, version_of: replaced in tests."""
    names = distributions_of(library.module) if distributions is None else tuple(distributions)
    if not names and (distributions is not None or not is_there(library.module)):
        if sys.version_info[:2] < library.min_python:
            needed, here = (".".join(map(str, pair)) for pair in (library.min_python, sys.version_info[:2]))
            return Found(library, reason=f"not installed: needs Python {needed}, this is {here}")
        hint = f" ({library.hint})" if library.hint else ""
        return Found(library, reason=f"not installed: pip install {library.distribution}{hint}")
    version = version_of(names[0]) if names else None
    wrong = [name for name in names if _normal(name) in map(_normal, library.wrong)]
    if wrong:
        return Found(
            library,
            names,
            version,
            reason=f"the wrong distribution: {wrong[0]} is another project with the same import name; "
            f"pip uninstall {wrong[0]} and install {library.distribution}",
        )
    if len(names) > 1:
        return Found(
            library,
            names,
            version,
            reason=f"{' and '.join(names)} both bring {library.module}, which breaks both; keep "
            f"{library.distribution if library.distribution in names else 'one'}",
        )
    works, problem = (importer or import_apart)(library)
    if not works:
        return Found(library, names, version, importable=problem.startswith("lacks"), reason=problem)
    remark = ""
    if names and _normal(names[0]) != _normal(library.distribution):
        known = "a third party's build" if names[0] in library.others else "an unknown distribution"
        remark = f"{known}: {names[0]}; the tested one is {library.distribution}"
    return Found(library, names, version, importable=True, usable=True, reason=remark)


def import_apart(library: Library) -> tuple[bool, str]:
    """Import a library in a process of its own and look for what is needed of it."""
    script = (
        "import importlib, json, os, sys\n"
        "name, needs = sys.argv[1], json.loads(sys.argv[2])\n"
        "say = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1)\n"  # what a library prints is not the answer
        "try:\n"
        "    module = importlib.import_module(name)\n"
        "    missing = [need for need in needs if not hasattr(module, need)]\n"
        "    answer = 'lacks ' + ', '.join(missing) if missing else ''\n"
        "except BaseException as error:\n"
        "    answer = 'import fails: ' + type(error).__name__ + ': ' + str(error).splitlines()[0][:300] "
        "if str(error) else 'import fails: ' + type(error).__name__\n"
        "say.write(json.dumps(answer)); say.flush(); os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, library.module, json.dumps(library.needs)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return False, f"import takes longer than {IMPORT_TIMEOUT_S:g} s"
    if done.returncode:
        return False, f"import ends its process with status {done.returncode}"
    problem: str = json.loads(done.stdout)
    return not problem, problem


def is_there(module: str) -> bool:
    """Whether a module can be found, without importing it (its packages are)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
