"""What the GPU kernels ask of a model, over the rules of the format (the rows marked [K] in spec/model.md).

Knows: shapes that the kernels are written for. Does not know: devices, libraries. Nothing here is an
error of a checkpoint: the CPU backend runs all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_ray.config.hf import ModelConfig


def gpu_capability_problems(config: ModelConfig) -> list[str]:
    """One line for each rule that the model breaks, empty if the GPU kernels can run it.

    Sources: spec/model.md §1.3, §1.5 and §6.2; spec/attention.md §1.5.
    """
    text = config.text
    problems: list[str] = []

    def need(ok: bool, key: str, rule: str) -> None:
        if not ok:
            problems.append(f"text_config.{key} = {getattr(text, key)!r}: the GPU kernels need {rule}")

    need(text.qk_rope_head_dim == 64, "qk_rope_head_dim", "64")
    need(text.head_dim == 512, "head_dim", "512")
    need(text.num_attention_heads in (64, 128), "num_attention_heads", "64 or 128")
    need(text.index_head_dim == 128, "index_head_dim", "128")
    need(
        text.hidden_size % 256 == 0 and text.hidden_size >= 512,
        "hidden_size",
        "a multiple of 256, at least 512",
    )
    need(
        text.moe_intermediate_size % 128 == 0,
        "moe_intermediate_size",
        "a multiple of 128 (packed FP4 scales)",
    )
    need(text.n_routed_experts % 4 == 0, "n_routed_experts", "a multiple of 4 (gate kernel)")
    need(text.num_experts_per_tok <= 32, "num_experts_per_tok", "at most 32 (gate kernel)")
    if text.has_drafter:
        need(
            text.dspark_n_routed_experts % 4 == 0, "dspark_n_routed_experts", "a multiple of 4 (gate kernel)"
        )
        need(text.dspark_num_experts_per_tok <= 32, "dspark_num_experts_per_tok", "at most 32 (gate kernel)")
    if text.has_engram:
        need(text.engram_head_dim % 128 == 0, "engram_head_dim", "a multiple of 128 (packed table scales)")
    if text.candidate_source_layer_id is not None:
        blocks, size = text.candidate_topk_blocks, text.candidate_block_size
        need(blocks % 8 == 0 and blocks <= 4096, "candidate_topk_blocks", "a multiple of 8, at most 4096")
        need(size in (8, 16), "candidate_block_size", "8 or 16")
        need(
            blocks * size * 2 % 1024 == 0,
            "candidate_topk_blocks",
            f"blocks * candidate_block_size * 2 B = {blocks * size * 2} to be a multiple of 1024",
        )
        need(text.index_n_heads <= 32, "index_n_heads", "at most 32")
    return problems
