"""Random arrivals with shared heads, tiny pools, aborts: no output changes, nobody starves, nothing leaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deepinfer_ray.engine import decode
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.simulation import Loop, create_scheduler
from deepinfer_ray.engine.state import SchedulerState

Outputs = dict[int, tuple[list[int], str]]


def prompts_of(random: np.random.Generator, count: int) -> list[np.ndarray]:
    """Prompts out of a small tree of heads: many begin alike at several depths, some are equal."""
    prompts: list[np.ndarray] = []
    for _ in range(count):
        if prompts and random.random() < 0.15:
            prompts.append(prompts[random.integers(len(prompts))])
            continue
        parts = [np.full(random.integers(1, 4) * 64, random.integers(3, 6), np.int32) for _ in range(3)]
        depth = random.integers(0, 4)
        tail = random.integers(3, 900, random.integers(1, 120)).astype(np.int32)
        prompts.append(np.concatenate([*parts[:depth], tail]).astype(np.int32))
    return prompts


class Scenario:
    """Requests that arrive over time in a run of random settings."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.seed = seed
        self.settings = {
            "num_drafts": int(random.choice([0, 0, 2, 5])),
            "max_seqs": int(random.integers(1, 8)),
            "state_slots": int(random.integers(9, 14)),
            "num_blocks": int(random.integers(10, 20)),
            "max_batched_tokens": int(random.choice([128, 200, 512, 1024])),
            "max_model_len": 1000,
            "zos": bool(random.integers(2)),
            "strict_block_headroom": bool(random.integers(2)),
            "idle_fast_path": bool(random.integers(4)),
            "prefill_all_interval": 5,
            "prefill_any_interval": 7,
        }
        self.prompts = prompts_of(random, int(random.integers(3, 30)))
        self.arrivals = sorted(random.integers(0, 30, len(self.prompts)).tolist())
        self.max_tokens = random.integers(1, 200, len(self.prompts)).tolist()
        self.logprobs = (random.random(len(self.prompts)) < 0.1).tolist()
        self.aborts = {
            int(index): int(random.integers(0, 40))
            for index in np.flatnonzero(random.random(len(self.prompts)) < 0.1)
        }

    def run(
        self, snapshots: int, fraction: float, check: Callable[[Loop], None] | None = None
    ) -> tuple[Loop, Outputs]:
        loop = Loop(
            create_scheduler(
                **self.settings,
                prefix_snapshots=snapshots,
                prefix_block_fraction=fraction,
                prefix_min_saved_tokens=1,
            )
        )
        loop.prompt_tokens = 0  # type: ignore[attr-defined]
        added = 0
        for turn in range(20_000):
            while added < len(self.prompts) and self.arrivals[added] <= turn:
                params = SamplingParams(
                    max_tokens=self.max_tokens[added],
                    ignore_eos=True,
                    prompt_logprobs=0 if self.logprobs[added] else None,
                )
                loop.scheduler.add(Request(self.prompts[added], params, request_id=added + 1))
                added += 1
            for index, when in self.aborts.items():
                if when == turn and index < added:
                    loop.scheduler.abort(index + 1)
            if added == len(self.prompts) and not loop.scheduler.has_unfinished:
                break
            plan = loop.turn().plan
            if plan.is_prompt:
                loop.prompt_tokens += int(plan.q.sum())  # type: ignore[attr-defined]
            if check is not None:
                check(loop)
        loop.flush()
        outputs = {
            request_id: (record.token_ids.tolist(), str(record.reason))
            for request_id, record in loop.results.items()
        }
        assert len(outputs) == len(self.prompts)
        return loop, outputs


def check_books(loop: Loop) -> None:
    scheduler = loop.scheduler
    scheduler.check_integrity()
    cache = scheduler.state.prefixes
    assert cache._num_held <= cache.max_blocks
    assert not cache._coming


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_sharing_changes_no_output_starves_and_leaks_nothing(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence is preempted only when no kept prefix could have made room for it."""
    hits = evicted = preempted = 0
    original = decode.preempt

    def watched(state: SchedulerState, row: int) -> None:
        assert state.prefixes.num_reclaimable() == 0
        original(state, row)

    monkeypatch.setattr(decode, "preempt", watched)
    for seed in range(first, first + 10):
        scenario = Scenario(seed)
        _, expected = scenario.run(0, 0.0)
        random = np.random.default_rng(seed + 10_000)
        loop, outputs = scenario.run(
            int(random.integers(1, 6)), float(random.choice([0.2, 0.5, 0.9])), check_books
        )
        aborted = {index + 1 for index in scenario.aborts}
        for request_id, (tokens, reason) in outputs.items():
            if request_id in aborted:  # ended at another length, but on the same way
                shorter = min(len(tokens), len(expected[request_id][0]))
                assert tokens[:shorter] == expected[request_id][0][:shorter]
            else:
                assert (tokens, reason) == expected[request_id]
        state = loop.scheduler.state
        hits += state.prefixes.num_hits
        evicted += state.prefixes.num_evicted
        preempted += state.num_preempted
        state.prefixes.clear()
        loop.scheduler.check_integrity()
        assert state.blocks.num_free == state.blocks.size - 1
        assert len(state.prefixes._free) == len(state.prefixes.snapshots)
        assert not state.prefixes._demand
    assert hits > 0
    assert evicted > 0
    assert preempted > 0


def test_whatever_is_cached_is_not_computed() -> None:
    """With room for everything, computed and cached tokens are the tokens of all prompts."""
    total = 0
    for seed in range(8):
        scenario = Scenario(seed)
        scenario.settings |= {"num_blocks": 400, "max_seqs": 8, "state_slots": 40}
        scenario.aborts, scenario.arrivals = {}, [0] * len(scenario.prompts)
        loop, _ = scenario.run(12, 0.5, check_books)
        cached = sum(record.sequence.cached_tokens for record in loop.results.values())
        assert loop.prompt_tokens + cached == sum(map(len, scenario.prompts))  # type: ignore[attr-defined]
        total += cached
    assert total > 3000


@pytest.mark.parametrize("seed", range(4))
def test_nobody_overtakes(seed: int) -> None:
    """Requests are first scheduled in the order of arrival, kept prefixes or not."""
    scenario = Scenario(seed + 500)
    scenario.aborts = {}
    seen: list[int] = []

    def note(loop: Loop) -> None:
        for sequence in sorted(
            (s for s in loop.scheduler.table.sequences if s is not None), key=lambda s: s.seq_id
        ):
            if sequence.request_id not in seen:
                seen.append(sequence.request_id)

    scenario.run(4, 0.5, note)
    assert seen == sorted(seen)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_soak(first: int) -> None:
    for seed in range(first, first + 100):
        scenario = Scenario(seed)
        scenario.aborts = {}
        _, expected = scenario.run(0, 0.0)
        assert scenario.run(3, 0.5, check_books)[1] == expected
