"""The cold side of one sequence: touched when it is admitted, preempted or ended, never in a decode step.

Knows: the request, its place in the state machine (spec/engine.md §2.2), what it must keep while it owns no
row. Does not know: the table's columns, blocks, steps.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_ray.engine.diagnostics import Diagnostics
from deepinfer_ray.engine.request import FinishReason, Request, RequestResult

if TYPE_CHECKING:
    from deepinfer_ray.engine.grammar_matcher import RowGrammar
    from deepinfer_ray.engine.prefix_cache import SharePoints


class Status(enum.IntEnum):
    """States of spec/engine.md §2.2; everything from STOPPED on is final."""

    FREE = -1
    """Only of a table row: it belongs to nobody."""
    WAITING = 0
    RUNNING = 1
    STOPPED = 2
    LENGTH_CAPPED = 3
    ABORTED = 4
    IGNORED = 5
    """Refused before it ran: too long, or it can never fit."""
    PREEMPTED = 6
    SO_FAILED = 7
    VE_FAILED = 8
    FAILED = 9
    """Any other failure that belongs to this sequence alone."""


REASON = {
    Status.STOPPED: FinishReason.STOP,
    Status.LENGTH_CAPPED: FinishReason.LENGTH,
    Status.ABORTED: FinishReason.ABORTED,
    Status.IGNORED: FinishReason.ERROR,
    Status.PREEMPTED: FinishReason.PREEMPTED,
    Status.SO_FAILED: FinishReason.ERROR,
    Status.VE_FAILED: FinishReason.ERROR,
    Status.FAILED: FinishReason.ERROR,
}
"""Output row of each final status (spec/engine.md §1.5)."""


@dataclass(slots=True, eq=False)
class ForkSource:
    """What a fork will share when it is scheduled. Every block and the state slot carry one reference of it.

    blocks: the source's block ids. num_tokens: tokens whose cache the fork may use. state: the slot whose
    rings are cloned. steps: the source's step count at the fork; once it has moved on, its rings no longer
    fit and the fork computes its prompt itself (spec/engine.md §2.5, ours).
    """

    blocks: list[int]
    num_tokens: int
    state: int
    source_id: int
    steps: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way. `seq_id` is unique per engine; `row` is its state slot, 0 while it has none.

    tokens, logprobs: int32 / float32 [L] kept only while the sequence has no row (prompt, then the outputs
    that a preemption must not lose). checkpoints: ascending lengths at which a chunk has to end.
    image_spans: half-open token ranges that no chunk may cut. extra: whatever the step loop attaches
    (detokenizer, pixels); it follows the sequence through preemption.
    """

    request: Request
    seq_id: int
    prompt_len: int
    tokens: np.ndarray | None
    logprobs: np.ndarray | None = None
    status: Status = Status.WAITING
    row: int = 0
    schedulable: bool = True
    queued: bool = False
    """Whether it stands in the waiting queue or among the prompted."""
    checkpoints: deque[int] = field(default_factory=deque)
    image_spans: Items[tuple[int, int]] = ()
    fork: ForkSource | None = None
    share: SharePoints | None = None
    """Where others may take over its cache, or it theirs; set once it waited with prefix reuse on."""
    in_demand: bool = False
    """Whether its share points are counted among those that wait."""
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_self_preemptions: int = 0
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    ended: bool = False
    """Its terminal record exists."""
    prompt_logprobs: np.ndarray | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    diagnostics: Diagnostics | None = None
    extra: Any = None
    grammar: RowGrammar | None = None
    """What its outputs have to follow, once that is compiled."""

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.status >= Status.STOPPED

    def __repr__(self) -> str:  # never a token
        return f"Sequence({self.seq_id}, request={self.request_id}, {self.status.name}, row={self.row})"


@dataclass(slots=True, eq=False)
class Terminal:
    """The one record with which a sequence ends. token_ids: int32 [outputs], logprobs: float32 [outputs]."""

    sequence: Sequence
    status: Status
    token_ids: np.ndarray
    logprobs: np.ndarray
    error: str | None = None
    error_code: str | None = None

    @property
    def request_id(self) -> int:
        return self.sequence.request.request_id

    @property
    def reason(self) -> FinishReason:
        return REASON[self.status]

    def to_result(self, text: str = "") -> RequestResult:
        """The request's result; `text` is the decoded completion."""
        sequence = self.sequence
        return RequestResult(
            request_id=sequence.request_id,
            token_ids=self.token_ids,
            text=text,
            finish_reason=self.reason.value,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=sequence.cached_tokens,
            logprobs=None if sequence.request.params.logprobs is None else self.logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
            top_logprobs=sequence.top_logprobs,
            diagnostics=sequence.diagnostics,
            error=self.error,
            error_code=self.error_code,
        )

    def __repr__(self) -> str:  # never a token
        count = len(self.token_ids)
        return f"Terminal({self.request_id}, {self.reason}, tokens={count}, code={self.error_code})"
