"""The rank's loop: schedule, launch, sample, commit; once plain, once overlapped.

Knows: the order of the parts of a step and what each may know (spec/engine.md §7). Does not know: policy
(scheduler), distributions (sampler), text, results. The overlapped loop commits a decode step after the next
one is launched: its tokens are gathered on the device from the step before, its metadata needs no token.
Both loops give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from deepinfer_ray.cache.checks import StepLimits
from deepinfer_ray.cache.metadata import StepMetadata, build_decode, build_prefill
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine import inputs, sampler
from deepinfer_ray.engine.inputs import HistoryReader, InFlight, PromptScores, StepRows
from deepinfer_ray.engine.plan import CommitResult, StepOutputs, StepPlan
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Terminal
from deepinfer_ray.engine.timeline import Timeline
from deepinfer_ray.engine.timers import StepTimers
from deepinfer_ray.errors import ConfigError

SCORE_BYTES = 64 << 20
"""Logits of prompt rows that exist at one time when prompt log-probabilities are asked for."""

BAD_ROW = (
    "internal",
    "the model gave no usable distribution (NaN, infinity, or every token masked); "
    "check the weights and logit_bias of this row",
)


class ModelOutput(Protocol):
    """hidden: [T, D] after the final norm."""

    @property
    def hidden(self) -> torch.Tensor: ...


class Model(Protocol):
    """What the loop needs of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, meta: StepMetadata, pools: CachePools) -> ModelOutput: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] -> float32 [N, V]."""
        ...


class HostCopy:
    """Device tensors on their way to the host; on a CPU they are there already."""

    def __init__(self, tensors: dict[str, torch.Tensor | None]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.device.type == "cuda":
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                pinned.copy_(tensor, non_blocking=True)
                tensor = pinned
                self._event = self._event or torch.cuda.Event()
            self._tensors[name] = tensor
        if self._event is not None:
            self._event.record()

    def wait(self) -> dict[str, np.ndarray]:
        """The one place where the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}


@dataclass(slots=True)
class Flight:
    """One launched step. members: plan indices that are sampled. results: int64 [n] tokens of all sequences
    on the device (0 where nothing is sampled), for the step behind this one."""

    plan: StepPlan
    members: np.ndarray
    hidden: torch.Tensor | None = None
    last_rows: torch.Tensor | None = None
    scores: PromptScores | None = None
    in_flight: InFlight | None = None
    copy: HostCopy | None = None


class StepLoop:
    """Runs a scheduler's plans on a model. `step` returns the terminal records of sequences that ended."""

    def __init__(
        self,
        model: Model,
        pools: CachePools,
        scheduler: Scheduler,
        *,
        blacklist: np.ndarray | None = None,
        placeholders: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        """blacklist: ids that are never sampled. placeholders: run an empty step's forward with one invalid
        row, because other ranks wait in its collectives."""
        if scheduler.settings.num_drafts:
            raise ConfigError(
                f"speculative.num_drafts is {scheduler.settings.num_drafts}, but this step loop verifies no "
                "drafts; set it to 0"
            )
        self.model, self.pools, self.scheduler = model, pools, scheduler
        self.table, self.device = scheduler.table, pools.device
        self.overlapped = scheduler.settings.overlapped
        self.timers = StepTimers(pools.device, timeline)
        self.before_sample: Callable[[], None] | None = None
        """Called in every step once its forward is launched: the time for host work that nobody waits for."""
        self._placeholders = placeholders
        text, topology = model.config.text, model.config.topology
        self._ratios = topology.ratios
        self._limits = StepLimits(
            pools.layout,
            topology.ratios,
            pools.num_blocks,
            pools.num_slots,
            self.table.max_blocks,
            getattr(model, "max_positions", text.max_position_embeddings),
        )
        pad = int(self.table.compress_ids(np.asarray([text.engram_pad_token_id]))[0])
        self._reader = HistoryReader(self.table, text.engram_max_ngram_size if text.has_engram else 0, pad)
        self._blacklist = None if blacklist is None or not len(blacklist) else self._upload(blacklist)
        compress = self.table.compress
        self._lookup = None if compress is None else self._upload(compress.astype(np.int64))
        self._previous: Flight | None = None
        self.num_steps = 0
        self.last_plan: StepPlan | None = None
        self._commits: list[CommitResult] = []

    # -- the two loops ----------------------------------------------------------------------------------

    def step(self) -> list[Terminal]:
        """One step of this rank, possibly empty."""
        return self._step_overlapped() if self.overlapped else self._step_plain()

    @torch.inference_mode()
    def _step_plain(self) -> list[Terminal]:
        plan = self._schedule()
        flight = self._launch(plan, None)
        self._sample(flight)
        self.scheduler.reclaim()
        return plan.ignored + self._commit(flight)

    @torch.inference_mode()
    def _step_overlapped(self) -> list[Terminal]:
        previous, self._previous = self._previous, None
        plan = self._schedule()
        flight = self._launch(plan, previous)
        ended = plan.ignored
        if previous is not None:
            ended = ended + self._commit(previous)
            self.scheduler.refresh(plan)
        self._sample(flight)
        self.scheduler.reclaim()
        if plan.is_prompt:
            return ended + self._commit(flight)
        self._previous = None if plan.is_empty else flight
        return ended

    @torch.inference_mode()
    def flush(self) -> list[Terminal]:
        """Commits the step that is still in flight, if any."""
        previous, self._previous = self._previous, None
        return [] if previous is None else self._commit(previous)

    def take_commits(self) -> list[CommitResult]:
        """What was committed since the last call."""
        commits, self._commits = self._commits, []
        return commits

    @property
    def has_in_flight(self) -> bool:
        return self._previous is not None

    # -- schedule, launch -------------------------------------------------------------------------------

    def _span(self, name: str, step: int) -> AbstractContextManager[None]:
        return self.timers.span(name, step)

    def _schedule(self) -> StepPlan:
        with self._span("schedule", self.num_steps + 1):
            plan = self.scheduler.schedule()
        self.num_steps += 1
        self.last_plan = plan
        return plan

    def _launch(self, plan: StepPlan, previous: Flight | None) -> Flight:
        """Copies of forks, metadata, forward. Reads no result of the step before on the host."""
        flight = Flight(plan, np.flatnonzero(plan.last_chunk))
        if len(plan.clone_states):
            self.pools.clone_slots(plan.clone_states[:, 0].tolist(), plan.clone_states[:, 1].tolist())
        if len(plan.clone_blocks):
            self.pools.clone_blocks(plan.clone_blocks[:, 0].tolist(), plan.clone_blocks[:, 1].tolist())
        if plan.is_empty and not self._placeholders:
            return flight
        with self._span("prepare", plan.step):
            meta = self._placeholder(plan) if plan.is_empty else self._metadata(plan, previous)
        with self._span("forward", plan.step):
            output = self.model.forward(meta, self.pools)
        if not plan.is_empty:
            flight.hidden, flight.last_rows = output.hidden, meta.last_rows
            if plan.is_prompt:
                flight.scores = inputs.prompt_scores(plan, self.table)
        return flight

    def _metadata(self, plan: StepPlan, previous: Flight | None) -> StepMetadata:
        rows = StepRows.of(plan)
        in_flight = previous.in_flight if previous is not None and plan.overlaps else None
        if in_flight is None:
            ids_T, ngrams_TG = self._reader.tokens(plan, rows)
        else:  # the device fills them in below
            ids_T = np.zeros(len(rows.positions), np.int64)
            ngrams_TG = np.zeros((len(rows.positions), self._reader.order), np.int64)
        tables = self.table.block_table[plan.rows]
        self._limits.check(
            is_prefill=plan.is_prompt,
            q=plan.q,
            k=plan.k,
            state_ids=plan.rows,
            block_tables=tables,
            num_blocks_of=self.table.n_blocks[plan.rows],
        )
        build = build_prefill if plan.is_prompt else build_decode
        meta = build(
            self.pools.layout,
            self._ratios,
            q=plan.q,
            k=plan.k,
            state_ids=plan.rows,
            block_tables=tables,
            input_ids=ids_T,
            ngram_ids=ngrams_TG,
            device=self.device,
        )
        if in_flight is not None:
            fresh_ids, fresh_compressed, window = self._reader.overlapped(plan)
            meta.input_ids, meta.ngram_ids = inputs.gather_in_flight(
                self._upload(plan.remap.astype(np.int64)),
                self._upload(fresh_ids.astype(np.int64)),
                self._upload(fresh_compressed.astype(np.int64)),
                self._upload(window.astype(np.int64)),
                in_flight,
                self._lookup,
                self._reader.pad,
                (meta.seq_of_row, self._upload(rows.row_in_seq)),
                order=self._reader.order,
            )
        return meta

    def _placeholder(self, plan: StepPlan) -> StepMetadata:
        """One invalid row in block 0 and slot 0, which belong to nobody (spec/engine.md §8.6)."""
        one = np.ones(1, np.int64)
        build = build_prefill if plan.is_prompt else build_decode
        return build(
            self.pools.layout,
            self._ratios,
            q=one,
            k=one,
            state_ids=one * 0,
            block_tables=np.zeros((1, 1), np.int64),
            input_ids=one * 0,
            ngram_ids=np.full((1, self._reader.order), self._reader.pad, np.int64),
            valid=np.zeros(1, np.bool_),
            device=self.device,
        )

    # -- sample, commit ---------------------------------------------------------------------------------

    def _sample(self, flight: Flight) -> None:
        """Launches sampling; everything before the sampled tokens is committed by now."""
        if self.before_sample is not None:
            self.before_sample()
        plan, hidden = flight.plan, flight.hidden
        if hidden is None or flight.last_rows is None:
            return
        tensors: dict[str, torch.Tensor | None] = {}
        with self._span("sample", plan.step):
            if len(flight.members):
                everyone = len(flight.members) == plan.num_seqs
                members = self._upload(flight.members)
                last = flight.last_rows if everyone else flight.last_rows[members]
                logits = self.model.logits(hidden[last])
                rows = inputs.sample_rows(plan, self.table, flight.members)
                drawn = sampler.sample(logits, rows, self._blacklist)
                tokens = drawn.tokens
                if not everyone:
                    tokens = tokens.new_zeros(plan.num_seqs).index_copy(0, members, tokens)
                if self.overlapped and not plan.is_prompt:
                    none = tokens.new_zeros((plan.num_seqs, 0))
                    flight.in_flight = InFlight(tokens, none, tokens.new_zeros(plan.num_seqs))
                tensors |= {
                    "tokens": tokens,
                    "bad": drawn.bad,
                    "logprobs": drawn.logprobs,
                    "top_ids": drawn.top_ids,
                    "top_logprobs": drawn.top_logprobs,
                }
            if flight.scores is not None:
                tensors["scores"] = self._score_prompt(hidden, flight.scores)
            flight.copy = HostCopy(tensors)
        flight.hidden = flight.last_rows = None

    def _score_prompt(self, hidden: torch.Tensor, scores: PromptScores) -> torch.Tensor:
        chunk = max(1, SCORE_BYTES // (4 * self.model.config.text.vocab_size))
        rows, targets = self._upload(scores.rows), self._upload(scores.targets)
        parts = [
            sampler.prompt_logprobs(
                self.model.logits(hidden[rows[at : at + chunk]]), targets[at : at + chunk]
            )
            for at in range(0, len(scores.rows), chunk)
        ]
        return torch.cat(parts)

    def _commit(self, flight: Flight) -> list[Terminal]:
        """Waits for the step's results and makes them part of its sequences."""
        plan = flight.plan
        with self._span("wait", plan.step):
            host = flight.copy.wait() if flight.copy is not None else {}
        with self._span("commit", plan.step):
            outputs = StepOutputs(host.get("tokens", np.zeros(plan.num_seqs, np.int64)).astype(np.int32))
            if "logprobs" in host:
                outputs.logprobs = np.zeros((plan.num_seqs, 1), np.float32)
                outputs.logprobs[flight.members, 0] = host["logprobs"]
            if "bad" in host and host["bad"].any():
                outputs.failures = dict.fromkeys(flight.members[host["bad"]].tolist(), BAD_ROW)
            if flight.scores is not None:
                self._keep_scores(plan, flight.scores, host["scores"])
            result = self.scheduler.commit(plan, outputs)
            if "top_ids" in host:
                self._keep_alternatives(flight, result, host["top_ids"], host["top_logprobs"])
        self._commits.append(result)
        return result.terminals

    def _keep_scores(self, plan: StepPlan, scores: PromptScores, values: np.ndarray) -> None:
        at = 0
        for index, first, count in scores.spans:
            row = int(plan.rows[index])
            sequence = self.table.sequences[row]
            if sequence is not None and self.table.seq_id[row] == plan.seq_ids[index]:
                if sequence.prompt_logprobs is None:
                    sequence.prompt_logprobs = np.zeros(sequence.prompt_len - 1, np.float32)
                sequence.prompt_logprobs[first - 1 : first - 1 + count] = values[at : at + count]
            at += count

    def _keep_alternatives(
        self, flight: Flight, result: CommitResult, ids: np.ndarray, logprobs: np.ndarray
    ) -> None:
        """Alternatives of the tokens that were really appended."""
        member_of_row = dict(zip(flight.plan.rows[flight.members].tolist(), range(len(ids)), strict=True))
        for row in result.rows.tolist():
            sequence, width = self.table.sequences[row], int(self.table.num_logprobs[row])
            if sequence is None or width <= 0:
                continue
            member = member_of_row[row]
            if sequence.top_logprobs is None:
                sequence.top_logprobs = []
            pairs = zip(ids[member, :width].tolist(), logprobs[member, :width].tolist(), strict=True)
            sequence.top_logprobs.append(list(pairs))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
