"""Random schedules for ranks in lockstep: the same runs on threads and on real gloo processes.

Imported by the vote property tests, and run as a script that forks one gloo process a rank (so that torch is
imported once): `lockstep_runs.py WORLD STORE_FILE FIRST_SEED COUNT OUT_FILE`.
Everything of a run follows from its seed: group size, settings, arrivals and aborts of every rank.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from deepinfer_ray.engine.phase_vote import VoteGroup
from deepinfer_ray.engine.simulation import Loop, create_scheduler
from deepinfer_ray.parallel.rank_group import TorchGroup

MAX_TURNS = 4000


@dataclass(frozen=True)
class Arrival:
    turn: int
    length: int
    max_tokens: int
    abort_after: int | None


@dataclass(frozen=True)
class Scenario:
    size: int
    settings: dict[str, Any]
    arrivals: list[list[Arrival]]
    """By rank, ascending turns."""

    @property
    def last_arrival(self) -> int:
        return max((a.turn for rank in self.arrivals for a in rank), default=0)


def scenario(seed: int) -> Scenario:
    rng = np.random.default_rng(seed)
    size = 2 + seed % 3
    settings = {
        "num_blocks": int(rng.integers(5, 14)),
        "max_model_len": 500,
        "max_batched_tokens": int(rng.integers(64, 400)),
        "max_seqs": int(rng.integers(1, 6)),
        "state_slots": 12,
        "num_drafts": int(rng.choice([0, 2, 5])),
        "prefill_all_interval": int(rng.integers(1, 8)),
        "prefill_any_interval": int(rng.integers(1, 8)),
        "idle_fast_path": bool(rng.random() < 0.7),
        "strict_block_headroom": bool(rng.random() < 0.3),
        "preemption": str(rng.choice(["stop", "recompute"])),
        "zos": bool(rng.random() < 0.7),
    }
    settings["max_batched_tokens"] = max(settings["max_batched_tokens"], 6 * settings["max_seqs"])
    arrivals = []
    for _ in range(size):
        count = int(rng.integers(0, 6))
        turns = np.sort(rng.integers(0, 12, count)).tolist()
        arrivals.append(
            [
                Arrival(
                    turn=turn,
                    length=int(rng.choice([1, 20, 100, 127, 128, 129, 200, 300])),
                    max_tokens=int(rng.integers(1, 25)),
                    abort_after=int(rng.integers(0, 10)) if rng.random() < 0.2 else None,
                )
                for turn in turns
            ]
        )
    return Scenario(size, settings, arrivals)


def run_rank(seed: int, rank: int, group: VoteGroup) -> str:
    """One rank's run: its phases as a string of P and D. Raises if a record is missing or books do not
    balance."""
    case = scenario(seed)
    loop = Loop(create_scheduler(votes=group, **case.settings), lambda ids: (ids % 4).astype(np.int32))
    due = list(case.arrivals[rank])
    aborts: list[tuple[int, int]] = []
    added: list[int] = []
    phases: list[str] = []
    turn = 0
    while True:
        while due and due[0].turn <= turn:
            arrival = due.pop(0)
            sequence = loop.add(arrival.length, arrival.max_tokens)
            added.append(sequence.request_id)
            if arrival.abort_after is not None:
                aborts.append((turn + arrival.abort_after, sequence.request_id))
        for when, request_id in aborts:
            if when == turn:
                loop.scheduler.abort(request_id)
        agreement = loop.scheduler.agree()
        if not agreement.unfinished and turn > case.last_arrival:
            break
        phases.append("P" if loop.turn(agreement).plan.is_prompt else "D")
        loop.scheduler.check_integrity()
        turn += 1
        if turn > MAX_TURNS:
            raise RuntimeError(f"seed {seed} rank {rank}: not done after {MAX_TURNS} steps")
    loop.flush()
    loop.scheduler.check_integrity()
    if sorted(loop.results) != sorted(added):
        raise RuntimeError(f"seed {seed} rank {rank}: {len(added)} requests, {len(loop.results)} records")
    return "".join(phases)


def run_process(rank: int, world: int, store: str, first_seed: int, count: int, out: str) -> None:
    """All runs of one gloo rank; its phases by seed go to `out.RANK`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {size: dist.new_group(list(range(size)), backend="gloo") for size in (2, 3, 4)}
    phases = {}
    for seed in range(first_seed, first_seed + count):
        size = scenario(seed).size
        if rank < size:
            phases[seed] = run_rank(seed, rank, TorchGroup(groups[size], name="vote"))
    with open(f"{out}.{rank}", "w") as file:
        json.dump(phases, file)
    dist.destroy_process_group()


def main(world: int, store: str, first_seed: int, count: int, out: str) -> int:
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_process, args=(rank, world, store, first_seed, count, out))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
