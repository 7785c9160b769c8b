"""`bench policy`: scheduling policies of a lock-step fleet, compared on a simulated clock.

The real scheduler of every rank runs; only the model is replaced by a cost model of H200 GPUs (policy_cost.py
names its sources). It answers which of the original's constants are worth keeping: the vote intervals 70 and
100, the watermark 0.90, the blanket headroom, strict FIFO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer_ray.bench.policy_plots import draw
from deepinfer_ray.bench.policy_study import PER_RANK, SEATS, Lab, make_studies
from deepinfer_ray.errors import ConfigError


def run(
    seats: int = SEATS, per_rank: int = PER_RANK, studies: tuple[str, ...] = (), seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of all studies, or of the named ones; `ConfigError` for an unknown name."""
    known = {study.name: study for study in make_studies(seats)}
    for name in studies:
        if name not in known:
            raise ConfigError(f"there is no policy study {name!r}; choose from: {', '.join(known)}")
    lab = Lab(seats, per_rank, seed=seed)
    return [row for name, study in known.items() if not studies or name in studies for row in lab.rows(study)]


def plots(rows: list[dict[str, Any]], directory: Path) -> list[Path]:
    """SVG files of what `run` returned, and two timelines; the paths written."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in draw(rows).items():
        path = directory / f"policy-{name}.svg"
        path.write_text(svg, encoding="utf-8")
        written.append(path)
    return written
