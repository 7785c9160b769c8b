"""What the scheduler needs to know of the configuration, resolved to plain numbers.

Knows: limits, intervals and switches of spec/engine.md §17 that steer scheduling, and the values derived
from them (spec/engine.md §1.2). Does not know: YAML, the model, a device.

Each switch that reproduces a behaviour of the recorded traces is named in `SchedulerSettings.parity`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from deepinfer_ray.errors import ConfigError

NO_LIMIT = 2**30
BLOCK_TOKENS = 128
PREFILL_WATERMARK = 0.90
"""No prefill is wanted above this fraction of used blocks (spec/engine.md §3.2)."""
PARITY_INTERVALS = (70, 100)
"""Decode steps between ALL and between ANY votes in the recorded traces (spec/engine.md §3.2)."""
HEADROOM = 0.8
"""One sequence of maximal length must fit in this fraction of the pool (spec/engine.md §10.3)."""

Role = Literal["normal", "prompt", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Every number and switch of one rank's scheduler; validated at construction (`ConfigError`).

    Lengths are tokens, intervals are decode steps, `num_blocks` includes block 0, which is never handed out.
    """

    num_blocks: int
    max_model_len: int = 4096
    max_batched_tokens: int | None = None
    """None: max(max_model_len, 4096, max_seqs * (1 + num_drafts))."""
    max_seqs: int = 256
    num_drafts: int = 0
    max_backtracking: int | None = None
    """How far a window ring can be rolled back; None or anything smaller: num_drafts + 1."""
    role: Role = "normal"
    preemption: Literal["stop", "recompute"] = "recompute"
    on_preempt: Literal["finish", "replay"] = "replay"
    """What becomes of a preempted sequence whose grammar is active: ended, or recomputed and replayed."""
    chunked_prefill: bool = True
    min_chunk_tokens: int = 0
    prefill_max_sum_k: int = NO_LIMIT
    prefill_all_interval: int = 16
    prefill_any_interval: int = 16
    zos: bool | None = None
    """Overlapped loop; None: on unless the role is `prompt`."""
    idle_fast_path: bool = True
    strict_block_headroom: bool = False
    state_slots_ratio: float = 1.2
    state_slots: int | None = None
    """Number of state slots, slot 0 included; None: from the ratio."""
    prefix_snapshots: int = 0
    """Prefixes that can be kept for reuse, each with a state slot behind `num_state_slots`; 0 = no reuse."""
    prefix_block_fraction: float = 0.25
    """Most blocks that kept prefixes may hold; they give them back when a sequence needs one."""
    prefix_min_saved_tokens: int = 256
    keep_tokens: int = 0
    """Of prefill truncation; 0 = off."""
    truncation: Literal["off", "mask", "compact"] = "off"
    """How the rows before the kept ones are left out (spec/attention.md §13.2)."""
    cp: int = 1
    varlen: bool = False
    eos_token_id: int = 1
    vocab_size: int = 129280

    def __post_init__(self) -> None:
        self._require(
            self.num_blocks > 1,
            "cache.num_blocks",
            self.num_blocks,
            "must be at least 2: block 0 is a sentinel",
        )
        self._require(
            self.max_model_len >= 1, "scheduler.max_model_len", self.max_model_len, "must be at least 1"
        )
        self._require(self.max_seqs >= 1, "scheduler.max_seqs", self.max_seqs, "must be at least 1")
        self._require(
            0 <= self.num_drafts < BLOCK_TOKENS,
            "speculative.num_drafts",
            self.num_drafts,
            f"must be in [0, {BLOCK_TOKENS}): a step may need one new block at most",
        )
        for name in ("prefill_all_interval", "prefill_any_interval"):
            self._require(
                getattr(self, name) >= 1, f"scheduler.{name}", getattr(self, name), "must be at least 1"
            )
        self._require(
            self.state_slots_ratio >= 1,
            "cache.state_slots_ratio",
            self.state_slots_ratio,
            "must be at least 1",
        )
        self._require(
            0 <= self.prefix_block_fraction < 1,
            "cache.prefix_budget_fraction",
            self.prefix_block_fraction,
            "must be in [0, 1)",
        )
        self._require(self.cp >= 1, "parallel.cp", self.cp, "must be at least 1")
        decode_rows = self.max_seqs * (1 + self.num_drafts)
        budget = self.token_budget
        key = "scheduler.max_batched_tokens"
        self._require(
            budget >= decode_rows,
            key,
            budget,
            f"must be at least max_seqs * (1 + num_drafts) = {decode_rows}",
        )
        self._require(
            budget >= self.cp_align, key, budget, f"must be at least 2 * parallel.cp = {self.cp_align}"
        )
        if not self.chunked_prefill:
            whole = budget // self.cp_align * self.cp_align
            self._require(
                whole >= self.max_model_len,
                key,
                budget,
                f"must hold a prompt of max_model_len = {self.max_model_len} in multiples of {self.cp_align} "
                "when chunked_prefill is off",
            )
        self._require(
            self.prefill_max_sum_k >= self.prompt_limit,
            "scheduler.prefill_max_sum_k",
            self.prefill_max_sum_k,
            f"must be at least the longest prompt = {self.prompt_limit}",
        )
        if self.role == "completion":
            self._require(
                self.preemption == "stop",
                "scheduler.preemption",
                self.preemption,
                "must be stop for role completion: it cannot recompute a prompt",
            )
            self._require(self.cp == 1, "parallel.cp", self.cp, "must be 1 for role completion")

    @staticmethod
    def _require(ok: bool, key: str, value: object, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{key} is {value}; it {rule}")

    @property
    def token_budget(self) -> int:
        """Most tokens of one step."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        return max(self.max_model_len, 4096, self.max_seqs * (1 + self.num_drafts))

    @property
    def overlapped(self) -> bool:
        """Whether decode steps are committed one schedule later (zero-overhead scheduling)."""
        return self.role != "prompt" if self.zos is None else self.zos

    @property
    def cp_align(self) -> int:
        """Chunks are counted in multiples of this (mirror layout of context parallelism)."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def backtracking(self) -> int:
        return max(self.max_backtracking or 0, self.num_drafts + 1)

    @property
    def prompt_limit(self) -> int:
        """Longest sequence that can be prefilled."""
        return self.max_model_len if self.chunked_prefill else min(self.max_model_len, self.token_budget)

    @property
    def runtime_max_model_len(self) -> int:
        """Exclusive bound of every position a step may touch (spec/engine.md §1.2)."""
        in_flight = self.num_drafts + 1 if self.overlapped else 0
        return self.max_model_len + self.num_drafts + in_flight + self.num_drafts

    @property
    def num_state_slots(self) -> int:
        """Rows of the sequence table, slot 0 included."""
        return (
            int(self.max_seqs * self.state_slots_ratio) + 1 if self.state_slots is None else self.state_slots
        )

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-(self.runtime_max_model_len + 1) // BLOCK_TOKENS)

    @property
    def draft_pad_id(self) -> int:
        """Placeholder draft after a prefill (spec/speculative.md §3.6)."""
        return self.vocab_size - 1

    def require_headroom(self) -> None:
        """`ConfigError` unless a sequence of maximal length fits in 0.8 of the pool (spec/engine.md §10.3).

        Also what keeps a partially prefilled sequence below the prefill watermark.
        """
        room = int(HEADROOM * BLOCK_TOKENS * self.num_blocks)
        if self.runtime_max_model_len > room:
            raise ConfigError(
                f"scheduler.max_model_len {self.max_model_len} needs {self.runtime_max_model_len} cache "
                f"tokens "
                f"for one sequence, but {HEADROOM} of {self.num_blocks} blocks of {BLOCK_TOKENS} hold "
                f"{room}; "
                "decrease scheduler.max_model_len or give the cache more memory"
            )

    def parity(self) -> SchedulerSettings:
        """The same settings with every switch set to the behaviour of the recorded traces."""
        return replace(
            self,
            idle_fast_path=False,
            strict_block_headroom=True,
            prefill_all_interval=PARITY_INTERVALS[0],
            prefill_any_interval=PARITY_INTERVALS[1],
        )

    @classmethod
    def of(
        cls, config: Any, num_blocks: int, *, vocab_size: int, eos_token_id: int, num_slots: int | None = None
    ) -> SchedulerSettings:
        """From an `EngineConfig` (groups scheduler, cache, prefill, speculative, structured, parallel).

        num_slots: state slots of the pools; those beyond `num_state_slots` keep prefixes."""
        s, cache, speculative = config.scheduler, config.cache, config.speculative
        spare = 0 if num_slots is None else max(0, num_slots - config.num_state_slots)
        return cls(
            num_blocks=num_blocks,
            max_model_len=s.max_model_len,
            max_batched_tokens=s.max_batched_tokens,
            max_seqs=s.max_seqs,
            num_drafts=config.num_drafts,
            max_backtracking=cache.max_backtracking,
            role=s.role,
            preemption=s.preemption,
            on_preempt=config.structured.on_preempt,
            chunked_prefill=s.chunked_prefill,
            min_chunk_tokens=s.min_chunk_tokens,
            prefill_max_sum_k=NO_LIMIT if s.prefill_max_sum_k is None else s.prefill_max_sum_k,
            prefill_all_interval=s.prefill_all_interval,
            prefill_any_interval=s.prefill_any_interval,
            zos=s.zos,
            idle_fast_path=s.idle_fast_path,
            strict_block_headroom=s.strict_block_headroom,
            state_slots_ratio=cache.state_slots_ratio,
            prefix_snapshots=spare if cache.prefix_reuse and s.role != "completion" else 0,
            prefix_block_fraction=cache.prefix_budget_fraction,
            prefix_min_saved_tokens=cache.prefix_min_saved_tokens,
            keep_tokens=0 if config.prefill.truncation_mode == "off" else config.prefill.keep_tokens,
            truncation=config.prefill.truncation_mode,
            cp=config.parallel.cp,
            varlen=speculative.varlen,
            eos_token_id=eos_token_id,
            vocab_size=vocab_size,
        )
