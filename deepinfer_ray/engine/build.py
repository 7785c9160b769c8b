"""An engine from a checkpoint directory and a configuration.

Knows: the order in which a rank comes up: config, checks, weights, cache, engine (spec/engine.md §10). Does
not know: other ranks, Ray, requests. Everything that can be refused is refused before weights are read.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine.capacity import Capacity, plan_capacity
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.engine.draft_pool import DraftPool
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.lockstep import Follower, LeadingModel, LeadingPools, Lockstep
from deepinfer_ray.engine.phase_vote import agree_num_blocks
from deepinfer_ray.engine.timeline import Timeline
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.engram_ids import checked_compressed_ids, load_tokenizer
from deepinfer_ray.model.expert_slots import balance_layers
from deepinfer_ray.model.moe import MoE
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.parallel import deep_ep
from deepinfer_ray.parallel.channel import Channel
from deepinfer_ray.parallel.groups import ProcessGroups
from deepinfer_ray.parallel.rebalance import Rebalancer, Trigger

logger = logging.getLogger(__name__)

POSITION_SLACK = 128
"""Position tables reach this far beyond the context, so that plain and overlapped loops, whose last positions
differ by one, share one bound (it is part of bitwise equality)."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """Everything of a rank but its weights and caches."""

    config: EngineConfig
    """Resolved against the model."""
    model_config: ModelConfig
    numerics: Numerics
    layout: CacheLayout
    tokenizer: Tokenizer
    compress: np.ndarray | None
    """int32 token id -> Engram id; None without Engram."""
    defaults: GenerationDefaults
    device: torch.device


def pick_device(name: str) -> torch.device:
    """`auto` (or an empty name) = CUDA where there is one. `ConfigError` if the device is not there."""
    # Read when CUDA starts: an eager decode step launches more kernels than the default queue holds, and a
    # full queue makes the host wait.
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    if name in ("auto", ""):
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device here; use cpu")
    return device


def prepare(model_dir: str | Path, config: EngineConfig, device: str | None = None) -> RankParts:
    """Reads the small files and checks everything that needs no weights. `ConfigError`, `CheckpointError`."""
    where = pick_device(device or config.runtime.backend)
    model_config = ModelConfig.load(model_dir)
    config = config.resolve(model_config)
    if config.num_drafts > model_config.text.dspark_block_size:
        logger.warning(
            "speculative.num_drafts = %d, but the drafter of this checkpoint was trained for %d "
            "(dspark_block_size): later drafts will hardly be accepted",
            config.num_drafts,
            model_config.text.dspark_block_size,
        )
    tokenizer = load_tokenizer(config.model.tokenizer_path or model_dir)
    compress = None
    if model_config.text.has_engram:
        compress = checked_compressed_ids(tokenizer, model_config.text.engram_compressed_vocab_size)
    numerics = Numerics(config.numerics)
    layout = CacheLayout.build(
        model_config, numerics, config.num_drafts, max_backtracking=config.max_backtracking
    )
    defaults = GenerationDefaults.load(model_dir)
    return RankParts(config, model_config, numerics, layout, tokenizer, compress, defaults, where)


def cache_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes for blocks and slots: configured on a CPU; on a GPU its share of the memory that is left."""
    if device.type == "cpu":
        return config.cache.cpu_budget_bytes
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.cache.memory_utilization) - (total - free)


def capacity_of(parts: RankParts) -> Capacity:
    """Pool sizes on this device as it is now."""
    budget, config = cache_budget(parts.config, parts.device), parts.config
    if config.num_drafts and parts.device.type != "cpu":
        vocab = parts.model_config.text.vocab_size
        budget -= DraftPool.bytes_of(config.scheduler.max_seqs, config.num_drafts, vocab)
    return plan_capacity(parts.layout, config, budget)


def position_bound(config: EngineConfig) -> int:
    """Positions of the rotation tables: the same with and without drafts, in both loops."""
    slack = max(POSITION_SLACK, 3 * config.num_drafts + 2)
    return -(-(config.max_model_len + slack) // POSITION_SLACK) * POSITION_SLACK


def build_engine(
    model_dir: str | Path,
    config: EngineConfig | None = None,
    device: str | None = None,
    *,
    timeline: Timeline | None = None,
    rank: int = 0,
) -> Engine:
    """The engine of one rank on its own, weights loaded, caches allocated.

    device: `cpu`, `cuda`, `cuda:1`, `auto`; None = `runtime.backend`.
    """
    engine = build_rank(model_dir, config, device, ProcessGroups.single(), timeline=timeline, rank=rank)
    assert isinstance(engine, Engine)
    return engine


def build_rank(
    model_dir: str | Path,
    config: EngineConfig | None,
    device: str | None,
    groups: ProcessGroups,
    *,
    timeline: Timeline | None = None,
    rank: int = 0,
) -> Engine | Follower:
    """The engine of one rank of a gang; collective over the gang. rank: its number in the fleet."""
    parts = prepare(model_dir, config or EngineConfig(), device)
    groups.check_alike(parts.config.model_dump_json())
    if parts.device.type == "cpu":
        capacity_of(parts)  # an impossible budget fails here, not after minutes of loading
    elif parts.device.index is not None:
        torch.cuda.set_device(parts.device)
    drafter = parts.config.num_drafts > 0
    with Checkpoint.open(model_dir, drafter=drafter) as checkpoint:
        model = load_text_model(
            checkpoint,
            parts.numerics,
            max_positions=position_bound(parts.config),
            drafter=drafter,
            backend="cpu",
            device=parts.device,
            ranks=groups.for_model(parts.config.eplb.extra_experts, deep_ep_buffer(parts, groups)),
        )
    capacity = capacity_of(parts)
    # A driver's block and slot numbers are its followers' too, and votes compare like with like: the rank
    # with the least memory sets the size for all.
    num_blocks = capacity.num_blocks
    if groups.gang.size > 1:
        num_blocks = agree_num_blocks(groups.gang, num_blocks)
    num_slots = groups.gang.minimum(capacity.num_slots + capacity.num_snapshots)
    leads = groups.cp.size > 1 and groups.place.is_driver
    pools = (LeadingPools if leads else CachePools)(parts.layout, num_blocks, num_slots, parts.device)
    ranks: Lockstep | None = None
    runner: Any = model
    if groups.gang.size > 1:
        rebalancer = _rebalancer(model, groups, parts.config, parts.device)
        channel = Channel(groups.cp, parts.device) if groups.cp.size > 1 else None
        if channel is not None and not leads:
            return Follower(model, pools, groups, channel, rebalancer)
        if isinstance(pools, LeadingPools) and channel is not None:
            pools.channel, runner = channel, LeadingModel(model, channel)
        ranks = Lockstep(groups, rebalancer, channel)
    return Engine(
        runner,
        pools,
        parts.tokenizer,
        parts.config,
        compress=parts.compress,
        defaults=parts.defaults,
        timeline=timeline,
        rank=rank,
        ranks=ranks,
    )


def deep_ep_buffer(parts: RankParts, groups: ProcessGroups) -> deep_ep.DeepEPBuffer | None:
    """The process's buffer if DeepEP carries expert rows here; collective. All ranks use it or none does.

    `ConfigError` if `moe.transport` asks for it and some rank cannot.
    """
    wanted, text = parts.config.moe.transport, parts.model_config.text
    if groups.ep.size == 1 or wanted == "torch" or parts.numerics.exact:
        return None
    package = deep_ep.find(parts.device)
    if not groups.gang.minimum(int(package is not None)):
        if wanted == "deep_ep":
            raise ConfigError(
                "moe.transport is deep_ep, but not every rank of the gang has deep_ep >= 2.5 and a CUDA "
                "device from Hopper on; install it everywhere or set moe.transport = torch"
            )
        return None
    ranks = groups.for_model(parts.config.eplb.extra_experts)
    return deep_ep.DeepEPBuffer.create(
        package,
        getattr(groups.ep, "group", None),
        max_rows=deep_ep.buffer_rows(parts.config.max_batched_tokens),
        hidden=text.hidden_size,
        top_k=text.num_experts_per_tok,
        physical=ranks.placement(1, text.n_routed_experts).num_physical,
        comm_sms=parts.config.moe.comm_sms,
    )


def _rebalancer(
    model: TextModel, groups: ProcessGroups, config: EngineConfig, device: torch.device
) -> Rebalancer | None:
    """What counts and moves the experts of an expert group; None in a group of one."""
    if groups.ep.size == 1:
        return None
    options, ranks = config.eplb, groups.for_model(config.eplb.extra_experts)
    blocks: list[list[Any]] = [list(model.blocks)]
    if model.drafter is not None:
        blocks.append(list(model.drafter.layers))
    stacks: list[list[MoE]] = [[block.ffn for block in layers] for layers in blocks]
    layer_groups = [
        balance_layers(
            layers,
            ranks.placement(len(layers), layers[0].layer.num_experts),
            groups.ep.rank,
            options.window,
            device,
        )
        for layers in stacks
    ]
    trigger = Trigger(
        options.interval, options.window, after_prefill=options.after_prefill, role=config.scheduler.role
    )
    return Rebalancer(
        layer_groups,
        groups.ep,
        trigger,
        stat_interval=options.stat_interval,
        p2p_groups=options.p2p_groups,
        verify=options.verify,
        verbose=options.verbose,
    )
