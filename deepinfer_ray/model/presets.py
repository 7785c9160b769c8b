"""Configs of synthetic checkpoints: `tiny`, `tiny-gpu`, `slice`, and the cuts that keep a config legal.

Knows: spec/model.md §6 and the released dimensions. Does not know: tensors, tokenizers, files.
A preset is a fresh `config.json` as a dict; `engram_compressed_vocab_size` is filled in with the tokenizer.
"""

from __future__ import annotations

from typing import Any, Literal

from deepinfer_ray.config.engram import engram_primes
from deepinfer_ray.errors import ConfigError

Preset = Literal["tiny", "tiny-gpu", "slice"]

SLICE_LAYERS, SLICE_EXPERTS, SLICE_ENGRAM_ROWS = 6, 32, 1_000_000
"""Cuts of `slice` when none are given: 10.5 GB."""

QUANTIZATION = {
    "quant_method": "fp8",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}


def _yarn(original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def _shared_text(**values: Any) -> dict[str, Any]:
    """Keys that are the same in every preset, then the given ones."""
    return {
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 64,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "index_head_dim": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_max_ngram_size": 4,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        **values,
    }


def _config(
    image_token_id: int, compatibility: str | None, text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
        **({"tokenizer_compatibility": compatibility} if compatibility else {}),
        "quantization_config": dict(QUANTIZATION),
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "patch_size": 14,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_wh_ratio": None,
            **vision,
        },
    }


def _tiny() -> dict[str, Any]:
    """spec/model.md §6.1: every feature in 9.7 M parameters."""
    text = _shared_text(
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=128,
        q_lora_rank=128,
        o_lora_rank=64,
        o_groups=2,
        max_position_embeddings=4096,
        rope_scaling=_yarn(256),
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        compress_ratios=[0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        kv_source_layer_ids=[1, 3, 4],
        index_source_layer_ids=[1, 3, 4, 6],
        index_n_heads=4,
        index_topk=16,
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        candidate_block_size=4,
        engram_layer_ids=[1, 3],
        engram_vocab_size=512,
        engram_n_heads=2,
        engram_head_dim=128,
        dspark_noise_token_id=499,
        dspark_target_layer_ids=[5, 6, 7],
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )
    vision = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_image_tokens": 64,
        "min_pixels": 7056,
    }
    return _config(500, "native", text, vision)


def _tiny_gpu() -> dict[str, Any]:
    """spec/model.md §6.3: the shapes that the GPU kernels are written for."""
    config = _tiny()
    config["text_config"] |= {
        "hidden_size": 512,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 256,
        "o_lora_rank": 128,
        "o_groups": 8,
        "index_n_heads": 32,
        "index_topk": 512,
        "candidate_topk_blocks": 128,
        "candidate_block_size": 8,
        "sliding_window": 128,
        "dspark_markov_rank": 64,
        "max_position_embeddings": 65536,
        "rope_scaling": _yarn(4096),
    }
    return config


def _slice() -> dict[str, Any]:
    """Released dimensions and token ids; depth, experts and Engram rows are cut by `preset_config`."""
    text = _shared_text(
        vocab_size=129280,
        hidden_size=5120,
        moe_intermediate_size=2304,
        num_hidden_layers=40,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        max_position_embeddings=1048576,
        rope_scaling=_yarn(65536),
        n_routed_experts=384,
        num_experts_per_tok=6,
        sliding_window=128,
        compress_ratios=[0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        index_n_heads=32,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        engram_layer_ids=[1, 14],
        engram_vocab_size=16000000,
        engram_n_heads=8,
        engram_head_dim=256,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=[37, 38, 39],
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
    )
    vision = {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
    }
    return _config(129264, None, text, vision)


def preset_config(
    preset: Preset, layers: int | None = None, experts: int | None = None, engram_rows: int | None = None
) -> dict[str, Any]:
    """`config.json` of a preset, cut to `layers` backbone layers, `experts` routed experts a layer and
    at most `engram_rows` rows a table. None keeps the preset's own number; `slice` has its own cuts.
    `ConfigError` if a cut cannot be made."""
    builders = {"tiny": _tiny, "tiny-gpu": _tiny_gpu, "slice": _slice}
    if preset not in builders:
        raise ConfigError(f"--preset {preset}: must be one of {', '.join(builders)}")
    config = builders[preset]()
    text = config["text_config"]
    if preset == "slice":
        layers = SLICE_LAYERS if layers is None else layers
        experts = SLICE_EXPERTS if experts is None else experts
        engram_rows = SLICE_ENGRAM_ROWS if engram_rows is None else engram_rows
    if layers is not None and layers != text["num_hidden_layers"]:
        text |= _cut_layers(layers, text["num_nextn_predict_layers"])
    if experts is not None:
        _cut_experts(text, experts)
    if engram_rows is not None:
        _cut_engram(text, engram_rows)
    orders, heads = text["engram_max_ngram_size"] - 1, text["engram_n_heads"]
    primes = engram_primes(text["engram_vocab_size"], len(text["engram_layer_ids"]), orders, heads)
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return config


def _cut_layers(layers: int, drafts: int) -> dict[str, Any]:
    """A topology of the release's kind: window layers, ratio-2 half, ratio-1 half with re-index layers."""
    if layers < 3:
        raise ConfigError(f"--layers {layers}: at least 3 are needed, one of each ratio (0, 2, 1)")
    window = 1 if layers < 10 else 2
    ones = layers // 2
    twos = layers - ones - window
    first_one = window + twos
    step = 6 if twos > 6 else -(-twos // 2)
    reindex = 4 if ones > 4 else max(1, ones // 2)
    pooled = list(range(window, first_one, step))
    return {
        "num_hidden_layers": layers,
        "compress_ratios": [0] * window + [2] * twos + [1] * ones + [0] * drafts,
        "kv_source_layer_ids": [*pooled, first_one],
        "index_source_layer_ids": [*pooled, *range(first_one, layers, reindex)],
        "candidate_source_layer_id": first_one,
        "engram_layer_ids": sorted({1, pooled[-1]}),
        "dspark_target_layer_ids": list(range(max(first_one, layers - 3), layers)),
    }


def _cut_experts(text: dict[str, Any], experts: int) -> None:
    if experts < 1:
        raise ConfigError(f"--experts {experts}: must be positive")
    share = experts * text["dspark_n_routed_experts"] / text["n_routed_experts"]
    drafts = max(1, round(share))
    if experts % 4 == 0:  # keeps a GPU-shaped preset GPU-shaped
        drafts = -(-drafts // 4) * 4
    text["n_routed_experts"], text["dspark_n_routed_experts"] = experts, drafts
    text["num_experts_per_tok"] = min(text["num_experts_per_tok"], experts)
    text["dspark_num_experts_per_tok"] = min(text["dspark_num_experts_per_tok"], drafts)


def _cut_engram(text: dict[str, Any], rows: int) -> None:
    """The largest `engram_vocab_size` (start of the prime search) whose tables have at most `rows`."""
    tables, heads = len(text["engram_layer_ids"]), text["engram_n_heads"]
    orders = text["engram_max_ngram_size"] - 1

    def largest(start: int) -> int:
        return max(sum(map(sum, layer)) for layer in engram_primes(start, tables, orders, heads))

    if largest(2) > rows:
        raise ConfigError(
            f"--engram-rows {rows}: at least {largest(2)} are needed, one prime for each column"
        )
    low, high = 2, max(3, rows)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if largest(middle) <= rows else (low, middle)
    text["engram_vocab_size"] = low
