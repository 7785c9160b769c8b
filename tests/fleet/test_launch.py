"""What a fleet asks machines for, and what it says about that; no cluster."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer_ray.config.load import load_config
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.fleet import fleet as fleet_module
from deepinfer_ray.fleet.cluster import Connection
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.launch import Launcher
from deepinfer_ray.fleet.options import FleetOptions, default_options, fleet_grid, rank_environment
from deepinfer_ray.fleet.rank_actor import RANK_ENVIRONMENT, RankActor
from deepinfer_ray.fleet.topology import Node
from deepinfer_ray.job.forecast import _placement

FLAGS = {"--model": "m", "--input": ["in.parquet"], "--output": "out"}
GPU_MACHINE = Node("a", "10.0.0.1", {"CPU": 16.0, "GPU": 8.0}, {})
CPU_MACHINE = Node("b", "10.0.0.2", {"CPU": 64.0}, {})


def launcher(device: str) -> Launcher:
    return Launcher(fleet_grid(None, 1), FleetOptions(), "/models/v41", None, device, "none:none", "test")


def test_a_rank_whose_gpu_machine_was_lost_does_not_move_to_a_cpu() -> None:
    """Its rows would come slowly, and sampled ones differently."""
    made = launcher("auto")
    assert made.plan([CPU_MACHINE, GPU_MACHINE]).bundles == ({"CPU": 1.0, "GPU": 1.0},)
    assert made.plan([CPU_MACHINE]).bundles == ({"CPU": 1.0, "GPU": 1.0},)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", True), ("cpu", False), ("auto", False)])
def test_which_device_holds_a_gpu_where_no_machine_has_one(device: str, gpus: bool) -> None:
    assert ("GPU" in launcher(device).bundle([CPU_MACHINE])) is gpus


@pytest.mark.parametrize(("dp", "own", "warns"), [(300, True, True), (2, True, False), (300, False, False)])
def test_more_ranks_than_cores_are_told_where_the_cluster_is_ours(
    stub: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    dp: int, own: bool, warns: bool,
) -> None:  # fmt: skip
    asked = []

    def connect(address: str | None, **resources: int | None) -> Connection:
        asked.append(resources["num_cpus"])
        return Connection("127.0.0.1:1", own, joined=False)

    monkeypatch.setattr(fleet_module, "connect", connect)
    monkeypatch.setattr(fleet_module.os, "sched_getaffinity", lambda pid: {0, 1})
    RayFleet("m", None, dp, device="cpu", engine_factory=stub.make)._connect()
    assert asked[0] >= dp, "no refusal"
    lines = [record.getMessage() for record in caplog.records]
    text = "300 ranks share the 2 cores of this machine and take turns: 2 are ready sooner and no slower"
    assert lines == ([f"{text}; lower --dp"] if warns else [])


def test_labels_that_a_run_names_reach_the_plan() -> None:
    """The names hold dots, which the keys of a configuration cannot."""
    sets = ['parallel.label_selector=["ray.io/accelerator-type=H200", "zone=in(a,b)"]']
    options = default_options(load_config((), sets, FLAGS, {}))
    assert options.label_selector == {"ray.io/accelerator-type": "H200", "zone": "in(a,b)"}
    chosen = replace(launcher("auto"), options=options)
    machine = replace(GPU_MACHINE, labels={"ray.io/accelerator-type": "H200", "zone": "b"})
    plan = chosen.plan([machine, CPU_MACHINE])
    assert plan.label_selector == options.label_selector
    assert plan.bundles == ({"CPU": 1.0, "GPU": 1.0},)
    assert "GPU" not in replace(launcher("auto"), options=options).bundle([GPU_MACHINE]), "not one to choose"


def test_a_label_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'zone' is no label; write name=value"):
        load_config((), ["parallel.label_selector=[zone]"], FLAGS, {})


def test_the_plan_of_a_run_knows_the_labels_too() -> None:
    problems: list[str] = []
    grid, cluster = fleet_grid(None, 2), ("10.0.0.1:6379", [GPU_MACHINE])
    assert _placement(grid, cluster, True, problems, 2, {})["possible"]
    assert not problems
    assert not _placement(grid, cluster, True, problems, 2, {"zone": "b"})["possible"]
    assert "where zone = b" in problems[0]
    assert "holds 0 now, 0 when empty (parallel.label_selector)" in problems[0]


def test_ranks_with_collectives_get_the_environment_that_theirs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process before anything imports CUDA; what a person set goes first."""
    alone, gang = fleet_grid(None, 2), fleet_grid(SimpleNamespace(parallel=SimpleNamespace(ep=2)), 2)
    assert rank_environment(alone, {"A": "1"}) == {"A": "1"}
    chosen = rank_environment(gang, {"NCCL_PXN_DISABLE": "0", "A": "1"})
    assert (chosen["NCCL_PXN_DISABLE"], chosen["NCCL_NVLS_ENABLE"], chosen["A"]) == ("0", "0", "1")
    for name in (*chosen, *RANK_ENVIRONMENT):
        monkeypatch.setenv(name, "before")
    RankActor(chosen)
    assert {name: os.environ[name] for name in chosen} == chosen
    assert os.environ["OMP_NUM_THREADS"] == "1"
