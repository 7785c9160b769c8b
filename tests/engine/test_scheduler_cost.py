"""What a decode step costs the host: no sequence is touched in Python, time grows with arrays only."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from deepinfer_ray.bench.scheduler import Bench, run


def python_calls(sequences: int) -> int:
    """Fewest calls (Python and C) of one schedule and commit over some steps."""
    bench = Bench(sequences)
    scheduler, counts = bench.scheduler, []
    previous = None
    for _ in range(12):
        calls = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        plan = scheduler.schedule()
        if previous is not None:
            scheduler.commit(*previous)
            scheduler.refresh(plan)
        scheduler.reclaim()
        sys.setprofile(None)
        previous = (plan, bench.model.run(plan))
        counts.append(calls)
    return min(counts[2:])


def test_a_decode_step_touches_no_sequence_one_by_one() -> None:
    small, large = python_calls(16), python_calls(256)
    assert large < small + 60  # 240 more sequences; appending blocks is one branch, whatever their number


def test_rows_and_growth() -> None:
    rows = run(sizes=(256, 512), steps=40)
    assert [row["sequences"] for row in rows] == [256, 512]
    assert set(rows[0]) >= {"sequences", "median_ms", "schedule_ms", "inputs_ms", "commit_ms"}
    cost = [row["schedule_ms"] + row["commit_ms"] for row in rows]
    assert cost[1] <= 2.5 * cost[0]
