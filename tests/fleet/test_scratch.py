"""Temporary directories of local clusters outlive neither a clean end nor a killed driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deepinfer_ray.fleet.scratch import Scratch, sweep


def test_deleted_at_the_end(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    (scratch.path / "session").mkdir()
    scratch.delete()
    scratch.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_live_drivers_directory_is_left_alone(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    assert sweep(tmp_path) == []
    assert Scratch(tmp_path).path != scratch.path
    assert scratch.path.exists()


def test_what_was_kept_on_purpose_stays(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    (scratch.path / "log").write_text("why it failed")
    scratch.keep()
    assert sweep(tmp_path) == []
    assert (scratch.path / "log").read_text() == "why it failed"


def test_a_killed_drivers_directory_goes_with_the_next_one(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom deepinfer_ray.fleet.scratch import Scratch\n"
        "print(Scratch(Path(sys.argv[1])).path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    dead = Path(shown.stdout.strip())
    assert dead.exists()
    scratch = Scratch(tmp_path)
    assert not dead.exists()
    assert list(tmp_path.iterdir()) == [scratch.path]


def test_other_directories_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "dray-mine").mkdir()
    (tmp_path / "ray").mkdir()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2
