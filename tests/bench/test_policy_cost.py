"""The cost model: terms by hand, and the signs that policies live on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_ray.bench.policy_cost import IDLE, CostModel, RankLoad

PLAIN = CostModel(
    ranks=2,
    routed_bytes=0,
    routed_parameters=0,
    replicated_bytes=3e9,
    dense_parameters=1e9,
    head_parameters=0,
    drafter_bytes=0,
    drafter_routed_bytes=0,
    bandwidth=1e12,
    dense_rate=1e15,
    attention_row_s=0,
    index_keys=0,
    exchange_calls=0,
    row_exchange_bytes=0,
    overhead_s=0,
)
"""Nothing but dense weights: 3 ms of reading or 2 us a row, whatever is longer."""


def test_load_counts_visible_pairs_row_by_row() -> None:
    q, k = np.array([3, 1], np.int32), np.array([10, 7], np.int32)
    assert RankLoad.of(q, k) == RankLoad(rows=4, pairs=8 + 9 + 10 + 7, visible=17)
    assert RankLoad.of(q[:0], k[:0]) == IDLE


def test_dense_part_is_a_roofline() -> None:
    assert PLAIN.decode_s([IDLE, IDLE]) == pytest.approx(3e-3)
    assert PLAIN.decode_s([RankLoad(1500, 0, 0), IDLE]) == pytest.approx(3e-3)
    assert PLAIN.decode_s([RankLoad(3000, 0, 0), IDLE]) == pytest.approx(6e-3)
    assert PLAIN.prompt_s([RankLoad(3000, 0, 0), IDLE]) == pytest.approx(6e-3)


def test_all_ranks_wait_for_the_longest_rows_and_share_the_experts() -> None:
    skewed = [RankLoad(4000, 0, 0), IDLE]
    even = [RankLoad(2000, 0, 0)] * 2
    assert PLAIN.prompt_s(skewed) == pytest.approx(2 * PLAIN.prompt_s(even))
    experts = replace(PLAIN, dense_parameters=0, replicated_bytes=0, routed_parameters=1e9)
    assert experts.prompt_s(skewed) == pytest.approx(experts.prompt_s(even))


def test_experts_are_read_only_as_far_as_they_are_hit() -> None:
    reading = replace(PLAIN, replicated_bytes=0, dense_parameters=0, routed_bytes=2e12, hit_share=0.25)
    assert reading.decode_s([RankLoad(1, 0, 0), IDLE]) == pytest.approx(0.25)
    assert reading.decode_s([RankLoad(1, 0, 0), RankLoad(1, 0, 0)]) == pytest.approx(1 - 0.75**2)
    assert reading.decode_s([IDLE, IDLE]) == 0


def test_a_row_travels_to_the_remote_ranks_that_it_hits() -> None:
    """Two ranks, six experts: both are hit but for 2 in 64 rows; one of them is the own one half the time."""
    assert CostModel(ranks=2).remote_copies == pytest.approx(2 * (1 - 0.5**6) / 2)
    assert CostModel(ranks=1).remote_copies == 0


def test_released_figures_are_plausible() -> None:
    """64 sequences of 700 tokens, 6 rows each, on 4 ranks: the experts alone are read in 24 ms."""
    cost = CostModel()
    load = RankLoad(384, 384 * 700, 64 * 700)
    experts = cost.routed_bytes / 4 / cost.bandwidth
    assert experts == pytest.approx(24.3e-3, rel=0.01)
    assert experts < cost.decode_s([load] * 4) < 2 * experts
    prompt = RankLoad(4096, 4096 * 300, 4096)
    assert 0.2 < cost.prompt_s([prompt] * 4) < 0.3
    assert cost.prompt_s([prompt, IDLE, IDLE, IDLE]) > 0.5 * cost.prompt_s([prompt] * 4)


def test_every_term_grows_with_its_load() -> None:
    cost = CostModel()
    base = RankLoad(5000, 10_000_000, 100_000)
    for name in ("rows", "pairs"):
        more = replace(base, **{name: 2 * getattr(base, name)})
        assert cost.decode_s([more] * 4) > cost.decode_s([base] * 4), name
    bytes_bound = RankLoad(64, 64 * 100_000, 64 * 100_000)
    assert cost.decode_s([bytes_bound] * 4) > cost.decode_s([replace(bytes_bound, visible=0)] * 4)
