"""What a figure was measured on, and the frame that every benchmark's JSON has.

Knows: processor, accelerator, library versions, the date. Does not know: any benchmark.
"""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_machine() -> dict[str, Any]:
    """Processor, cores, thread count, accelerator and versions, as a JSON-able dict."""
    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(0) if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def report(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`{"name", "machine", "date", "rows"}`: what `bench NAME --json` prints."""
    return {
        "name": name,
        "machine": describe_machine(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
