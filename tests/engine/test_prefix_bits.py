"""Requests that start from a kept prefix give the bits of requests that compute all of their prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.cache.pool import POISON_BYTE
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.hooks import EngineHooks
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.request import Request


def same(kit: Any, requests: list[Request], one: Engine, other: Engine) -> list[int]:
    """Both engines give the same bits; cached tokens of the other one's results."""
    lab = kit.lab("mock")
    expected = [kit.bits(result) for result in lab.run(one, requests)]
    results = lab.run(other, kit.again(requests))
    for index, (bits, result) in enumerate(zip(expected, results, strict=True)):
        assert kit.bits(result) == bits, f"request {index} with {result.cached_tokens} cached tokens"
    return [result.cached_tokens for result in results]


@pytest.mark.parametrize(
    "settings",
    [
        {"zos": True},
        {"zos": False},
        {"zos": True, "max_seqs": 1},
        {"zos": True, "max_batched_tokens": 128},
        {"zos": False, "max_batched_tokens": 200, "max_seqs": 3},
        {"zos": True, "idle_fast_path": False, "prefill_all_interval": 3},
        {"zos": True, "chunked_prefill": False},
        {"zos": True, "max_backtracking": 6},
        {"zos": False, "num_blocks": 14, "prefix_block_fraction": 0.6},
        {"zos": True, "num_blocks": 14, "snapshots": 1},
    ],
    ids=lambda values: "-".join(f"{name}={value}" for name, value in values.items()),
)
def test_mock_model_sees_the_same_cache_in_every_schedule(kit: Any, settings: dict[str, Any]) -> None:
    lab = kit.lab("mock")
    requests = kit.family([256, 130, 512], [1, 2, 3, 40, 90], seed=1, max_tokens=9)
    requests += kit.family([20, 128], [100], seed=2, prompt_logprobs=0)
    order = np.random.default_rng(3).permutation(len(requests)).tolist()
    requests = [requests[index] for index in order]
    requests += kit.again(requests[:4])
    cached = same(kit, requests, lab.engine(snapshots=0), lab.engine(**settings))
    assert sum(cached) > 0


@pytest.mark.parametrize("zos", [True, False], ids=["overlapped", "plain"])
def test_storm_of_preemptions(kit: Any, zos: bool) -> None:
    """Victims start again from a kept prefix, and still give the same bits."""
    lab = kit.lab("mock")
    requests = kit.family([256, 256], [99, 109, 119, 125], seed=5, max_tokens=40)
    engine = lab.engine(num_blocks=9, zos=zos, max_seqs=8, prefix_block_fraction=0.5)
    cached = same(kit, requests, lab.engine(snapshots=0), engine)
    assert engine.stats["preempted"] > 0
    assert sum(cached) > 0


def test_real_model_gives_the_same_bits(kit: Any) -> None:
    """Greedy and sampled rows, log-probabilities; tails shorter and longer than the window."""
    lab = kit.lab("tinyB-released")
    requests = kit.family([384, 130], [1, 2, 20, 65], seed=7)
    cached = same(kit, requests, lab.engine(snapshots=0, zos=False), lab.engine())
    assert cached == [0, 384, 384, 384, 0, 128, 128, 128]


def test_real_model_with_longer_rings_and_preemption(kit: Any) -> None:
    """With rings 6 rows longer, a prefix can be kept up to 6 tokens later: no boundary is forced."""
    lab = kit.lab("tinyB-exact")
    requests = kit.family([128], [5, 109, 119, 126], seed=8, max_tokens=20)
    engine = lab.engine(
        max_backtracking=6, num_blocks=5, max_model_len=400, max_seqs=4, prefix_block_fraction=0.5
    )
    one = lab.engine(snapshots=0, max_backtracking=6)
    cached = same(kit, requests, one, engine)
    assert engine.stats["preempted"] > 0
    assert sum(cached) > 0


class PoisonUnused(EngineHooks):
    """Right after a prefix is restored, before anything runs, overwrites with NaN whatever the new sequence
    has no right to read: ring rows outside [P - W + 1, P), compression state unless a group is open at P, the
    entries of its own blocks at or behind P, and its blocks that nobody has written."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.restored: list[int] = []

    def post_schedule(self, plan: StepPlan) -> None:
        engine = self.engine
        assert engine is not None
        for row in plan.clone_states[:, 1].tolist():
            index = plan.rows.tolist().index(row)
            start = int(plan.k[index] - plan.q[index])
            self.restored.append(start)
            self._poison_slot(engine, row, start)
            table = engine.scheduler.table
            for block, first in zip(table.blocks_of(row), range(0, 10_000, 128), strict=False):
                if first + 128 > start:
                    self._poison_block(engine, block, max(0, start - first))

    @staticmethod
    def _poison_slot(engine: Engine, row: int, start: int) -> None:
        layout, slot = engine.pools.layout, engine.pools.slots[row]
        window = {position % layout.ring_rows for position in range(start - layout.window + 1, start)}
        size = layout.window_record.bytes
        for offset in layout.ring_offsets.values():
            for place in set(range(layout.ring_rows)) - window:
                slot[offset + place * size : offset + (place + 1) * size] = POISON_BYTE
        size = 2 * layout.head_dim * 4
        for offset in layout.state_offsets.values():
            for place in range(layout.state_rows):
                if start % 2 == 0 or place != (start - 1) % layout.state_rows:
                    slot[offset + place * size : offset + (place + 1) * size] = POISON_BYTE

    @staticmethod
    def _poison_block(engine: Engine, block: int, start: int) -> None:
        """start: tokens of the block that are cached."""
        layout, data = engine.pools.layout, engine.pools.blocks[block]
        for part in layout.main_parts.values():
            first, size = start // part.ratio, part.record.bytes
            data[part.offset + first * size : part.offset + part.entries * size] = POISON_BYTE
        for part in layout.index_parts.values():
            first, record = start // part.ratio, part.record
            data[part.offset + first * record.data_bytes : part.scale_offset] = POISON_BYTE
            scales = part.scale_offset + first * record.scale_bytes
            data[scales : part.scale_offset + part.entries * record.scale_bytes] = POISON_BYTE


@pytest.mark.parametrize("name", ["mock", "tinyB-released", "tinyB-exact", "tinyA-released"])
def test_nothing_but_the_window_and_the_entries_before_it_is_read(kit: Any, name: str) -> None:
    lab = kit.lab(name)
    if "A" in name:
        requests = kit.family([128], [1, 10], seed=9, max_tokens=3)
        requests += kit.again(requests[-1:])  # a whole prompt: a group is open at 137
    else:
        requests = kit.family([256, 130], [1, 2, 30], seed=9) + kit.family([100, 101], [1], seed=10)
        requests += kit.again(requests[-2:])  # whole prompts, one of an odd and one of an even length
    hooks = PoisonUnused()
    engine = lab.engine(hooks=hooks)
    hooks.engine = engine
    cached = same(kit, requests, lab.engine(snapshots=0), engine)
    assert sorted(hooks.restored) == sorted(tokens for tokens in cached if tokens)
    assert {tokens % 2 for tokens in cached if tokens} == {0, 1}


def test_a_shared_head_of_512_tokens_saves_four_fifths_of_the_prefill(kit: Any) -> None:
    lab = kit.lab("tinyB-released")
    requests = kit.family([512], [18 + row for row in range(10)], seed=11, max_tokens=3)
    plain, reusing = lab.engine(snapshots=0), lab.engine()
    cached = same(kit, requests, plain, reusing)
    assert cached == [0] + [512] * 9
    assert plain.stats["prompt_tokens"] == sum(len(request.prompt) for request in requests)
    assert reusing.stats["prompt_tokens"] <= 0.2 * plain.stats["prompt_tokens"]
    assert reusing.stats["cached_tokens"] == sum(cached)
    assert (reusing.stats["prefixes_kept"], reusing.stats["prefix_hits"]) == (1, 9)


def test_a_later_request_starts_from_what_is_kept(kit: Any) -> None:
    """Kept prefixes outlive the requests that left them."""
    lab = kit.lab("mock")
    first, second, late = kit.family([256], [30, 30, 30], seed=12)
    engine = lab.engine()
    lab.run(engine, [first, second])
    assert not engine.has_unfinished()
    (result,) = lab.run(engine, [late])
    assert result.cached_tokens == 256
    (alone,) = lab.run(lab.engine(snapshots=0), kit.again([late]))
    assert kit.bits(result) == kit.bits(alone)


def test_the_donor_may_be_aborted(kit: Any) -> None:
    """What a step computed stays right whatever becomes of its request."""
    lab = kit.lab("mock")
    donor, sharer = kit.family([256], [200, 30], seed=13)
    engine = lab.engine()
    engine.add(donor)
    engine.add(sharer)
    engine.step()
    assert engine.abort(donor.request_id)
    results = {result.request_id: result for result in engine.run()}
    engine.check_integrity()
    assert results[donor.request_id].finish_reason == "aborted"
    assert results[sharer.request_id].cached_tokens == 256
    (alone,) = lab.run(lab.engine(snapshots=0), kit.again([sharer]))
    assert kit.bits(results[sharer.request_id]) == kit.bits(alone)
