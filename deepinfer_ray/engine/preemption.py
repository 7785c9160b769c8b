"""What happens to the sequence that has to give way when no block is free (spec/engine.md §5.3).

Knows: recompute or end, and what each keeps. Does not know: who was chosen (decode.py).
"""

from __future__ import annotations

from deepinfer_ray.engine.sequence import Sequence, Status
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.state import SchedulerState

MAX_SELF_PREEMPTIONS = 2
"""A sequence that had the whole pool and still ran out this often will never fit (D17)."""


def must_end(settings: SchedulerSettings, so_status: int) -> bool:
    """Whether a victim cannot be recomputed: the option, or a grammar in progress that is not replayed."""
    return settings.preemption == "stop" or (so_status != 0 and settings.on_preempt == "finish")


def preempt(state: SchedulerState, row: int) -> None:
    """Takes the row's memory now. The sequence goes to the front of the queue with all its tokens, or ends.

    Its step in flight is lost: the row no longer carries its id, so the late commit passes over it. The
    blocks may be reused in the same pass, all cache writes being ordered behind that step.
    """
    table = state.table
    sequence = table.sequences[row]
    assert sequence is not None
    alone = state.blocks.size - 1 - state.blocks.num_free == int(table.n_blocks[row])
    state.num_preempted += 1
    sequence.num_preemptions += 1
    sequence.num_self_preemptions += alone
    if must_end(state.settings, int(table.so_status[row])):
        _end(state, sequence, "the cache ran out of blocks and this sequence was preempted")
    elif sequence.num_self_preemptions >= MAX_SELF_PREEMPTIONS:
        _end(
            state,
            sequence,
            f"the sequence filled all {state.blocks.size - 1} cache blocks alone, {MAX_SELF_PREEMPTIONS} "
            f"times; "
            "lower max_tokens or give the cache more memory",
        )
    else:
        state.to_rowless(sequence)
        sequence.queued = True
        state.waiting.appendleft(sequence)


def _end(state: SchedulerState, sequence: Sequence, message: str) -> None:
    row = sequence.row
    state.outbox.append(state.end(sequence, Status.PREEMPTED, message, "out_of_blocks"))
    state.free_row(row)
