"""A gang that was lost may wait for its new machine longer than the first placement may take."""

from __future__ import annotations

import os
import signal
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.errors import PlacementError
from deepinfer_ray.fleet.backend import WorkItem
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.fleet.placement import Placement
from deepinfer_ray.fleet.watch import Patience

pytestmark = pytest.mark.ray


def run_past_a_death(stub: ModuleType, patience: Patience) -> int:
    """The attempts of one row during which its rank was killed."""
    options = FleetOptions(cpus_per_rank=0.5, patience=patience)
    with RayFleet("m", None, 1, device="cpu", engine_factory=stub.make, options=options) as fleet:
        fleet.submit([WorkItem(0, stub.prompt(stub.SLOW, 300), SamplingParams(), 0)])
        os.kill(fleet.status()["ranks"][0]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if results := fleet.poll(0.5):
                return results[0].attempts
    raise AssertionError("the row did not end")


@pytest.mark.parametrize("replacement", [30.0, 2.0])
def test_a_machine_that_must_be_started_first(
    cluster: Any,
    stub: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replacement: float,
) -> None:
    """The second placement is met four seconds after it was asked for."""
    placed, asked = Placement.placed, dict[str, float]()

    def late(placement: Placement) -> bool:
        since = asked.setdefault(placement.name, time.monotonic())
        return placed(placement) and (placement.name.endswith("-g0") or time.monotonic() - since > 4)

    monkeypatch.setattr(Placement, "placed", late)
    patience = Patience(placement=1.5, replacement=replacement)
    if replacement > 4:
        assert run_past_a_death(stub, patience) == 2
        assert "the job waits for 30 s in all" in caplog.text
    else:
        with pytest.raises(PlacementError, match=r"was not met within [23]\.?\d* s"):
            run_past_a_death(stub, patience)


def test_the_wait_begins_when_the_last_other_gang_is_gone(stub: ModuleType) -> None:
    """A gang waited for two hours beside one that ran; then that one died, and both machines are to come."""
    now = [0.0]
    fleet = RayFleet("m", None, 2, engine_factory=stub.make, clock=lambda: now[0])
    other: Any = SimpleNamespace(index=0, stage="up")
    lost: Any = SimpleNamespace(
        index=1, stage="placing", generation=1, late=True, since=0.0,
        placement=SimpleNamespace(failure=lambda waited_s, **_: PlacementError(f"{waited_s:g} s")),
    )  # fmt: skip
    fleet._gangs.put(other)
    fleet._gangs.put(lost)
    for now[0] in (100.0, 7200.0):
        assert fleet._vigil.overdue(lost, fleet._gangs) is None
    other.stage = "placing"
    now[0] += Patience().replacement - 1
    assert fleet._vigil.overdue(lost, fleet._gangs) is None
    now[0] += 2
    with pytest.raises(PlacementError, match="8101 s"):
        fleet._vigil.overdue(lost, fleet._gangs)
