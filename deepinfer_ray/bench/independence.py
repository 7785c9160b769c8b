"""What it costs on a CPU that a row's bits do not depend on its batch (model spec §9.4).

Every product pads its rows to a tile of 16 (`ops.linear`); here the same product runs padded and as it is, in
turns, for weights of the tiny preset and of the released model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from deepinfer_ray.ops.linear import linear

ROWS = (1, 2, 4, 8, 12, 16, 24, 64)
WEIGHTS = {"tiny wq_b": (1024, 128), "released wq_a": (1280, 5120)}
"""Output and input features."""
BUDGET_S = 0.12


def _turns(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of both, run in turns."""
    clock = time.perf_counter
    times: list[tuple[float, float]] = []
    end = clock() + BUDGET_S
    while clock() < end or len(times) < 5:
        start = clock()
        first()
        between = clock()
        second()
        times.append((between - start, clock() - between))
    mine, other = zip(*times, strict=True)
    return statistics.median(mine), statistics.median(other)


def run() -> list[dict[str, Any]]:
    """Rows `{"product", "rows", "padded_us", "plain_us", "ratio"}`."""
    found = []
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for name, shape in WEIGHTS.items():
            weight_OI = torch.randn(shape, generator=generator)
            for rows in ROWS:
                x_TI = torch.randn((rows, shape[1]), generator=generator)
                padded, plain = _turns(lambda: linear(x_TI, weight_OI), lambda: F.linear(x_TI, weight_OI))  # noqa: B023
                found.append(
                    {
                        "product": name,
                        "rows": rows,
                        "padded_us": round(1e6 * padded, 1),
                        "plain_us": round(1e6 * plain, 1),
                        "ratio": round(padded / plain, 2),
                    }
                )
    return found
