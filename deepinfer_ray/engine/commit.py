"""The commit of one step: accepted drafts and sampled tokens become part of their sequences.

Knows: the stop rule, lengths, in-flight counters (spec/engine.md §2.3, §2.4, §14.4; spec/speculative.md
§3.4). Does not know: how tokens were chosen, text. Works as well one schedule late: a row that changed hands
or ended since then is recognised by its sequence id and status, and passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer_ray.engine.block_manager import IntegrityError
from deepinfer_ray.engine.plan import CommitResult, StepOutputs, StepPlan
from deepinfer_ray.engine.sequence import Status
from deepinfer_ray.engine.state import SchedulerState

NEVER = np.int32(2**30)

OnTokens = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray | None]
"""(rows int64 [m], starts int32 [m], counts int32 [m]) -> int32 [m] or None. Called with the watched rows of
a commit, their new tokens already in the arena at `starts`; answers how many of them to keep when the
sequence stops there (1 … counts), 0 to go on; None = nobody stops."""


class Committer:
    """Applies `StepOutputs` to the table."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.on_tokens: OnTokens | None = None
        self._columns = np.arange(state.settings.num_drafts + 1, dtype=np.int32)

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> CommitResult:
        """Commits one step. `IntegrityError` if it was committed before or a row's books contradict it."""
        if plan.committed:
            raise IntegrityError(f"{plan} was committed twice")
        plan.committed = True
        state, table = self.state, self.state.table
        if state.in_flight is plan:
            state.in_flight = None
        state.num_uncommitted -= not plan.is_empty
        if plan.is_empty:
            return CommitResult(plan.rows, np.empty(0, np.int32), np.empty(0, np.int32))
        rows, status = plan.rows, table.status.take(plan.rows)
        alive = status == Status.RUNNING
        alive &= table.seq_id.take(rows) == plan.seq_ids
        result = CommitResult(rows, np.empty(0, np.int32), np.empty(0, np.int32))
        if plan.is_prompt:
            alive = self._commit_prompt(plan, status, alive)
        else:
            self._settle(rows, alive)
        for index in sorted(outputs.failures):
            if alive[index]:
                alive[index] = False
                code, message = outputs.failures[index]
                self._finish(int(rows[index]), Status.FAILED, result, message, code)
        select = slice(None) if alive.all() else np.flatnonzero(alive)
        self._append(plan, outputs, select, result)
        return result

    # -- bookkeeping before the tokens ----------------------------------------------------------------

    def _settle(self, rows: np.ndarray, alive: np.ndarray) -> None:
        """The step is no longer in flight."""
        table = self.state.table
        mine = rows if alive.all() else rows[alive]
        table.inflight[mine] -= self.state.settings.num_drafts + 1
        table.proc_cnt[mine] += 1

    def _commit_prompt(self, plan: StepPlan, status: np.ndarray, running: np.ndarray) -> np.ndarray:
        """Advances the cached length; chunks go back to the queue, complete prompts join `running`."""
        state, table = self.state, self.state.table
        rows = plan.rows
        own = table.seq_id.take(rows) == plan.seq_ids
        live = own & (status <= Status.RUNNING)
        mine = rows[live]
        table.inflight[mine] -= state.settings.num_drafts + 1
        table.proc_cnt[mine] += 1
        table.num_cached[mine] += plan.q[live]
        chunks = live & ~plan.last_chunk
        for row in rows[chunks][::-1].tolist():
            sequence = table.sequences[row]
            assert sequence is not None
            sequence.queued = True
            state.waiting.appendleft(sequence)
        joining = own & ~chunks
        if not live.all():
            state.running_dirty = True  # ended while the step ran: reaped by the next schedule
        state.running = np.concatenate((state.running, rows[joining]))
        table.n_draft[rows[joining]] = state.settings.num_drafts
        return running & plan.last_chunk

    # -- tokens ---------------------------------------------------------------------------------------

    def _append(
        self, plan: StepPlan, outputs: StepOutputs, select: np.ndarray | slice, result: CommitResult
    ) -> None:
        state, table, settings = self.state, self.state.table, self.state.settings
        rows = plan.rows[select]
        result.rows = rows
        if not len(rows):
            return
        sampled = outputs.sampled[select]
        starts = table.len.take(rows)
        num_drafts = settings.num_drafts
        if num_drafts and not plan.is_prompt and outputs.accepted is not None:
            accepted = outputs.accepted[select]
            tokens = np.empty((len(rows), num_drafts + 1), np.int32)
            tokens[:, :num_drafts] = accepted
            count = (accepted >= 0).sum(axis=1, dtype=np.int32)
            tokens[np.arange(len(rows)), count] = sampled
            table.accepted[rows] = count
            result.num_drafts_verified = int(plan.q[select].sum()) - len(rows)
            result.num_drafts_accepted = int(count.sum())
            result.verified_each, result.accepted_each = plan.q[select] - 1, count
            count = count + 1
        else:
            tokens = sampled.reshape(-1, 1).astype(np.int32, copy=False)
            count = np.ones(len(rows), np.int32)
            if num_drafts:
                table.accepted[rows] = 0
        stop_at = self._first_stop(rows, tokens, starts)
        output_room = table.max_tokens.take(rows)
        output_room -= starts
        output_room += table.prompt_len.take(rows)
        room = np.minimum(output_room, (settings.max_model_len + 1) - starts)
        kept = np.minimum(count, room)
        np.minimum(kept, stop_at, out=kept)
        stopped = kept == stop_at
        finished = stopped | (kept == room)
        self._store(rows, starts, tokens, outputs, select)
        if self.on_tokens is not None:
            self._ask_hook(rows, starts, kept, stopped, finished)
        table.len[rows] = starts + kept
        if plan.is_prompt:
            self._first_token_times(rows)
        else:
            table.num_cached[rows] += kept
        self._store_drafts(plan, outputs, rows, select)
        result.starts, result.counts = starts, kept
        if finished.any():
            state.running_dirty = True
            for row, by_stop in zip(rows[finished].tolist(), stopped[finished].tolist(), strict=True):
                self._finish(row, Status.STOPPED if by_stop else Status.LENGTH_CAPPED, result)

    def _first_stop(self, rows: np.ndarray, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """int32 [m] 1-based column of the first token that ends its sequence, NEVER if none does.

        Columns behind the sampled token are never tokens (negative) or repeat a rejected id; the caller's
        count comes before them. Tokens before `min_tokens` outputs do not stop.
        """
        table = self.state.table
        eos = table.eos.take(rows)
        hit = tokens == eos[:, None]
        if table.n_stop_ids.take(rows).any():
            hit |= (tokens[:, :, None] == table.stop_ids[rows][:, None, :]).any(axis=2)
            hit &= tokens >= 0
        if not hit.any():
            return np.full(len(rows), NEVER, np.int32)
        minimum = table.min_tokens.take(rows)
        if minimum.any():
            outputs = (starts - table.prompt_len.take(rows))[:, None] + self._columns[: tokens.shape[1]] + 1
            hit &= outputs >= minimum[:, None]
        return np.where(hit.any(axis=1), hit.argmax(axis=1).astype(np.int32) + np.int32(1), NEVER)

    def _store(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        tokens: np.ndarray,
        outputs: StepOutputs,
        select: np.ndarray | slice,
    ) -> None:
        """Tokens into the arena. What is written behind the kept ones is undefined by contract."""
        table = self.state.table
        where = starts[:, None] + self._columns[: tokens.shape[1]]
        flat = rows[:, None] * table.capacity + where
        table.tokens.reshape(-1)[flat] = tokens
        if table.compress is not None:
            table.compressed.reshape(-1)[flat] = table.compress_ids(np.maximum(tokens, 0))
        if outputs.logprobs is not None:
            table.logprobs.reshape(-1)[flat] = outputs.logprobs[select][:, : tokens.shape[1]]

    def _ask_hook(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        kept: np.ndarray,
        stopped: np.ndarray,
        finished: np.ndarray,
    ) -> None:
        watched = np.flatnonzero(self.state.table.watched.take(rows))
        if not len(watched) or self.on_tokens is None:
            return
        answer = self.on_tokens(rows[watched], starts[watched], kept[watched])
        if answer is None:
            return
        stops = answer > 0
        hits = watched[stops]
        kept[hits] = np.minimum(kept[hits], answer[stops])
        stopped[hits] = finished[hits] = True

    def _store_drafts(
        self, plan: StepPlan, outputs: StepOutputs, rows: np.ndarray, select: np.ndarray | slice
    ) -> None:
        """Proposals and confidences of the next step (spec/engine.md §2.4 last paragraph)."""
        table, settings = self.state.table, self.state.settings
        if not settings.num_drafts:
            return
        if plan.is_prompt:
            table.draft[rows] = settings.draft_pad_id
            return
        table.has_draft[rows] = True
        if outputs.drafts is not None:
            table.draft[rows] = outputs.drafts[select]
        if settings.varlen and outputs.confidence is not None:
            table.prev_rate[rows] = table.rate[rows]
            table.rate[rows] = np.cumprod(outputs.confidence[select], axis=1, dtype=np.float32)
            table.n_rates[rows] = np.minimum(table.n_rates[rows] + 1, 2)

    def _first_token_times(self, rows: np.ndarray) -> None:
        now = self.state.clock()
        for row in rows.tolist():
            sequence = self.state.table.sequences[row]
            if sequence is not None and sequence.first_token_time is None:
                sequence.first_token_time = now

    def _finish(
        self,
        row: int,
        status: Status,
        result: CommitResult,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        state = self.state
        sequence = state.table.sequences[row]
        assert sequence is not None
        state.running_dirty = True
        result.terminals.append(state.end(sequence, status, error, error_code))

    # -- repair ---------------------------------------------------------------------------------------

    def refresh(self, plan: StepPlan) -> None:
        """Exact lengths and draft slots of a launched step, after the commit of the step before it
        (spec/engine.md §7.4 step 6). Rows that ended meanwhile keep their bound; they are discarded."""
        table = self.state.table
        rows = plan.rows
        live = table.seq_id.take(rows) == plan.seq_ids
        plan.k = np.where(live, table.num_cached.take(rows) + plan.q, plan.k)
        if self.state.settings.num_drafts:
            mine = live & (plan.remap >= 0)
            slots = table.draft_slot.take(rows) * table.has_draft.take(rows)
            plan.draft_read = np.where(mine, slots, plan.draft_read)
            table.has_draft[rows[mine]] = False
