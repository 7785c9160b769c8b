"""The doctor on this machine, and NVLink domains from what nvidia-smi prints."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deepinfer_ray.cli import doctor as module
from deepinfer_ray.cli.main import app
from deepinfer_ray.ops.libraries import LIBRARIES
from deepinfer_ray.ops.registry import OPERATIONS

FABRIC = """
==============NVSMI LOG==============
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : {state}
        Status                            : Success
        CliqueId                          : 32766
        ClusterUUID                       : {uuid}
    Processes                             : None
"""
UUID = "5b4c3c1e-0000-4321-9abc-001122334455"


@pytest.mark.parametrize(
    ("state", "uuid", "domain"),
    [
        ("Completed", UUID, f"{UUID}.32766"),
        ("Completed", "00000000-0000-0000-0000-000000000000", None),
        ("N/A", "N/A", None),
        ("In Progress", UUID, None),
    ],
)
def test_domain_of_a_fabric(state, uuid, domain):
    assert module.gpu_domain(FABRIC.format(state=state, uuid=uuid)) == domain
    assert module.gpu_domain("") is None


@pytest.mark.slow
def test_doctor_says_why_each_library_is_unused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = module.diagnose()
    json.dumps(found)
    libraries = {one["name"]: one for one in found["libraries"]}
    assert set(libraries) == set(LIBRARIES)
    for one in libraries.values():
        assert one["used_by"] or one["reason"] or one["name"] == "xgrammar"
    assert [one["name"] for one in found["operations"]] == [one.name for one in OPERATIONS]
    for one in found["operations"]:
        assert one["backend"] == "reference" or one["function"]
        assert all(one["why_not"].values())
    assert found["machine"]["torch"]
    assert found["cluster"] is None


def test_it_is_printed_for_people_and_machines(monkeypatch):
    """With a library that is there and one that is not, a GPU with a domain, and a labelled cluster."""
    libraries = [
        {"name": "tilelang", "serves": "kernels", "distributions": ["tilelang"], "version": "0.1.15"}
        | {"importable": True, "usable": True, "used_by": ["linear"], "reason": ""},
        {"name": "flash_mla", "serves": "attention", "distributions": ["flash-mla"], "version": "1.0.0.dev0"}
        | {
            "importable": False,
            "usable": False,
            "used_by": [],
            "reason": "the wrong distribution: flash-mla",
        },
    ]
    why = {
        "flash_mla.sparse": "runs on sm100, this device is sm90",
        "a.b": "runs on sm100, this device is sm90",
    }
    node = {"node_id": "ab" * 16, "address": "10.0.0.2", "domain": "rack-1", "accelerator": "H200"}
    found = {
        "machine": {"host": "box", "python": "3.12.1", "cores": 8, "memory_bytes": 2**34, "shm_bytes": 2**30}
        | {"torch": "2.13.0", "torch_cuda": "13.2", "ray": None, "nvcc": None, "driver": "580"},
        "gpus": [{"index": 0, "name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 141 * 10**9}],
        "architecture": "sm90",
        "domain": None,
        "libraries": libraries,
        "operations": [
            {"name": "linear", "backend": "tilelang", "function": "k:run", "why_not": why},
        ],
        "cluster": {"address": "10.0.0.1:6379", "nodes": [{**node, "cpus": 64.0, "gpus": 8.0, "labels": {}}]},
    }
    monkeypatch.setattr(module, "diagnose", lambda gpus: found if gpus else found | {"gpus": []})
    runner = CliRunner(env={"COLUMNS": "200"})
    shown = runner.invoke(app, ["doctor"]).stdout
    for text in (
        "machine:  box, 8 cores, 16.0 GiB, /dev/shm 1.0 GiB",
        "Python 3.12.1, torch 2.13.0 (CUDA 13.2), Ray not installed, nvcc not found",
        "GPU 0:    NVIDIA H200, compute capability 9.0, 131.3 GiB",
        "domain:   box (no fabric: the machine is its own NVLink domain); label the node with: ray start",
        "usable   tilelang     tilelang 0.1.15",
        "refused  flash_mla    flash-mla 1.0.0.dev0   attention: the wrong distribution: flash-mla",
        "linear                   tilelang   k:run",
        "not flash_mla.sparse, a.b: runs on sm100, this device is sm90",
        "10.0.0.2 (abababab): 64 CPUs, 8 GPUs H200, domain rack-1",
    ):
        assert text in shown
    assert json.loads(runner.invoke(app, ["doctor", "--json"]).stdout) == found
    alone = runner.invoke(app, ["doctor", "--json", "--set", "runtime.backend=cpu"])
    assert json.loads(alone.stdout)["gpus"] == []
