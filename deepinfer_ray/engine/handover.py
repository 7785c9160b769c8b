"""A sequence changes engines after its prompt: role `prompt` computes it, role `completion` goes on with it.

Knows: what has to travel (tokens, cache blocks, state slot, what the result needs), how it leaves one engine
and enters another of the same layout in the same process. Does not know: networks, fleets, routing. The bytes
are copied verbatim, so the completion is bitwise that of one engine in role `normal`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_ray.engine.detokenizer import TextStream
from deepinfer_ray.engine.diagnostics import Diagnostics
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.hooks import EngineHooks
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.engine.sequence import Sequence, Status
from deepinfer_ray.engine.state import blocks_for
from deepinfer_ray.errors import ConfigError


@dataclass(slots=True, eq=False)
class Handover:
    """A sequence with a complete prompt and its first token, on its way.

    tokens, logprobs: int32 / float32 [L], prompt and outputs. blocks: uint8 [B, block_bytes], the cache of
    the first L - 1 tokens. state: uint8 [slot_bytes]. The rest is what its result will say.
    """

    request: Request
    tokens: np.ndarray
    logprobs: np.ndarray
    blocks: torch.Tensor
    state: torch.Tensor
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    diagnostics: Diagnostics | None = None
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of cache and state."""
        return self.blocks.numel() + self.state.numel()

    def __repr__(self) -> str:  # never a token
        return f"Handover({self.request.request_id}, tokens={len(self.tokens)}, bytes={self.nbytes})"


class PromptSender(EngineHooks):
    """Hooks of an engine in role `prompt`: every complete prompt leaves it for `outbox`."""

    def __init__(self) -> None:
        self.outbox: deque[Handover] = deque()
        self._engine: Engine | None = None

    def init_pd_split(self, engine: Engine) -> None:
        if engine.settings.role != "prompt":
            raise ConfigError(
                f"a prompt sender needs scheduler.role = 'prompt', not {engine.settings.role!r}"
            )
        self._engine = engine

    def send_processed_prompts(self, plan: StepPlan) -> None:
        engine = self._engine
        assert engine is not None, "an engine in role `prompt` introduces itself at its start"
        table = engine.scheduler.table
        for index in np.flatnonzero(plan.last_chunk).tolist():
            row = int(plan.rows[index])
            if table.seq_id[row] != plan.seq_ids[index] or table.status[row] != Status.RUNNING:
                continue  # ended with its first token, failed or aborted: its record is out
            sequence = table.sequences[row]
            assert sequence is not None
            self.outbox.append(_pack(engine, sequence))
            engine.scheduler.release_processed(sequence.request_id)


def _pack(engine: Engine, sequence: Sequence) -> Handover:
    table, row = engine.scheduler.table, sequence.row
    length = int(table.len[row])
    return Handover(
        request=sequence.request,
        tokens=table.tokens[row, :length].copy(),
        logprobs=table.logprobs[row, :length].copy(),
        blocks=engine.pools.export_blocks(table.blocks_of(row)[: blocks_for(length - 1)]),
        state=engine.pools.export_slot(row),
        cached_tokens=sequence.cached_tokens,
        prompt_logprobs=sequence.prompt_logprobs,
        top_logprobs=sequence.top_logprobs,
        diagnostics=sequence.diagnostics,
        arrival_time=sequence.arrival_time,
        first_scheduled_time=sequence.first_scheduled_time,
        first_token_time=sequence.first_token_time,
    )


def receive(engine: Engine, handover: Handover) -> bool:
    """Takes a sequence into an engine, between two of its steps; False if it has no room for it now.

    `ConfigError` if the engine's caches are laid out otherwise than the sender's.
    """
    layout, table = engine.pools.layout, engine.scheduler.table
    theirs = (handover.blocks.shape[1], len(handover.state))
    if theirs != (layout.block_bytes, layout.slot_bytes):
        raise ConfigError(
            f"the sequence comes in blocks of {theirs[0]} and a state of {theirs[1]} bytes, this engine has "
            f"{layout.block_bytes} and {layout.slot_bytes}: both engines need the same model, numerics, "
            "speculative.num_drafts and cache.max_backtracking"
        )
    params, outputs = handover.request.params, handover.tokens[len(handover.request.prompt) :]
    stream = None
    if params.stop:
        stream = TextStream(engine.tokens, params.stop, params.include_stop_str_in_output)
        for place, token in enumerate(outputs.tolist()):
            stream.push(token, armed=place + 1 > params.min_tokens)
    sequence = engine.scheduler.try_receive(
        handover.request, handover.tokens, logprobs=handover.logprobs, extra=stream
    )
    if sequence is None:
        return False
    engine.pools.import_blocks(table.blocks_of(sequence.row), handover.blocks)
    engine.pools.import_slot(sequence.row, handover.state)
    sequence.cached_tokens = handover.cached_tokens
    sequence.prompt_logprobs, sequence.top_logprobs = handover.prompt_logprobs, handover.top_logprobs
    sequence.diagnostics = handover.diagnostics
    sequence.arrival_time = handover.arrival_time
    sequence.first_scheduled_time = handover.first_scheduled_time
    sequence.first_token_time = handover.first_token_time
    spec = engine.structured.spec_of(params)
    if spec is not None:
        engine.structured.supply(sequence, spec)
    engine.scheduler.enqueue_received(sequence)
    return True


class SplitEngine:
    """Two engines of one process as one: prompts in the first, completions in the second.

    Results are those of one engine in role `normal`. The prompt engine pauses while what it computed waits
    for more than the completion engine's seats.
    """

    def __init__(self, prompt: Engine, completion: Engine) -> None:
        """prompt: role `prompt`, its hooks a `PromptSender`. completion: role `completion`."""
        if not isinstance(prompt.loop.hooks, PromptSender):
            raise ConfigError("the prompt engine needs a PromptSender as its hooks")
        if completion.settings.role != "completion":
            raise ConfigError(
                f"the second engine needs scheduler.role = 'completion', not {completion.settings.role!r}"
            )
        self.prompt, self.completion = prompt, completion
        self.outbox = prompt.loop.hooks.outbox
        self._aborted: set[int] = set()
        """Requests that were aborted while they were in the outbox."""

    def add(self, request: Request) -> None:
        self.prompt.add(request)

    def abort(self, request_id: int) -> bool:
        """Ends a request in either engine, or between them when it arrives. False if it is not alive."""
        for handover in self.outbox:
            if handover.request.request_id == request_id and request_id not in self._aborted:
                self._aborted.add(request_id)
                return True
        return self.prompt.abort(request_id) or self.completion.abort(request_id)

    def step(self) -> list[RequestResult]:
        """A step of each engine that has work; results of the requests that ended."""
        results: list[RequestResult] = []
        if len(self.outbox) < self.completion.settings.max_seqs:
            results += self.prompt.step()
        while self.outbox and receive(self.completion, self.outbox[0]):
            request_id = self.outbox.popleft().request.request_id
            if request_id in self._aborted:
                self._aborted.discard(request_id)
                self.completion.abort(request_id)
        if self.outbox and not self.completion.has_unfinished():
            results.append(self._refuse(self.outbox.popleft()))
        return results + self.completion.step()

    def _refuse(self, handover: Handover) -> RequestResult:
        """A sequence that does not even fit the empty completion engine."""
        need, size = blocks_for(len(handover.tokens) - 1), self.completion.scheduler.state.blocks.size
        return RequestResult.failed(
            handover.request.request_id,
            len(handover.request.prompt),
            "out_of_blocks",
            f"{len(handover.tokens)} tokens need {need} cache blocks, the completion engine has {size - 1}",
        )

    def wanted(self) -> int:
        """How many more requests it would take now without piling them up."""
        return max(0, self.prompt.wanted() - len(self.outbox))

    def has_unfinished(self) -> bool:
        return self.prompt.has_unfinished() or bool(self.outbox) or self.completion.has_unfinished()

    def run(self) -> list[RequestResult]:
        """Steps until nothing is left."""
        results: list[RequestResult] = []
        while self.has_unfinished():
            results += self.step()
        return results

    def check_integrity(self) -> None:
        """`IntegrityError` unless both engines' books balance."""
        self.prompt.check_integrity()
        self.completion.check_integrity()
