"""Where ranks may stand: nodes, bundles, packing, rank order (spec/distributed.md §6, spec/ray.md §2.2).

Knows: plain tables of nodes and resources, NVLink domains as node labels, how ranks are numbered.
Does not know: Ray. A table of invented nodes gives the same plan as a real cluster's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_ray.errors import PlacementError

GPU_DOMAIN_LABEL = "ray.io/gpu-domain"
"""Node label that names an NVLink domain. Ray never sets it: operators label their nodes."""

NODE_LABEL = "ray.io/node-id"

Bundle = dict[str, float]
"""Resources of one rank, e.g. {"CPU": 1.0, "GPU": 1.0}."""


@dataclass(frozen=True)
class Node:
    """One live machine. `total` and `free`: resource name → quantity; `free` is what nobody holds now."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def domain(self) -> str | None:
        """The NVLink domain that the node's label names, if it has one."""
        return self.labels.get(GPU_DOMAIN_LABEL) or None

    def meets(self, selector: Mapping[str, str]) -> bool:
        """Whether its labels are as selected: `v`, `!v`, `in(a,b)`, `!in(a,b)` by name (spec/ray.md §2.3)."""
        for name, wish in selector.items():
            values = wish.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
            if (self.labels.get(name) in [value.strip() for value in values]) == wish.startswith("!"):
                return False
        return True

    def room(self, bundle: Bundle) -> int:
        """How many such bundles the whole machine could hold were nothing else on it."""
        return _room(self.total, bundle)

    def room_now(self, bundle: Bundle) -> int:
        """How many such bundles it could hold beside what is on it."""
        return _room(self.free, bundle)


def _room(quantities: Mapping[str, float], bundle: Bundle) -> int:
    wants = [(name, amount) for name, amount in bundle.items() if amount > 0]
    return min(int((quantities.get(name, 0.0) + 1e-9) // amount) for name, amount in wants)


def nodes_of(rows: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> list[Node]:
    """Live nodes of a cluster's node table; `free` maps a node id to its unheld resources.

    A node that `free` does not know counts as wholly free.
    """
    return [
        Node(
            node_id=row["NodeID"],
            address=row.get("NodeManagerAddress", ""),
            total=dict(row.get("Resources", {})),
            free=dict(free.get(row["NodeID"], row.get("Resources", {}))),
            labels=dict(row.get("Labels", {})),
        )
        for row in rows
        if row.get("Alive")
    ]


def rank_bundle(cpus: float, gpus: float) -> Bundle:
    """The bundle of one rank: {"CPU": c} and, on a GPU backend, {"GPU": 1}."""
    if cpus <= 0 and gpus <= 0:
        raise PlacementError(f"a rank must hold some CPU or GPU, got cpus={cpus} gpus={gpus}")
    return {name: float(amount) for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}


@dataclass(frozen=True)
class PlacementPlan:
    """What to ask Ray for. Exactly one of `strategy` and `topology_strategy` is set.

    label_selector: of every bundle; empty = any machine.
    """

    bundles: tuple[Bundle, ...]
    strategy: str | None = None
    topology_strategy: Mapping[str, str] | None = None
    warning: str | None = None
    label_selector: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """E.g. `4 × {CPU: 1, GPU: 1}, STRICT_PACK within one ray.io/gpu-domain`."""
        how = f"STRICT_PACK within one {GPU_DOMAIN_LABEL}" if self.topology_strategy else str(self.strategy)
        where = "".join(f", where {name} = {wish}" for name, wish in self.label_selector.items())
        return f"{describe_bundles(self.bundles)}, {how}{where}"


def plan_placement(
    bundles: Sequence[Bundle], nodes: Sequence[Node], label_selector: Mapping[str, str] | None = None
) -> PlacementPlan:
    """How the ranks of one gang are packed (one bundle a rank), on machines with the selected labels.

    One NVLink domain when every candidate node (one that could hold a bundle at all) names its domain;
    else one machine when some machine could hold all of them; else PACK, with a warning to show.
    """
    bundles, selector = tuple(bundles), dict(label_selector or {})
    candidates = [
        node for node in nodes if node.meets(selector) and any(node.room(bundle) for bundle in bundles)
    ]
    if candidates and all(node.domain for node in candidates):
        topology = {NODE_LABEL: "PACK", GPU_DOMAIN_LABEL: "STRICT_PACK"}
        return PlacementPlan(bundles, topology_strategy=topology, label_selector=selector)
    if not candidates or len(bundles) == 1 or any(_holds_all(node, bundles) for node in candidates):
        return PlacementPlan(bundles, strategy="STRICT_PACK", label_selector=selector)
    unlabelled = [node for node in candidates if not node.domain]
    warning = (
        f"{len(bundles)} ranks do not fit on one machine and {len(unlabelled)} of {len(candidates)} "
        f"candidate machines carry no {GPU_DOMAIN_LABEL} label (e.g. {unlabelled[0].address}), so ranks that "
        f"exchange experts may land in different NVLink domains; label the nodes: "
        f"ray start --labels={GPU_DOMAIN_LABEL}=NAME"
    )
    return PlacementPlan(bundles, strategy="PACK", warning=warning, label_selector=selector)


def _holds_all(node: Node, bundles: Sequence[Bundle]) -> bool:
    return all(node.total.get(name, 0.0) + 1e-9 >= amount for name, amount in _sum(bundles).items())


def num_held(plan: PlacementPlan, nodes: Sequence[Node], *, now: bool = False) -> int:
    """How many copies of the plan these machines hold when empty; now: beside what is on them.

    Bundles of a plan are alike.
    """
    bundle, wanted = plan.bundles[0], len(plan.bundles)
    rooms: Counter[str] = Counter()
    for node in nodes:
        if not node.meets(plan.label_selector):
            continue
        if plan.topology_strategy:
            place = node.domain or node.node_id
        else:
            place = node.node_id if plan.strategy == "STRICT_PACK" else "cluster"
        rooms[place] += node.room_now(bundle) if now else node.room(bundle)
    return sum(room // wanted for room in rooms.values())


def can_ever_hold(plan: PlacementPlan, nodes: Sequence[Node], copies: int = 1) -> bool:
    """Whether these machines, empty, could hold so many copies of the plan.

    False is final only where no machine can join (a local cluster).
    """
    return num_held(plan, nodes) >= copies


def rank_order(
    node_of_bundle: Sequence[str],
    nodes: Sequence[Node],
    *,
    cp: int = 1,
    device_of_bundle: Sequence[int] | None = None,
) -> list[int]:
    """Bundle index of each rank, by (domain, machine, device index, bundle index).

    The node is the one each bundle really got: neither bundle indices nor strategies promise an order.
    node_of_bundle: node id per bundle. device_of_bundle: index of the GPU on its machine, if any.
    Raises `PlacementError` when a bundle has no live node or a machine's ranks do not divide into CP groups.
    """
    table = {node.node_id: node for node in nodes}
    lost = [index for index, node_id in enumerate(node_of_bundle) if node_id not in table]
    if lost:
        raise PlacementError(
            f"bundle {lost[0]} stands on node {node_of_bundle[lost[0]]!r}, which is not alive"
        )
    for node_id, count in Counter(node_of_bundle).items():
        if count % cp:
            raise PlacementError(
                f"a context parallel group must sit on one machine: {table[node_id].address} holds {count} "
                f"ranks and {count} mod C = {count} mod {cp} = {count % cp}, must be 0; choose --cp among "
                f"the divisors of {count} or give machines that hold whole groups"
            )
    devices = device_of_bundle or [0] * len(node_of_bundle)

    def key(index: int) -> tuple[str, str, str, int, int]:
        node = table[node_of_bundle[index]]
        return (node.domain or node.node_id, node.address, node.node_id, devices[index], index)

    return sorted(range(len(node_of_bundle)), key=key)


def describe_bundles(bundles: Sequence[Bundle]) -> str:
    """E.g. `4 × {CPU: 1, GPU: 1}`; unlike bundles are joined by `+`."""
    counts = Counter(tuple(sorted(bundle.items())) for bundle in bundles)
    return " + ".join(f"{count} × {_show(dict(items))}" for items, count in counts.items())


def demand_and_supply(plan: PlacementPlan, nodes: Sequence[Node], copies: int = 1) -> str:
    """Lines for a person: what is asked, and what each machine has, has free and could hold."""
    total = _sum(plan.bundles * copies)
    each = f"{copies} groups of " if copies > 1 else ""
    lines = [f"  demand: {each}{plan.describe()} = {_show(total)}", "  supply:"]
    for node in sorted(nodes, key=lambda node: (node.domain or "", node.address, node.node_id)):
        parts = [
            f"{name} {_amount(node.free.get(name, 0.0))} free of {_amount(node.total.get(name, 0.0))}"
            for name in total
        ]
        now, empty = (
            (min(map(node.room_now, plan.bundles)), min(map(node.room, plan.bundles)))
            if (selected := node.meets(plan.label_selector))
            else (0, 0)
        )
        domain = f", {GPU_DOMAIN_LABEL}={node.domain}" if node.domain else ""
        lines.append(
            f"    node {node.address} ({node.node_id[:8]}{domain}): {', '.join(parts)}; holds {now} now, "
            f"{empty} when empty" + ("" if selected else " (parallel.label_selector)")
        )
    if not nodes:
        lines.append("    no live node")
    return "\n".join(lines)


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    total: Bundle = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _show(quantities: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {_amount(amount)}" for name, amount in sorted(quantities.items())) + "}"


def _amount(value: float) -> str:
    return f"{value:g}"
