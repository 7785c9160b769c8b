"""Packing, rank order and their messages on invented node tables."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deepinfer_ray.errors import PlacementError
from deepinfer_ray.fleet.topology import (
    GPU_DOMAIN_LABEL,
    Node,
    can_ever_hold,
    demand_and_supply,
    nodes_of,
    num_held,
    plan_placement,
    rank_bundle,
    rank_order,
)

GPU_RANK = {"CPU": 1.0, "GPU": 1.0}


def node(
    name: str, gpus: float = 8, cpus: float = 64, domain: str | None = None, free: float | None = None
) -> Node:
    total = {"CPU": cpus, "GPU": gpus, "memory": 1e9}
    labels = {GPU_DOMAIN_LABEL: domain} if domain else {}
    return Node(name, f"10.0.0.{name[-1]}", total, {**total, "GPU": gpus if free is None else free}, labels)


def test_labelled_nodes_give_one_domain() -> None:
    plan = plan_placement([GPU_RANK] * 16, [node("n1", domain="a"), node("n2", domain="a")])
    assert plan.topology_strategy == {"ray.io/node-id": "PACK", GPU_DOMAIN_LABEL: "STRICT_PACK"}
    assert plan.strategy is None
    assert plan.warning is None


def test_nodes_that_can_hold_no_rank_need_no_label() -> None:
    head = node("n0", gpus=0)
    plan = plan_placement([GPU_RANK] * 4, [head, node("n1", domain="a")])
    assert plan.topology_strategy is not None


def test_one_machine_when_it_holds_all() -> None:
    plan = plan_placement([GPU_RANK] * 8, [node("n1"), node("n2", domain="a")])
    assert (plan.strategy, plan.warning) == ("STRICT_PACK", None)


def test_several_machines_without_labels_are_warned_about() -> None:
    plan = plan_placement([GPU_RANK] * 16, [node("n1"), node("n2", domain="a")])
    assert plan.strategy == "PACK"
    assert plan.warning is not None
    assert "16 ranks do not fit on one machine and 1 of 2 candidate machines carry no" in plan.warning
    assert "10.0.0.1" in plan.warning
    assert f"ray start --labels={GPU_DOMAIN_LABEL}=NAME" in plan.warning


def test_one_rank_needs_no_warning() -> None:
    assert plan_placement([GPU_RANK], [node("n1"), node("n2")]).strategy == "STRICT_PACK"
    assert plan_placement([GPU_RANK], []).strategy == "STRICT_PACK"


@pytest.mark.parametrize(
    ("ranks", "nodes", "copies", "holds"),
    [
        (8, [node("n1")], 1, True),
        (9, [node("n1")], 1, False),
        (16, [node("n1"), node("n2")], 1, True),  # PACK
        (16, [node("n1", domain="a"), node("n2", domain="b")], 1, False),
        (16, [node("n1", domain="a"), node("n2", domain="a")], 1, True),
        (1, [node("n1"), node("n2")], 16, True),
        (1, [node("n1"), node("n2")], 17, False),
        (1, [], 1, False),
    ],
)
def test_can_ever_hold(ranks: int, nodes: list[Node], copies: int, holds: bool) -> None:
    assert can_ever_hold(plan_placement([GPU_RANK] * ranks, nodes), nodes, copies) is holds


def test_rank_order_follows_the_nodes_really_given() -> None:
    """PACK keeps no promise about bundle order: ranks of a machine must be consecutive all the same."""
    nodes = [node("n1", domain="b"), node("n2", domain="a"), node("n3", domain="b"), node("n4", domain="a")]
    got = [one.node_id for one in nodes for _ in range(4)]
    random.Random(3).shuffle(got)
    order = rank_order(got, nodes, cp=2)
    assert sorted(order) == list(range(16))
    assert [got[bundle] for bundle in order] == ["n2"] * 4 + ["n4"] * 4 + ["n1"] * 4 + ["n3"] * 4


def test_rank_order_within_a_machine_follows_the_devices() -> None:
    nodes = [node("n1")]
    assert rank_order(["n1"] * 4, nodes, device_of_bundle=[2, 0, 3, 1]) == [1, 3, 0, 2]
    assert rank_order(["n1"] * 4, nodes) == [0, 1, 2, 3]


def test_an_unlabelled_machine_is_its_own_domain() -> None:
    assert rank_order(["n2", "n1", "n2", "n1"], [node("n1"), node("n2")]) == [1, 3, 0, 2]


def test_context_groups_sit_on_one_machine() -> None:
    with pytest.raises(
        PlacementError, match=r"10\.0\.0\.1 holds 3 ranks and 3 mod C = 3 mod 2 = 1, must be 0"
    ):
        rank_order(["n1"] * 3 + ["n2"], [node("n1"), node("n2")], cp=2)


def test_a_bundle_on_a_dead_node_is_refused() -> None:
    with pytest.raises(PlacementError, match="bundle 1 stands on node 'n9', which is not alive"):
        rank_order(["n1", "n9"], [node("n1")])


def test_message_names_demand_and_every_supply() -> None:
    nodes = [node("n1", domain="a", free=2), node("n2", gpus=0)]
    text = demand_and_supply(plan_placement([GPU_RANK] * 4, nodes), nodes)
    assert "demand: 4 × {CPU: 1, GPU: 1}, STRICT_PACK within one ray.io/gpu-domain = {CPU: 4, GPU: 4}" in text
    labelled = "node 10.0.0.1 (n1, ray.io/gpu-domain=a)"
    assert f"{labelled}: CPU 64 free of 64, GPU 2 free of 8; holds 2 now, 8 when empty" in text
    assert "node 10.0.0.2 (n2): CPU 64 free of 64, GPU 0 free of 0; holds 0 now, 0 when empty" in text
    assert "memory" not in text
    assert "no live node" in demand_and_supply(plan_placement([GPU_RANK], []), [])
    assert "3 groups of 1 × {CPU: 1, GPU: 1}, STRICT_PACK = {CPU: 3, GPU: 3}" in demand_and_supply(
        plan_placement([GPU_RANK], []), [], copies=3
    )


def test_fractions_of_a_cpu_are_counted_exactly() -> None:
    small = Node("n1", "a", {"CPU": 4.0}, {"CPU": 0.3})
    assert small.room({"CPU": 0.1}) == 40
    assert small.room_now({"CPU": 0.1}) == 3


def test_dead_nodes_supply_nothing() -> None:
    rows = [
        {
            "NodeID": "n1",
            "Alive": True,
            "NodeManagerAddress": "h1",
            "Resources": {"CPU": 4},
            "Labels": {"a": "b"},
        },
        {"NodeID": "n2", "Alive": False, "NodeManagerAddress": "h2", "Resources": {}},
    ]
    assert nodes_of(rows, {"n1": {"CPU": 1.0}}) == [Node("n1", "h1", {"CPU": 4}, {"CPU": 1.0}, {"a": "b"})]
    assert nodes_of(rows, {})[0].free == {"CPU": 4}


def test_a_rank_needs_some_resource() -> None:
    assert rank_bundle(2, 1) == {"CPU": 2.0, "GPU": 1.0}
    assert rank_bundle(0.5, 0) == {"CPU": 0.5}
    with pytest.raises(PlacementError, match="must hold some CPU or GPU"):
        rank_bundle(0, 0)


@pytest.mark.parametrize(
    ("wish", "meets"),
    [
        ("H200", [True, False, False]),
        ("!H200", [False, True, True]),
        ("in(H100, H200)", [True, True, False]),
        ("!in(H100,H200)", [False, False, True]),
    ],
)
def test_labels_select_machines_as_ray_does(wish: str, meets: list[bool]) -> None:
    nodes = [replace(node("n", 4, 4), labels=labels) for labels in ({"kind": "H200"}, {"kind": "H100"}, {})]
    assert [each.meets({"kind": wish}) for each in nodes] == meets


def test_machines_that_are_not_selected_hold_nothing() -> None:
    """Neither their domain nor their room counts, and the message says why."""
    labels = {GPU_DOMAIN_LABEL: "a", "kind": "H200"}
    nodes = [replace(node("good", 4, 4), labels=labels), node("other", 8, 8)]
    plan = plan_placement([GPU_RANK] * 4, nodes, {"kind": "H200"})
    assert plan.topology_strategy is not None, "the other machine's missing label is no matter"
    assert num_held(plan, nodes) == 1
    assert num_held(plan_placement([GPU_RANK] * 4, nodes, {"kind": "B200"}), nodes) == 0
    text = demand_and_supply(plan, nodes)
    assert "STRICT_PACK within one ray.io/gpu-domain, where kind = H200" in text
    ends = [line.split("holds ")[1] for line in text.splitlines() if "holds " in line]
    assert sorted(ends) == ["0 now, 0 when empty (parallel.label_selector)", "4 now, 4 when empty"]
