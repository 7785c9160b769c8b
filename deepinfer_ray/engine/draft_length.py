"""How many drafts of each sequence a step verifies (speculative spec §4, engine spec §5.4).

Knows: survival products, the search for the best number of rows, how rows are given out. Does not know: where
times come from (`cost_curve.py`), how drafts are made or verified.

A draft is worth its survival a = Π confidences up to it: the chance that it and all before it are accepted.
A step of B rows gives about E(B) = n + (the B - n largest a) tokens and costs T(B); the best B maximises E/T.

B must not depend on the drafts that it may cut off: a draft that is verified *because of its own value* is no
longer a sample of the draft distribution, and acceptance is then biased. So B is chosen from the survivals of
two steps ago, whose drafts are settled. Who gets the B - n rows is decided by the newest survivals: a later
draft's survival never exceeds an earlier one's, so no draft has a say in its own admission.

Shape letters: n sequences, N drafts a sequence at most.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from deepinfer_ray.engine.table import SequenceTable


class StepCost(Protocol):
    """Time of a decode step."""

    def milliseconds(self, rows: np.ndarray, sequences: int) -> np.ndarray:
        """float64 [m] of steps with rows int64 [m] of that many sequences; inf where it is unknown."""
        ...


def ranked(rates_nN: np.ndarray) -> np.ndarray:
    """int64 [n·N] flat places by rate descending, equal rates by sequence ascending."""
    return np.argsort(-rates_nN.reshape(-1), kind="stable")


def best_rows(rates_nN: np.ndarray, cost: StepCost) -> int:
    """B*: rows that give the most tokens per time, at least n; of equals the fewest.

    rates: float32 [n, N] survivals, descending along N. The cost jumps from size to size, so that every B is
    tried. Drafts of survival 0 are never worth a row.
    """
    n = len(rates_nN)
    rates = rates_nN.reshape(-1)[ranked(rates_nN)]
    rates = rates[: np.count_nonzero(rates > 0)]
    expected = np.cumsum(np.concatenate([np.array([n], np.float32), rates]), dtype=np.float32)
    rows = n + np.arange(len(expected))
    return int(rows[(expected / cost.milliseconds(rows, n)).argmax()])


def give_out(rates_nN: np.ndarray, total: int) -> np.ndarray:
    """int32 [n] rows of each sequence: one, and one for each of its drafts among the `total - n` best."""
    n, drafts = rates_nN.shape
    chosen = ranked(rates_nN)[: total - n] // max(drafts, 1)
    return np.bincount(chosen, minlength=n).astype(np.int32) + np.int32(1)


def give_out_on_device(confidence_mN: torch.Tensor, remap_n: torch.Tensor, total: int) -> torch.Tensor:
    """int64 [n]: `give_out` by the confidences of the step before, where only the device knows them yet.

    confidence: float32 [m, N] of the previous batch. remap: int64 [n] index in it, -1 = not in it: such a
    sequence has no drafts and gets one row. The rows add up to `total` (speculative spec §4.4).
    """
    n, drafts = len(remap_n), confidence_mN.shape[1]
    rates_nN = confidence_mN.index_select(0, remap_n.clamp_min(0)).cumprod(1)
    rates_nN = rates_nN.masked_fill((remap_n < 0).unsqueeze(1), 0.0)
    order = rates_nN.view(-1).sort(descending=True, stable=True).indices[: total - n]
    ones = torch.ones(n, dtype=torch.int64, device=remap_n.device)
    return ones.index_add_(0, order // drafts, torch.ones_like(order))


class ScheduledLengths:
    """Row numbers for the scheduler (`decode.DraftLengths`) by confidence and cost."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    def choose(self, table: SequenceTable, rows: np.ndarray) -> np.ndarray:
        """int32 [n]; the survivals of two steps ago make the budget, the newest give it out.

        While a step is in flight its drafts' survivals are the newest that the host has, and two steps old
        for the step to come: both choices then use the same ones, and the device gives the rows out again.
        """
        if not len(rows):
            return np.empty(0, np.int32)
        known, paired = table.n_rates.take(rows), table.sched_cnt.take(rows) == table.proc_cnt.take(rows)
        # Without a survival: pending drafts are taken to be good, a fresh sequence has none worth a row.
        pending = table.has_draft.take(rows) | ~paired
        missing = pending.astype(np.float32)[:, None]
        newest = np.where((known > 0)[:, None], table.rate[rows], missing)
        older = np.where((known > 1)[:, None], table.prev_rate[rows], missing)
        budget = np.where(paired[:, None], older, newest)
        return give_out(newest, best_rows(budget, self.cost))
