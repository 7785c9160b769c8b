"""`deepinfer-ray doctor`: this machine, its libraries, what serves each operation, the cluster.

Knows: where to look, how findings become JSON or lines. Does not know: models, jobs. Nothing is changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_ray.cli.options import ConfigFiles, Sets

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_ray.ops.libraries import Found
    from deepinfer_ray.ops.registry import Choice

GIB = 2**30
SMI_TIMEOUT_S = 30
NO_CLUSTER_UUID = re.compile(r"^[0-]*$")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: ConfigFiles = None,
    sets: Sets = None,
) -> None:
    """Say what this machine and the cluster of RAY_ADDRESS have, what serves each operation and why.

    With runtime.backend = cpu, what would serve a run that leaves the GPUs alone.
    """
    from deepinfer_ray.config.load import load_config

    found = diagnose(gpus=load_config(config or (), sets or ()).runtime.backend != "cpu")
    if as_json:
        typer.echo(json.dumps(found))
    else:
        from rich.console import Console

        _print(Console(highlight=False), found)


def diagnose(gpus: bool = True) -> dict[str, Any]:
    """The JSON object of `doctor`. gpus: look for them."""
    from deepinfer_ray.ops.libraries import LIBRARIES, probe
    from deepinfer_ray.ops.registry import architecture, choose

    with ThreadPoolExecutor(len(LIBRARIES)) as pool:
        libraries = dict(zip(LIBRARIES, pool.map(probe, LIBRARIES.values()), strict=True))
    devices = _gpus() if gpus else []
    capability = tuple(devices[0]["capability"]) if devices else None
    arch = architecture(capability)
    choices = choose(arch, libraries)
    return {
        "machine": _machine(),
        "gpus": devices,
        "architecture": arch,
        "domain": gpu_domain(_smi("-q")) if devices else None,
        "libraries": [
            _library(one, [choice for choice in choices if choice.library == name], arch)
            for name, one in libraries.items()
        ],
        "operations": [
            {
                "name": choice.operation,
                "backend": choice.backend,
                "function": choice.function,
                "why_not": dict(choice.why_not),
            }
            for choice in choices
        ],
        "cluster": _cluster(),
    }


def _library(found: Found, choices: Sequence[Choice], arch: str) -> dict[str, Any]:
    """A library, who uses it, and why nobody does. Structured output needs no operation of a device."""
    reason = found.reason
    if found.usable and not choices and found.library.module != "xgrammar":
        reason = "; ".join(filter(None, (reason, f"serves no operation on this device ({arch})")))
    return {
        "name": found.library.module,
        "serves": found.library.serves,
        "distributions": list(found.distributions),
        "version": found.version,
        "importable": found.importable,
        "usable": found.usable,
        "used_by": [choice.operation for choice in choices],
        "reason": reason,
    }


def _machine() -> dict[str, Any]:
    import torch

    try:
        ray = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        ray = None
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_bytes": shm,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "ray": ray,
        "nvcc": shutil.which("nvcc"),
        "driver": _smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None,
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
            }
        )
    return devices


def _smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpu_domain(listing: str) -> str | None:
    """The NVLink domain of a machine from `nvidia-smi -q`: `UUID.CLIQUE`, the value for the node's label.

    None when the GPUs belong to no fabric (HGX boards, PCIe): then the machine is its own domain.
    """
    for block in re.split(r"^\s+Fabric\s*$", listing, flags=re.M)[1:]:
        fields = dict(
            re.findall(r"^\s+(State|Status|CliqueId|ClusterUUID)\s*:\s*(.+?)\s*$", block[:1000], re.M)
        )
        uuid = fields.get("ClusterUUID", "")
        if fields.get("State") == "Completed" and not NO_CLUSTER_UUID.match(uuid):
            return f"{uuid}.{fields.get('CliqueId', '0')}"
    return None


def _cluster() -> dict[str, Any] | None:
    """Nodes of the cluster of RAY_ADDRESS; None without one."""
    address = os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        return None
    from deepinfer_ray.fleet.cluster import connect
    from deepinfer_ray.fleet.placement import cluster_nodes

    connection = connect(address)
    try:
        nodes = cluster_nodes()
        return {
            "address": connection.address,
            "nodes": [
                {
                    "node_id": node.node_id,
                    "address": node.address,
                    "domain": node.domain,
                    "accelerator": node.labels.get("ray.io/accelerator-type"),
                    "cpus": node.total.get("CPU", 0.0),
                    "gpus": node.total.get("GPU", 0.0),
                    "labels": {key: value for key, value in node.labels.items() if key != "ray.io/node-id"},
                }
                for node in nodes
            ],
        }
    finally:
        connection.close()


def _print(console: Console, found: dict[str, Any]) -> None:
    def line(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    machine = found["machine"]
    line(
        f"machine:  {machine['host']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.1f} GiB, "
        f"/dev/shm {machine['shm_bytes'] / GIB:.1f} GiB"
    )
    line(
        f"software: Python {machine['python']}, torch {machine['torch']} "
        f"({'CUDA ' + machine['torch_cuda'] if machine['torch_cuda'] else 'a CPU build'}), "
        f"Ray {machine['ray'] or 'not installed'}, nvcc {machine['nvcc'] or 'not found'}"
    )
    if not found["gpus"]:
        line("GPUs:     none that torch can use; everything runs on the CPU reference")
    for device in found["gpus"]:
        line(
            f"GPU {device['index']}:    {device['name']}, compute capability "
            f"{'.'.join(map(str, device['capability']))}, {device['memory_bytes'] / GIB:.1f} GiB"
        )
    if found["gpus"]:
        domain = found["domain"] or f"{machine['host']} (no fabric: the machine is its own NVLink domain)"
        line(f"domain:   {domain}; label the node with: ray start --labels=ray.io/gpu-domain=NAME")
    line("\nlibraries")
    for library in found["libraries"]:
        state = "usable " if library["usable"] else "missing" if not library["version"] else "refused"
        which = f"{' + '.join(library['distributions'])} {library['version']}" if library["version"] else "–"
        reason = f": {library['reason']}" if library["reason"] else ""
        line(f"  {state}  {library['name']:<13}{which:<22} {library['serves']}{reason}")
    line(f"\noperations on {found['architecture']}")
    for operation in found["operations"]:
        line(f"  {operation['name']:<24} {operation['backend']:<10} {operation['function']}")
        for what, why in _grouped(operation["why_not"]):
            line(f"  {'':<24}   not {what}: {why}")
    _print_cluster(line, found["cluster"])


def _grouped(why_not: dict[str, str]) -> Sequence[tuple[str, str]]:
    """Candidates with the same reason on one line."""
    names: dict[str, list[str]] = {}
    for what, why in why_not.items():
        names.setdefault(why, []).append(what)
    return [(", ".join(group), why) for why, group in names.items()]


def _print_cluster(line: Any, cluster: dict[str, Any] | None) -> None:
    if cluster is None:
        line("\ncluster: none (RAY_ADDRESS is not set)")
        return
    line(f"\ncluster {cluster['address']}")
    for node in cluster["nodes"]:
        line(
            f"  {node['address']} ({node['node_id'][:8]}): {node['cpus']:g} CPUs, {node['gpus']:g} GPUs"
            f"{' ' + node['accelerator'] if node['accelerator'] else ''}, "
            f"{'domain ' + node['domain'] if node['domain'] else 'no ray.io/gpu-domain label'}"
        )
