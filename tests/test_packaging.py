"""The wheel and the sdist hold what they must, and the command runs from an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMPTS = "deepinfer_ray/toy/data/prompts.parquet"
PACKAGED = ["deepinfer_ray/py.typed", "deepinfer_ray/kernels/__init__.py", PROMPTS]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel and one sdist, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("dist")
    sources = folder / "sources"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        sources.mkdir(exist_ok=True)
        (sources / name).write_bytes((ROOT / name).read_bytes())
    for name in ("deepinfer_ray", "kernels"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(sources / name)], check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "out"), str(sources)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder / "out"


@pytest.mark.slow
def test_wheel_holds_every_package_and_data_file(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(PACKAGED) <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deepinfer_ray").rglob("*.py")}
    assert not modules - names, f"missing from the wheel: {sorted(modules - names)[:5]}"
    assert not [name for name in names if name.startswith(("tests", "jobs"))]


@pytest.mark.slow
def test_sdist_holds_the_sources_and_the_licence(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "kernels/__init__.py", PACKAGED[0], PROMPTS} <= names


@pytest.mark.slow
def test_command_runs_from_an_installed_wheel(archives: Path, tmp_path: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True, capture_output=True)
    code = "import deepinfer_ray.cli.main as m; print(m.__file__); m.run()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(site)), "another copy of the package was imported"
    assert "generate" in ran.stdout
