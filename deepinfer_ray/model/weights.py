"""Checkpoint to model: every module's tensors read, converted for the backend, and put in place.

Knows: which stored tensors make up which fused parameter, how much memory dequantized experts may take.
Does not know: files and byte ranges (`model/checkpoint.py`), what the modules compute.
The model is built on the meta device, so nothing is allocated twice; each parameter replaces its meta twin as
soon as its stored pieces are read. The drafter's tensors are read when it is wanted; vision tensors are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepinfer_ray.config.hf import ModelConfig, Topology
from deepinfer_ray.errors import CheckpointError, ConfigError
from deepinfer_ray.model.attention import Attention
from deepinfer_ray.model.block import Block
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.drafter import Drafter, DraftLayer
from deepinfer_ray.model.engram import Engram
from deepinfer_ray.model.hyper_connections import HyperConnection, spread_scale
from deepinfer_ray.model.moe import MoE, PackedExperts, StackedExperts
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.ops.formats import as_bytes, dequant_fp8_weight, dequant_mxfp4_weight
from deepinfer_ray.ops.linear import product_dtype
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.parallel.engram_shards import ShardedEngramStore, shard_range
from deepinfer_ray.parallel.engram_store import EngramStore, LocalEngramStore
from deepinfer_ray.parallel.model_ranks import ModelRanks, equal_layers
from deepinfer_ray.parallel.rank_group import RankGroup

DEQUANT_BUDGET_BYTES = 2 << 30
"""Default limit for dequantized experts; above it they stay packed and are dequantized when hit."""


class _Source:
    """Stored tensors converted for a backend (`prepare`): on CPU exact float32."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: str,
        device: torch.device | str,
        products: torch.dtype,
        ranks: ModelRanks,
        topology: Topology,
    ) -> None:
        if backend != "cpu":
            raise ConfigError(f"backend {backend!r} has no weight preparation; known backends: cpu")
        self.checkpoint, self.device, self.products, self.ranks = checkpoint, device, products, ranks
        self.local_experts: list[list[int]] = []
        """By layer: the logical expert of each slot of this rank, in slot order."""
        for layers in (topology.backbone, topology.layers[topology.num_layers :]):
            if layers:
                count = equal_layers([layer.num_experts for layer in layers], "layers")
                placement = ranks.placement(len(layers), count)
                self.local_experts += [
                    placement.local_experts(place, ranks.ep.rank) for place in range(len(layers))
                ]

    def plain(self, name: str) -> torch.Tensor:
        """float32 of a BF16 or F32 tensor."""
        return self.checkpoint.read(name).to(device=self.device, dtype=torch.float32)

    def fp8(self, name: str) -> torch.Tensor:
        """[out, in] of an FP8 linear and its block scales, in the dtype of rounded products: exact."""
        weight, scale = self.checkpoint.read(f"{name}.weight"), self.checkpoint.read(f"{name}.scale")
        return dequant_fp8_weight(as_bytes(weight), as_bytes(scale)).to(self.device, self.products)


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a meta parameter; the shape must be the one that the module declared."""
    declared = getattr(module, name)
    if tuple(declared.shape) != tuple(value.shape):
        raise CheckpointError(
            f"{type(module).__name__}.{name} is {list(declared.shape)} but the checkpoint gives "
            f"{list(value.shape)}"
        )
    setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=False))


def _load_hyper_connection(module: HyperConnection, source: _Source, prefix: str, m: int) -> None:
    put(module, "fn", source.plain(f"{prefix}_fn"))
    put(module, "base", source.plain(f"{prefix}_base"))
    put(module, "scale", spread_scale(source.plain(f"{prefix}_scale"), m))


def _load_attention(module: Attention, source: _Source, prefix: str) -> None:
    put(module, "wq_a_wkv", torch.cat((source.fp8(f"{prefix}.wq_a"), source.fp8(f"{prefix}.wkv"))))
    queries = [source.fp8(f"{prefix}.wq_b")]
    if module.indexer is not None:
        queries.append(source.fp8(f"{prefix}.indexer.wq_b"))
    put(module, "wq_b", torch.cat(queries))
    for name in ("q_norm", "kv_norm"):
        put(module, name, source.plain(f"{prefix}.{name}.weight"))
    put(module, "attn_sink", source.plain(f"{prefix}.attn_sink"))
    wo_a = source.fp8(f"{prefix}.wo_a")
    put(module, "wo_a", wo_a.view(module.groups, wo_a.shape[0] // module.groups, -1).transpose(1, 2))
    put(module, "wo_b", source.fp8(f"{prefix}.wo_b"))
    side = []
    if module.compressor is not None:
        if module.ratio == 2:
            side.append(source.plain(f"{prefix}.compressor.wgate.weight"))
        side.append(source.plain(f"{prefix}.compressor.wkv.weight"))
        put(module.compressor, "norm", source.plain(f"{prefix}.compressor.norm.weight"))
    if module.indexer is not None:
        side.append(source.plain(f"{prefix}.indexer.weights_proj.weight"))
    if side:
        put(module, "side", torch.cat(side))
    if module.index_keys is not None:
        put(module.index_keys, "wk", source.plain(f"{prefix}.indexer.wk.weight").to(source.products))
        put(module.index_keys, "k_norm", source.plain(f"{prefix}.indexer.k_norm.weight"))


def _load_moe(module: MoE, source: _Source, prefix: str, stacked: bool) -> None:
    experts = source.local_experts[module.layer.index]
    module.exchange = source.ranks.exchange(len(experts), "float32" if module.numerics.exact else "fp8")
    put(module, "gate", source.plain(f"{prefix}.ffn.gate.weight"))
    put(module, "bias", source.plain(f"{prefix}.ffn.gate.bias"))
    if module.bias_vl is not None:
        put(module, "bias_vl", source.plain(f"{prefix}.ffn.gate.bias_vl"))
    shared13 = shared2 = None
    if module.shared_w13 is not None:
        name = f"{prefix}.ffn.shared_experts"
        shared13 = torch.cat((source.fp8(f"{name}.w1"), source.fp8(f"{name}.w3")))
        shared2 = source.fp8(f"{name}.w2")
    if stacked:
        _load_stacked(module, source, prefix, experts, shared13, shared2)
        return
    if shared13 is not None and shared2 is not None:
        put(module, "shared_w13", shared13)
        put(module, "shared_w2", shared2)
    read = source.checkpoint.read_experts(prefix, experts)
    hidden, width = read.w2.shape[1], read.w2.shape[2] * 2
    with torch.device("meta"):
        packed = PackedExperts(len(experts), hidden, width, source.products)
    for name, value in read._asdict().items():
        put(packed, name, as_bytes(value).to(source.device))
    module.experts = packed


def _load_stacked(
    module: MoE,
    source: _Source,
    prefix: str,
    experts: Sequence[int],
    shared13: torch.Tensor | None,
    shared2: torch.Tensor | None,
) -> None:
    """Dequantize expert by expert into the stack; a shared expert of the same width becomes its last one."""
    hidden = module.gate.shape[1]
    first = source.checkpoint.entry(f"{prefix}.ffn.experts.0.w1.weight")
    width = first.shape[0]
    # The shared expert sees this rank's own rows: it can join the routed ones where those are the same rows.
    fused = module.exchange.is_local and shared2 is not None and shared2.shape[1] == width
    with torch.device(source.device):
        stack = StackedExperts(len(experts) + fused, hidden, width, source.products)
    for place, expert in enumerate(experts):
        read = source.checkpoint.read_experts(prefix, [expert])
        stack.w13[place] = dequant_mxfp4_weight(as_bytes(read.w13[0]), as_bytes(read.w13_scale[0])).t()
        stack.w2[place] = dequant_mxfp4_weight(as_bytes(read.w2[0]), as_bytes(read.w2_scale[0])).t()
    module.experts = stack
    if shared13 is None or shared2 is None:
        return
    if not fused:
        put(module, "shared_w13", shared13)
        put(module, "shared_w2", shared2)
        return
    stack.w13[-1], stack.w2[-1] = shared13.t(), shared2.t()
    module.shared_expert = len(experts)
    module.shared_w13 = module.shared_w2 = None


def _load_engram(module: Engram, source: _Source, prefix: str) -> None:
    put(module, "wkv", source.fp8(f"{prefix}.wkv"))
    put(module, "weight", source.plain(f"{prefix}.q_weight") * source.plain(f"{prefix}.k_weight"))


def _load_block(block: Block, source: _Source, prefix: str, m: int, stacked: bool) -> None:
    _load_hyper_connection(block.hc_attn, source, f"{prefix}.hc_attn", m)
    _load_hyper_connection(block.hc_ffn, source, f"{prefix}.hc_ffn", m)
    put(block, "attn_norm", source.plain(f"{prefix}.attn_norm.weight"))
    put(block, "ffn_norm", source.plain(f"{prefix}.ffn_norm.weight"))
    _load_attention(block.attn, source, f"{prefix}.attn")
    _load_moe(block.ffn, source, prefix, stacked)
    if block.engram is not None:
        _load_engram(block.engram, source, f"{prefix}.engram")


def _load_drafter(drafter: Drafter, source: _Source, m: int, stacked: bool) -> None:
    layers = [layer for layer in drafter.layers if isinstance(layer, DraftLayer)]
    last = f"mtp.{len(layers) - 1}"
    put(drafter, "main_proj", source.fp8("mtp.0.main_proj"))
    put(drafter, "main_norm", source.plain("mtp.0.main_norm.weight"))
    for place, layer in enumerate(layers):
        _load_block(layer, source, f"mtp.{place}", m, stacked)
    put(drafter, "norm", source.plain(f"{last}.norm.weight"))
    put(drafter, "markov_embed", source.checkpoint.read(f"{last}.markov_head.embed.weight").to(source.device))
    put(drafter, "markov_head", source.plain(f"{last}.markov_head.head.weight"))
    put(drafter, "confidence", source.plain(f"{last}.confidence_head.proj.weight").view(-1))


def load_engram_store(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", group: RankGroup | None = None
) -> EngramStore:
    """The rows of all Engram tables as stored bytes: all of them on `device`, or this rank's share of them in
    host memory when the group has several ranks."""
    plan = checkpoint.config.engram
    if group is None or group.size == 1:
        group, spans = None, [(0, rows) for rows in plan.rows]
    else:
        spans, device = [shard_range(rows, group.size, group.rank) for rows in plan.rows], "cpu"
    tables = [
        checkpoint.read_engram_rows(layer, *span) for layer, span in zip(plan.layer_ids, spans, strict=True)
    ]
    codes = [as_bytes(codes).to(device) for codes, _ in tables]
    scales = [as_bytes(scales).to(device) for _, scales in tables]
    if group is None:
        return LocalEngramStore(codes, scales)
    return ShardedEngramStore(group, list(plan.rows), codes, scales)


def dequantized_expert_bytes(
    config: ModelConfig, dtype: torch.dtype = torch.float32, *, drafter: bool = False
) -> int:
    """Bytes of all routed experts of the backbone, with `drafter` of the draft layers too, in the dtype of
    products."""
    text, topology = config.text, config.topology
    per_expert = 3 * text.hidden_size * text.moe_intermediate_size * dtype.itemsize
    layers = topology.layers if drafter else topology.backbone
    return sum(layer.num_experts * per_expert for layer in layers)


def load_text_model(
    checkpoint: Checkpoint,
    numerics: Numerics,
    *,
    config: ModelConfig | None = None,
    max_positions: int | None = None,
    backend: str = "cpu",
    device: torch.device | str = "cpu",
    dequant_budget_bytes: int = DEQUANT_BUDGET_BYTES,
    products: torch.dtype | None = None,
    drafter: bool = False,
    ranks: ModelRanks | None = None,
) -> TextModel:
    """The backbone of a checkpoint, ready to run, with `drafter` its draft layers too.

    config: overrides the checkpoint's (same shapes; e.g. another `index_topk`). max_positions: see
    `TextModel`. dequant_budget_bytes: bytes that dequantized routed experts may take; beyond it each layer
    keeps them packed. products: float32 or bfloat16 weights of rounded products, by default what this machine
    does well (`product_dtype`). Both choices are made once, never by a batch. ranks: the other ranks, with
    which this one shares experts, tables and prefill rows; None = it has everything itself.
    """
    config, ranks = config or checkpoint.config, ranks or ModelRanks()
    products = products or product_dtype(numerics, device)
    source = _Source(checkpoint, backend, device, products, ranks, config.topology)
    with torch.device("meta"):
        model = TextModel(config, numerics, max_positions)
        if drafter:
            model.drafter = Drafter(config, numerics)
    routed = dequantized_expert_bytes(config, source.products, drafter=drafter)
    stacked = routed // ranks.ep.size <= dequant_budget_bytes
    model.ranks = ranks
    with checkpoint.loading(), torch.no_grad():
        embed = checkpoint.read("embed.weight")
        put(model, "embed", embed.to(device))
        put(model.head, "norm", source.plain("norm.weight"))
        put(model.head, "weight", source.plain("head.weight"))
        for block in model.blocks:
            assert isinstance(block, Block)
            _load_block(block, source, f"layers.{block.layer.index}", config.text.hc_mult, stacked)
        if model.drafter is not None:
            _load_drafter(model.drafter, source, config.text.hc_mult, stacked)
        if config.text.has_engram:
            model.engram_store = load_engram_store(checkpoint, device, ranks.engram)
    left = [name for name, value in model.named_parameters() if value.is_meta]
    if left:
        raise CheckpointError(f"parameters were not loaded: {', '.join(left)}")
    model.prepare(device)
    return model.eval()
