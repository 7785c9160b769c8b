"""One rank's engine: requests in, exactly one result out for each.

Knows: a model, its cache pools, a scheduler and a step loop; validation, text, statistics. Does not know:
rows, Ray, other ranks (beside the vote group handed to the scheduler), how the model was loaded (`build.py`).
One thread calls it.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.cost_curve import CurveStore
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.engine.detokenizer import TextStream, TokenTable
from deepinfer_ray.engine.draft_length import ScheduledLengths
from deepinfer_ray.engine.flops import FlopModel, peak_tflops
from deepinfer_ray.engine.gc_policy import GcPolicy
from deepinfer_ray.engine.grammar_pool import GrammarPool
from deepinfer_ray.engine.hooks import EngineHooks
from deepinfer_ray.engine.lockstep import Lockstep
from deepinfer_ray.engine.phase_vote import VoteGroup
from deepinfer_ray.engine.profile_http import ProfileServer
from deepinfer_ray.engine.profiling import DEFAULT_STEPS, Profiler, visible_gpu
from deepinfer_ray.engine.request import Request, RequestResult, as_token_ids
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Status, Terminal
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.stats import WINDOW_STEPS, EngineStats
from deepinfer_ray.engine.stats_log import PROMPT_INTERVAL, StatsLog, memory_outside_torch
from deepinfer_ray.engine.step_loop import Model, StepLoop
from deepinfer_ray.engine.structured import StructuredOutputs
from deepinfer_ray.engine.timeline import Timeline
from deepinfer_ray.errors import ConfigError, RowError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QUEUE_SHARE = 4
"""A rank keeps 1/4 of its seats' number of requests waiting, so that a freed seat is taken at once."""

GRAMMAR_WAIT_S = 0.02
"""How long a step waits when all requests are waiting for their grammars."""


class Engine:
    """Facade over scheduler, step loop and text.

    A request that can never run ends with an error result like any other; `step` never raises for one.
    """

    def __init__(
        self,
        model: Model,
        pools: CachePools,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        compress: np.ndarray | None = None,
        defaults: GenerationDefaults | None = None,
        settings: SchedulerSettings | None = None,
        votes: VoteGroup | None = None,
        timeline: Timeline | None = None,
        hooks: EngineHooks | None = None,
        rank: int = 0,
        ranks: Lockstep | None = None,
        grammars: GrammarPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compress: int32 token id -> Engram id, None for a model without Engram. settings: instead of those
        that `config` gives. votes: the data-parallel group, None = a rank on its own. hooks: what else
        takes part in a step. rank: its number in logs and file names. ranks: the other ranks of its gang,
        with whom it then makes every turn. grammars: a pool that others use, too; by default its own."""
        self.config, self.model, self.pools, self.ranks = config, model, pools, ranks
        if ranks is not None:
            votes = ranks.groups.votes
        self.vocab_size = model.config.text.vocab_size
        ends = (defaults or GenerationDefaults()).eos_token_ids or (model.config.eos_token_id,)
        self.eos_token_id, self._more_ends = ends[0], ends[1:]
        self.settings = settings or SchedulerSettings.of(
            config,
            pools.num_blocks,
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            num_slots=pools.num_slots,
        )
        self._check_pools()
        if model.config.text.has_engram and compress is None:
            raise ConfigError("the model has Engram layers: the engine needs the map to compressed token ids")
        self.tokens = TokenTable.of(tokenizer, self.vocab_size, hidden=ends)
        self.scheduler = Scheduler(self.settings, votes=votes, compress=compress, clock=clock)
        self.scheduler.on_tokens = self._watch
        blacklist = np.asarray(config.sampling.blacklisted_ids, np.int64)
        if blacklist.size and blacklist.max() >= self.vocab_size:
            raise ConfigError(
                f"sampling.token_blacklist names token {int(blacklist.max())}, the vocabulary ends at "
                f"{self.vocab_size - 1}"
            )
        self._lockstep = ranks is not None or (votes is not None and votes.size > 1)
        self.loop = StepLoop(
            model,
            pools,
            self.scheduler,
            blacklist=blacklist,
            best=config.sampling.force_topk,
            diagnose=config.sampling.diagnostics,
            placeholders=self._lockstep,
            timeline=timeline,
            hooks=hooks,
            sync_guard=not config.debug.disable_sync_guard,
            confidence_temperature=config.speculative.confidence_temperature,
            batch_invariant=config.runtime.batch_invariant,
        )
        added = {token: each.content for token, each in tokenizer.get_added_tokens_decoder().items()}
        self.structured = self.loop.structured = StructuredOutputs(
            self.scheduler,
            self.tokens.pieces,
            ends,
            {token: text for token, text in added.items() if token < self.vocab_size and token not in ends},
            config.structured,
            grammars,
        )
        if self.settings.varlen and self.settings.num_drafts:
            self._schedule_lengths()
        self._refused: list[RequestResult] = []
        self._observe(rank, clock)
        if self.settings.role != "normal":
            self.loop.hooks.init_pd_split(self)

    def _observe(self, rank: int, clock: Callable[[], float]) -> None:
        """What watches the steps: statistics, their log, the profiler, the collector."""
        options, device = self.config.observability, torch.device(self.pools.device)
        interval = options.log_interval if options.log_stats else 0
        if self.settings.role == "prompt":
            interval = min(interval, PROMPT_INTERVAL)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._stats = EngineStats(
            clock=clock,
            window=interval if interval > 0 else WINDOW_STEPS,
            flops=FlopModel.build(self.model.config, self.config.numerics),
            peak_tflops=peak_tflops(name, arm_host=platform.machine() == "aarch64"),
            cp=self.settings.cp,
            load_window=self.config.eplb.stat_interval,
        )
        self._stats_log = StatsLog(
            interval,
            rank=rank,
            memory_interval=options.nccl_mem_interval,
            memory=partial(memory_outside_torch, device),
        )
        self.gc = GcPolicy(self.config.runtime.gc_interval, self.settings.role)
        self.loop.before_sample = self.gc.step
        http = options.profile_http
        gpu = visible_gpu(device, fallback=rank)
        self.profiler = Profiler(self.loop.timers, output_dir=http.output_dir, gpu_id=gpu, rank=rank)
        self.profile_server = (
            ProfileServer.start(self.profiler, http.host, http.port_base) if http.enabled else None
        )

    def _schedule_lengths(self) -> None:
        """Verified lengths by confidence and measured cost (spec/speculative.md §4). The drivers of a gang
        measure together and have one curve."""
        options, store = self.config.speculative, None
        if options.perf_cache_dir:
            device = torch.device(self.pools.device)
            key = {
                "unit": "ms",
                "model": self.model.config.text.model_dump(mode="json"),
                "numerics": self.config.numerics,
                "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.node(),
                "drafts": self.settings.num_drafts,
                "ranks": None if self.ranks is None else str(self.ranks.groups.grid),
            }
            store = CurveStore(Path(options.perf_cache_dir), key, options.perf_cache_ttl_s)
        group = None if self.ranks is None else self.ranks.groups.votes
        costs = self.loop.measure_costs(self.config.runtime.graph_interval, store, group)
        self.scheduler.draft_lengths = ScheduledLengths(costs)

    def _check_pools(self) -> None:
        settings, pools = self.settings, self.pools
        num_slots = settings.num_state_slots + settings.prefix_snapshots
        if pools.num_blocks < settings.num_blocks or pools.num_slots < num_slots:
            raise ConfigError(
                f"the cache pools hold {pools.num_blocks} blocks and {pools.num_slots} slots, the scheduler "
                f"was promised {settings.num_blocks} and {num_slots}"
            )
        settings.require_headroom()

    # -- requests ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. One that can never run gets its error result from the next `step`.

        `request.params.n` is not looked at: the caller expands it into requests with derived seeds.
        """
        try:
            request = self._checked(request)
            spec = self.structured.spec_of(request.params)
        except RowError as error:
            length = len(request.prompt) if hasattr(request.prompt, "__len__") else 0
            failed = RequestResult.failed(request.request_id, length, error.code, str(error))
            self._refused.append(failed)
            return
        params = request.params
        stream = None
        if params.stop:
            stream = TextStream(self.tokens, params.stop, params.include_stop_str_in_output)
        sequence = self.scheduler.add(request, ready=spec is None, extra=stream)
        if spec is not None:
            self.structured.hold(sequence, spec)

    def _checked(self, request: Request) -> Request:
        """The request as it will run, or `RowError`."""
        params = request.params
        prompt = as_token_ids(request.prompt, self.vocab_size)
        if len(prompt) > self.settings.prompt_limit:
            raise RowError(
                "prompt_too_long",
                f"{len(prompt)} prompt tokens, but at most {self.settings.prompt_limit} can be run "
                "(scheduler.max_model_len); shorten the prompt or raise it",
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            outside = [token for token in ids if not 0 <= token < self.vocab_size]
            if outside:
                raise RowError(
                    "bad_sampling_params", f"{name}: token {outside[0]} is outside [0, {self.vocab_size})"
                )
        if (params.logprobs or 0) > self.vocab_size:
            raise RowError(
                "bad_sampling_params",
                f"logprobs: {params.logprobs} alternatives, the vocabulary has {self.vocab_size}",
            )
        if params.prompt_logprobs is not None and self.config.prefill.truncation_mode != "off":
            raise RowError(
                "bad_sampling_params",
                f"prompt_logprobs needs every prompt row, but prefill.truncation_mode is "
                f"{self.config.prefill.truncation_mode!r}",
            )
        if self._more_ends and not params.ignore_eos:
            ends = tuple(dict.fromkeys((*params.stop_token_ids, *self._more_ends)))
            params = params.model_copy(update={"stop_token_ids": ends})
        return dataclasses.replace(request, prompt=prompt, params=params)

    def abort(self, request_id: int) -> bool:
        """Ends a request wherever it is; its result comes from the next `step`. False if it is not alive."""
        return self.scheduler.abort(request_id)

    # -- steps ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestResult]:
        """One step of the loop; results of the requests that ended. In a gang one turn, which is collective
        and runs no step if no rank has work."""
        results, self._refused = self._refused, []
        if self._waits_for_grammars():
            return results
        agreement = None
        if self.ranks is not None:
            agreement = self.ranks.agree(self.scheduler, self.loop.has_in_flight)
            if self.ranks.idle:
                return results
        if self._lockstep or self.scheduler.has_unfinished or self.loop.has_in_flight:
            started = self._stats.clock()
            self.profiler.before_step()
            terminals = self.loop.step(agreement)
            if self.ranks is not None:
                assert self.loop.last_plan is not None
                self.ranks.after_step(self.loop.last_plan.is_prompt)
                if (load := self.ranks.take_load()) is not None:
                    self._stats.record_expert_balance(load.most, load.mean)
            goes_on = self._lockstep or self.scheduler.has_unfinished or self.loop.has_in_flight
            self.profiler.after_step(goes_on)
            self._record(started, goes_on)
            results += [self._result(terminal) for terminal in terminals]
        return results

    def _waits_for_grammars(self) -> bool:
        """Takes what was compiled; whether there is nothing to do before more is (after a short wait)."""
        structured, scheduler = self.structured, self.scheduler

        def only_grammars() -> bool:
            waiting = structured.num_waiting
            return waiting > 0 and scheduler.num_unfinished == waiting and not self.loop.has_in_flight

        alone = not self._lockstep and self.ranks is None
        structured.pump(GRAMMAR_WAIT_S if alone and only_grammars() else 0.0)
        return alone and only_grammars() and not scheduler.state.outbox

    def _record(self, started: float, goes_on: bool) -> None:
        stats, plan = self._stats, self.loop.last_plan
        assert plan is not None
        stats.record_step(
            plan, self.loop.take_commits(), started, goes_on=goes_on and self.settings.overlapped
        )
        if self._stats_log.due(stats.steps):
            self._stats_log.put(stats.capture(self.scheduler), self.loop.timers.take())

    def has_unfinished(self) -> bool:
        """Whether another step is needed here."""
        return bool(self._refused) or self.scheduler.has_unfinished or self.loop.has_in_flight

    def run(self) -> list[RequestResult]:
        """Steps until nothing is left, in a gang on any rank; results in the order in which they ended."""
        results: list[RequestResult] = []
        while self.has_unfinished() or self.ranks is not None:
            results += self.step()
            if self.ranks is not None and self.ranks.idle:
                break
        return results

    def wanted(self) -> int:
        """How many more requests it would take now without piling them up."""
        seats = self.settings.max_seqs
        return max(0, seats + max(1, seats // QUEUE_SHARE) - self.scheduler.num_unfinished)

    @property
    def part(self) -> str:
        """What it is doing inside a step, for whoever watches it."""
        return (self.ranks.part if self.ranks is not None else "") or self.loop.part

    @property
    def stats(self) -> dict[str, Any]:
        """A JSON-able picture of this rank (spec/engine.md §9.6)."""
        prefixes, hooks = self.scheduler.state.prefixes, self.loop.hooks
        return {
            **self._stats.snapshot(self.scheduler),
            "pending": hooks.get_num_pendings(self.scheduler),
            "prefixes_kept": len(prefixes),
            "prefix_hits": prefixes.num_hits,
            "prefixes_evicted": prefixes.num_evicted,
            **({} if self.ranks is None else self.ranks.stats()),
            **hooks.build_extra_metrics_log(),
        }

    def pulse(self) -> dict[str, Any]:
        """Totals and gauges of this moment, JSON-able; cheap enough for once a second."""
        return self._stats.pulse(self.scheduler) | ({} if self.ranks is None else self.ranks.stats())

    def profile(self, num_steps: int = DEFAULT_STEPS, output_dir: str | Path | None = None) -> Future[Path]:
        """Profile the next `num_steps` steps (1 … 50), fewer if the work ends: a torch trace, and beside it
        `…-timeline.json`, the parts of each step; both for chrome://tracing or Perfetto.

        Any thread may call. The future gives the trace's path once it is written. Raises `ValueError`, and
        `ProfileBusyError` while another profile is queued or running. output_dir: None =
        `observability.profile_http.output_dir`, else the system's temporary directory.
        """
        return self.profiler.request(num_steps, output_dir)

    def close(self) -> None:
        """Ends the threads of logs and profiles; may be called twice. No step may follow."""
        if self.profile_server is not None:
            self.profile_server.close()
            self.profile_server = None
        self.structured.close()
        self.profiler.close()
        self._stats_log.close()
        self.gc.release_process()
        if self.ranks is not None:
            self.ranks.close()

    def check_integrity(self) -> None:
        """`IntegrityError` unless the scheduler's books balance."""
        self.scheduler.check_integrity()

    # -- text -------------------------------------------------------------------------------------------

    def _watch(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """Shows the new tokens of requests with stop strings to their streams."""
        table, answer = self.scheduler.table, None
        for index, (row, start, count) in enumerate(
            zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
        ):
            sequence = table.sequences[row]
            if sequence is None or not isinstance(sequence.extra, TextStream):
                continue
            params, before = sequence.request.params, start - sequence.prompt_len
            for place in range(count):
                token = int(table.tokens[row, start + place])
                if token in params.stop_token_ids and not params.include_stop_str_in_output:
                    break
                sequence.extra.push(token, armed=before + place + 1 > params.min_tokens)
                if sequence.extra.stopped:
                    answer = np.zeros(len(rows), np.int32) if answer is None else answer
                    answer[index] = place + 1
                    break
        return answer

    def _result(self, terminal: Terminal) -> RequestResult:
        self._stats.record_terminal(terminal)
        return terminal.to_result(self._text(terminal))

    def _text(self, terminal: Terminal) -> str:
        """Text of the completion: without EOS, without the stop token id that ended it unless asked for."""
        stream = terminal.sequence.extra
        if isinstance(stream, TextStream):
            stream.finish()
            return stream.text
        tokens, params = terminal.token_ids, terminal.sequence.request.params
        if len(tokens) and terminal.status is Status.STOPPED and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return self.tokens.text(tokens.tolist())
