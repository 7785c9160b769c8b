"""All options of one rank's engine, and the rules between them that need no device.

Knows: derived sizes (spec/engine.md §1.2), rules between blocks, and with a model (`resolve`).
Does not know: memory of a device, rows, files. An option left at None is derived; `resolve` fills them all.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ValidationError, model_validator

from deepinfer_ray.config.base import Section, validation_to_config_error
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.sections import (
    CacheOptions,
    DebugOptions,
    EplbOptions,
    ModelOptions,
    MoeOptions,
    MultimodalOptions,
    ObservabilityOptions,
    ParallelOptions,
    PrefillOptions,
    RuntimeOptions,
    SamplingOptions,
    SchedulerOptions,
    SpeculativeOptions,
    StructuredOptions,
)
from deepinfer_ray.config.topology import BLOCK_TOKENS
from deepinfer_ray.errors import ConfigError

DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_DRAFTS = 5
CAPACITY_SHARE = 0.8
"""One sequence of maximal length may fill at most this share of the blocks (spec/engine.md §10.3)."""


class EngineConfig(Section):
    """All options of one rank's engine."""

    numerics: Literal["exact", "released"] = "released"
    model: ModelOptions = ModelOptions()
    parallel: ParallelOptions = ParallelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    prefill: PrefillOptions = PrefillOptions()
    speculative: SpeculativeOptions = SpeculativeOptions()
    sampling: SamplingOptions = SamplingOptions()
    structured: StructuredOptions = StructuredOptions()
    multimodal: MultimodalOptions = MultimodalOptions()
    moe: MoeOptions = MoeOptions()
    eplb: EplbOptions = EplbOptions()
    runtime: RuntimeOptions = RuntimeOptions()
    observability: ObservabilityOptions = ObservabilityOptions()
    debug: DebugOptions = DebugOptions()

    @property
    def num_drafts(self) -> int:
        """Draft tokens a step; before `resolve` 0 where the option is left open."""
        return self.speculative.num_drafts or 0

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len or DEFAULT_MAX_MODEL_LEN

    @property
    def max_batched_tokens(self) -> int:
        """Query rows of one step."""
        decode_rows = self.scheduler.max_seqs * (1 + self.num_drafts)
        return self.scheduler.max_batched_tokens or max(self.max_model_len, 4096, decode_rows)

    @property
    def max_backtracking(self) -> int:
        """Tokens by which a ring may be rolled back."""
        return max(self.cache.max_backtracking or 0, self.num_drafts + 1)

    @property
    def runtime_max_model_len(self) -> int:
        """Exclusive bound of every position that is ever touched (spec/engine.md §1.2)."""
        n = self.num_drafts
        return self.max_model_len + n + (n + 1 if self.scheduler.overlapped else 0) + n

    @property
    def num_state_slots(self) -> int:
        """State slots with slot 0, which belongs to nobody."""
        return math.floor(self.scheduler.max_seqs * self.cache.state_slots_ratio) + 1

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that can be admitted."""
        if self.scheduler.chunked_prefill:
            return self.max_model_len
        return min(self.max_model_len, self.max_batched_tokens)

    @model_validator(mode="after")
    def _rules_between_blocks(self) -> EngineConfig:
        scheduler, rows = self.scheduler, self.scheduler.max_seqs * (1 + self.num_drafts)
        if self.max_batched_tokens < rows:
            raise ValueError(
                f"scheduler.max_batched_tokens = {self.max_batched_tokens} is less than scheduler.max_seqs * "
                f"(1 + speculative.num_drafts) = {scheduler.max_seqs} * {1 + self.num_drafts} = {rows}; "
                "raise it or lower scheduler.max_seqs"
            )
        if not scheduler.chunked_prefill and self.max_batched_tokens < self.max_model_len:
            raise ValueError(
                f"scheduler.max_batched_tokens = {self.max_batched_tokens} is less than "
                f"scheduler.max_model_len = {self.max_model_len}; raise it or set scheduler.chunked_prefill"
            )
        if scheduler.prefill_max_sum_k < self.prompt_limit:
            raise ValueError(
                f"scheduler.prefill_max_sum_k = {scheduler.prefill_max_sum_k} is less than the "
                f"longest prompt, {self.prompt_limit} tokens"
            )
        if scheduler.min_chunk_tokens > self.max_batched_tokens:
            raise ValueError(
                f"scheduler.min_chunk_tokens = {scheduler.min_chunk_tokens} exceeds "
                f"scheduler.max_batched_tokens = {self.max_batched_tokens}: no chunk could be scheduled"
            )
        if scheduler.role == "completion" and scheduler.preemption != "stop":
            raise ValueError(
                "scheduler.role = 'completion' cannot recompute prompts: set scheduler.preemption = 'stop'"
            )
        if scheduler.role == "completion" and self.parallel.cp != 1:
            raise ValueError(f"scheduler.role = 'completion' needs parallel.cp = 1, not {self.parallel.cp}")
        if self.cache.num_blocks_override is not None and scheduler.max_model_len is not None:
            self.check_capacity(self.cache.num_blocks_override)
        return self

    def check_capacity(self, num_blocks: int) -> None:
        """`ConfigError` unless one sequence of maximal length fits into 0.8 of the blocks."""
        if num_blocks <= 1:
            raise ConfigError(
                f"the memory budget gives {num_blocks} cache blocks, at least 2 are needed; raise "
                "cache.memory_utilization (GPU), cache.cpu_budget_bytes (CPU), or lower scheduler.max_seqs"
            )
        room = math.floor(BLOCK_TOKENS * num_blocks * CAPACITY_SHARE)
        if self.runtime_max_model_len > room:
            raise ConfigError(
                f"a sequence of maximal length needs {self.runtime_max_model_len} positions, but 0.8 of "
                f"{num_blocks} cache blocks hold {room}; lower scheduler.max_model_len = "
                f"{self.max_model_len} or give the cache more memory"
            )

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """This config with every derived option written out and checked against the model."""
        text = model.text
        if self.speculative.num_drafts is None:
            drafts = DEFAULT_DRAFTS if text.has_drafter and self.runtime.backend == "cuda" else 0
            return self.with_values(speculative={"num_drafts": drafts}).resolve(model)
        limit = text.max_position_embeddings
        if (self.scheduler.max_model_len or 0) > limit:
            raise ConfigError(
                f"scheduler.max_model_len = {self.scheduler.max_model_len} exceeds the model's "
                f"max_position_embeddings = {limit}"
            )
        if self.num_drafts and not text.has_drafter:
            raise ConfigError(
                f"speculative.num_drafts = {self.num_drafts}, but the checkpoint has no draft layers "
                "(num_nextn_predict_layers = 0); set it to 0"
            )
        self._check_truncation(model)
        derived = self.with_values(
            scheduler={"max_model_len": self.scheduler.max_model_len or min(4096, limit)}
        )
        resolved = derived.with_values(
            scheduler={"max_batched_tokens": derived.max_batched_tokens, "zos": self.scheduler.overlapped},
            cache={"max_backtracking": self.max_backtracking},
            parallel={"dp": self.parallel.replicas, "engram": self.parallel.engram_size},
            multimodal={
                "use_pool": self.multimodal.use_pool is not False and self.scheduler.role != "completion"
            },
        )
        if resolved.cache.num_blocks_override is not None:
            resolved.check_capacity(resolved.cache.num_blocks_override)
        return resolved

    def _check_truncation(self, model: ModelConfig) -> None:
        """Bounded replay against the model's window and topology (spec/attention.md §1.5 #6, §13)."""
        mode, keep = self.prefill.truncation_mode, self.prefill.keep_tokens
        if mode == "off":
            return
        least = model.text.sliding_window + self.max_backtracking
        if keep < least:
            raise ConfigError(
                f"prefill.keep_tokens = {keep} is less than sliding_window + max_backtracking = "
                f"{model.text.sliding_window} + {self.max_backtracking} = {least}"
            )
        if mode != "compact":
            return
        consumers = [layer.index for layer in model.topology.backbone if layer.is_consumer]
        engram = [layer for layer in model.text.engram_layer_ids if layer in consumers]
        if engram:
            raise ConfigError(
                f"prefill.truncation_mode = 'compact' needs all Engram layers before layer "
                f"{model.topology.n_prefill_layer}, but {engram} are consumers; use 'mask' or 'off'"
            )
        targets = [layer.index for layer in model.topology.backbone if layer.is_target]
        if len({layer in consumers for layer in targets}) > 1:
            raise ConfigError(
                f"prefill.truncation_mode = 'compact' needs all draft target layers {targets} on one side of "
                f"layer {model.topology.n_prefill_layer}; use 'mask' or 'off'"
            )

    def with_values(self, **sections: object) -> EngineConfig:
        """A copy with other values: `with_values(numerics="exact", scheduler={"max_seqs": 4})`."""
        data = self.model_dump()
        for name, value in sections.items():
            data[name] = {**data[name], **value} if isinstance(value, dict) else value
        try:
            return type(self).model_validate(data)
        except ValidationError as error:
            raise validation_to_config_error(error, type(self), lambda path: None) from None
