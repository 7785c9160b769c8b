"""Every tensor that a checkpoint of a given config holds: name, stored dtype, shape (spec/model.md §2.2).

Knows: names and storage formats. Does not know: files, values, what a runtime does with them.
Linears are stored `[out, in]`; `X.scale` belongs to `X.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from deepinfer_ray.config.hf import LayerSpec, ModelConfig

SCALE_BLOCK = 32

ITEM_BYTES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "BOOL": 1,
}
"""Safetensors dtype strings that a shard may hold, and their width."""

ROUTED = "Routed experts"
SHARED = "Shared experts"
ATTENTION = "Attention"
INDEXER = "Indexer + compressor"
ROUTER = "Router gates"
MHC = "mHC"
NORMS = "Layer norms + final norm"
EMBEDDING = "Embedding"
HEAD = "Head"
ENGRAM_TABLES = "Engram tables"
ENGRAM_PROJECTIONS = "Engram projections"
DRAFT_EXPERTS = "DSpark experts"
DRAFT_OTHER = "DSpark other"
VISION = "Vision + aligner + image vectors"

COMPONENTS = (
    ROUTED,
    SHARED,
    ATTENTION,
    INDEXER,
    ROUTER,
    MHC,
    NORMS,
    EMBEDDING,
    HEAD,
    ENGRAM_TABLES,
    ENGRAM_PROJECTIONS,
    DRAFT_EXPERTS,
    DRAFT_OTHER,
    VISION,
)


class TensorSpec(NamedTuple):
    """One stored tensor. `dtype` is the safetensors string; `required` is False for drafter and vision."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    component: str
    required: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Weights held: two for a byte of packed FP4, none for scales."""
        if self.dtype == "F8_E8M0":
            return 0
        return prod(self.shape) * (2 if self.dtype == "I8" else 1)


def expected_tensors(config: ModelConfig) -> list[TensorSpec]:
    """All tensors of a checkpoint, grouped as the release groups them into shards."""
    return list(_tensors(config))


def shard_group(name: str) -> str:
    """Which tensors share a shard: vision, embed, one backbone layer, head with norm, one draft layer, one
    Engram table (weight and scale together)."""
    top, _, rest = name.partition(".")
    if top in ("layers", "mtp"):
        index, _, suffix = rest.partition(".")
        if suffix.startswith("engram.embed."):
            return f"engram.{index}"
        return f"{top}.{index}"
    if top in ("vision", "aligner") or top.startswith("image_"):
        return "vision"
    return "head" if top in ("head", "norm") else top


def _tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    text = config.text
    D, V = text.hidden_size, text.vocab_size
    if config.vision is not None:
        yield from _vision(config)
    yield TensorSpec("embed.weight", "BF16", (V, D), EMBEDDING, True)
    for layer in config.topology.backbone:
        yield from _block(config, layer)
    yield TensorSpec("head.weight", "BF16", (V, D), HEAD, True)
    yield TensorSpec("norm.weight", "BF16", (D,), NORMS, True)
    for layer in config.topology.drafts:
        yield from _block(config, layer)
    for layer_id, rows in zip(config.engram.layer_ids, config.engram.rows, strict=True):
        width, prefix = text.engram_head_dim, f"layers.{layer_id}.engram.embed"
        yield TensorSpec(f"{prefix}.weight", "F8_E4M3", (rows, width), ENGRAM_TABLES, True)
        yield TensorSpec(f"{prefix}.scale", "F8_E8M0", (rows, width // SCALE_BLOCK), ENGRAM_TABLES, True)


def _fp8(name: str, out: int, inner: int, component: str, required: bool) -> Iterator[TensorSpec]:
    """e4m3 weight with one ue8m0 scale a 32x32 block; the last row block may be partial."""
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (out, inner), component, required)
    blocks = (-(-out // SCALE_BLOCK), -(-inner // SCALE_BLOCK))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", blocks, component, required)


def _fp4(name: str, out: int, inner: int, component: str, required: bool) -> Iterator[TensorSpec]:
    """Two e2m1 codes a byte, one ue8m0 scale a row and 32 columns."""
    yield TensorSpec(f"{name}.weight", "I8", (out, inner // 2), component, required)
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (out, inner // SCALE_BLOCK), component, required)


def layer_prefix(config: ModelConfig, layer: LayerSpec) -> str:
    """Stored prefix of a runtime layer: `layers.{l}` or `mtp.{i}`."""
    return f"mtp.{layer.index - config.topology.num_layers}" if layer.is_draft else f"layers.{layer.index}"


def _block(config: ModelConfig, layer: LayerSpec) -> Iterator[TensorSpec]:
    """All tensors of a backbone or draft layer, Engram table apart."""
    text = config.text
    prefix, D, m = layer_prefix(config, layer), text.hidden_size, text.hc_mult
    needed = not layer.is_draft

    def part(component: str) -> str:
        return DRAFT_OTHER if layer.is_draft else component

    for sub in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}.{sub}_norm.weight", "BF16", (D,), part(NORMS), needed)
        mixes = (2 + m) * m
        yield TensorSpec(f"{prefix}.hc_{sub}_fn", "F32", (mixes, m * D), part(MHC), needed)
        yield TensorSpec(f"{prefix}.hc_{sub}_base", "F32", (mixes,), part(MHC), needed)
        yield TensorSpec(f"{prefix}.hc_{sub}_scale", "F32", (3,), part(MHC), needed)
    yield from _attention(config, layer, part(ATTENTION))
    yield from _moe(config, layer)
    if layer.engram is not None:
        columns = config.engram.width
        yield from _fp8(f"{prefix}.engram.wkv", (m + 1) * D, columns, ENGRAM_PROJECTIONS, True)
        for name in ("q_weight", "k_weight"):
            yield TensorSpec(f"{prefix}.engram.{name}", "BF16", (m, D), ENGRAM_PROJECTIONS, True)
    if layer.is_draft:
        yield from _draft_extras(config, layer)


def _attention(config: ModelConfig, layer: LayerSpec, component: str) -> Iterator[TensorSpec]:
    text = config.text
    prefix, D, d, H = (
        f"{layer_prefix(config, layer)}.attn",
        text.hidden_size,
        text.head_dim,
        text.num_attention_heads,
    )
    needed = not layer.is_draft
    yield TensorSpec(f"{prefix}.attn_sink", "F32", (H,), component, needed)
    yield from _fp8(f"{prefix}.wq_a", text.q_lora_rank, D, component, needed)
    yield TensorSpec(f"{prefix}.q_norm.weight", "BF16", (text.q_lora_rank,), component, needed)
    yield from _fp8(f"{prefix}.wq_b", H * d, text.q_lora_rank, component, needed)
    yield from _fp8(f"{prefix}.wkv", d, D, component, needed)
    yield TensorSpec(f"{prefix}.kv_norm.weight", "BF16", (d,), component, needed)
    latent = text.o_groups * text.o_lora_rank
    yield from _fp8(f"{prefix}.wo_a", latent, H // text.o_groups * d, component, needed)
    yield from _fp8(f"{prefix}.wo_b", D, latent, component, needed)
    if layer.is_kv_source:
        yield TensorSpec(f"{prefix}.compressor.wkv.weight", "BF16", (d, D), INDEXER, True)
        yield TensorSpec(f"{prefix}.compressor.norm.weight", "BF16", (d,), INDEXER, True)
        if layer.ratio == 2:
            yield TensorSpec(f"{prefix}.compressor.wgate.weight", "BF16", (d, D), INDEXER, True)
    if layer.is_index_source:
        heads, width = text.index_n_heads, text.index_head_dim
        yield from _fp8(f"{prefix}.indexer.wq_b", heads * width, text.q_lora_rank, INDEXER, True)
        yield TensorSpec(f"{prefix}.indexer.weights_proj.weight", "BF16", (heads, D), INDEXER, True)
    if layer.is_index_k_source:
        yield TensorSpec(f"{prefix}.indexer.wk.weight", "BF16", (text.index_head_dim, d), INDEXER, True)
        yield TensorSpec(f"{prefix}.indexer.k_norm.weight", "BF16", (text.index_head_dim,), INDEXER, True)


def _moe(config: ModelConfig, layer: LayerSpec) -> Iterator[TensorSpec]:
    text = config.text
    prefix, D, M = f"{layer_prefix(config, layer)}.ffn", text.hidden_size, text.moe_intermediate_size
    needed, E = not layer.is_draft, layer.num_experts
    router = DRAFT_OTHER if layer.is_draft else ROUTER
    yield TensorSpec(f"{prefix}.gate.weight", "BF16", (E, D), router, needed)
    yield TensorSpec(f"{prefix}.gate.bias", "F32", (E,), router, needed)
    if config.has_vision:
        yield TensorSpec(f"{prefix}.gate.bias_vl", "F32", (E,), router, needed)
    if text.n_shared_experts:
        shared, width = DRAFT_OTHER if layer.is_draft else SHARED, text.n_shared_experts * M
        yield from _fp8(f"{prefix}.shared_experts.w1", width, D, shared, needed)
        yield from _fp8(f"{prefix}.shared_experts.w3", width, D, shared, needed)
        yield from _fp8(f"{prefix}.shared_experts.w2", D, width, shared, needed)
    routed = DRAFT_EXPERTS if layer.is_draft else ROUTED
    for expert in range(E):
        yield from _fp4(f"{prefix}.experts.{expert}.w1", M, D, routed, needed)
        yield from _fp4(f"{prefix}.experts.{expert}.w3", M, D, routed, needed)
        yield from _fp4(f"{prefix}.experts.{expert}.w2", D, M, routed, needed)


def _draft_extras(config: ModelConfig, layer: LayerSpec) -> Iterator[TensorSpec]:
    """What only the first and the last draft layer hold."""
    text = config.text
    prefix, D, V, r = layer_prefix(config, layer), text.hidden_size, text.vocab_size, text.dspark_markov_rank
    if layer is config.topology.drafts[0]:
        taps = len(text.dspark_target_layer_ids)
        yield from _fp8(f"{prefix}.main_proj", D, taps * D, DRAFT_OTHER, False)
        yield TensorSpec(f"{prefix}.main_norm.weight", "BF16", (D,), DRAFT_OTHER, False)
    if layer is config.topology.drafts[-1]:
        yield TensorSpec(f"{prefix}.norm.weight", "BF16", (D,), DRAFT_OTHER, False)
        yield TensorSpec(f"{prefix}.markov_head.embed.weight", "BF16", (V, r), DRAFT_OTHER, False)
        yield TensorSpec(f"{prefix}.markov_head.head.weight", "BF16", (V, r), DRAFT_OTHER, False)
        yield TensorSpec(f"{prefix}.confidence_head.proj.weight", "BF16", (1, D + r), DRAFT_OTHER, False)


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    """Tower, projector and the three image vectors, all BF16."""
    vision, D = config.vision, config.text.hidden_size
    assert vision is not None
    h, i = vision.hidden_size, vision.intermediate_size
    merged = h * vision.downsample_ratio**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (h, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (h,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (h,),
            f"{prefix}.norm2.weight": (h,),
            f"{prefix}.attn.wqkv.weight": (3 * h, h),
            f"{prefix}.attn.wqkv.bias": (3 * h,),
            f"{prefix}.attn.wo.weight": (h, h),
            f"{prefix}.attn.wo.bias": (h,),
            f"{prefix}.mlp.w1.weight": (2 * i, h),
            f"{prefix}.mlp.w2.weight": (h, i),
        }
    shapes |= {
        "vision.norm.weight": (h,),
        "aligner.w1.weight": (D, merged),
        "aligner.w1.bias": (D,),
        "aligner.w2.weight": (D, D),
        "aligner.w2.bias": (D,),
        "image_start": (D,),
        "image_end": (D,),
        "image_newline": (D,),
    }
    for name, shape in shapes.items():
        yield TensorSpec(name, "BF16", shape, VISION, False)
