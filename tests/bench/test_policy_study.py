"""Studies: rows, verdicts, and pictures of a small lab."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ray.bench import policy, policy_plots
from deepinfer_ray.bench.policy_study import (
    AMPLE_BLOCKS,
    FREQUENT,
    PARITY,
    RARE,
    Lab,
    Study,
    Workload,
    make_studies,
    tight_blocks,
    verdict,
)
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.errors import ConfigError

SMALL = Study(
    "intervals",
    "?",
    (RARE, FREQUENT),
    (Workload("steady", "uniform"), Workload("batch", "uniform")),
)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(seats=4, per_rank=4, ranks=2)


@pytest.fixture(scope="module")
def rows(lab: Lab) -> list[dict[str, Any]]:
    return lab.rows(SMALL)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1.05, 1.00], "better"),
        ([1.30, 0.97], "mixed"),
        ([0.95, 1.00], "worse"),
        ([0.80, 1.10], "mixed"),
        ([1.01, 0.99], "same"),
        ([1.04, 0.97], "mixed"),
    ],
)
def test_better_means_a_gain_without_a_loss(gains: list[float], expected: str) -> None:
    assert verdict(gains) == expected


def test_rows_summarise_their_workloads(rows: list[dict[str, Any]]) -> None:
    assert [(r["policy"], r["workload"]) for r in rows] == [
        ("70/100", "all"),
        ("16/16", "all"),
        ("70/100", "steady uniform"),
        ("70/100", "batch uniform"),
        ("16/16", "steady uniform"),
        ("16/16", "batch uniform"),
    ]
    assert all(r["gain"] == 1 and r["verdict"] == "reference" for r in rows if r["policy"] == "70/100")
    summary, parts = rows[1], rows[4:]
    assert summary["gain"] == pytest.approx((parts[0]["gain"] * parts[1]["gain"]) ** 0.5, abs=2e-3)
    assert summary["worst_gain"] == min(part["gain"] for part in parts)
    assert summary["mean_batch"] == pytest.approx(
        (parts[0]["mean_batch"] + parts[1]["mean_batch"]) / 2, abs=0.1
    )
    assert all(list(row) == list(rows[0]) for row in rows)


def test_a_pair_runs_once_whatever_its_name(lab: Lab, rows: list[dict[str, Any]]) -> None:
    workload = SMALL.workloads[0]
    assert lab.run(RARE, workload) is lab.run(replace(RARE, name="again"), workload)
    assert lab.run(RARE, workload) is not lab.run(replace(RARE, watermark=0.5), workload)


def test_a_timeline_can_be_asked_for_later(lab: Lab, rows: list[dict[str, Any]]) -> None:
    workload = SMALL.workloads[0]
    plain = lab.run(RARE, workload)
    traced = lab.run(RARE, workload, keep_timeline=True)
    assert traced.timeline
    assert traced.seconds == plain.seconds
    assert traced.timeline[-1][1] == pytest.approx(traced.seconds)
    assert {kind for _, _, kinds in traced.timeline for kind in kinds} == {"prefill", "decode", "idle"}


def test_every_study_has_parity_as_its_reference() -> None:
    references = {study.name: study.policies[0] for study in make_studies()}
    assert (references["intervals"].all_interval, references["intervals"].any_interval) == (70, 100)
    assert not references["idle"].idle_fast_path
    assert references["watermark"].watermark == 0.90
    assert references["headroom"].strict_headroom
    assert references["queue"].order == "fifo"
    assert references["together"] == PARITY
    parity = SchedulerSettings(num_blocks=2, max_model_len=100).parity()
    assert (parity.idle_fast_path, parity.strict_block_headroom) == (False, True)
    assert (PARITY.idle_fast_path, PARITY.strict_headroom) == (False, True)
    assert (PARITY.all_interval, PARITY.any_interval, PARITY.watermark) == (70, 100, 0.90)
    for study in make_studies():
        assert len({p.name for p in study.policies}) == len(study.policies)
        assert len({w.name for w in study.workloads}) == len(study.workloads)


@pytest.mark.parametrize("seats", [1, 24, 128])
def test_a_tight_pool_still_holds_the_longest_sequence(seats: int) -> None:
    """Below the watermark, else a partial prompt would hold up its own rest (spec/engine.md §6.7)."""
    for lengths, longest in (("uniform", 1536), ("lognormal", 6144), ("bimodal", 12544)):
        blocks = tight_blocks(lengths, 0.35, seats)  # type: ignore[arg-type]
        assert longest <= 0.8 * 128 * blocks
        assert blocks < AMPLE_BLOCKS


def test_an_unknown_study_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no policy study 'interval'; choose from: intervals, sensitivity"):
        policy.run(studies=("interval",))


def test_run_of_one_study_gives_its_rows_alone() -> None:
    rows = policy.run(seats=2, per_rank=1, studies=("headroom",))
    assert {row["study"] for row in rows} == {"headroom"}
    assert len(rows) == 2 * (1 + 5)


def test_plots_are_written_as_well_formed_svg(
    rows: list[dict[str, Any]], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_plots, "Lab", lambda: lab)
    written = policy.plots(rows, tmp_path / "plots")
    assert {path.name for path in written} == {
        "policy-intervals-gain.svg",
        "policy-intervals-speed.svg",
        "policy-intervals-wait.svg",
        "policy-intervals-idle.svg",
        "policy-timeline-parity.svg",
        "policy-timeline-16-16.svg",
    }
    for path in written:
        assert ET.fromstring(path.read_text()).tag.endswith("svg")
    assert "steady uniform" in (tmp_path / "plots" / "policy-intervals-speed.svg").read_text()


def test_committed_figures_bear_out_their_recommendation() -> None:
    path = Path(policy.__file__).parent / "results" / "policy.json"
    result = json.loads(path.read_text())
    assert {"name", "machine", "date", "rows", "parity", "recommended", "findings"} <= set(result)
    recommended = result["recommended"]
    name = f"{recommended['prefill_all_interval']}/{recommended['prefill_any_interval']}"
    everywhere = [result["rows"], *result["more_seeds"].values(), result["seats_128"]["rows"]]
    for rows in everywhere:
        verdicts = {(r["study"], r["policy"]): r["verdict"] for r in rows if r["workload"] == "all"}
        assert verdicts["intervals", name] == "better"
    studies = list(dict.fromkeys(row["study"] for row in result["rows"]))
    assert studies == [study.name for study in make_studies()]
