"""Cluster files by Ray's schema, RayJob manifests by the operator's fields, runtime environments."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from deepinfer_ray.cli.main import app
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.load import FLAGS
from deepinfer_ray.engine.fit import fit_table
from deepinfer_ray.fleet.topology import GPU_DOMAIN_LABEL
from deepinfer_ray.parallel.grid import RankGrid

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted(path.name for path in (ROOT / "configs/cluster").glob("*.yaml"))
RAY_JOBS = sorted(path.name for path in (ROOT / "configs/kuberay").glob("*.yaml"))
RUNTIME_ENVS = sorted(path.name for path in (ROOT / "configs/ray").glob("runtime_env*.yaml"))

RAY_JOB_FIELDS = {
    *("entrypoint", "runtimeEnvYAML", "metadata", "jobId", "submissionMode", "submitterPodTemplate"),
    *("submitterConfig", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources"),
    *("shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
    *("suspend", "managedBy", "clusterSelector", "deletionStrategy", "schedule", "rayClusterSpec"),
}
GROUP_FIELDS = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams"),
    *("template", "labels"),
}


def test_the_files_are_there():
    assert CLUSTERS == ["aws.yaml", "gcp.yaml", "local.yaml"]
    assert RAY_JOBS == ["rayjob-b200.yaml", "rayjob-h100.yaml", "rayjob-h200.yaml"]
    assert "runtime_env.yaml" in RUNTIME_ENVS


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_s_schema_accepts_a_cluster_file(load, name):
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    config = load(f"configs/cluster/{name}")
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**config, "workers": 1}, schema)
    assert any(GPU_DOMAIN_LABEL in command for command in config["worker_start_ray_commands"])


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_cloud_files_have_a_group_for_each_gpu(load, name):
    config = load(f"configs/cluster/{name}")
    groups = {kind: group for kind, group in config["available_node_types"].items() if kind != "head"}
    assert set(groups) == {"h100", "h200", "b200"}
    for kind, group in groups.items():
        assert group["resources"]["GPU"] == 8
        assert group["labels"]["ray.io/accelerator-type"] == kind.upper()
        assert group["resources"][f"accelerator_type:{kind.upper()}"] == 1
        assert group["min_workers"] <= group["max_workers"] <= config["max_workers"]
    assert "GPU" not in config["available_node_types"]["head"]["resources"]
    assert config["head_node_type"] == "head"


@pytest.mark.parametrize("name", RAY_JOBS)
def test_a_ray_job_has_only_fields_that_the_operator_knows(load, name):
    manifest = load(f"configs/kuberay/{name}")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    assert set(spec) <= RAY_JOB_FIELDS
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
    assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= GROUP_FIELDS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    if spec["shutdownAfterJobFinishes"] is False:
        assert "ttlSecondsAfterFinished" not in spec


@pytest.mark.parametrize("name", RAY_JOBS)
def test_a_ray_job_s_pods(load, name):
    import ray

    cluster = load(f"configs/kuberay/{name}")["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    (group,) = cluster["workerGroupSpecs"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["resources"]["limits"] == container["resources"]["requests"]
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert group["rayStartParams"]["labels"] == f"{GPU_DOMAIN_LABEL}=$GPU_DOMAIN"
    domain = next(variable for variable in container["env"] if variable["name"] == "GPU_DOMAIN")
    assert domain["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@pytest.mark.parametrize("name", RAY_JOBS)
def test_a_ray_job_s_command_fits_its_machines(load, root, name):
    """Known flags; as many ranks as GPUs; an EP size whose ranks fit on that kind of GPU."""
    spec = load(f"configs/kuberay/{name}")["spec"]
    program, command, *words = shlex.split(spec["entrypoint"])
    assert program == "deepinfer-ray"
    assert command in {one.callback.__name__ for one in app.registered_commands}
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert set(flags) <= set(FLAGS)
    grid = RankGrid.build(dp=int(flags["--dp"]), ep=int(flags["--ep"]))
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert grid.world_size == 8 * group["replicas"]
    model = ModelConfig.load(root / "configs/models/deepseek-v4.1-flash")
    fits = fit_table(model, EngineConfig().resolve(model))
    kind = group["groupName"].upper()
    assert {fit.fits for fit in fits if (fit.gpu.name, fit.ep) == (kind, grid.ep)} == {True}


def runtime_envs(load):
    yield from ((name, load(f"configs/ray/{name}")) for name in RUNTIME_ENVS)
    for name in RAY_JOBS:
        yield name, yaml.safe_load(load(f"configs/kuberay/{name}")["spec"]["runtimeEnvYAML"])


def test_runtime_environments(load):
    from ray.runtime_env import RuntimeEnv

    for name, content in runtime_envs(load):
        RuntimeEnv(**content)
        assert int(content["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30, name
