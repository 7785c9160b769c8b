"""Gangs on machines that name their NVLink domain: where they land, what cannot be, what comes and goes.

One cluster of fake machines: the labelled ones have one GPU each, so that a gang of two needs two of them.
"""

from __future__ import annotations

import pytest

from deepinfer_ray.fleet.placement import REMOVE_TIMEOUT_S
from deepinfer_ray.fleet.watch import Patience

pytestmark = pytest.mark.ray


def test_ranks_on_machines_without_labels_are_spread_with_a_warning(lab):
    found = lab("place", ranks=2, gpus=0.0, domains="")
    assert found["error"] is None
    assert len(set(found["nodes"])) == 2, "each machine holds one"
    (warning,) = [line for line in found["told"] if "carry no ray.io/gpu-domain label" in line]
    assert "2 ranks do not fit on one machine" in warning
    assert "ray start --labels=ray.io/gpu-domain=NAME" in warning
    assert found["held"] == []


def test_an_expert_group_lands_in_one_domain(lab):
    """The room that is free lies in two domains, one GPU in a and two in b."""
    found = lab("place", ranks=2, gpus=1.0, domains="abb")
    assert found["domains"] == ["b", "b"]
    assert found["nodes"] == sorted(set(found["nodes"])), "ranks are numbered by where they stand"
    assert found["told"] == []
    assert found["held"] == []


def test_what_no_domain_holds_is_refused_with_demand_and_supply(lab):
    """Three GPUs are free, but not in one domain."""
    found = lab("place", ranks=3, gpus=1.0, domains="abb", placement_s=3)
    assert found["seconds"] < 3 + 15
    assert Patience().placement + REMOVE_TIMEOUT_S <= 60, "what it takes by default"
    text = found["error"]
    assert "was not met within 3" in text
    assert "demand: 3 × {CPU: 1, GPU: 1}, STRICT_PACK within one ray.io/gpu-domain = {CPU: 3, GPU: 3}" in text
    for domain, machines in (("a", 1), ("b", 2)):
        supply = [line for line in text.splitlines() if f"ray.io/gpu-domain={domain}" in line]
        assert len(supply) == machines
        assert all("GPU 1 free of 1; holds 1 now, 1 when empty" in line for line in supply)
    assert "what to do: ask for fewer ranks (--dp, --cp, --ep)" in text
    assert found["held"] == []


def test_a_second_gang_joins_a_running_job_and_leaves_it(lab):
    """It waits for a place in the other domain, joins, is drained, joins again, and leaves at the end."""
    found = lab("come_and_go")
    waiting, joined, _, again, end = found["seen"]
    assert (found["lost"], found["attempts"], found["restarts"]) == (0, {"1": found["attempts"]["1"]}, 0)
    assert [rank["stage"] for rank in waiting["ranks"]] == ["up", "up", "placing", "placing"]
    for moment, generation in ((joined, 0), (again, 1)):
        ranks = moment["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
        assert [found["domains"].get(rank["node_id"], "a") for rank in ranks] == ["b", "b", "a", "a"]
        assert [rank["generation"] for rank in ranks] == [0, 0, generation, generation]
        assert len({rank["node_id"] for rank in ranks}) == 4
    counts = [(moment["gangs"]["joined"], moment["gangs"]["left"]) for moment in found["seen"]]
    assert counts == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
    assert all(rank["gang"] == 0 for rank in end["ranks"])
    assert len(found["groups"]) == 1, "the second gang has given its place back while the first still stood"
    assert found["held"] == []


@pytest.mark.slow
def test_a_machine_of_an_expert_group_dies_and_another_domain_takes_over(lab):
    """Two ranks of a real model over gloo in one domain; the other has room."""
    found = lab("lose_a_machine_of_a_gang", count=24)
    assert found["same"], "the rows are not those of one process"
    assert found["redone"] > 0
    assert found["restarts"] == 1, "and the budget allowed no death"
    assert found["moved"]
    assert len(set(found["domains"])) == 1
    assert found["held"] == []
