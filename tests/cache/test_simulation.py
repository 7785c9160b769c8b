"""Which token does each index resolve to? A randomized index-level simulation (attention spec §12).

The caches hold token tags instead of vectors: every token ever fed to a step, rejected drafts included, has
its own tag. After each step every query row's window keys and visible entries must resolve to exactly the
tokens that the row may see. Chunk lengths, step mixes, verify widths, acceptance, truncation and the blocks'
order are random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.checks import StepLimits, check_metadata
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.metadata import StepMetadata, build_decode, build_prefill

RATIOS = (1, 2)
NONE = -7


@dataclass
class Tags:
    """Caches of one layer of each kind, holding tags. Entries hold the tags of all their tokens."""

    layout: CacheLayout
    num_blocks: int
    num_slots: int
    ring: torch.Tensor = field(init=False)
    consumer_ring: torch.Tensor = field(init=False)
    state: torch.Tensor = field(init=False)
    entries: dict[int, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        self.ring = torch.full((self.num_slots * layout.ring_rows,), NONE)
        self.consumer_ring = self.ring.clone()
        self.state = torch.full((self.num_slots * layout.state_rows,), NONE)
        self.entries = {r: torch.full((self.num_blocks * layout.block_tokens // r, r), NONE) for r in RATIOS}

    def run(self, meta: StepMetadata) -> list[tuple[list[int], list[int] | None, dict[int, list[list[int]]]]]:
        """One layer of each kind; what each query row resolves its keys to.

        Per row: window tags, window tags in a consumer layer (None on dropped rows), entries by ratio.
        """
        return self._prefill(meta) if meta.is_prefill else self._decode(meta)

    def _store(self, pool: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
        pool[ids[ids >= 0]] = values[ids >= 0]

    def _prefill(
        self, meta: StepMetadata
    ) -> list[tuple[list[int], list[int] | None, dict[int, list[list[int]]]]]:
        tags = meta.input_ids
        assert meta.swa_history is not None
        for ratio, plan in meta.ratios.items():
            assert plan.entry_rows is not None
            members = torch.where(plan.entry_rows >= 0, tags[plan.entry_rows.clamp(min=0)], NONE)
            members = torch.where(plan.entry_ring >= 0, self.state[plan.entry_ring.clamp(min=0)], members)
            self._store(self.entries[ratio], plan.entry_slots, members)
        self._store(self.state, meta.ring_positions, tags)

        def load(ring: torch.Tensor) -> torch.Tensor:
            assert meta.swa_history is not None
            return torch.where(meta.swa_history >= 0, ring[meta.swa_history.clamp(min=0)], NONE)

        window = torch.cat((load(self.ring), tags))
        self._store(self.ring, meta.swa_store, tags)
        consumer = meta.consumer
        if consumer is None:
            rows, keys, store = torch.arange(meta.num_rows), meta.swa_keys, meta.swa_store
        else:
            rows = torch.arange(meta.num_rows) if consumer.rows is None else consumer.rows
            keys, store = consumer.swa_keys, consumer.swa_store
        consumer_window = torch.cat((load(self.consumer_ring), tags[rows]))
        self._store(self.consumer_ring, store, tags[rows])
        place = {row: i for i, row in enumerate(rows.tolist())}
        seen = []
        for t in range(meta.num_rows):
            entries = {}
            for ratio, plan in meta.ratios.items():
                assert plan.load_slots is not None
                assert plan.ks is not None
                begin = int(plan.ks[t])
                slots = plan.load_slots[begin : begin + int(plan.klen[t])]
                entries[ratio] = self.entries[ratio][slots].tolist()
            own = None
            if t in place:
                own = self._resolve(consumer_window, keys[place[t]])
            seen.append((self._resolve(window, meta.swa_keys[t]), own, entries))
        return seen

    def _decode(
        self, meta: StepMetadata
    ) -> list[tuple[list[int], list[int] | None, dict[int, list[list[int]]]]]:
        tags = meta.input_ids
        assert meta.block_tables is not None
        self.ring[meta.swa_store] = tags
        self.consumer_ring[meta.swa_store] = tags
        self.state[meta.ring_positions] = tags
        for ratio, plan in meta.ratios.items():
            assert plan.closing is not None
            self.entries[ratio][plan.entry_slots[plan.closing]] = self.state[plan.entry_ring[plan.closing]]
        seen = []
        for t in range(meta.num_rows):
            entries = {}
            for ratio, plan in meta.ratios.items():
                per_block = self.layout.block_tokens // ratio
                j = torch.arange(int(plan.klen[t]))
                slots = meta.block_tables[t, j // per_block] * per_block + j % per_block
                entries[ratio] = self.entries[ratio][slots].tolist()
            keys = meta.swa_keys[t]
            seen.append((self._resolve(self.ring, keys), self._resolve(self.consumer_ring, keys), entries))
        return seen

    @staticmethod
    def _resolve(buffer: torch.Tensor, keys: torch.Tensor) -> list[int]:
        kept = int((keys >= 0).sum())
        assert (keys[:kept] >= 0).all()  # oldest first, padding only behind
        return buffer[keys[:kept]].tolist()


@dataclass
class Sequence:
    slot: int
    table: np.ndarray
    prompt: list[int]
    tokens: list[int]
    """Tags of the accepted tokens; the last one has not been computed yet once the prompt is done."""
    computed: int = 0


def expected_window(tokens: list[int], pos: int, window: int, floor: int = 0) -> list[int]:
    return tokens[max(0, pos - window + 1, min(floor, pos + 1)) : pos + 1]


@pytest.mark.parametrize("seed", range(24))
def test_every_index_resolves_to_the_right_token(build: Callable[..., CacheLayout], seed: int):
    rng = np.random.default_rng(seed)
    drafts = int(rng.integers(0, 6))
    layout = build(drafts, block_tokens=32)
    least = layout.window + layout.max_backtracking
    mode = ("off", "mask", "compact")[seed % 3]
    keep = least + int(rng.integers(0, 7))
    count, max_len = 5, 150
    width = layout.blocks_for(max_len + drafts + 1)
    num_blocks = 1 + count * width
    blocks = 1 + rng.permutation(num_blocks - 1)
    tag = itertools.count(1)
    caches = Tags(layout, num_blocks, count + 1)
    limits = StepLimits(
        layout, RATIOS, num_blocks, count + 1, max_blocks=64, rope_rows=max_len + 2 * drafts + 1
    )
    slots = 1 + rng.permutation(count)
    sequences = []
    for i in range(count):
        prompt = [next(tag) for _ in range(int(rng.integers(1, 100)))]
        sequences.append(Sequence(int(slots[i]), blocks[i * width : (i + 1) * width], prompt, list(prompt)))

    def shared(chosen: list[Sequence], q: list[int], k: list[int], ids: list[int]) -> dict[str, np.ndarray]:
        return {
            "q": np.array(q, np.int32),
            "k": np.array(k, np.int32),
            "state_ids": np.array([s.slot for s in chosen], np.int32),
            "block_tables": np.stack([s.table for s in chosen]).astype(np.int32),
            "input_ids": np.array(ids, np.int32),
            "ngram_ids": np.zeros((len(ids), 0), np.int32),
        }

    def check(inputs: dict[str, np.ndarray], meta: StepMetadata) -> None:
        limits.check(
            is_prefill=meta.is_prefill,
            **{name: inputs[name] for name in ("q", "k", "state_ids", "block_tables")},
        )
        check_metadata(meta, layout, num_blocks, count + 1)

    def check_entries(got: dict[int, list[list[int]]], tokens: list[int], pos: int) -> None:
        for ratio in RATIOS:
            assert got[ratio] == [tokens[j * ratio : (j + 1) * ratio] for j in range((pos + 1) // ratio)]

    for _ in range(60):
        fresh = [s for s in sequences if s.computed < len(s.prompt)]
        running = [s for s in sequences if s.computed >= len(s.prompt) and len(s.tokens) < max_len]
        if not fresh and not running:
            break
        if fresh and (not running or rng.random() < 0.5):
            chosen = [s for s in fresh if rng.random() < 0.7] or fresh[:1]
            q = [int(rng.integers(1, len(s.prompt) - s.computed + 1)) for s in chosen]
            k = [s.computed + n for s, n in zip(chosen, q, strict=True)]
            ids = [t for s, end in zip(chosen, k, strict=True) for t in s.prompt[s.computed : end]]
            inputs = shared(chosen, q, k, ids)
            total = np.array([len(s.prompt) for s in chosen])
            meta = build_prefill(layout, RATIOS, **inputs, truncation=mode, keep_tokens=keep, total=total)
            check(inputs, meta)
            seen = iter(caches.run(meta))
            for s, n in zip(chosen, q, strict=True):
                floor = len(s.prompt) - keep if mode != "off" else 0
                for pos in range(s.computed, s.computed + n):
                    window, own, entries = next(seen)
                    assert window == expected_window(s.prompt, pos, layout.window)
                    last = pos == s.computed + n - 1
                    assert (own is None) == (mode == "compact" and pos < floor and not last)
                    if own is not None:
                        assert own == expected_window(s.prompt, pos, layout.window, floor)
                    check_entries(entries, s.prompt, pos)
                s.computed += n
                if s.computed == len(s.prompt):
                    s.tokens.append(next(tag))
        else:
            chosen = [s for s in running if rng.random() < 0.7] or running[:1]
            verify = [int(rng.integers(0, drafts + 1)) for _ in chosen]
            proposals = [[next(tag) for _ in range(n)] for n in verify]
            k = [s.computed + 1 + n for s, n in zip(chosen, verify, strict=True)]
            ids = [t for s, p in zip(chosen, proposals, strict=True) for t in (s.tokens[-1], *p)]
            inputs = shared(chosen, [n + 1 for n in verify], k, ids)
            meta = build_decode(layout, RATIOS, **inputs)
            check(inputs, meta)
            seen = iter(caches.run(meta))
            for s, proposal in zip(chosen, proposals, strict=True):
                trial = s.tokens + proposal
                for pos in range(s.computed, s.computed + 1 + len(proposal)):
                    window, own, entries = next(seen)
                    assert window == expected_window(trial, pos, layout.window)
                    # The rectangle is long enough that decode never looks in front of it.
                    assert own == window
                    check_entries(entries, trial, pos)
                accepted = int(rng.integers(0, len(proposal) + 1))
                s.computed += 1 + accepted
                s.tokens += [*proposal[:accepted], next(tag)]
    else:
        assert not [s for s in sequences if s.computed < len(s.prompt)]
