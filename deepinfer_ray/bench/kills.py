"""Jobs that are killed at random moments and run to the end: what was lost, doubled, changed or left behind.

Knows: a small job over two ranks on fake machines, whom to kill and when. Does not know: how a job resumes.
Every kill is a SIGKILL: of the driver, of a rank, or of the raylet of a machine that holds a rank. The moment
is drawn by seed: some time into the start, or shortly after the n-th part was committed. A killed driver is
started again with the same command. All rows are then compared with those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deepinfer_ray.bench.fake_machines import FakeMachines, fake_machines

Victim = Literal["driver", "rank", "raylet"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)

ROWS = 128
ROWS_PER_PART = 8
RANKS = 2
MACHINES = RANKS + 1  # one to spare
FREE_COLUMNS = ("attempts", "cached_tokens")
"""What may differ after a kill: how often a row was tried, and which prompts met a common head in a cache."""

LATE_S = 0.4
"""A kill comes at most so long after the part that it waits for."""
RUN_TIMEOUT_S = 300.0
CLEAN_TIMEOUT_S = 20.0
KEPT = {"manifest.json", "config.json", "summary.json", "report.html"}
"""Files that a finished job may leave in `_deepinfer/`, beside the folder `stats`."""


@dataclass(frozen=True)
class Kill:
    """What the kills of one job did. at: where in it they struck. redone: rows that engines got again."""

    victims: tuple[Victim, ...]
    at: tuple[str, ...]
    lost: int
    duplicated: int
    different: int
    redone: int
    seconds: float
    left: tuple[str, ...]


class JobRun:
    """The driver of one output directory, as a process."""

    def __init__(self, flags: dict[str, Any], folder: Path, address: str) -> None:
        self.output = folder / "out"
        self.tally = folder / "tally"
        self.log = folder / "driver.log"
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "flags": {**flags, "--output": str(self.output)},
            "sets": [f"job.rows_per_part={ROWS_PER_PART}"],
            "tally": str(self.tally),
        }
        self._command = [sys.executable, "-m", "deepinfer_ray.bench.kills_driver", json.dumps(spec)]
        self._environment = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def parts(self) -> int:
        return len(list(self.output.glob("part-*.parquet")))

    def wait(self) -> None:
        """Until the job is done; `RuntimeError` with the log's end if it did not end well."""
        try:
            code = self.process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -1
        if code:
            end = self.log.read_text(errors="replace")[-6000:]
            raise RuntimeError(f"the driver ended with code {code}; its log ends with:\n{end}")

    def kill(self) -> None:
        """SIGKILL, and nothing of its own is left to wait for."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def rows(self) -> pa.Table:
        """All rows in part order."""
        return pa.concat_tables(pq.ParquetFile(part).read() for part in sorted(self.output.glob("part-*")))

    def strangers(self) -> list[str]:
        """Files that a finished job does not leave."""
        found = []
        for path in self.output.rglob("*"):
            name = path.relative_to(self.output)
            known = name.match("part-*.parquet") or name.match("_deepinfer/stats/run-*.jsonl")
            if path.is_file() and not known and not (name.parts[0] == "_deepinfer" and path.name in KEPT):
                found.append(str(name))
        return found

    def given(self) -> int:
        """Rows that engines were given, in all runs."""
        return self.tally.stat().st_size if self.tally.exists() else 0


class KillLab:
    """A cluster, an input and what an undisturbed job makes of it; `strike` disturbs one."""

    def __init__(self, machines: FakeMachines, folder: Path) -> None:
        self._machines = machines
        self._folder = folder
        self._flags = self._inputs()
        self._count = 0
        began = time.monotonic()
        clean = self._run("clean")
        clean.start()
        machines.wait_until(lambda: clean.parts > 0 or not clean.running, RUN_TIMEOUT_S)
        self.start_seconds = time.monotonic() - began
        clean.wait()
        self.seconds = time.monotonic() - began
        self._expected = by_id(clean.rows())
        if len(self._expected) != ROWS or clean.given() != ROWS:
            raise RuntimeError(f"the undisturbed job gave {len(self._expected)} of {ROWS} rows")

    def _inputs(self) -> dict[str, Any]:
        from deepinfer_ray.model.synthetic import make_checkpoint

        model = make_checkpoint(self._folder / "model", "tiny", layers=6, experts=4)
        random = np.random.default_rng(0)
        own = [
            {"max_tokens": int(random.integers(1, 12)), "temperature": 0.0 if row % 2 else 0.8, "logprobs": 1}
            for row in range(ROWS)
        ]
        rows = {
            "id": [f"r{row:04}" for row in range(ROWS)],
            "prompt": [f"row {row} " + "x" * int(random.integers(0, 40)) for row in range(ROWS)],
            "sampling": list(map(json.dumps, own)),
        }
        pq.write_table(pa.table(rows), self._folder / "in.parquet")
        return {
            "--model": str(model),
            "--input": [str(self._folder / "in.parquet")],
            "--id-column": "id",
            "--sampling-column": "sampling",
            "--dp": RANKS,
            "--device": "cpu",
            "--max-num-seqs": 8,
            "--max-model-len": 128,
        }

    def _run(self, name: str) -> JobRun:
        return JobRun(self._flags, self._folder / name, self._machines.address)

    def strike(self, victims: Sequence[Victim], seed: int) -> Kill:
        """Run a job, kill `victims` one after the other, let it come to its end.

        A job that ended before all had been killed does not count: the moments are drawn again.
        """
        random = np.random.default_rng(seed)
        for _ in range(10):
            self._count += 1
            run = self._run(f"{self._count:03}")
            began = time.monotonic()
            run.start()
            try:
                moments = self._strike(run, victims, random)
                run.wait()
            finally:
                if run.running:
                    run.kill()
            if len(moments) == len(victims):
                return self._judge(run, tuple(victims), moments, time.monotonic() - began)
        raise RuntimeError(f"ten jobs ended before {', '.join(victims)} had been killed")

    def _strike(self, run: JobRun, victims: Sequence[Victim], random: np.random.Generator) -> list[str]:
        """Where in the job each kill struck; fewer than `victims` if it ended before."""
        moments = []
        after = sorted(random.integers(0, ROWS // ROWS_PER_PART, len(victims)).tolist())
        for victim, part in zip(victims, after, strict=True):
            moment = self._wait_for_moment(run, part, random)
            if not (run.running and self._kill(run, victim, random)):
                break
            moments.append(f"{victim} {moment}")
            if victim == "driver":
                run.start()
            elif victim == "raylet":
                self._machines.add()  # while the job goes on: the next kill needs a spare one again
        return moments

    def _wait_for_moment(self, run: JobRun, part: int, random: np.random.Generator) -> str:
        if part == 0:
            wait_s = float(random.uniform(0, self.start_seconds))
            time.sleep(wait_s)
            return f"{wait_s:.2f} s into a start"
        self._machines.wait_until(lambda: run.parts >= part or not run.running, RUN_TIMEOUT_S)
        wait_s = float(random.uniform(0, LATE_S))
        time.sleep(wait_s)
        return f"{wait_s:.2f} s after part {part}"

    def _kill(self, run: JobRun, victim: Victim, random: np.random.Generator) -> bool:
        if victim == "driver":
            run.kill()
            return True
        self._machines.wait_until(lambda: bool(self._machines.ranks()) or not run.running, RUN_TIMEOUT_S)
        ranks = self._machines.ranks()
        if not ranks or not run.running:
            return False
        chosen = ranks[int(random.integers(len(ranks)))]
        if victim == "raylet":
            self._machines.kill(chosen.node_id)
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen.pid, signal.SIGKILL)
            return True
        return False

    def _judge(self, run: JobRun, victims: tuple[Victim, ...], moments: list[str], seconds: float) -> Kill:
        self._machines.wait_until(lambda: not self._machines.held(), CLEAN_TIMEOUT_S)
        rows = run.rows()
        counts = Counter(rows["row_id"].to_pylist())
        got = by_id(rows)
        return Kill(
            victims,
            tuple(moments),
            lost=len(self._expected.keys() - got.keys()),
            duplicated=sum(count - 1 for count in counts.values()),
            different=sum(
                got.get(row_id, expected) != expected for row_id, expected in self._expected.items()
            ),
            redone=run.given() - ROWS,
            seconds=seconds,
            left=(*run.strangers(), *self._machines.held()),
        )


def by_id(table: pa.Table) -> dict[str, dict[str, Any]]:
    """Rows by id, without the columns that a kill may change."""
    return {row["row_id"]: row for row in table.drop_columns(list(FREE_COLUMNS)).to_pylist()}


@contextlib.contextmanager
def kill_lab() -> Iterator[KillLab]:
    """A lab whose cluster and files are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, fake_machines(MACHINES) as machines:
        yield KillLab(machines, Path(folder))


def figures(kills: Sequence[Kill]) -> list[dict[str, Any]]:
    """One row a victim: sums over its kills, and how many rows a kill cost on average and at most."""
    rows = []
    for victim in VICTIMS:
        own = [kill for kill in kills if kill.victims == (victim,)]
        if own:
            redone = [kill.redone for kill in own]
            rows.append(
                {
                    "victim": victim,
                    "kills": len(own),
                    "rows": ROWS * len(own),
                    "lost": sum(kill.lost for kill in own),
                    "duplicated": sum(kill.duplicated for kill in own),
                    "different": sum(kill.different for kill in own),
                    "left_behind": sum(len(kill.left) for kill in own),
                    "redone_mean": round(float(np.mean(redone)), 1),
                    "redone_max": max(redone),
                    "seconds": round(float(np.mean([kill.seconds for kill in own])), 1),
                }
            )
    return rows


def run(kills: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """`kills` kills in turn of driver, rank and raylet; a row of figures for each kind."""
    with kill_lab() as lab:
        return figures([lab.strike([VICTIMS[index % 3]], seed + index) for index in range(kills)])
