"""What passes between the scheduler and the step loop: `StepPlan` out, `StepOutputs` in, `CommitResult` back.

Knows: the arrays of one step, row for row in batch order. Does not know: how they were chosen, how they are
computed. Shape letters: n sequences of the step, N drafts a step at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer_ray.engine.sequence import Sequence, Terminal

NO_PAIRS = np.empty((0, 2), np.int32)
NO_TRIPLES = np.empty((0, 3), np.int32)
NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step of one rank. n = 0 is legal: the rank runs a placeholder of the same kind.

    The arrays are snapshots: they stay true while later steps are scheduled (`q`, `k`, `draft_read` are
    rewritten once, by `Scheduler.refresh`).
    """

    step: int
    """Running number of `schedule()` calls."""
    is_prompt: bool
    rows: np.ndarray
    """int64 [n] table rows = state slots."""
    seq_ids: np.ndarray
    """int64 [n] owner of each row when the step was made; compare before any late write."""
    q: np.ndarray
    """int32 [n] query tokens."""
    k: np.ndarray
    """int32 [n] sequence length after the step's tokens: the first query sits at position k - q. An upper
    bound while `remap >= 0`, exact after `refresh`."""
    last_chunk: np.ndarray
    """bool [n] whether the step's last token is sampled from (always true in decode)."""
    num_tokens: int
    """Tokens counted against the budget (prompt: each chunk rounded up to the CP alignment)."""
    remap: np.ndarray
    """int32 [n] index of the same sequence in the uncommitted previous step, -1 = none."""
    draft_read: np.ndarray
    """int32 [n] draft slot whose proposals this step verifies, 0 = placeholders."""
    draft_write: np.ndarray
    """int32 [n] draft slot that receives this step's proposals."""
    ignored: list[Terminal] = field(default_factory=list)
    """Sequences that ended without this step's help; hand them out with the step's results."""
    finished: list[Sequence] = field(default_factory=list)
    """Sequences reaped by this schedule; their memory returns in `reclaim`."""
    clone_states: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    """int32 [m, 2] (source, destination) state slots to copy before the forward."""
    clone_blocks: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    """int32 [m, 2] (source, destination) blocks to copy before the forward."""
    save_states: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    """int32 [m, 2] (row, snapshot) state slots to copy right after the forward: kept prefixes."""
    block_updates: np.ndarray = field(default_factory=lambda: NO_TRIPLES)
    """int32 [m, 3] (row, column, block id) entries of the block table that this schedule wrote."""
    decode_step: int = 0
    """The vote counter after this schedule."""
    committed: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def is_empty(self) -> bool:
        """Nothing scheduled: this rank runs a placeholder."""
        return len(self.rows) == 0

    @property
    def overlaps(self) -> bool:
        """Whether any sequence is also in the uncommitted previous step: lengths need the device repair."""
        return bool((self.remap >= 0).any())

    def __repr__(self) -> str:
        kind = "P" if self.is_prompt else "D"
        return f"StepPlan({self.step}, {kind}, n={self.num_seqs}, tokens={self.num_tokens})"


@dataclass(slots=True, eq=False)
class StepOutputs:
    """What sampling produced, on the host, in the plan's batch order.

    sampled: int32 [n] the fresh token of each sequence. accepted: int32 [n, N] accepted draft ids, -1 from
    the first rejection on (None when N = 0 or in a prompt step). drafts: int32 [n, N] proposals for the next
    step. confidence: float32 [n, N]. logprobs: float32 [n, N+1] of the accepted drafts, then of the sampled
    token at column `accepted count`. failures: batch index -> (error code, message) of sequences that failed
    alone.
    """

    sampled: np.ndarray
    accepted: np.ndarray | None = None
    drafts: np.ndarray | None = None
    confidence: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CommitResult:
    """What one commit changed. rows/starts/counts: sequence `rows[i]` got `counts[i]` tokens from position
    `starts[i]` of the arena on (int64 / int32 / int32 [m], discarded sequences left out)."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    terminals: list[Terminal] = field(default_factory=list)
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0
    verified_each: np.ndarray | None = None
    """int32 [m] drafts that each of `rows` had verified; None without drafts."""
    accepted_each: np.ndarray | None = None
    """int32 [m] drafts of them that were accepted."""
    confidence_error: float | None = None
    """Sum of |acceptance probability - confidence| over the verified drafts, where it is known."""
