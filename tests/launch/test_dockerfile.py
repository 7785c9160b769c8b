"""The image's recipe: a linter, and what a linter does not know about this project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_ray.ops.libraries import LIBRARIES


@pytest.fixture(scope="module")
def recipe(root):
    """Instructions as (word, rest), continued lines joined, comments left out."""
    text = (root / "docker/Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


def hadolint(path):
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "--no-color", path], capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say(root, tmp_path):
    done = hadolint(root / "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text("FROM debian\nRUN cd /x && apt-get install wget\n")
    assert hadolint(worse).returncode == 1


def test_it_does_not_run_as_root(recipe):
    users = [rest for word, rest in recipe if word == "USER"]
    assert users == ["10001"]
    last_stage = max(index for index, (word, _) in enumerate(recipe) if word == "FROM")
    assert ("USER", "10001") in recipe[last_stage:]
    assert any(word == "RUN" and "useradd" in rest and "--uid 10001" in rest for word, rest in recipe)


def test_cuda_13_with_a_compiler_and_both_architectures(recipe):
    (image,) = [rest for word, rest in recipe if word == "ARG" and rest.startswith("CUDA_IMAGE")]
    assert re.fullmatch(r"CUDA_IMAGE=nvidia/cuda:13\.[1-9]\d*\.\d+-devel-ubuntu24\.04", image)
    environment = " ".join(rest for word, rest in recipe if word == "ENV")
    assert 'TORCH_CUDA_ARCH_LIST="9.0a;10.0a"' in environment


def test_everything_is_pinned(recipe):
    runs = " && ".join(rest for word, rest in recipe if word == "RUN")
    for command in re.findall(r"pip install [^&;]*", runs):
        assert "-c constraints.txt" in command or "--no-deps" in command, command
    for name in ("deep_gemm", "deep_ep", "flash_mla"):
        library = LIBRARIES[name]
        assert re.search(rf"\b{library.distribution}==\d", runs)
        assert not any(re.search(rf"(?<![\w-]){wrong}\b", runs) for wrong in library.wrong)


def test_what_is_copied_exists_and_is_not_ignored(recipe, root):
    ignored = (root / "docker/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [rest.split()[:-1] for word, rest in recipe if word == "COPY" and not rest.startswith("--from")]
    names = {name for names in copied for name in names}
    assert {"deepinfer_ray", "kernels", "constraints.txt", "jobs", "configs"} <= names
    for name in names:
        assert (root / name).exists()
        assert f"!{name}" in ignored
