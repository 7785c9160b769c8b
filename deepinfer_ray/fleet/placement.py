"""One placement group: asked for, looked at, removed until it is gone; and the error of one that is not met.

Knows: Ray's placement groups and node table. Does not know: actors, ranks, rows.
A group is never repaired: Ray reschedules bundles one by one and may never finish, so a gang that lost a
member gives its group back whole and asks for a new one (spec/ray.md §0.3).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from deepinfer_ray.errors import ConfigError, PlacementError
from deepinfer_ray.fleet.topology import Node, PlacementPlan, demand_and_supply, nodes_of

logger = logging.getLogger(__name__)

POLL_S = 0.05
REMOVE_TIMEOUT_S = 15.0


def cluster_nodes() -> list[Node]:
    """The live nodes of the connected cluster, with what each has free."""
    import ray

    free: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a private path: without it every node counts as wholly free
        free = ray._private.state.available_resources_per_node()
    return nodes_of(ray.nodes(), free)


class Placement:
    """A placement group that was asked for: `placed` looks, `remove` gives it back, `failure` explains."""

    def __init__(
        self, plan: PlacementPlan, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from ray.util import placement_group

        self.plan = plan
        self.name = name
        self._clock = clock
        if plan.warning:
            logger.warning("%s: %s", name, plan.warning)
        packing: dict[str, Any] = {"strategy": plan.strategy}
        if plan.topology_strategy:
            packing = {"topology_strategy": dict(plan.topology_strategy)}
        if plan.label_selector:
            packing["bundle_label_selector"] = [dict(plan.label_selector)] * len(plan.bundles)
        try:
            self.group = placement_group(list(plan.bundles), name=name, **packing)
        except ValueError as error:
            if not plan.label_selector:
                raise
            raise ConfigError(
                f"parallel.label_selector = {dict(plan.label_selector)} is refused by Ray: {error}\n"
                "  what to do: write each as name=value, with value, !value, in(a,b) or !in(a,b)"
            ) from None

    def placed(self) -> bool:
        """Whether every bundle stands on a node now."""
        return self._row().get("state") == "CREATED"

    def node_ids(self) -> list[str]:
        """The machines on which bundles stand."""
        return [node_id for node_id in self._row().get("bundles_to_node_id", {}).values() if node_id]

    def failure(
        self,
        waited_s: float,
        *,
        hopeless: bool = False,
        copies: int = 1,
        now: str = "nothing was left running",
    ) -> PlacementError:
        """The error for a person: demand, supply of each node, what to do.

        copies: how many groups like this one are missing. now: what goes on meanwhile.
        """
        why = "can never be met by these machines" if hopeless else f"was not met within {waited_s:g} s"
        return PlacementError(
            f"placement {self.name} {why}:\n{demand_and_supply(self.plan, cluster_nodes(), copies)}\n"
            "  what to do: ask for fewer ranks (--dp, --cp, --ep) or smaller ones, free or add machines; "
            + now
        )

    def bundle_strategy(self, index: int) -> Any:
        """The scheduling strategy that pins an actor to one bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        )

    def remove(self, timeout_s: float = REMOVE_TIMEOUT_S) -> bool:
        """Give the group back, killing what runs in it; True once Ray reports it gone. Legal in any state."""
        from ray.util import remove_placement_group

        remove_placement_group(self.group)
        deadline = self._clock() + timeout_s
        while not self.removed():
            if self._clock() >= deadline:
                logger.warning("%s: Ray has not confirmed the removal within %g s", self.name, timeout_s)
                return False
            time.sleep(POLL_S)
        return True

    def removed(self) -> bool:
        """Whether Ray knows the group no more or as removed."""
        return self._row().get("state", "REMOVED") == "REMOVED"

    def _row(self) -> dict[str, Any]:
        from ray.util import placement_group_table

        row: dict[str, Any] = placement_group_table(self.group) or {}
        return row
