"""Triggers, and whole rebalances: rank 0 decides, all follow, every row meets the bytes of its expert."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from deepinfer_ray.errors import ConfigError, RankFailure
from deepinfer_ray.parallel import rebalance
from deepinfer_ray.parallel.balanced_exchange import BalancedExchange
from deepinfer_ray.parallel.balancer import balance
from deepinfer_ray.parallel.expert_exchange import LocalExchange
from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.expert_slots import TensorSlots
from deepinfer_ray.parallel.rank_group import SingleRank, ThreadGroup
from deepinfer_ray.parallel.rebalance import LayerGroup, Rebalancer, Trigger

# ---- when


def moments(trigger: Trigger, kinds: str) -> tuple[list[int], list[int]]:
    """(steps recorded, steps that rebalance) of a run of prefills P and decodes D."""
    verdicts = [trigger.step(kind == "P") for kind in kinds]
    return (
        [i for i, verdict in enumerate(verdicts) if verdict.record],
        [i for i, verdict in enumerate(verdicts) if verdict.rebalance],
    )


@pytest.mark.parametrize(
    ("interval", "rebalances"),
    [
        (100, [24, 124]),
        (20, [4, 24, 44, 64, 84, 104, 124]),
        (3, list(range(0, 130, 3))),
        (1, list(range(130))),
    ],
)
def test_the_first_comes_after_a_quarter(interval: int, rebalances: list[int]) -> None:
    assert moments(Trigger(interval, 1), "D" * 130)[1] == rebalances


def test_no_interval_means_never() -> None:
    assert moments(Trigger(0, 100), "DPD" * 50) == ([], [])


def test_prefills_of_a_mixed_engine_are_left_out() -> None:
    assert moments(Trigger(8, 4), "PPDPDD") == ([2, 4, 5], [4])


def test_after_prefill_the_next_decode_rebalances() -> None:
    recorded, rebalances = moments(Trigger(100, 4, after_prefill=True), "DPPDDDPD")
    assert recorded == list(range(8))
    assert rebalances == [3, 7]


@pytest.mark.parametrize("role", ["prompt", "completion"])
def test_engines_of_one_kind_count_every_step(role: rebalance.Role) -> None:
    kind = "P" if role == "prompt" else "D"
    trigger = Trigger(8, 4, after_prefill=True, role=role)
    assert moments(trigger, kind * 12) == (list(range(12)), [1, 9])


def test_a_window_longer_than_the_interval_is_refused() -> None:
    text = "1 <= window <= interval, or interval = 0: got window = 9, interval = 8"
    with pytest.raises(ConfigError, match=text):
        Trigger(8, 9)
    with pytest.raises(ConfigError, match="got window = 0, interval = 8"):
        Trigger(8, 0)


# ---- what


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rows_meet_their_experts_through_forced_rebalances(run_ranks, scenario, ranks: int) -> None:
    """Hashes of all slots and equality of all tables are checked right after each (`verify`)."""

    def rank(group: ThreadGroup) -> tuple[list[int], list[int]]:
        rebalancer = scenario.build(group, p2p_groups=2)
        done = [number for number in range(23) if scenario.step(rebalancer, number)]
        placement = rebalancer.groups[0].placement
        placement.check_integrity()
        assert (
            placement.physical_to_logical.tolist() == rebalancer.groups[0].tables.physical_to_logical.tolist()
        )
        return done, placement.flat().tolist()

    results = run_ranks(ranks, rank)
    assert results[0][0] == [0, 5, 10, 15, 20]
    assert all(result == results[0] for result in results)


def test_the_policy_sees_the_sum_of_all_ranks_and_rank_0_alone_runs_it(
    run_ranks, scenario, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[np.ndarray] = []

    def spy(tokens: np.ndarray, ep_size: int, extra: int) -> ExpertMap:
        seen.append(tokens.copy())
        return balance(tokens, ep_size, extra)

    monkeypatch.setattr(rebalance, "balance", spy)

    def rank(group: ThreadGroup) -> rebalance.Rebalance | None:
        rebalancer = scenario.build(group, interval=12)
        results = [scenario.step(rebalancer, number) for number in range(2)]
        assert results == [False, False]
        layers = rebalancer.groups[0]
        for layer in range(scenario.LAYERS):
            layers.routing(layer).count(torch.zeros(group.rank, 1, dtype=torch.int64))
        return rebalancer.after_step(is_prefill=False)

    with caplog.at_level(logging.INFO, "deepinfer_ray.eplb"):
        results = run_ranks(2, rank)
    (tokens,) = seen
    want = np.zeros((4, scenario.LAYERS, scenario.EXPERTS), np.int64)
    for number in range(2):
        for layer in range(scenario.LAYERS):
            for source in range(2):
                experts = scenario.routed(number, layer, source)
                want[number, layer] += np.bincount(experts[experts >= 0], minlength=scenario.EXPERTS)
    want[2, :, 7] = 1  # slot 0 of rank 1 under the initial map
    assert tokens.tolist() == want.tolist()
    first = results[0]
    assert first.balance_after > first.balance_before
    assert first.received_bytes > 0
    lines = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 1
    assert lines[0].startswith("rebalance 1: rank_balance ")


def test_counters_are_cleared_and_the_figure_goes_on(run_ranks, scenario) -> None:
    def rank(group: ThreadGroup) -> tuple[list[bool], list[float]]:
        rebalancer = scenario.build(group, interval=0)
        done = [scenario.step(rebalancer, number) for number in range(9)]
        assert rebalancer.groups[0].counters.counts.sum() == 0
        assert rebalancer.shuffles == []
        load = rebalancer.take_load()
        assert rebalancer.take_load().ratio == 1.0
        return done, list(load)

    results = run_ranks(2, rank)
    assert results[0] == results[1]
    done, (most, mean) = results[0]
    assert not any(done)
    total = sum(
        int((scenario.routed(number, layer, source) >= 0).sum())
        for number in range(8) for layer in range(2) for source in range(2)
    )  # fmt: skip
    assert mean == total / 2
    assert most > mean


def test_a_window_without_tokens_moves_nothing(run_ranks, scenario) -> None:
    def rank(group: ThreadGroup) -> rebalance.Rebalance | None:
        rebalancer = scenario.build(group, interval=1)
        return rebalancer.after_step(is_prefill=False)

    for done in run_ranks(2, rank):
        assert (done.number, done.slots, done.received_bytes) == (1, 0, 0)


def test_one_rank_does_nothing() -> None:
    placement = ExpertMap.initial(1, 4, 1)
    group = LayerGroup(placement, TensorSlots([[torch.zeros(4, 1)]]), 0, 1)
    rebalancer = Rebalancer([group], SingleRank(), Trigger(1, 1), verify=True)
    group.routing(0).count(torch.tensor([[3]]))
    assert rebalancer.after_step(is_prefill=False) is None
    assert group.counters.counts.sum() == 0
    assert group.placement is placement
    assert rebalancer.shuffles == []


def test_the_table_of_loads(run_ranks, scenario, caplog: pytest.LogCaptureFixture) -> None:
    tokens = np.array([[[4, 1], [0, 0]], [[5, 0], [2, 0]]])
    placement = ExpertMap.from_physical(np.array([[0, 1, 0], [1, 0, 1]]), 2, 1)
    assert rebalance.load_table(tokens, placement) == "layer 0: 4.5×2 0.5\nlayer 1: 1.0 0.0×2"

    def rank(group: ThreadGroup) -> bool:
        return bool(scenario.step(scenario.build(group, interval=1, verbose=True), 0))

    with caplog.at_level(logging.INFO, "deepinfer_ray.eplb"):
        assert run_ranks(2, rank) == [True, True]
    assert caplog.text.count("mean tokens of a step by layer and expert:\nlayer 0: ") == 1


def test_two_layouts_are_balanced_side_by_side(run_ranks) -> None:
    """A drafter has fewer experts; its map, window and weights are its own, the moment is the same."""

    def rank(group: ThreadGroup) -> list[list[int]]:
        layers = []
        for experts, tokens in ((4, [9, 0, 8, 0]), (6, [5, 0, 0, 6, 0, 0])):
            placement = ExpertMap.initial(1, experts, 2)
            weights = torch.tensor(placement.local_experts(0, group.rank)).view(-1, 1).float()
            made = LayerGroup(placement, TensorSlots([[weights]]), group.rank, 1)
            local = tokens[group.rank * len(weights) :][: len(weights)]
            made.counters.counts[0] = torch.tensor(local)
            layers.append(made)
        assert Rebalancer(layers, group, Trigger(1, 1), verify=True).after_step(is_prefill=False)
        return [made.slots.layer_tensors(0)[0].view(-1).int().tolist() for made in layers]

    first, second = run_ranks(2, rank)
    assert (0 in first[0]) != (2 in first[0])
    assert (0 in first[1]) != (3 in first[1])
    assert sorted(first[0] + second[0]) == [0, 1, 2, 3]
    assert sorted(first[1] + second[1]) == [0, 1, 2, 3, 4, 5]


def test_tables_that_differ_are_found(run_ranks, scenario) -> None:
    def rank(group: ThreadGroup) -> str:
        rebalancer = scenario.build(group, interval=1)
        layers = rebalancer.groups[0]
        layers.tables.update = lambda placement: None  # type: ignore[method-assign]
        layers.tables.logical_count[0, 0] += group.rank
        with pytest.raises(RankFailure) as failure:
            rebalancer.after_step(is_prefill=False)
        return str(failure.value)

    for text in run_ranks(2, rank):
        assert text == "expert rank 1 has other maps than rank 0 after a rebalance; rebuild the gang"


def test_a_map_for_other_ranks_is_refused() -> None:
    group = LayerGroup(ExpertMap.initial(1, 4, 2), TensorSlots([[torch.zeros(2, 1)]]), 1, 1)
    with pytest.raises(ConfigError, match="a map for rank 1 of 2 was given to rank 0 of 1"):
        Rebalancer([group], SingleRank(), Trigger(0, 1))
    with pytest.raises(ConfigError, match="a map of 1 layers cannot place the experts of 2"):
        LayerGroup(ExpertMap.initial(1, 4, 2), TensorSlots([[torch.zeros(2, 1)]] * 2), 1, 1)


def test_an_exchange_with_a_map_around_it() -> None:
    placement = ExpertMap.from_physical(np.array([[2, 0, 1, 0]]), 3, 1)
    group = LayerGroup(placement, TensorSlots([[torch.zeros(4, 1)]]), 0, 1)
    exchange = BalancedExchange(LocalExchange(4), group.routing(0))
    x, weights = torch.randn(3, 2), torch.rand(3, 2)
    received = exchange.dispatch(x, torch.tensor([[0, 2], [0, 1], [-1, -1]]), weights)
    assert exchange.is_local
    assert received.experts.tolist() == [[1, 0], [3, 2], [-1, -1]]
    assert received.rows is x
    assert group.counters.counts.tolist() == [[1, 1, 1, 1]]
    out = torch.randn(3, 2, 2)
    assert torch.equal(exchange.combine(out, received), out)
    assert exchange.dispatch(x[:0], torch.empty(0, 2, dtype=torch.int64), weights[:0]).experts.shape == (0, 2)
    with pytest.raises(ConfigError, match="an exchange for 3 local experts cannot serve 4 slots a rank"):
        BalancedExchange(LocalExchange(3), group.routing(0))
