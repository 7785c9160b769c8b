"""Compiles `kernels.c` once for this machine and loads it; without a compiler there is nothing to load.

Knows: compilers, flags, the cache directory. Does not know: what the functions compute.
The library's name holds a digest of source, flags, compiler and processor features, so a stale or foreign one
is never loaded. It appears by one rename: any number of ranks may build it at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
SWITCH = "DEEPINFER_RAY_NATIVE"
"""Environment variable; `off` keeps to tensor operations."""
# No contraction: a fused multiply-add rounds once where the tensor operations round twice.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)
TIMEOUT_S = 120.0


def find_compiler() -> str | None:
    """The C compiler: `$CC`, else cc, gcc or clang on the path."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_directory() -> Path:
    """Where built libraries are kept: under `$XDG_CACHE_HOME` or `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "deepinfer-ray"


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT_S).stdout
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version, _processor_features().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(directory: Path | None = None) -> Path:
    """The library's path, compiled unless it is there. `OSError` or `subprocess` errors say what failed."""
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang or $CC) on the path")
    directory = directory or cache_directory()
    path = directory / f"kernels-{_digest(compiler)}.so"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        built = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        os.replace(built, path)
    return path


def load() -> ctypes.CDLL | None:
    """The loaded library, or None with the reason in the log: tensor operations give the same bits."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return None
    try:
        return ctypes.CDLL(str(build()))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()[:500]
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    logger.info("small CPU operations run as tensor operations, not as native code: %s", reason)
    return None
