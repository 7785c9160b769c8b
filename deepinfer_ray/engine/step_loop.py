"""The rank's loop: schedule, launch, sample, commit; once plain, once overlapped.

Knows: the order of the parts of a step and what each may know (spec/engine.md §7). Does not know: policy
(scheduler), distributions (sampler), text, results. The overlapped loop commits a decode step after the next
one is launched: its tokens are gathered on the device from the step before, its metadata needs no token.
Both loops give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from deepinfer_ray.cache.checks import StepLimits
from deepinfer_ray.cache.metadata import StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine import inputs, sampler
from deepinfer_ray.engine.cost_curve import (
    CostCurve,
    CostListener,
    CurveStore,
    StepCosts,
    announced,
    averaged,
    ladder,
)
from deepinfer_ray.engine.drafting import Drafting
from deepinfer_ray.engine.hooks import EngineHooks
from deepinfer_ray.engine.host_copy import HostCopy
from deepinfer_ray.engine.inputs import HistoryReader, InFlight, PromptScores
from deepinfer_ray.engine.phase_vote import Agreement
from deepinfer_ray.engine.plan import CommitResult, StepOutputs, StepPlan
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Terminal
from deepinfer_ray.engine.step_inputs import InputBuilder, RowMultiples
from deepinfer_ray.engine.structured import Failures, StructuredOutputs
from deepinfer_ray.engine.timeline import Timeline
from deepinfer_ray.engine.timers import StepTimers
from deepinfer_ray.engine.token_details import TokenDetails
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.sync_guard import forbid_sync
from deepinfer_ray.parallel.rank_group import RankGroup, SingleRank

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


@dataclass(slots=True)
class Flight:
    """One launched step. members: plan indices that are sampled. sample_rows: int64, their query rows on the
    device, then some again (see `StepInputs`)."""

    plan: StepPlan
    members: np.ndarray
    hidden: torch.Tensor | None = None
    sample_rows: torch.Tensor | None = None
    scores: PromptScores | None = None
    in_flight: InFlight | None = None
    lengths: HostCopy | None = None
    """Rows of each sequence, where the device gave them out."""
    copy: HostCopy | None = None
    failures: Failures = field(default_factory=dict)
    """Sequences that failed before they were sampled."""


class StepLoop:
    """Runs a scheduler's plans on a model. `step` returns the terminal records of sequences that ended."""

    def __init__(
        self,
        model: Model,
        pools: CachePools,
        scheduler: Scheduler,
        *,
        blacklist: np.ndarray | None = None,
        best: int = 0,
        placeholders: bool = False,
        timeline: Timeline | None = None,
        hooks: EngineHooks | None = None,
        sync_guard: bool = True,
        batch_invariant: bool = False,
        confidence_temperature: float | tuple[float, ...] = 1.0,
        diagnose: bool = False,
    ) -> None:
        """blacklist: ids that are never sampled. best: logits of a row that take part, 0 = all.
        placeholders: run an empty step's forward with invalid rows, because other ranks wait in its
        collectives. sync_guard: raise where launching a step would wait for a CUDA device. batch_invariant:
        see `RowMultiples`. confidence_temperature: see `Drafting`. diagnose: keep how each token came
        about."""
        self.model, self.pools, self.scheduler = model, pools, scheduler
        self.table, self.device = scheduler.table, pools.device
        self.overlapped = scheduler.settings.overlapped
        self.hooks = hooks or EngineHooks()
        self.timers = StepTimers(pools.device, timeline)
        self.before_sample: Callable[[], None] | None = None
        """Called in every step once its forward is launched: the time for host work that nobody waits for."""
        self.structured: StructuredOutputs | None = None
        """Grammars of the sequences, if any may have one."""
        self._placeholders = placeholders
        text, topology = model.config.text, model.config.topology
        limits = StepLimits(
            pools.layout,
            topology.ratios,
            pools.num_blocks,
            pools.num_slots,
            self.table.max_blocks,
            getattr(model, "max_positions", text.max_position_embeddings),
        )
        pad = int(self.table.compress_ids(np.asarray([text.engram_pad_token_id]))[0])
        reader = HistoryReader(self.table, text.engram_max_ngram_size if text.has_engram else 0, pad)
        multiples = RowMultiples.of(self.device, scheduler.settings, batch_invariant)
        settings = scheduler.settings
        self.inputs = InputBuilder(
            pools,
            limits,
            reader,
            topology.ratios,
            multiples,
            settings.varlen,
            text.vocab_size,
            settings.truncation,
            settings.keep_tokens,
        )
        self._staging = Staging(self.device)
        self._details = TokenDetails(self.table)
        self._blacklist: torch.Tensor | None = None
        self._best, self._diagnose = best, diagnose
        if blacklist is not None and len(blacklist):
            self._blacklist = torch.from_numpy(blacklist).to(self.device)
        self.drafting = self._make_drafting(confidence_temperature, multiples.sample)
        self._costs: CostListener | None = None
        self._guarded = sync_guard and self.device.type == "cuda"
        self._previous: Flight | None = None
        self._agreement: Agreement | None = None
        self.part = ""
        """The part of a step that it is in, or was in last."""
        self.num_steps = 0
        self.last_plan: StepPlan | None = None
        self._commits: list[CommitResult] = []

    def _make_drafting(self, temperature: float | tuple[float, ...], row_multiple: int) -> Drafting | None:
        settings = self.scheduler.settings
        if not settings.num_drafts:
            return None
        if getattr(self.model, "drafter", None) is None:
            raise ConfigError(
                f"speculative.num_drafts is {settings.num_drafts}, but the model was loaded without its "
                "draft layers; set it to 0"
            )
        return Drafting(
            self.model,  # type: ignore[arg-type]
            self.pools,
            self.table,
            num_slots=settings.max_seqs,
            vocab_size=self.model.config.text.vocab_size,
            temperature=temperature,
            blacklist=self._blacklist,
            best=self._best,
            staging=self._staging,
            row_multiple=row_multiple,
            diagnose=self._diagnose,
        )

    @torch.inference_mode()
    def measure_costs(
        self, interval: int, store: CurveStore | None = None, group: RankGroup | None = None
    ) -> StepCosts:
        """What decode forwards cost by their number of rows, now and, corrected, from here on. Runs trial
        steps that touch nobody's cache. group: ranks that are to have one curve; collective over them."""
        settings, group = self.scheduler.settings, group or SingleRank()
        sizes = ladder(settings.max_seqs * (1 + settings.num_drafts), interval)
        kept = store.load(sizes) if store is not None and group.rank == 0 else None
        curve = announced(kept, sizes, group)
        if curve is None:
            curve = averaged(CostCurve.measure(sizes, self._trial), group)
            if store is not None and group.rank == 0:
                store.save(curve)
        costs = StepCosts(curve)
        self._costs = self.timers.listener = CostListener(costs)
        return costs

    def _trial(self, rows: int) -> None:
        self.model.forward(self.inputs.trial(rows), self.pools)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- the two loops ----------------------------------------------------------------------------------

    def step(self, agreement: Agreement | None = None) -> list[Terminal]:
        """One step of this rank, possibly empty. agreement: what the ranks agreed on for this turn, if the
        caller asked them."""
        self._agreement = agreement
        return self._step_overlapped() if self.overlapped else self._step_plain()

    @torch.inference_mode()
    def _step_plain(self) -> list[Terminal]:
        plan = self._schedule()
        flight = self._launch(plan, None)
        self._sample(flight)
        self._reclaim(plan)
        return plan.ignored + self._commit(flight)

    @torch.inference_mode()
    def _step_overlapped(self) -> list[Terminal]:
        previous, self._previous = self._previous, None
        plan = self._schedule()
        flight = self._launch(plan, previous)
        ended = plan.ignored
        if previous is not None:
            ended = ended + self._commit(previous)
            if flight.lengths is not None:
                plan.q = flight.lengths.wait()["q"].astype(np.int32)
            self.scheduler.refresh(plan)
        self._sample(flight)
        self._reclaim(plan)
        if plan.is_prompt:
            return ended + self._commit(flight)
        self._previous = None if plan.is_empty else flight
        return ended

    @torch.inference_mode()
    def flush(self) -> list[Terminal]:
        """Commits the step that is still in flight, if any."""
        previous, self._previous = self._previous, None
        ended = [] if previous is None else self._commit(previous)
        self.hooks.process_output(ended)
        return ended

    def _reclaim(self, plan: StepPlan) -> None:
        """The host's last part of a step that does not wait for it: caches to save, memory to free."""
        for sequence in plan.finished:
            self.hooks.finalize_seq(sequence)
        if plan.is_prompt:
            self.hooks.pe_prepare_save_kvcache(plan)
        else:
            self.hooks.do_save_kvcache(plan)
        self.scheduler.reclaim()

    def take_commits(self) -> list[CommitResult]:
        """What was committed since the last call."""
        commits, self._commits = self._commits, []
        return commits

    @property
    def has_in_flight(self) -> bool:
        return self._previous is not None

    # -- schedule, launch -------------------------------------------------------------------------------

    def _span(self, name: str, step: int) -> AbstractContextManager[None]:
        self.part = name
        return self.timers.span(name, step)

    def _no_waiting(self) -> AbstractContextManager[None]:
        return forbid_sync() if self._guarded else nullcontext()

    def _schedule(self) -> StepPlan:
        with self._span("schedule", self.num_steps + 1):
            plan = self.scheduler.schedule(self._agreement)
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
        self.hooks.post_schedule(plan)
        if not plan.is_prompt:
            wanted = self.hooks.should_copy_state(plan)
            if len(wanted):
                self.hooks.do_copy_state(plan, wanted)
        if plan.is_empty and not self._placeholders:
            return flight
        with self._span("prepare", plan.step), self._no_waiting():
            in_flight = previous.in_flight if previous is not None and plan.overlaps else None
            step = self.inputs.build(plan, flight.members, in_flight)
            if self._costs is not None and not plan.is_prompt and not plan.is_empty:
                self._costs.expect(plan.step, int(plan.q.sum()), plan.num_seqs)
            if step.q is not None:
                flight.lengths = HostCopy({"q": step.q})
        with self._span("forward", plan.step), self._no_waiting():
            output = self.model.forward(step.meta, self.pools)
        if len(plan.save_states):
            self.pools.clone_slots(plan.save_states[:, 0].tolist(), plan.save_states[:, 1].tolist())
        if not plan.is_empty:
            flight.hidden, flight.sample_rows = output.hidden, step.sample_rows
            if plan.is_prompt:
                flight.scores = inputs.prompt_scores(plan, self.table)
        return flight

    # -- sample, commit ---------------------------------------------------------------------------------

    def _sample(self, flight: Flight) -> None:
        """Launches sampling; everything before the sampled tokens is committed by now."""
        if self.before_sample is not None:
            self.before_sample()
        plan, hidden, members = flight.plan, flight.hidden, flight.members
        if hidden is None or flight.sample_rows is None:
            if self.drafting is not None and self._placeholders and not plan.is_prompt:
                self.drafting.placeholder()
            return
        verifies = self.drafting is not None and not plan.is_prompt
        masks = None
        if self.structured is not None and len(members):
            with self._span("grammar", plan.step):
                masks, flight.failures = self.structured.masks(plan, members, verifies=verifies)
        if self.drafting is not None and verifies:
            with self._span("sample", plan.step), self._no_waiting():
                drafted = self.drafting.run(plan, hidden, masks)
                flight.in_flight = drafted.in_flight if self.overlapped else None
                flight.copy = HostCopy(drafted.tensors)
            flight.hidden = flight.sample_rows = None
            return
        tensors: dict[str, torch.Tensor | None] = {}
        with self._span("sample", plan.step), self._no_waiting():
            if len(members):
                logits = self.model.logits(hidden.index_select(0, flight.sample_rows))
                rows = inputs.sample_rows(plan, self.table, members).padded(len(flight.sample_rows))
                rows.masks, rows.diagnose = masks, self._diagnose
                drawn = sampler.sample(logits, rows, self._blacklist, self._staging, best=self._best)
                if self.overlapped and not plan.is_prompt:
                    none = drawn.tokens.new_zeros((len(drawn.tokens), 0))
                    flight.in_flight = InFlight(drawn.tokens, none, torch.zeros_like(drawn.tokens))
                for name in ("tokens", "bad", "logprobs", "top_ids", "top_logprobs", "smaller"):
                    values = getattr(drawn, name)
                    tensors[name] = None if values is None else values[: len(members)]
            if flight.scores is not None:
                tensors["scores"] = self._score_prompt(hidden, flight.scores)
            flight.copy = HostCopy(tensors)
        flight.hidden = flight.sample_rows = None

    def _score_prompt(self, hidden: torch.Tensor, scores: PromptScores) -> torch.Tensor:
        chunk = max(1, SCORE_BYTES // (4 * self.model.config.text.vocab_size))
        multiple = min(self.inputs.multiples.prompt, chunk)
        chunk -= chunk % multiple
        count = len(scores.rows)
        padding = (0, -count % multiple)
        rows, targets = self._staging.send([np.pad(each, padding) for each in (scores.rows, scores.targets)])
        parts = [
            sampler.prompt_logprobs(
                self.model.logits(hidden[rows[at : at + chunk]]), targets[at : at + chunk]
            )
            for at in range(0, len(rows), chunk)
        ]
        return torch.cat(parts)[:count]

    def _commit(self, flight: Flight) -> list[Terminal]:
        """Waits for the step's results and makes them part of its sequences."""
        plan = flight.plan
        with self._span("wait", plan.step):
            host = flight.copy.wait() if flight.copy is not None else {}
        if self._costs is not None:
            self.timers.poll()
        with self._span("commit", plan.step):
            outputs = self._outputs(flight, host)
            if "bad" in host and host["bad"].any():
                outputs.failures = dict.fromkeys(flight.members[host["bad"]].tolist(), BAD_ROW)
            outputs.failures |= flight.failures
            if flight.scores is not None:
                self._details.keep_scores(plan, flight.scores, host["scores"])
            result = self.scheduler.commit(plan, outputs)
            if "error" in host:
                result.confidence_error = float(host["error"][0])
            if "top_ids" in host or "smaller" in host:
                rows = None
                if self.drafting is not None and not plan.is_prompt:
                    rows = self.drafting.rows_of(plan)
                self._details.keep(plan, flight.members, rows, result, host)
        if plan.is_prompt:
            self.hooks.pe_do_save_kvcache(plan)
            if self.scheduler.settings.role == "prompt":
                self.hooks.send_processed_prompts(plan)
                self.scheduler.reclaim()
        self.hooks.post_process_model_outputs(plan, result)
        self._commits.append(result)
        return result.terminals

    def _outputs(self, flight: Flight, host: dict[str, np.ndarray]) -> StepOutputs:
        plan = flight.plan
        if self.drafting is not None and "drafts" in host:
            return self.drafting.outputs(plan, host)
        outputs = StepOutputs(np.zeros(plan.num_seqs, np.int32))
        if "tokens" in host:
            outputs.sampled[flight.members] = host["tokens"]
        if "logprobs" in host:
            outputs.logprobs = np.zeros((plan.num_seqs, 1), np.float32)
            outputs.logprobs[flight.members, 0] = host["logprobs"]
        return outputs
