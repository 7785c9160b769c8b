"""Counters, the window in logical ids, the load-balance figure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.load_window import ExpertCounters, LoadBalance, LoadMeter, LoadWindow
from deepinfer_ray.parallel.rank_group import SingleRank, ThreadGroup


def test_every_slot_of_a_row_counts_and_no_expert_does_not() -> None:
    counters = ExpertCounters(2, 3)
    counters.add(1, torch.tensor([[0, 2], [-1, 2], [-1, -1]]))
    counters.add(1, torch.tensor([[2, -1]]))
    counters.add(0, torch.empty(0, 2, dtype=torch.int64))
    assert counters.counts.tolist() == [[0, 0, 0], [1, 0, 3]]
    address = counters.counts.data_ptr()
    counters.reset()
    assert counters.counts.sum() == 0
    assert counters.counts.data_ptr() == address


def test_the_window_forgets_the_oldest_step() -> None:
    window = LoadWindow(2, 1, 3)
    local = torch.tensor([[2, 0]])
    for count in (1, 2, 3):
        window.record(torch.tensor([[count, 10 * count]], dtype=torch.int32), local)
    assert window.total(SingleRank()).tolist() == [[[30, 0, 3]], [[20, 0, 2]]]


def test_replicas_on_one_rank_are_one_expert() -> None:
    window = LoadWindow(1, 1, 2)
    window.record(torch.tensor([[5, 7, 1]], dtype=torch.int32), torch.tensor([[1, 1, 0]]))
    assert window.total(SingleRank()).tolist() == [[[1, 12]]]


def test_steps_before_a_new_map_stay_with_their_experts() -> None:
    """A window of slots would credit the first step to the experts that moved in later."""
    window = LoadWindow(3, 1, 4)
    window.record(torch.tensor([[9, 1]], dtype=torch.int32), torch.tensor([[0, 1]]))
    window.record(torch.tensor([[2, 4]], dtype=torch.int32), torch.tensor([[3, 0]]))
    assert window.total(SingleRank()).sum(0).tolist() == [[13, 1, 0, 2]]


def test_the_window_is_summed_over_the_ranks(run_ranks) -> None:
    def rank(group: ThreadGroup) -> np.ndarray:
        window = LoadWindow(2, 1, 3)
        window.record(torch.tensor([[group.rank + 1]], dtype=torch.int32), torch.tensor([[group.rank]]))
        own = window.counts.clone()
        total = window.total(group)
        assert torch.equal(window.counts, own)
        return total

    for total in run_ranks(3, rank):
        assert total.tolist() == [[[1, 2, 3]], [[0, 0, 0]]]


def test_the_figure_is_the_sum_of_maxima_over_the_sum_of_means(run_ranks) -> None:
    """By step and layer, over ranks: a balanced step does not hide an uneven one, nor one layer another."""
    tokens = torch.tensor([[[3, 1], [0, 4]], [[1, 5], [2, 0]]])  # [rank, step, layer]

    def rank(group: ThreadGroup) -> list[LoadBalance | None]:
        meter = LoadMeter(2, 2)
        got = []
        for step in range(4):
            counts = tokens[group.rank, step % 2].int()
            first, second = counts[:1].view(1, 1), torch.stack((counts[1:], counts[1:] * 0), dim=1)
            got.append(meter.record([first, second], group))
        return [*got, meter.take(), meter.take()]

    want = LoadBalance(3 + 5 + 2 + 4, (4 + 6 + 2 + 4) / 2)
    for got in run_ranks(2, rank):
        assert got == [None, None, want, None, want, None]
        assert got[2].ratio == 14 / 8


def test_no_token_is_perfect_balance() -> None:
    meter = LoadMeter(1, 1)
    meter.record([torch.zeros(1, 4, dtype=torch.int32)], SingleRank())
    got = meter.take()
    assert got == LoadBalance(0.0, 0.0)
    assert got is not None
    assert got.ratio == 1.0
    assert (LoadBalance(3.0, 2.0) + LoadBalance(1.0, 2.0)).ratio == 1.0


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"eplb\.window must be at least 1 step, got 0"):
        LoadWindow(0, 1, 1)
    with pytest.raises(ConfigError, match=r"eplb\.stat_interval must be at least 1 step, got 0"):
        LoadMeter(0, 1)
