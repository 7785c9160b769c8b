"""The hard rules between the keys of `config.json` (spec/model.md §1, §6.2), topology apart.

Knows: which keys a feature needs, legal values, divisibility. Does not know: files, layer roles
(`topology.py`), what only a GPU kernel needs (`capabilities.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from deepinfer_ray.config.engram import engram_plan
from deepinfer_ray.config.schema import QuantizationConfig, TextConfig, VisionConfig
from deepinfer_ray.errors import ConfigError

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"
QUANT_GROUP = 32
"""Features that share one scale in every quantized tensor and activation."""

_M = TypeVar("_M", bound=BaseModel)

NULL_IS_ABSENT = {
    "rope_scaling",
    "engram_layer_ids",
    "index_k_source_layer_ids",
    "num_nextn_predict_layers",
    "hc_shifted",
    "dspark_target_attn_input",
    "use_fp4_sparse_kv",
    "engram_num_embeddings",
}
"""Optional keys for which a JSON null means their default."""

ONLY_VALUE: dict[str, object] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hc_shifted": True,
    "dspark_target_attn_input": True,
}
"""text_config keys whose only supported value is this one."""

QUANTIZATION: dict[str, object] = {
    "quant_method": "fp8",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": (32, 32),
    "scale_fmt": "ue8m0",
}

ENGRAM_KEYS = (
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "engram_pad_token_id",
)
DRAFT_KEYS = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
CANDIDATE_KEYS = ("candidate_topk_blocks", "candidate_block_size")


class Problems:
    """Broken rules of one config, so that a person sees all of them at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: list[str] = []

    def need(self, ok: bool, key: str, value: object, rule: str) -> None:
        if not ok:
            self.lines.append(f"{key} = {show(value)}: {rule}")

    def raise_if_any(self) -> None:
        if self.lines:
            raise ConfigError(f"{self.source}: " + "; ".join(self.lines))


def show(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 120 else text[:117] + "..."


def parse_block(cls: type[_M], data: object, path: str, source: str) -> _M:
    """`data` as `cls`, or a `ConfigError` that lists every key of the wrong type or range."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {path} = {show(data)}: must be a JSON object")
    try:
        return cls.model_validate(dict(data))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join([path, *map(str, problem["loc"])])
            if problem["type"] == "missing":
                lines.append(f"{key} is missing: the key is required")
            else:
                lines.append(
                    f"{key} = {show(problem['input'])}: {problem['msg'].replace('Input should', 'must')}"
                )
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def parse_text(data: Mapping[str, Any], source: str) -> TextConfig:
    """Defaults that depend on other keys, then types, ranges and rules."""
    values = {key: value for key, value in data.items() if not (value is None and key in NULL_IS_ABSENT)}
    if not values.get("rope_scaling", True):
        del values["rope_scaling"]
    if "index_k_source_layer_ids" not in values and "kv_source_layer_ids" in values:
        values["index_k_source_layer_ids"] = values["kv_source_layer_ids"]
    candidate = values.get("candidate_source_layer_id")
    if isinstance(candidate, int) and not isinstance(candidate, bool) and candidate < 0:
        values["candidate_source_layer_id"] = None
    if isinstance(values.get("swiglu_limit"), int | float) and values["swiglu_limit"] == 0:
        values["swiglu_limit"] = None
    # Keys of a feature that is off may hold anything, null included.
    off = [] if values.get("engram_layer_ids") else [k for k in values if k.startswith("engram_")]
    if not values.get("num_nextn_predict_layers"):
        off += [k for k in DRAFT_KEYS if k in values]
    if values.get("candidate_source_layer_id", 0) is None:
        off += [k for k in CANDIDATE_KEYS if k in values]
    text = parse_block(TextConfig, {k: v for k, v in values.items() if k not in off}, "text_config", source)
    _check_text(text, source)
    return text


def _check_text(text: TextConfig, source: str) -> None:
    """Value rules of spec/model.md §1.3 and the divisibility rules of §6.2 that hold on every backend."""
    problems = Problems(source)

    def need(ok: bool, key: str, rule: str) -> None:
        problems.need(ok, f"text_config.{key}", getattr(text, key), rule)

    for key, only in ONLY_VALUE.items():
        need(getattr(text, key) == only, key, f"only {json.dumps(only)} is supported")
    need(
        text.num_attention_heads % text.o_groups == 0,
        "o_groups",
        f"num_attention_heads = {text.num_attention_heads} must be divisible by o_groups",
    )
    for key in ("hidden_size", "moe_intermediate_size", "head_dim", "index_head_dim", "q_lora_rank"):
        need(
            getattr(text, key) % QUANT_GROUP == 0,
            key,
            f"must be a multiple of {QUANT_GROUP} (one scale a group)",
        )
    need(
        text.o_groups * text.o_lora_rank % QUANT_GROUP == 0,
        "o_lora_rank",
        f"o_groups * o_lora_rank = {text.o_groups * text.o_lora_rank} must be a multiple of {QUANT_GROUP}",
    )
    need(text.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "must be even: rotation works on pairs")
    for key in ("head_dim", "index_head_dim"):
        need(
            text.qk_rope_head_dim <= getattr(text, key),
            "qk_rope_head_dim",
            f"must not exceed {key} = {getattr(text, key)}",
        )
    need(
        text.num_experts_per_tok <= text.n_routed_experts,
        "num_experts_per_tok",
        f"must not exceed n_routed_experts = {text.n_routed_experts}",
    )
    if text.candidate_source_layer_id is not None:
        _need_keys(problems, text, CANDIDATE_KEYS, "candidate_source_layer_id is set")
    if text.has_engram:
        _check_engram(problems, text)
    if text.has_drafter:
        _check_drafter(problems, text)
    problems.raise_if_any()


def _need_keys(problems: Problems, text: TextConfig, keys: tuple[str, ...], reason: str) -> None:
    for key in keys:
        if key not in text.model_fields_set:
            problems.lines.append(f"text_config.{key} is missing: the key is required because {reason}")


def _check_engram(problems: Problems, text: TextConfig) -> None:
    before = len(problems.lines)
    _need_keys(problems, text, ENGRAM_KEYS, "engram_layer_ids is not empty")
    if len(problems.lines) > before:
        return

    def need(ok: bool, key: str, rule: str) -> None:
        problems.need(ok, f"text_config.{key}", getattr(text, key), rule)

    need(text.engram_max_ngram_size >= 2, "engram_max_ngram_size", "must be at least 2: orders are 2 … this")
    for key in ("engram_vocab_size", "engram_n_heads"):
        need(getattr(text, key) >= 1, key, "must be positive when there are Engram layers")
    need(
        text.engram_head_dim >= 1 and text.engram_head_dim % QUANT_GROUP == 0,
        "engram_head_dim",
        f"must be a positive multiple of {QUANT_GROUP} (one scale a group)",
    )
    need(
        1 <= text.engram_compressed_vocab_size <= text.vocab_size,
        "engram_compressed_vocab_size",
        f"must lie in [1, vocab_size] = [1, {text.vocab_size}]",
    )
    need(
        0 <= text.engram_pad_token_id < text.vocab_size,
        "engram_pad_token_id",
        f"must be a token id below vocab_size = {text.vocab_size}",
    )
    if text.engram_num_embeddings is not None and len(problems.lines) == before:
        rows = engram_plan(text).rows
        need(
            text.engram_num_embeddings == rows,
            "engram_num_embeddings",
            f"must be the sums of each layer's primes, {list(rows)}, "
            f"which follow from engram_vocab_size = {text.engram_vocab_size}",
        )


def _check_drafter(problems: Problems, text: TextConfig) -> None:
    before = len(problems.lines)
    _need_keys(problems, text, DRAFT_KEYS, "num_nextn_predict_layers is not 0")
    if len(problems.lines) > before:
        return

    def need(ok: bool, key: str, rule: str) -> None:
        problems.need(ok, f"text_config.{key}", getattr(text, key), rule)

    for key in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
        need(getattr(text, key) >= 1, key, "must be positive when there are draft layers")
    need(
        1 <= text.dspark_num_experts_per_tok <= text.dspark_n_routed_experts,
        "dspark_num_experts_per_tok",
        f"must lie in [1, dspark_n_routed_experts] = [1, {text.dspark_n_routed_experts}]",
    )
    need(
        0 <= text.dspark_noise_token_id < text.vocab_size,
        "dspark_noise_token_id",
        f"must be a token id below vocab_size = {text.vocab_size}",
    )


def check_top_level(data: Mapping[str, Any], source: str) -> None:
    """Rules of spec/model.md §1.1."""
    problems = Problems(source)
    for key in ("architectures", "model_type", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key not in data:
            problems.lines.append(f"{key} is missing: the key is required")
    problems.raise_if_any()
    problems.need(
        data["architectures"] == [ARCHITECTURE],
        "architectures",
        data["architectures"],
        f'must be a list with exactly one entry, ["{ARCHITECTURE}"]',
    )
    problems.need(
        data["model_type"] == MODEL_TYPE,
        "model_type",
        data["model_type"],
        f'only "{MODEL_TYPE}" is supported',
    )
    problems.need(data["dtype"] == "bfloat16", "dtype", data["dtype"], 'only "bfloat16" is supported')
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = data.get(key)
        absent = value is None and key == "image_token_id"
        problems.need(absent or type(value) is int, key, value, "must be an integer token id")
    mode = data.get("tokenizer_compatibility")
    problems.need(
        mode in (None, "release", "native"), "tokenizer_compatibility", mode, 'must be "release" or "native"'
    )
    problems.raise_if_any()


def parse_vision(data: object, source: str) -> VisionConfig | None:
    """The tower, or None when the block is absent or has no layers (spec/model.md §1.4)."""
    if data is None or (isinstance(data, Mapping) and data.get("num_hidden_layers") in (0, None)):
        return None
    vision = parse_block(VisionConfig, data, "vision_config", source)
    problems = Problems(source)
    problems.need(
        vision.hidden_size % vision.num_attention_heads == 0
        and (vision.hidden_size // vision.num_attention_heads) % 4 == 0,
        "vision_config.num_attention_heads",
        vision.num_attention_heads,
        f"hidden_size = {vision.hidden_size} must split into heads whose width is a multiple of 4 "
        "(two rotated axes of pairs)",
    )
    problems.raise_if_any()
    return vision


def parse_quantization(data: object, source: str) -> QuantizationConfig:
    """The block, every key at its only legal value."""
    quantization = parse_block(QuantizationConfig, data, "quantization_config", source)
    problems = Problems(source)
    for key, only in QUANTIZATION.items():
        value = getattr(quantization, key)
        legal = list(only) if isinstance(only, tuple) else only
        problems.need(
            value == only, f"quantization_config.{key}", value, f"only {json.dumps(legal)} is supported"
        )
    problems.raise_if_any()
    return quantization
