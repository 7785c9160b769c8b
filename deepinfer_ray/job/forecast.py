"""What a job would do: the findings of `plan` as one JSON-able object.

Knows: which look gives which finding, and what of it forbids a start. Does not know: how it is shown. Touches
no GPU, writes nothing, starts no cluster; joins one only to look at its nodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.job import RunConfig
from deepinfer_ray.engine.fit import fit_problem, fit_table
from deepinfer_ray.errors import CheckpointError, ConfigError, DeepInferError
from deepinfer_ray.fleet.options import most_gangs
from deepinfer_ray.fleet.topology import (
    Node,
    can_ever_hold,
    demand_and_supply,
    num_held,
    plan_placement,
    rank_bundle,
)
from deepinfer_ray.job.cpu_fit import cpu_fit
from deepinfer_ray.job.ids import check_ids
from deepinfer_ray.job.ledger import SUMMARY
from deepinfer_ray.job.plan import InputPlan
from deepinfer_ray.job.prepare import (
    RowSetup,
    Say,
    checked_plan,
    model_directory,
    prepare_rows,
    refuse_places,
)
from deepinfer_ray.job.store import Store
from deepinfer_ray.job.survey import Survey, survey
from deepinfer_ray.model.engram_ids import load_tokenizer
from deepinfer_ray.parallel.grid import RankGrid

CPUS_PER_RANK = 1.0


def forecast(
    config: RunConfig,
    say: Say,
    *,
    tokens_per_second: float | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    nodes: tuple[str, list[Node]] | None = None,
) -> dict[str, Any]:
    """The JSON object of `plan`. nodes: (address, nodes) of a cluster; None = that of RAY_ADDRESS, if set.

    Raises `ConfigError`, `CheckpointError`, `InputError` as `generate` would, and `PlacementError` when
    RAY_ADDRESS does not answer.
    """
    model_dir = model_directory(config.model.path)
    if tokens_per_second is not None and tokens_per_second <= 0:
        raise ConfigError(f"--tokens-per-second {tokens_per_second:g}: a speed is greater than 0")
    if config.job.output:
        refuse_places(config.job, config.model.path)
    model = ModelConfig.load(model_dir)
    engine = config.engine.resolve(model)
    asked = config.parallel
    grid = RankGrid.build(
        dp=asked.replicas,
        cp=asked.cp,
        ep=asked.ep,
        engram=asked.engram or int(asked.cp == asked.ep == 1),
    )
    problems: list[str] = []
    fits = fit_table(model, engine)
    cluster = nodes if nodes is not None else _nodes_of_ray_address()
    on_gpu = engine.runtime.backend == "cuda" or (
        engine.runtime.backend == "auto"
        and cluster is not None
        and any(node.total.get("GPU", 0) for node in cluster[1])
    )
    nothing_fits = fit_problem(fits, grid.ep)
    if nothing_fits and (on_gpu or engine.runtime.backend != "cpu"):
        problems.append(nothing_fits)
    on_cpu = cpu_fit(model, engine, grid, fits, local=cluster is None)
    if on_cpu.problem and engine.runtime.backend == "cpu":
        problems.append(f"ranks do not fit on a CPU: {on_cpu.problem}")
    found: dict[str, Any] = {
        **_rows(config, say, progress, problems),
        "grid": {
            "dp": grid.dp,
            "cp": grid.cp,
            "ep": grid.ep,
            "engram": grid.engram,
            "ranks": grid.world_size,
            "gangs": grid.num_gangs,
            "text": str(grid),
        },
        "fit": [fit.as_dict() for fit in fits],
        "cpu": on_cpu.as_dict(),
        "placement": _placement(
            grid,
            cluster,
            on_gpu,
            problems,
            most_gangs(grid, config.job.max_gangs),
            engine.parallel.labels,
        ),
    }
    found["estimate"] = _estimate(found, config, tokens_per_second)
    return {**found, "problems": problems}


def _rows(
    config: RunConfig, say: Say, progress: Callable[[int], None], problems: list[str]
) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(
        (
            *("rows", "files", "parts", "committed_rows", "bad_rows", "prompt_tokens"),
            *("max_completion_tokens", "first_prompt"),
        )
    )
    nothing["errors"] = {}
    if not config.job.input:
        return nothing
    try:
        setup = prepare_rows(config, say)
    except CheckpointError as error:
        problems.append(f"rows cannot be counted in tokens: {error}")
        return nothing
    plan = checked_plan(setup, say)
    if setup.columns.id is not None:
        check_ids(plan, setup.columns.id)
    seen = survey(setup, plan, progress)
    return {
        "rows": seen.rows,
        "files": len(plan.files),
        "parts": sum(1 for _ in plan.iter_parts()),
        "committed_rows": _committed(config, plan),
        "bad_rows": seen.bad_rows,
        "errors": {
            code: {"rows": rows, "row_id": seen.examples[code][0], "message": seen.examples[code][1]}
            for code, rows in seen.error_codes.most_common()
        },
        "prompt_tokens": seen.prompts.as_dict(),
        "max_completion_tokens": seen.max_completion_tokens,
        "first_prompt": _first_prompt(setup, seen),
    }


def _first_prompt(setup: RowSetup, seen: Survey) -> dict[str, Any] | None:
    """The first good row's prompt as the model sees it, control tokens by their spelling."""
    if seen.first_prompt is None:
        return None
    ids = seen.first_prompt.tolist()
    try:
        tokenizer = load_tokenizer(setup.engine.model.tokenizer_path or setup.model_dir)
        text = tokenizer.decode(ids, skip_special_tokens=False)
    except CheckpointError:  # rows of token ids need no tokenizer
        text = " ".join(map(str, ids))
    return {"row_id": seen.first_row, "tokens": len(ids), "text": text}


def _committed(config: RunConfig, plan: InputPlan) -> int:
    """Rows whose part is in the output already."""
    if not config.job.output:
        return 0
    there = set(Store(config.job.output).names())
    return sum(part.rows for part in plan.iter_parts() if part.name in there) if there else 0


def _nodes_of_ray_address() -> tuple[str, list[Node]] | None:
    address = os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        return None
    from deepinfer_ray.fleet.cluster import connect
    from deepinfer_ray.fleet.placement import cluster_nodes

    connection = connect(address)
    try:
        return connection.address, cluster_nodes()
    finally:
        connection.close()


def _placement(
    grid: RankGrid,
    cluster: tuple[str, list[Node]] | None,
    on_gpu: bool,
    problems: list[str],
    most_gangs: int,
    selector: Mapping[str, str],
) -> dict[str, Any]:
    """Where the ranks would stand now, and how many gangs there is room for."""
    further = most_gangs - grid.num_gangs
    if cluster is None:
        text = (
            f"no cluster (RAY_ADDRESS is not set): a local Ray on this machine, {os.cpu_count()} cores for "
            f"{grid.world_size} ranks"
        )
        if further:
            text += f"; up to {most_gangs} gangs of {grid.gang_size} as long as cores are free"
        return {"cluster": None, "nodes": [], "possible": None, "gangs_now": None, "text": text}
    address, nodes = cluster
    bundle = rank_bundle(CPUS_PER_RANK, 1.0 if on_gpu else 0.0)
    wanted = plan_placement([bundle] * grid.gang_size, nodes, selector)
    possible = can_ever_hold(wanted, nodes, grid.num_gangs)
    text = f"on {address}: {grid.num_gangs} gangs, each {wanted.describe()}"
    gangs_now = num_held(wanted, nodes, now=True)
    if further:
        text += (
            f"; up to {most_gangs} gangs while there is work for them: room for {gangs_now} now, for "
            f"{num_held(wanted, nodes)} when the machines are empty"
        )
    if wanted.warning:
        text += f"; {wanted.warning}"
    if not possible:
        problems.append(
            "the cluster cannot hold the ranks:\n" + demand_and_supply(wanted, nodes, grid.num_gangs)
        )
    return {
        "cluster": address,
        "nodes": [
            {
                "node_id": node.node_id,
                "address": node.address,
                "domain": node.domain,
                "ranks_now": node.room_now(bundle),
                "ranks_empty": node.room(bundle),
            }
            for node in nodes
        ],
        "possible": possible,
        "gangs_now": gangs_now,
        "text": text,
    }


def _estimate(found: dict[str, Any], config: RunConfig, tokens_per_second: float | None) -> dict[str, Any]:
    """Seconds for the rows that are left; unknown without a measured speed."""
    unknown = (
        "unknown: no speed was measured (give --tokens-per-second, or an --output that a run has written)"
    )
    speed, source = tokens_per_second, "--tokens-per-second"
    if speed is None and config.job.output:
        earlier = _summary(config.job.output)
        speed, source = earlier.get("tokens_per_second"), "the last run into the output"
    result = {"seconds": None, "tokens": None, "tokens_per_second": speed, "text": unknown}
    if not speed or found["prompt_tokens"] is None:
        return result
    tokens = found["prompt_tokens"]["total"] + found["max_completion_tokens"]
    if found["rows"]:
        tokens *= 1 - found["committed_rows"] / found["rows"]
    seconds = tokens / speed
    text = (
        f"at most {_duration(seconds)} for {tokens:,.0f} tokens at {speed:,.0f} tokens/s ({source}), if "
        "every completion runs to its end"
    )
    return {**result, "seconds": seconds, "tokens": int(tokens), "text": text}


def _summary(output: str) -> dict[str, Any]:
    try:
        content = Store(output).read(SUMMARY)
        return dict(json.loads(content)) if content else {}
    except (DeepInferError, OSError, ValueError):
        return {}


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
