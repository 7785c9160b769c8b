"""How long one lock-step of a fleet takes: a roofline of the released model on H200 GPUs.

Knows: bytes and operations of a decode and of a prompt step, spread over the ranks of one expert group.
Does not know: sequences, votes, queues. Nothing here was measured on the engine; the figures tell policies
apart, they do not predict a fleet's speed.

    step      = max over ranks (dense + attention + indexer + exchange) + experts + drafter + overhead
    dense     = max(bytes of the replicated weights / bandwidth, rows * 2 * parameters / rate)
    experts   = max(bytes of the experts that are hit / bandwidth, all rows / ranks * 2 * parameters / rate)
    attention = rows * layers * measured time of a row (top-k caps the keys: no term of the length)
    indexer   = max(visible tokens * key bytes / bandwidth, (row, visible token) pairs * operations / rate)
    exchange  = calls * latency + rows * remote copies * bytes / link

Rows of one rank wait for those of the longest one; the experts' work is shared by all ranks, evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank computes in a step. rows: query rows. pairs: (row, visible token) pairs. visible: tokens
    in the caches of the rank's sequences of this step. An idle rank is all zeros."""

    rows: int = 0
    pairs: int = 0
    visible: int = 0

    @classmethod
    def of(cls, q: np.ndarray, k: np.ndarray) -> RankLoad:
        """q, k: int32 [n] rows and length after them of each sequence (causal inside the rows)."""
        if not len(q):
            return cls()
        wide = q.astype(np.int64)
        pairs = wide * k - wide * (wide - 1) // 2
        return cls(int(wide.sum()), int(pairs.sum()), int(k.sum()))


IDLE = RankLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Parameters in bytes, operations and seconds; defaults are the released configuration."""

    ranks: int = 4
    """Size of the expert group, all of it one data-parallel fleet."""

    # Weights (model spec §5).
    routed_bytes: float = 288_777_830_400
    replicated_bytes: float = 8_522_921_408
    """Shared experts, attention, indexer, compressor, gates, mHC, norms, head, Engram projections."""
    routed_parameters: float = 8_493_465_600
    """Active in one token."""
    dense_parameters: float = 6_975_204_464
    """Active in one token beside routed experts and head."""
    head_parameters: float = 661_913_600
    """Only rows of decode steps pass it; one row a prompt does not count."""
    hit_share: float = 6 / 384
    """Of the experts of a layer that one token touches."""
    drafter_bytes: float = 713_428_872
    drafter_routed_bytes: float = 7_219_445_760
    # Card (measured on an H200: copy, bf16 matmul, shares that grouped GEMM prototypes reached).
    bandwidth: float = 4.25e12 * 0.70
    expert_rate_decode: float = 685e12 * 0.70
    expert_rate_prefill: float = 685e12 * 0.87
    dense_rate: float = 2 * 685e12 * 0.70
    """FP8 beside bf16: the ratio of the nominal peaks; the share is an assumption."""
    attention_row_s: float = 40 * 512e-6 / 1536
    """Sparse attention, prototype: 512 us a layer for 1536 rows of 128 + 512 keys."""
    # Indexer (attention spec §1.3, §5.3, §9.4): layers 2, 8, 14 own half a key a token, layer 20 one, layers
    # 24 to 36 read its keys again (up to 16384 of them: longer contexts are overestimated).
    index_keys: float = 3 * 0.5 + 1 + 4
    index_key_bytes: float = 68
    index_pair_operations: float = 2 * 32 * 128
    # Exchange (measured between two H200: latency inside a graph and eager, bytes a second of a rank).
    exchange_calls: int = 2 * 40
    exchange_latency_decode: float = 25e-6
    exchange_latency_prefill: float = 50e-6
    link: float = 207e9
    row_exchange_bytes: float = 40 * (5120 + 160 + 2 * 5120)
    """FP8 rows with scales there, bf16 rows back, 40 layers, one copy to each rank that is hit."""
    experts_per_token: int = 6
    # Assumptions.
    overhead_s: float = 1e-3
    """Sampling, metadata and launch gaps of any step."""
    prompt_overhead_s: float = 0.0
    """Of prompt steps on top; their eager launches are taken to hide behind their rows."""
    vote_s: float = 200e-6
    """One host all-reduce of a vote (measured: 198 us with gloo). `agree` hides behind the step before."""

    @property
    def remote_copies(self) -> float:
        """Other ranks that a token's row is sent to, on average."""
        hit = self.ranks * (1 - (1 - 1 / self.ranks) ** self.experts_per_token)
        return hit * (1 - 1 / self.ranks)

    def decode_s(self, loads: list[RankLoad]) -> float:
        """Seconds of one decode step with its verification rows; an empty rank still reads its weights."""
        total = sum(load.rows for load in loads)
        slowest = max(
            self._dense_s(load.rows, self.dense_parameters + self.head_parameters) + self._row_s(load)
            for load in loads
        )
        hit = 1 - (1 - self.hit_share) ** total
        drafter_bytes = self.drafter_bytes + self.drafter_routed_bytes / self.ranks * hit
        drafter = drafter_bytes / self.bandwidth if total else 0.0
        experts = self._experts_s(total, hit, self.expert_rate_decode)
        latency = self.exchange_calls * self.exchange_latency_decode
        return slowest + experts + drafter + latency + self.overhead_s

    def prompt_s(self, loads: list[RankLoad]) -> float:
        """Seconds of one prompt step."""
        total = sum(load.rows for load in loads)
        slowest = max(self._dense_s(load.rows, self.dense_parameters) + self._row_s(load) for load in loads)
        hit = 1 - (1 - self.hit_share) ** total
        experts = self._experts_s(total, hit, self.expert_rate_prefill)
        latency = self.exchange_calls * self.exchange_latency_prefill
        return slowest + experts + latency + self.overhead_s + self.prompt_overhead_s

    def _dense_s(self, rows: int, parameters: float) -> float:
        return max(self.replicated_bytes / self.bandwidth, rows * 2 * parameters / self.dense_rate)

    def _row_s(self, load: RankLoad) -> float:
        read = load.visible * self.index_keys * self.index_key_bytes / self.bandwidth
        score = load.pairs * self.index_keys * self.index_pair_operations / self.dense_rate
        sent = load.rows * self.remote_copies * self.row_exchange_bytes / self.link
        return load.rows * self.attention_row_s + max(read, score) + sent

    def _experts_s(self, rows: int, hit: float, rate: float) -> float:
        read = self.routed_bytes / self.ranks * hit / self.bandwidth
        return max(read, rows / self.ranks * 2 * self.routed_parameters / rate)
