"""Weight shuffle: the pairing rule, plans, in-place moves between ranks, slot hashes right after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.errors import ConfigError, RankFailure
from deepinfer_ray.parallel.expert_map import ExpertMap, ExpertMapError
from deepinfer_ray.parallel.expert_slots import SlotLedger, TensorSlots, slot_bytes, slot_digests
from deepinfer_ray.parallel.rank_group import SingleRank, ThreadGroup
from deepinfer_ray.parallel.shuffle import Copy, ShufflePlan, Transfer, WeightShuffle, plan_layer


def random_map(seed: int, layers: int, experts: int, ranks: int, extra: int) -> ExpertMap:
    random = np.random.default_rng(seed)
    rows = [
        random.permutation(np.append(np.arange(experts), random.integers(0, experts, extra)))
        for _ in range(layers)
    ]
    return ExpertMap.from_physical(np.array(rows), experts, ranks)


# ---- plans


def test_slots_that_stay_local_copies_and_one_transfer_for_two_slots() -> None:
    old, new = np.array([0, 1, 2, 3, 4, 0]), np.array([0, 0, 5, 5, 4, 1])
    with pytest.raises(ExpertMapError, match="no rank holds expert 5, which slot 2 shall hold"):
        plan_layer(old, new, 2)
    plan = plan_layer(old, np.array([0, 0, 4, 1, 1, 0]), 2)
    assert plan.copies == (Copy(0, 0, 1),)
    assert plan.transfers == (Transfer(1, 0, 1, 1, 0), Transfer(4, 1, 1, 0, 2))
    assert plan.duplicates == (Copy(1, 0, 1),)
    assert not plan_layer(old, old, 2)


def test_the_first_old_slot_is_the_source() -> None:
    plan = plan_layer(np.array([7, 7, 1, 2]), np.array([7, 1, 7, 7]), 2)
    assert plan.transfers == (Transfer(1, 1, 0, 0, 1), Transfer(7, 0, 0, 1, 0))
    assert plan.duplicates == (Copy(1, 0, 1),)


@pytest.mark.parametrize(
    ("senders", "receivers", "pairs"),
    [
        (2, 4, [0, 0, 1, 1]),
        (2, 5, [0, 0, 1, 1, 0]),
        (3, 8, [0, 0, 1, 1, 2, 2, 0, 1]),
        (3, 2, [0, 1]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_pairing(senders: int, receivers: int, pairs: list[int]) -> None:
    """Receiver j is served by sender j // k while j < k·S and by sender j - k·S afterwards."""
    ranks = senders + receivers
    # One slot a rank; expert 0 goes from the first ranks to all others. A second slot keeps the rest alive.
    old = np.array([[0, 1]] * senders + [[1, 1]] * receivers).ravel()
    new = np.array([[0, 1]] * ranks).ravel()
    plan = plan_layer(old, new, ranks)
    assert [transfer.receiver for transfer in plan.transfers] == list(range(senders, ranks))
    assert [transfer.sender for transfer in plan.transfers] == pairs


def test_random_plans_deliver_every_expert_once_from_a_holder() -> None:
    for seed in range(40):
        ranks = [2, 3, 4, 6][seed % 4]
        old, new = (random_map(10 * seed + i, 2, 18, ranks, 6) for i in range(2))
        plan = ShufflePlan.between(old, new)
        n = old.num_local
        for layer, moves in enumerate(plan.layers):
            slots = old.physical_to_logical[layer].reshape(ranks, n).copy()
            held = [set(row.tolist()) for row in slots]
            assert list(moves.transfers) == sorted(moves.transfers, key=lambda t: (t.expert, t.receiver))
            assert len({(t.expert, t.receiver) for t in moves.transfers}) == len(moves.transfers)
            for transfer in moves.transfers:
                assert slots[transfer.sender, transfer.source] == transfer.expert
                assert transfer.expert not in held[transfer.receiver]
            after = slots.copy()
            for copy in moves.copies:
                after[copy.rank, copy.target] = slots[copy.rank, copy.source]
            for transfer in moves.transfers:
                after[transfer.receiver, transfer.target] = transfer.expert
            for copy in moves.duplicates:
                after[copy.rank, copy.target] = after[copy.rank, copy.source]
            assert after.ravel().tolist() == new.physical_to_logical[layer].tolist()
        assert plan.sent.sum() == plan.received.sum()
        changed = int((old.physical_to_logical != new.physical_to_logical).sum())
        assert int(plan.received.sum() + plan.copied.sum()) == changed


def test_maps_of_other_sizes_are_refused() -> None:
    with pytest.raises(ExpertMapError, match=r"\[1, 4\] on 2 ranks and \[1, 4\] on 4"):
        ShufflePlan.between(ExpertMap.initial(1, 4, 2), ExpertMap.initial(1, 4, 4))


# ---- bytes


def test_a_slot_is_a_row_of_bytes_in_any_layout() -> None:
    base = torch.arange(2 * 3 * 4, dtype=torch.float32).view(2, 3, 4)
    transposed = base.transpose(1, 2)
    assert torch.equal(slot_bytes(transposed), base.view(2, -1).view(torch.uint8))
    padded = torch.zeros(2, 3, 8, dtype=torch.int8)[:, :, :5]
    assert slot_bytes(padded).shape == (2, 2 * 8 + 5)
    slot_bytes(transposed)[1].copy_(slot_bytes(transposed)[0])
    assert torch.equal(base[0], base[1])
    assert slot_bytes(torch.ones(3, dtype=torch.bfloat16)).shape == (3, 2)
    with pytest.raises(
        ConfigError, match=r"slots lie 1 elements apart and span 9; make the slot the leading"
    ):
        slot_bytes(torch.zeros(4, 3).t().contiguous().t())
    with pytest.raises(ConfigError, match=r"must be \[slots, …\], got the shape \[\]"):
        slot_bytes(torch.tensor(1.0))


def test_layers_must_be_alike_and_complete() -> None:
    odd = TensorSlots([[torch.zeros(2, 4)], [torch.zeros(2, 5)]])
    with pytest.raises(
        ConfigError, match=r"a slot of layer 1 has tensors of \[20\] bytes and one of layer 0 \[16\]"
    ):
        WeightShuffle(odd, 2, SingleRank())
    with pytest.raises(ConfigError, match=r"layer 0: tensors of \[2\] slots where each rank has 3"):
        WeightShuffle(odd, 3, SingleRank())
    with pytest.raises(ConfigError, match=r"eplb\.p2p_groups must be at least 1, got 0"):
        WeightShuffle(odd, 2, SingleRank(), p2p_groups=0)
    one = WeightShuffle(TensorSlots([[torch.zeros(2, 4)]]), 2, SingleRank())
    with pytest.raises(ConfigError, match="a plan of 2 layers and 4 slots cannot move 1 layers and 2 slots"):
        one.run(ShufflePlan.between(ExpertMap.initial(2, 4, 1), ExpertMap.initial(2, 4, 1)))


# ---- moves


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize(("ranks", "extra"), [(1, 2), (2, 0), (3, 6), (4, 2)])
def test_every_slot_holds_its_expert_right_after(
    run_ranks, scenario, ranks: int, extra: int, buckets: int
) -> None:
    maps = [random_map(100 * ranks + i, 2, 18, ranks, extra) for i in range(5)]

    def rank(group: ThreadGroup) -> int:
        layers = [scenario.expert_tensors(y, maps[0].local_experts(y, group.rank)) for y in range(2)]
        addresses = [tensor.data_ptr() for layer in layers for tensor in layer]
        slots = TensorSlots(layers)
        ledger = SlotLedger(slots, maps[0], group)
        shuffle = WeightShuffle(slots, maps[0].num_local, group, buckets)
        moved = 0
        for old, new in zip(maps, [*maps[1:], maps[0]], strict=True):
            moved += shuffle.run(ShufflePlan.between(old, new)).slots
            ledger.check(slots, new, group)
            for y in range(2):
                want = scenario.expert_tensors(y, new.local_experts(y, group.rank))
                for got, tensor in zip(layers[y], want, strict=True):
                    assert torch.equal(got, tensor)
        assert addresses == [tensor.data_ptr() for layer in layers for tensor in layer]
        return moved

    changed = sum(
        int((old.physical_to_logical != new.physical_to_logical).sum())
        for old, new in zip(maps, [*maps[1:], maps[0]], strict=True)
    )
    assert sum(run_ranks(ranks, rank)) == changed > 0


def test_a_damaged_slot_is_named_on_every_rank(run_ranks, scenario) -> None:
    placement = ExpertMap.initial(2, 4, 2, 2)

    def rank(group: ThreadGroup) -> str:
        layers = [scenario.expert_tensors(y, placement.local_experts(y, group.rank)) for y in range(2)]
        ledger = SlotLedger(TensorSlots(layers), placement, group)
        if group.rank == 1:
            layers[1][1][2, 0, 0] += 1
        with pytest.raises(RankFailure) as failure:
            ledger.check(TensorSlots(layers), placement, group)
        return str(failure.value)

    for text in run_ranks(2, rank):
        assert text.startswith(
            "layer 1: slot 2 of expert rank 1 does not hold the bytes of expert 1 (1 slots differ)"
        )


def test_replicas_that_differ_at_the_start_are_found() -> None:
    slots = TensorSlots([[torch.tensor([[1.0], [2.0], [3.0]])]])
    with pytest.raises(RankFailure, match="does not hold the bytes of expert 0"):
        SlotLedger(slots, ExpertMap.initial(1, 2, 1, 1), SingleRank())


def test_nothing_to_move_costs_no_message() -> None:
    """A plan without changes needs no peer: the other ranks of this group never call."""
    group = ThreadGroup.of(2, timeout_s=0.1)[0]
    placement = ExpertMap.initial(3, 4, 2)
    shuffle = WeightShuffle(TensorSlots([[torch.zeros(2, 1)]] * 3), 2, group)
    done = shuffle.run(ShufflePlan.between(placement, placement))
    assert (done.slots, done.sent_bytes, done.received_bytes) == (0, 0, 0)


def test_a_peer_that_does_not_come_is_a_failure() -> None:
    old, new = ExpertMap.initial(1, 4, 2), ExpertMap.from_physical(np.array([[2, 3, 0, 1]]), 4, 2)
    shuffle = WeightShuffle(TensorSlots([[torch.zeros(2, 1)]]), 2, ThreadGroup.of(2, timeout_s=0.05)[1])
    with pytest.raises(RankFailure, match="rank 1 waited in vain for bytes of rank 0"):
        shuffle.run(ShufflePlan.between(old, new))
    with pytest.raises(RankFailure, match="rank 0 waited in vain for the others"):
        ThreadGroup.of(2, timeout_s=0.05)[0].sum(torch.zeros(1))
    with pytest.raises(RankFailure, match="a group of one rank has nobody"):
        SingleRank().exchange([(torch.zeros(1), 0)], [])


def test_weights_made_under_inference_mode_are_moved(scenario) -> None:
    with torch.inference_mode():
        weights = torch.arange(4.0).view(4, 1)
    old, new = ExpertMap.initial(1, 4, 1), ExpertMap.from_physical(np.array([[1, 2, 3, 0]]), 4, 1)
    before = slot_digests(TensorSlots([[weights]]), 4)
    WeightShuffle(TensorSlots([[weights]]), 4, SingleRank()).run(ShufflePlan.between(old, new))
    assert weights.view(-1).tolist() == [1, 2, 3, 0]
    assert slot_digests(TensorSlots([[weights]]), 4).tolist() == [before[0].roll(-1).tolist()]


def test_processes_over_gloo_end_like_threads(run_ranks, scenario, tmp_path: Path) -> None:
    """Three processes rebalance four times with verified hashes, and hold what the threads hold."""
    store = tmp_path / "store"
    command = [sys.executable, scenario.__file__, "3", str(store)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as processes:
        threads: list[dict[str, Any]] = run_ranks(3, scenario.run)
        _, errors = processes.communicate(timeout=120)
    assert processes.returncode == 0, errors
    for rank in range(3):
        assert json.loads(Path(f"{store}.{rank}").read_text()) == threads[rank]
    assert threads[0]["rebalanced"] == [0, 5, 10, 15]
    assert threads[0]["map"] == threads[1]["map"] == threads[2]["map"]
