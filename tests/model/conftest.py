"""Golden models and a driver that runs sequences through real cache pools, by chunks and by steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.metadata import build_decode, build_prefill
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.engram import ngram_window
from deepinfer_ray.ops.numerics import Numerics

GOLDEN = Path(__file__).parents[1] / "data" / "golden"

torch.set_num_threads(1)


@cache
def expected(kind: str, file: str) -> dict[str, torch.Tensor]:
    """`exact` or `official` tensors of a golden model."""
    return load_file(GOLDEN / kind / f"expected_{file}.safetensors")


@cache
def load_model(
    kind: str,
    mode: str,
    variant: str = "engine",
    dense: bool = False,
    budget: int = 1 << 30,
    device: str = "cpu",
) -> TextModel:
    """A golden model; `dense` selects every visible entry, as the `dense.*` runs do."""
    with Checkpoint.open(GOLDEN / kind) as checkpoint:
        config = checkpoint.config
        if dense:
            config = config.with_text(index_topk=4096, candidate_topk_blocks=4096)
        return load_text_model(
            checkpoint, Numerics(mode, variant), config=config, device=device, dequant_budget_bytes=budget
        )


@dataclass
class Sequence:
    """A sequence in the pools: all its tokens (known in advance), its state slot and its blocks."""

    tokens: np.ndarray
    slot: int
    blocks: np.ndarray
    length: int = 0
    """Tokens computed so far."""


@dataclass
class Result:
    """What one step gave."""

    hidden: torch.Tensor
    logits: torch.Tensor
    taps: torch.Tensor | None
    capture: dict[str, torch.Tensor]


class Driver:
    """Runs sequences through a model's caches. Free slots and blocks hold NaN bytes, as stale memory may."""

    def __init__(
        self,
        model: TextModel,
        *,
        token_map: np.ndarray | None = None,
        num_drafts: int = 0,
        num_slots: int = 80,
        num_blocks: int = 160,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, config = model, model.config
        self.layout = CacheLayout.build(config, model.numerics, num_drafts)
        self.pools = CachePools(self.layout, num_blocks, num_slots, device)
        self.pools.poison(range(num_slots), range(num_blocks))
        rng = np.random.default_rng(seed)
        self._slots = list(rng.permutation(np.arange(1, num_slots)))
        self._blocks = list(rng.permutation(np.arange(1, num_blocks)))
        vocab = config.text.vocab_size
        self.token_map = np.arange(vocab) if token_map is None else token_map
        self.pad = int(self.token_map[config.text.engram_pad_token_id])

    def add(self, tokens: np.ndarray, reserve: int = 0) -> Sequence:
        """Place a sequence of known tokens; its blocks and slot come in shuffled order."""
        tokens = np.asarray(tokens)
        blocks = [self._blocks.pop() for _ in range(self.layout.blocks_for(len(tokens) + reserve))]
        return Sequence(tokens, int(self._slots.pop()), np.array(blocks))

    def step(
        self,
        sequences: list[Sequence],
        counts: list[int],
        *,
        prefill: bool,
        image_mask: np.ndarray | None = None,
        valid: np.ndarray | None = None,
        embeds: torch.Tensor | None = None,
        replay: tuple[str, int, list[int]] | None = None,
    ) -> Result:
        """Run the next `counts[i]` tokens of each sequence in one step. replay: truncation mode, kept tokens
        and the whole length of each sequence."""
        q = np.array(counts)
        k = np.array([sequence.length for sequence in sequences]) + q
        width = max(len(sequence.blocks) for sequence in sequences)
        tables = np.stack([np.pad(s.blocks, (0, width - len(s.blocks))) for s in sequences])
        positions = [np.arange(end - count, end) for count, end in zip(q, k, strict=True)]
        ids = np.concatenate([s.tokens[p] for s, p in zip(sequences, positions, strict=True)])
        order = max(1, self.model.config.engram.max_ngram)
        grams = np.concatenate(
            [self._grams(s.tokens, p, order) for s, p in zip(sequences, positions, strict=True)]
        )
        common = {
            "q": q,
            "k": k,
            "state_ids": np.array([sequence.slot for sequence in sequences]),
            "block_tables": tables,
            "input_ids": ids,
            "ngram_ids": grams,
            "valid": valid,
            "device": self.pools.device,
        }
        ratios = self.model.config.topology.ratios
        if prefill:
            if replay is not None:
                mode, keep, totals = replay
                common |= {"truncation": mode, "keep_tokens": keep, "total": np.array(totals)}
            meta = build_prefill(self.layout, ratios, image_mask=image_mask, **common)
        else:
            meta = build_decode(self.layout, ratios, **common)
        capture: dict[str, torch.Tensor] = {}
        with torch.inference_mode():
            out = self.model(meta, self.pools, with_taps=True, embeds=embeds, capture=capture)
            logits = self.model.logits(out.hidden)
        for sequence, end in zip(sequences, k, strict=True):
            sequence.length = int(end)
        capture = {name: value.cpu() for name, value in capture.items()}
        return Result(out.hidden.cpu(), logits.cpu(), out.taps.cpu(), capture)

    def _grams(self, tokens: np.ndarray, positions: np.ndarray, order: int) -> np.ndarray:
        known = (tokens >= 0) & (tokens < len(self.token_map))
        compressed = np.where(known, self.token_map[np.where(known, tokens, 0)], -1)
        return ngram_window(compressed, positions, None, order, self.pad)

    def prefill(self, sequence: Sequence, length: int, chunk: int | None = None) -> list[Result]:
        """Prefill `length` tokens in chunks of `chunk` (one chunk by default)."""
        results = []
        while sequence.length < length:
            count = min(chunk or length, length - sequence.length)
            results.append(self.step([sequence], [count], prefill=True))
        return results

    def decode(self, sequences: list[Sequence], rows: int = 1) -> Result:
        """One decode step of `rows` rows a sequence."""
        return self.step(sequences, [rows] * len(sequences), prefill=False)

    def state(self, sequence: Sequence) -> dict[str, torch.Tensor]:
        """Bytes that a sequence's future depends on: window rings, open group, entries and index keys."""
        layout, pools, n = self.layout, self.pools, sequence.length
        positions = torch.arange(max(0, n - layout.window), n)
        out = {
            f"ring{layer}": pools.load_window(
                layer, sequence.slot * layout.ring_rows + positions % layout.ring_rows
            )
            for layer in layout.ring_offsets
            if layer < self.model.config.topology.num_layers
        }
        open_group = torch.arange(n - n % 2, n)
        for layer in layout.state_offsets:
            rows = sequence.slot * layout.state_rows + open_group % layout.state_rows
            out[f"state{layer}"] = pools.load_state(layer, rows)
        blocks = torch.from_numpy(sequence.blocks)
        for name, parts in (("entries", layout.main_parts), ("keys", layout.index_parts)):
            for layer, part in parts.items():
                count = n // part.ratio
                entry = torch.arange(count)
                slots = blocks[entry // part.entries] * part.entries + entry % part.entries
                load = pools.load_entries if name == "entries" else pools.load_index_keys
                out[f"{name}{layer}"] = load(layer, slots)
        return out


def expected_map(kind: str) -> np.ndarray:
    """Token id -> compressed id of a golden model."""
    return expected(kind, "exact")["engram.token_map"].numpy()


def relative_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """float64 relative error of each row (token)."""
    a, b = (x.to(torch.float64).reshape(x.shape[0], -1) for x in (got, want))
    return (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)


def sorted_sets(ids: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Rows of ids as ascending sets, cut to the last `width` columns (the first ones are -1 padding)."""
    ids = ids.long().sort(-1).values
    return ids if width is None else ids[:, ids.shape[1] - width :]


def ulp_distance(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in bf16 steps of two tensors of bf16-representable values (signed zeros are equal)."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.to(torch.bfloat16).contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(got) - ordered(want)).abs()


@dataclass
class GoldenRun:
    """One prefill and the decode steps of a golden run."""

    tensors: dict[str, torch.Tensor]
    prefill: Result
    decode: list[Result]
    length: int
    positions: torch.Tensor
    driver: Driver
    sequence: Sequence


@cache
def golden_run(kind: str, mode: str, variant: str, run: str, device: str = "cpu") -> GoldenRun:
    """The golden prompt in one chunk, then its forced decode tokens."""
    tensors = expected(kind, "exact" if mode == "exact" else "official")
    model = load_model(kind, mode, variant, run == "dense", device=device)
    driver = Driver(model, token_map=expected_map(kind), device=device)
    ids, length = tensors["input_ids"].numpy(), int(tensors["prompt_len"])
    sequence = driver.add(ids)
    prefill = driver.prefill(sequence, length)[0]
    decode = [driver.decode([sequence]) for _ in range(len(ids) - length - 1)]
    return GoldenRun(tensors, prefill, decode, length, tensors["positions"].long(), driver, sequence)


class Harness:
    """What tests of the model share; a fixture, because test directories are not packages."""

    root = GOLDEN
    Driver = Driver
    expected = staticmethod(expected)
    expected_map = staticmethod(expected_map)
    load_model = staticmethod(load_model)
    golden_run = staticmethod(golden_run)
    relative_errors = staticmethod(relative_errors)
    sorted_sets = staticmethod(sorted_sets)
    ulp_distance = staticmethod(ulp_distance)

    @staticmethod
    def driver(kind: str, mode: str, variant: str = "engine", budget: int = 1 << 30, **args: Any) -> Driver:
        """Fresh pools around a golden model."""
        model = load_model(kind, mode, variant, budget=budget)
        return Driver(model, token_map=expected_map(kind), **args)


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    return Harness
