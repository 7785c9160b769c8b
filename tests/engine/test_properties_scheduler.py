"""Random runs of one rank: books balance after every step, tokens are right, nobody starves.

The starvation bound that is checked (fast path on; parity in brackets):
- progress: with a live request whose head is ready, no more than 4 [any_interval + 4] steps pass without a
  prefilled token, a committed token or a record;
- fairness: requests are scheduled for the first time in the order of their arrival;
- together: a request that needs c chunks and t tokens ends after at most W steps, W being the progress bound
  times the chunks and tokens, recomputed ones included, of everything that arrived before or runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine import decode
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.sequence import Sequence
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.simulation import Loop, Turn, create_scheduler, made_up_tokens
from deepinfer_ray.engine.state import SchedulerState


def reference(sequence: Sequence, limit: int, eos_every: int) -> tuple[list[int], str]:
    """What the request's output must be, one token at a time: (tokens, reason)."""
    params, out = sequence.request.params, []
    while True:
        position = sequence.prompt_len + len(out)
        token = int(made_up_tokens(np.array([sequence.request_id]), np.array([position]))[0])
        if eos_every and token % eos_every == 0:
            token = 1
        out.append(token)
        if token == 1 and not params.ignore_eos:
            return out, "stop"
        if position + 1 > limit or len(out) == params.max_tokens:
            return out, "length"


@dataclass
class Run:
    """One random run; everything follows from the seed."""

    seed: int
    parity: bool = False
    loop: Loop = field(init=False)
    added: list[Sequence] = field(default_factory=list)
    forked: set[int] = field(default_factory=set)
    idle_turns: int = 0

    def __post_init__(self) -> None:
        self.rng = rng = np.random.default_rng(self.seed)
        overrides: dict[str, Any] = {
            "num_blocks": int(rng.integers(4, 20)),
            "max_model_len": int(rng.integers(200, 700)),
            "max_seqs": int(rng.integers(1, 10)),
            "state_slots": int(rng.integers(3, 16)),
            "num_drafts": int(rng.choice([0, 1, 5])),
            "cp": int(rng.choice([1, 1, 2, 4])),
            "prefill_all_interval": int(rng.integers(1, 9)),
            "prefill_any_interval": int(rng.integers(1, 9)),
            "preemption": str(rng.choice(["recompute", "recompute", "stop"])),
            "chunked_prefill": bool(rng.random() < 0.8),
            "min_chunk_tokens": int(rng.choice([0, 0, 16])),
            "zos": bool(rng.random() < 0.6),
            "idle_fast_path": not self.parity,
            "strict_block_headroom": self.parity or bool(rng.random() < 0.3),
        }
        overrides["max_batched_tokens"] = max(
            int(rng.integers(40, 400)),
            overrides["max_seqs"] * (1 + overrides["num_drafts"]),
            0 if overrides["chunked_prefill"] else overrides["max_model_len"] + 8,
        )
        self.eos_every = int(rng.choice([0, 7, 40]))
        most = overrides["num_drafts"]
        self.loop = Loop(
            create_scheduler(**overrides),
            lambda ids: rng.integers(0, most + 1, len(ids)).astype(np.int32),
            self.eos_every,
        )

    @property
    def settings(self) -> SchedulerSettings:
        return self.loop.scheduler.settings

    def arrive(self) -> None:
        rng = self.rng
        cuts = self.settings.chunked_prefill and rng.random() < 0.2
        length = int(rng.choice([1, 5, 60, 127, 128, 129, 200, 260, 500, 800]))
        spans = []
        if rng.random() < 0.2 and length > 60:
            start = int(rng.integers(0, length - 50))
            spans = [(start, start + int(rng.integers(2, 50)))]
        self.added.append(
            self.loop.add(
                length,
                int(rng.integers(1, 60)),
                ignore_eos=bool(rng.random() < 0.3),
                image_spans=spans,
                checkpoints=rng.integers(1, 300, rng.integers(0, 3)).tolist() if cuts else [],
            )
        )

    def fork(self) -> None:
        scheduler = self.loop.scheduler
        parents = [
            s for s in scheduler.state.live.values() if s.row and scheduler.table.num_cached[s.row] > 0
        ]
        if not parents or self.loop.previous is not None:
            return
        parent = parents[int(self.rng.integers(len(parents)))]
        length = int(scheduler.table.len[parent.row])
        least = max(1, int(scheduler.table.num_cached[parent.row]))
        count = int(self.rng.integers(least, length + 1)) if least <= length else length
        params = SamplingParams(max_tokens=int(self.rng.integers(1, 30)), ignore_eos=True)
        request = Request(np.empty(0, np.int32), params, request_id=self.loop.take_id())
        child = scheduler.fork(parent.request_id, request, num_tokens=count)
        self.added.append(child)
        self.forked.add(child.request_id)

    def abort(self) -> None:
        if self.added:
            victim = self.added[int(self.rng.integers(len(self.added)))]
            alive = not victim.ended
            assert self.loop.scheduler.abort(victim.request_id) == alive

    def run(self, turns: int = 40, max_turns: int = 6000) -> None:
        scheduler, rng = self.loop.scheduler, self.rng
        for turn in range(max_turns):
            arriving = turn < turns
            if arriving:
                for _ in range(int(rng.poisson(0.4))):
                    self.arrive()
                if rng.random() < 0.08:
                    self.abort()
                if not self.parity and rng.random() < 0.1:
                    self.fork()
            elif not scheduler.has_unfinished:
                break
            between = self.abort if arriving and rng.random() < 0.05 else None
            self.check_turn(self.loop.turn(between=between))
        else:
            raise AssertionError(f"seed {self.seed}: not done after {max_turns} steps")
        self.loop.flush()
        scheduler.check_integrity()
        self.check_results()

    def check_turn(self, turn: Turn) -> None:
        scheduler = self.loop.scheduler
        scheduler.check_integrity()
        plan = turn.plan
        assert plan.num_tokens <= max(self.settings.token_budget, self.settings.max_seqs * 6)
        assert len(set(plan.rows.tolist())) == plan.num_seqs
        assert 0 not in plan.rows
        progressed = (
            (plan.is_prompt and plan.num_seqs > 0)
            or any(commit.counts.any() for commit in turn.commits)
            or bool(turn.terminals)
        )
        self.idle_turns = 0 if progressed or not scheduler.has_unfinished else self.idle_turns + 1
        bound = 4 + (self.settings.prefill_any_interval if self.parity else 0)
        assert self.idle_turns <= bound, f"seed {self.seed}: {self.idle_turns} steps without progress"

    def check_results(self) -> None:
        results = self.loop.results
        assert sorted(results) == sorted(s.request_id for s in self.added)
        for sequence in self.added:
            record = results[sequence.request_id]
            reason, tokens = str(record.reason), record.token_ids.tolist()
            if reason == "error" or (sequence.request_id in self.forked and not tokens):
                assert not tokens
                continue
            expected, ending = reference(sequence, self.settings.max_model_len, self.eos_every)
            if reason in ("stop", "length"):
                assert (tokens, reason) == (expected, ending)
            else:
                assert tokens == expected[: len(tokens)]
            logprobs = -(np.array(tokens, np.float32) / np.float32(997))
            eos = np.array(tokens) == 1
            assert np.array_equal(record.logprobs[~eos], logprobs[~eos])


@pytest.fixture
def _watch_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every preemption by decode must find the pool empty, and somebody in need unless the rule is strict."""
    seen: list[int] = []
    original, reserve = decode.preempt, decode.DecodeScheduler._reserve_short
    needs: list[np.ndarray] = []

    def watched(state: SchedulerState, row: int) -> None:
        assert state.blocks.num_free == 0
        if not state.settings.strict_block_headroom:
            assert (needs[-1] > 0).any()
        seen.append(row)
        original(state, row)

    def recorded(self: decode.DecodeScheduler, rows: np.ndarray, need: np.ndarray) -> np.ndarray:
        needs.append(need)
        if not self.state.settings.strict_block_headroom:
            assert np.count_nonzero(need > 0) > self.state.blocks.num_free
        return reserve(self, rows, need)

    monkeypatch.setattr(decode, "preempt", watched)
    monkeypatch.setattr(decode.DecodeScheduler, "_reserve_short", recorded)
    return seen


@pytest.mark.parametrize("first", range(0, 240, 40))
@pytest.mark.usefixtures("_watch_preemptions")
def test_random_runs(first: int) -> None:
    for seed in range(first, first + 40):
        Run(seed).run()


@pytest.mark.parametrize("first", range(0, 80, 40))
@pytest.mark.usefixtures("_watch_preemptions")
def test_random_runs_in_parity_mode(first: int) -> None:
    for seed in range(first, first + 40):
        Run(seed, parity=True).run()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 6000, 100))
@pytest.mark.usefixtures("_watch_preemptions")
def test_random_runs_soak(first: int) -> None:
    for seed in range(first, first + 100):
        Run(seed, parity=seed % 4 == 0).run()


@pytest.mark.parametrize("seed", range(20))
def test_first_come_first_scheduled(seed: int) -> None:
    """No request overtakes an earlier one on its way into the engine, whatever is preempted meanwhile."""
    rng = np.random.default_rng(seed)
    loop = Loop(create_scheduler(num_blocks=8, max_seqs=4, max_batched_tokens=150, prefill_all_interval=3))
    added = [loop.add(int(rng.integers(1, 400)), int(rng.integers(1, 60))) for _ in range(25)]
    order: list[int] = []
    while loop.scheduler.has_unfinished:
        for request_id, _, _ in loop.turn().chunks:
            if request_id not in order:
                order.append(request_id)
    assert order == [s.request_id for s in added]
    loop.flush()
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(12))
def test_a_ready_head_waits_no_longer_than_an_interval(seed: int) -> None:
    """With a seat and memory free, the head of the queue starts within the ALL interval plus one step."""
    rng = np.random.default_rng(seed)
    every = int(rng.integers(2, 12))
    loop = Loop(create_scheduler(prefill_all_interval=every, prefill_any_interval=every + 3))
    loop.add(20, 400)
    waits: list[int] = []
    for _ in range(30):
        for _ in range(int(rng.integers(1, 20))):
            loop.turn()
        if loop.scheduler.num_running > 6:
            continue
        sequence, steps = loop.add(10, int(rng.integers(1, 10))), 0
        while not sequence.row and not sequence.ended:
            loop.turn()
            steps += 1
        waits.append(steps)
    assert max(waits) <= every + 1
    loop.run()
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_outputs_do_not_depend_on_loop_seats_budget_or_pool(seed: int, drafts: int) -> None:
    """Plain and overlapped loop, seats, chunk budgets, preemption storms, order: the same tokens."""
    rng = np.random.default_rng(seed)
    work = [(int(rng.integers(1, 400)), int(rng.integers(1, 50))) for _ in range(12)]

    def outputs(order: list[int], **overrides: Any) -> list[list[int]]:
        accept = np.random.default_rng(seed)
        loop = Loop(
            create_scheduler(num_drafts=drafts, **overrides),
            lambda ids: accept.integers(0, drafts + 1, len(ids)).astype(np.int32),
            eos_every=30,
        )
        records: dict[int, int] = {}
        for index in order:
            length, max_tokens = work[index]
            request = Request(
                np.full(length, 7, np.int32), SamplingParams(max_tokens=max_tokens), request_id=10_000 + index
            )
            records[index] = loop.scheduler.add(request).request_id
        results = loop.run()
        loop.scheduler.check_integrity()
        return [results[records[index]].token_ids.tolist() for index in range(len(work))]

    plain = outputs(list(range(12)), zos=False)
    for overrides in (
        {"zos": True},
        {"max_seqs": 1},
        {"max_seqs": 3, "zos": False},
        {"max_batched_tokens": 48},
        {"num_blocks": 6, "prefill_all_interval": 2},
        {"num_blocks": 6, "zos": False, "strict_block_headroom": True},
    ):
        assert outputs(list(range(12)), **overrides) == plain
    assert outputs(rng.permutation(12).tolist()) == plain
