"""Pictures of the policy studies.

Knows: which columns of a row answer which question. Does not know: how the rows came about, but for the two
timelines, which it runs itself.
"""

from __future__ import annotations

from typing import Any

from deepinfer_ray.bench.policy_study import FREQUENT, PARITY, RARE, Lab, Policy, Workload
from deepinfer_ray.svg import Lane, Line, bar_chart, line_chart, timeline_chart

Row = dict[str, Any]
TIMELINE_S = 12.0
TIMELINE_WORK = Workload("steady", "bimodal")
ANY_OF_PARITY = 100


def draw(rows: list[Row]) -> dict[str, str]:
    """name -> SVG of every study in `rows`, and the timelines."""
    charts: dict[str, str] = {}
    for study in dict.fromkeys(row["study"] for row in rows):
        charts[f"{study}-gain"] = _gains(study, [row for row in rows if row["study"] == study])
    intervals = [row for row in rows if row["study"] == "intervals"]
    if intervals:
        charts["intervals-speed"] = _over_interval(intervals, "gain", "tokens/s beside 70/100")
        charts["intervals-wait"] = _over_interval(intervals, "ttft_p95_s", "p95 time to first token, s")
        charts["intervals-idle"] = _over_interval(intervals, "idle_time_share", "idle share of rank time")
    watermark = [row for row in rows if row["study"] == "watermark"]
    if watermark:
        charts["watermark-waste"] = _over_watermark(watermark)
    queue = [row for row in rows if row["study"] == "queue"]
    if queue:
        charts["queue-wait"] = _bars(queue, "ttft_mean_s", "mean time to first token, s")
        charts["queue-blocked"] = _bars(queue, "blocked_share", "rank-steps behind a blocked head")
    for policy in (PARITY, FREQUENT):
        charts[f"timeline-{policy.name.replace('/', '-')}"] = _timeline(policy)
    return charts


def _by(rows: list[Row], key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["workload"] != "all":
            groups.setdefault(row[key], []).append(row)
    return groups


def _gains(study: str, rows: list[Row]) -> str:
    policies = [row for row in rows if row["workload"] == "all"]
    return bar_chart(
        f"{study}: tokens/s beside {policies[0]['policy']}",
        [row["policy"] for row in policies],
        {
            "all workloads (geometric mean)": [row["gain"] for row in policies],
            "the worst one": [row["worst_gain"] for row in policies],
        },
        x_label="policy",
        y_label="ratio",
    )


def _over_interval(rows: list[Row], column: str, label: str) -> str:
    """Only policies whose two intervals are equal, and parity at its ANY interval."""
    lines = []
    for workload, group in _by(rows, "workload").items():
        points = []
        for row in group:
            every, anybody = row["policy"].split("/")
            if every == anybody or row["policy"] == RARE.name:
                points.append((float(anybody), float(row[column])))
        lines.append(Line(workload, sorted(points)))
    return line_chart(
        f"Vote intervals: {label}",
        lines,
        x_label=f"decode steps between votes ({ANY_OF_PARITY}: parity, 70 if all ranks want)",
        y_label=label,
        log_x=True,
    )


def _over_watermark(rows: list[Row]) -> str:
    lines = [
        Line(name, sorted((float(row["policy"]), float(row["recomputed_share"])) for row in group))
        for name, group in _by(rows, "workload").items()
    ]
    return line_chart(
        "Preemption waste under the watermark",
        lines,
        x_label="watermark (share of used blocks)",
        y_label="recomputed share of prefill",
    )


def _bars(rows: list[Row], column: str, label: str) -> str:
    groups = list(_by(rows, "workload"))
    series = {policy: [float(row[column]) for row in group] for policy, group in _by(rows, "policy").items()}
    return bar_chart(f"Order of the queue: {label}", groups, series, x_label="workload", y_label=label)


def _timeline(policy: Policy) -> str:
    """The first seconds of one run, a lane for each rank."""
    lab = Lab()
    run = lab.run(policy, TIMELINE_WORK, keep_timeline=True)
    steps = [step for step in run.timeline if step[0] < TIMELINE_S]
    lanes = [
        Lane(f"rank {rank}", [(start, end, kinds[rank]) for start, end, kinds in steps])
        for rank in range(lab.cost.ranks)
    ]
    title = f"{policy.name} ({policy.all_interval}/{policy.any_interval}): {TIMELINE_WORK.name}"
    return timeline_chart(title, lanes, x_label="seconds (simulated)")
