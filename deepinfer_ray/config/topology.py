"""Who owns what: the roles of every layer, derived from `text_config` (spec/model.md §1.5, attention.md §1).

Knows: source maps, their invariants, the split into producers and consumers. Does not know: widths, weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_ray.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_ray.config.hf import TextConfig

BLOCK_TOKENS = 128
"""Uncompressed tokens in one cache block; a candidate block must not cross its border."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Role of one layer. Ids are runtime ids: backbone 0 … L-1, draft layers L … L+J-1."""

    index: int
    ratio: int
    """0 = window only, 1 = every token has a global entry, 2 = pairs of tokens are pooled into one."""
    is_draft: bool
    kv_source: int | None
    """Layer whose compressed entries this layer attends; None when ratio is 0."""
    index_source: int | None
    """Layer whose top-k selection this layer uses."""
    index_k_source: int | None
    """Layer that owns the index keys that the selection is scored against."""
    is_candidate_source: bool
    reads_candidates: bool
    """An index source behind the candidate source: scores inside its candidate blocks only."""
    engram: int | None
    """Ordinal of this layer among the Engram layers."""
    is_target: bool
    """Its attention input is tapped for the drafter."""
    is_consumer: bool
    """Backbone layer at or behind `n_prefill_layer`."""
    num_experts: int
    experts_per_token: int

    @property
    def is_kv_source(self) -> bool:
        return self.kv_source == self.index

    @property
    def is_index_source(self) -> bool:
        return self.index_source == self.index

    @property
    def is_index_k_source(self) -> bool:
        return self.index_k_source == self.index


@dataclass(frozen=True, slots=True)
class Topology:
    """All layers and the border between producers and consumers."""

    num_layers: int
    num_draft_layers: int
    n_prefill_layer: int
    """First layer of ratio 1; layers from here on are consumers (YoCo)."""
    layers: tuple[LayerSpec, ...]

    @property
    def backbone(self) -> tuple[LayerSpec, ...]:
        return self.layers[: self.num_layers]

    @property
    def drafts(self) -> tuple[LayerSpec, ...]:
        return self.layers[self.num_layers :]

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compression ratios in use, ascending, without 0."""
        return tuple(sorted({layer.ratio for layer in self.layers} - {0}))

    @property
    def kv_sources(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.is_kv_source)

    @property
    def index_sources(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.is_index_source)

    @property
    def index_k_sources(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.is_index_k_source)

    @property
    def candidate_source(self) -> int | None:
        return next((layer.index for layer in self.layers if layer.is_candidate_source), None)


def _fail(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"text_config.{key} = {value!r}: {rule}")


def _check_ids(key: str, ids: tuple[int, ...], limit: int) -> None:
    for layer in ids:
        if not 0 <= layer < limit:
            raise _fail(key, list(ids), f"layer {layer} is outside [0, num_hidden_layers) = [0, {limit})")
    if list(ids) != sorted(set(ids)):
        raise _fail(key, list(ids), "ids must be ascending without repeats")


def _source_map(key: str, ids: tuple[int, ...], ratios: tuple[int, ...], limit: int) -> list[int | None]:
    """Nearest source at or before each backbone layer with a ratio; None for window-only layers.

    Sources and users of one segment agree on the ratio, so a segment is contiguous.
    """
    _check_ids(key, ids, limit)
    sources: list[int | None] = []
    source: int | None = None
    for layer in range(limit):
        if layer in ids:
            source = layer
        ratio = ratios[layer]
        if ratio == 0:
            if source is not None:
                raise _fail(
                    key,
                    list(ids),
                    f"layer {layer} has compress_ratios 0 but lies in the segment of source {source}; "
                    "a window-only layer may only precede the first source",
                )
            sources.append(None)
            continue
        if source is None:
            raise _fail(
                key, list(ids), f"layer {layer} has compress_ratios {ratio} but no source at or before it"
            )
        if ratios[source] != ratio:
            raise _fail(
                key,
                list(ids),
                f"layer {layer} has compress_ratios {ratio} but its source {source} has {ratios[source]}; "
                "a source and its users must agree on the ratio",
            )
        sources.append(source)
    return sources


def _check_refines(
    fine_key: str, fine: list[int | None], coarse_key: str, coarse: list[int | None], ids: tuple[int, ...]
) -> None:
    """Every border of the coarse map is one of the fine map: coarse[fine[l]] == coarse[l]."""
    for layer, source in enumerate(fine):
        if source is not None and coarse[source] != coarse[layer]:
            raise _fail(
                fine_key,
                list(ids),
                f"layer {layer} uses source {source}, which lies before the {coarse_key} border at layer "
                f"{coarse[layer]}; every one of {coarse_key} must be in {fine_key} too",
            )


def _check_candidates(text: TextConfig, index_map: list[int | None]) -> None:
    source = text.candidate_source_layer_id
    if source is None:
        return
    key, ratios = "candidate_source_layer_id", text.compress_ratios
    if not 0 <= source < text.num_hidden_layers:
        raise _fail(key, source, f"must be null, -1 or a layer of [0, {text.num_hidden_layers})")
    if ratios[source] == 0 or index_map[source] != source:
        raise _fail(
            key, source, f"must be one of index_source_layer_ids = {list(text.index_source_layer_ids)}"
        )
    for layer in range(source + 1, text.num_hidden_layers):
        if ratios[layer] != ratios[source]:
            raise _fail(
                key,
                source,
                f"layer {layer} has compress_ratios {ratios[layer]}, the candidate source {ratios[source]}; "
                "all layers behind it must have its ratio",
            )
    blocks, size = text.candidate_topk_blocks, text.candidate_block_size
    if blocks <= 0:
        raise _fail("candidate_topk_blocks", blocks, "must be positive when a candidate source is set")
    entries = BLOCK_TOKENS // ratios[source]
    if size <= 0 or entries % size:
        raise _fail(
            "candidate_block_size",
            size,
            f"must divide {BLOCK_TOKENS} / ratio = {entries}, so that none crosses a cache block",
        )
    if blocks * size < text.index_topk:
        raise _fail(
            "candidate_topk_blocks",
            blocks,
            f"times candidate_block_size = {size} gives {blocks * size}, "
            f"must be at least index_topk = {text.index_topk}",
        )


def build_topology(text: TextConfig) -> Topology:
    """Roles of all layers; a broken invariant is a `ConfigError` that names key, value and rule."""
    L, J, ratios = text.num_hidden_layers, text.num_nextn_predict_layers, text.compress_ratios
    if len(ratios) != L + J:
        raise _fail(
            "compress_ratios",
            f"{len(ratios)} entries",
            f"needs num_hidden_layers + num_nextn_predict_layers = {L} + {J} = {L + J} entries",
        )
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            raise _fail(
                "compress_ratios", list(ratios), f"layer {layer} has ratio {ratio}; only 0, 1 and 2 exist"
            )
        if layer >= L and ratio:
            raise _fail(
                "compress_ratios", list(ratios), f"draft layer {layer} has ratio {ratio}; it must be 0"
            )
    if 1 not in ratios:
        raise _fail(
            "compress_ratios", list(ratios), "no layer has ratio 1, so there is no first consumer layer"
        )
    n_prefill = ratios.index(1)

    kv = _source_map("kv_source_layer_ids", text.kv_source_layer_ids, ratios, L)
    index = _source_map("index_source_layer_ids", text.index_source_layer_ids, ratios, L)
    index_k = _source_map("index_k_source_layer_ids", text.index_k_source_layer_ids, ratios, L)
    if kv[n_prefill] != n_prefill:
        raise _fail(
            "kv_source_layer_ids",
            list(text.kv_source_layer_ids),
            f"the first consumer layer {n_prefill} must be a source: entries are never shared across it",
        )
    _check_refines(
        "index_k_source_layer_ids", index_k, "kv_source_layer_ids", kv, text.index_k_source_layer_ids
    )
    _check_refines(
        "index_source_layer_ids", index, "index_k_source_layer_ids", index_k, text.index_source_layer_ids
    )
    for layer in text.index_k_source_layer_ids:
        # The index key is projected from the latent that this layer's own compressor pools, and lives in the
        # same cache slots: a key source without entries of its own has nothing to project.
        if kv[layer] != layer:
            raise _fail(
                "index_k_source_layer_ids",
                list(text.index_k_source_layer_ids),
                f"layer {layer} is not in kv_source_layer_ids = {list(text.kv_source_layer_ids)}; "
                "index keys are made from the entries of the same layer",
            )
    _check_candidates(text, index)

    _check_ids("engram_layer_ids", text.engram_layer_ids, L)
    engram = {layer: ordinal for ordinal, layer in enumerate(text.engram_layer_ids)}
    targets = text.dspark_target_layer_ids if J else ()
    if J:
        _check_ids("dspark_target_layer_ids", targets, L)
        if not targets:
            raise _fail("dspark_target_layer_ids", [], "must name a layer when there are draft layers")

    candidate = text.candidate_source_layer_id
    layers = []
    for layer in range(L + J):
        draft = layer >= L
        layers.append(
            LayerSpec(
                index=layer,
                ratio=ratios[layer],
                is_draft=draft,
                kv_source=None if draft else kv[layer],
                index_source=None if draft else index[layer],
                index_k_source=None if draft else index_k[layer],
                is_candidate_source=layer == candidate,
                reads_candidates=candidate is not None
                and not draft
                and layer > candidate
                and index[layer] == layer,
                engram=engram.get(layer),
                is_target=layer in targets,
                is_consumer=n_prefill <= layer < L,
                num_experts=text.dspark_n_routed_experts if draft else text.n_routed_experts,
                experts_per_token=text.dspark_num_experts_per_tok if draft else text.num_experts_per_tok,
            )
        )
    return Topology(L, J, n_prefill, tuple(layers))
