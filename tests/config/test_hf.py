"""config.json: what loads, what it derives, and every rule with a config that breaks it."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ray.config.hf import ModelConfig, gpu_capability_problems
from deepinfer_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
RELEASED = ROOT / "configs" / "models" / "deepseek-v4.1-flash" / "config.json"
ABSENT = object()


def change(data: dict[str, Any], *changes: tuple[str, object]) -> dict[str, Any]:
    data = copy.deepcopy(data)
    for path, value in changes:
        *blocks, leaf = path.split(".")
        node = data
        for block in blocks:
            node = node[block]
        if value is ABSENT:
            del node[leaf]
        else:
            node[leaf] = value
    return data


@pytest.fixture(scope="module")
def released() -> dict[str, Any]:
    return json.loads(RELEASED.read_text())


@pytest.mark.parametrize(
    ("name", "n_prefill", "rows", "vision"),
    [("tinyA", 6, (434, 606), False), ("tinyB", 4, (304, 462), False), ("tinyV", 4, (304, 462), True)],
)
def test_golden_configs_load_though_no_gpu_kernel_could_run_them(
    name: str, n_prefill: int, rows: tuple[int, ...], vision: bool
) -> None:
    config = ModelConfig.load(GOLDEN / name)
    assert config.topology.n_prefill_layer == n_prefill
    assert config.engram.rows == rows
    assert config.has_vision is vision
    assert gpu_capability_problems(config)


def test_the_released_config_breaks_no_gpu_rule(released: dict[str, Any]) -> None:
    assert gpu_capability_problems(ModelConfig.from_dict(released)) == []


def test_roles_of_the_released_layers(released: dict[str, Any]) -> None:
    """spec/attention.md §1.3."""
    topology = ModelConfig.from_dict(released).topology
    assert topology.kv_sources == topology.index_k_sources == (2, 8, 14, 20)
    assert topology.index_sources == (2, 8, 14, 20, 24, 28, 32, 36)
    assert topology.n_prefill_layer == 20
    assert topology.candidate_source == 20
    assert [layer.index for layer in topology.layers if layer.reads_candidates] == [24, 28, 32, 36]
    assert [layer.index for layer in topology.layers if layer.is_target] == [37, 38, 39]
    assert [layer.index for layer in topology.layers if layer.is_consumer] == list(range(20, 40))
    assert [layer.engram for layer in topology.layers if layer.engram is not None] == [0, 1]
    layer = topology.layers[30]
    assert (layer.ratio, layer.kv_source, layer.index_source, layer.index_k_source) == (1, 20, 28, 20)
    window, draft = topology.layers[1], topology.layers[41]
    assert (window.kv_source, window.index_source, window.is_kv_source) == (None, None, False)
    assert (draft.is_draft, draft.num_experts, draft.experts_per_token, draft.ratio) == (True, 128, 3, 0)
    assert topology.ratios == (1, 2)


RULES: list[tuple[str, tuple[tuple[str, object], ...], str]] = [
    ("architectures gone", (("architectures", ABSENT),), "architectures is missing"),
    ("architectures text", (("architectures", "DeepseekV41ForCausalLM"),), "must be a list with exactly one"),
    ("two architectures", (("architectures", ["DeepseekV41ForCausalLM", "X"]),), "exactly one"),
    (
        "other architecture",
        (("architectures", ["LlamaForCausalLM"]),),
        "architectures = ['LlamaForCausalLM']",
    ),
    ("model_type", (("model_type", "deepseek_v4"),), "model_type = 'deepseek_v4': only \"deepseek_v41\""),
    ("dtype", (("dtype", "float16"),), "dtype = 'float16': only \"bfloat16\""),
    ("eos gone", (("eos_token_id", ABSENT),), "eos_token_id is missing"),
    ("eos list", (("eos_token_id", [1]),), "eos_token_id = [1]: must be an integer"),
    ("bos out of range", (("bos_token_id", 129280),), "bos_token_id = 129280: must be a token id below"),
    ("image id", (("image_token_id", 129999),), "image_token_id = 129999"),
    ("image id gone", (("image_token_id", ABSENT),), "image_token_id = None: the key is required because"),
    ("compatibility", (("tokenizer_compatibility", "v3"),), 'must be "release" or "native"'),
    ("no text_config", (("text_config", ABSENT),), "text_config is missing"),
    ("text_config list", (("text_config", []),), "text_config = []: must be a JSON object"),
    ("no quantization", (("quantization_config", ABSENT),), "quantization_config is missing"),
    (
        "no scale_fmt",
        (("quantization_config.scale_fmt", ABSENT),),
        "quantization_config.scale_fmt is missing",
    ),
    ("scale_fmt", (("quantization_config.scale_fmt", "fp32"),), 'only "ue8m0"'),
    (
        "quant_method",
        (("quantization_config.quant_method", "awq"),),
        "quantization_config.quant_method = 'awq'",
    ),
    ("expert_dtype", (("quantization_config.expert_dtype", "fp8"),), "quantization_config.expert_dtype"),
    (
        "scheme",
        (("quantization_config.activation_scheme", "static"),),
        "quantization_config.activation_scheme",
    ),
    ("block size", (("quantization_config.weight_block_size", [128, 128]),), "only [32, 32]"),
    ("hidden_size gone", (("text_config.hidden_size", ABSENT),), "text_config.hidden_size is missing"),
    (
        "hidden_size text",
        (("text_config.hidden_size", "5120"),),
        "text_config.hidden_size = '5120': must be a valid int",
    ),
    ("hidden_size bool", (("text_config.hidden_size", True),), "text_config.hidden_size = True"),
    ("hidden_size odd", (("text_config.hidden_size", 5100),), "hidden_size = 5100: must be a multiple of 32"),
    ("kv heads", (("text_config.num_key_value_heads", 8),), "num_key_value_heads = 8: only 1"),
    ("head_dim", (("text_config.head_dim", 500),), "head_dim = 500: must be a multiple of 32"),
    ("index_head_dim", (("text_config.index_head_dim", 100),), "index_head_dim = 100"),
    ("q_lora_rank", (("text_config.q_lora_rank", 1281),), "q_lora_rank = 1281"),
    ("o_lora_rank", (("text_config.o_lora_rank", 1023),), "o_groups * o_lora_rank = 8184"),
    ("moe width", (("text_config.moe_intermediate_size", 2305),), "moe_intermediate_size = 2305"),
    ("o_groups", (("text_config.o_groups", 7),), "num_attention_heads = 64 must be divisible"),
    ("rope odd", (("text_config.qk_rope_head_dim", 63),), "qk_rope_head_dim = 63: must be even"),
    ("rope wide", (("text_config.qk_rope_head_dim", 256),), "must not exceed index_head_dim = 128"),
    ("hidden_act", (("text_config.hidden_act", "gelu"),), "hidden_act = 'gelu': only \"silu\""),
    ("swiglu_limit", (("text_config.swiglu_limit", -1),), "swiglu_limit = -1"),
    ("bias", (("text_config.attention_bias", True),), "attention_bias = True: only false"),
    ("dropout", (("text_config.attention_dropout", 0.1),), "attention_dropout = 0.1: only 0.0"),
    ("eps nan", (("text_config.rms_norm_eps", float("nan")),), "rms_norm_eps"),
    ("scoring", (("text_config.scoring_func", "sigmoid"),), "scoring_func"),
    ("topk_method", (("text_config.topk_method", "greedy"),), "topk_method"),
    ("norm_topk", (("text_config.norm_topk_prob", False),), "norm_topk_prob = False: only true"),
    ("k > experts", (("text_config.num_experts_per_tok", 385),), "must not exceed n_routed_experts = 384"),
    ("k = 0", (("text_config.num_experts_per_tok", 0),), "num_experts_per_tok = 0"),
    ("hc_shifted", (("text_config.hc_shifted", False),), "hc_shifted = False: only true"),
    ("target input", (("text_config.dspark_target_attn_input", False),), "dspark_target_attn_input = False"),
    (
        "yarn key gone",
        (("text_config.rope_scaling.factor", ABSENT),),
        "text_config.rope_scaling.factor is missing",
    ),
    ("yarn text", (("text_config.rope_scaling", "yarn"),), "text_config.rope_scaling = 'yarn'"),
    ("ratios short", (("text_config.compress_ratios", [0, 2, 1]),), "40 + 3 = 43 entries"),
    (
        "ratio 4",
        (("text_config.compress_ratios", [0, 4, *[2] * 18, *[1] * 20, 0, 0, 0]),),
        "layer 1 has ratio 4",
    ),
    (
        "draft ratio",
        (("text_config.compress_ratios", [0, 0, *[2] * 18, *[1] * 20, 0, 1, 0]),),
        "draft layer 41",
    ),
    ("no ratio 1", (("text_config.compress_ratios", [0, 0, *[2] * 38, 0, 0, 0]),), "no layer has ratio 1"),
    (
        "hole",
        (("text_config.compress_ratios", [0, 0, *[2] * 3, 0, *[2] * 14, *[1] * 20, 0, 0, 0]),),
        "layer 5 has",
    ),
    (
        "no source",
        (("text_config.kv_source_layer_ids", [8, 14, 20]),),
        "layer 2 has compress_ratios 2 but no source",
    ),
    ("kv crosses", (("text_config.kv_source_layer_ids", [2, 8, 14]),), "but its source 14 has 2"),
    ("kv id high", (("text_config.kv_source_layer_ids", [2, 8, 14, 20, 40]),), "layer 40 is outside"),
    ("kv unsorted", (("text_config.kv_source_layer_ids", [2, 14, 8, 20]),), "ascending without repeats"),
    ("kv text", (("text_config.kv_source_layer_ids", "2,8"),), "text_config.kv_source_layer_ids"),
    (
        "index coarse",
        (("text_config.index_source_layer_ids", [2, 14, 20]),),
        "every one of index_k_source_layer_ids",
    ),
    ("index_k coarse", (("text_config.index_k_source_layer_ids", [2, 14, 20]),), "border at layer 8"),
    (
        "index_k fine",
        (("text_config.index_k_source_layer_ids", [2, 8, 14, 20, 24]),),
        "layer 24 is not in kv_source",
    ),
    ("index_topk", (("text_config.index_topk", 0),), "index_topk = 0"),
    (
        "candidate gone",
        (("text_config.candidate_source_layer_id", ABSENT),),
        "candidate_source_layer_id is missing",
    ),
    (
        "candidate reuse",
        (("text_config.candidate_source_layer_id", 21),),
        "must be one of index_source_layer_ids",
    ),
    (
        "candidate ratio",
        (("text_config.candidate_source_layer_id", 14),),
        "all layers behind it must have its ratio",
    ),
    ("candidate high", (("text_config.candidate_source_layer_id", 40),), "candidate_source_layer_id = 40"),
    ("blocks gone", (("text_config.candidate_topk_blocks", ABSENT),), "candidate_topk_blocks is missing"),
    (
        "blocks 0",
        (("text_config.candidate_topk_blocks", 0),),
        "must be positive when a candidate source is set",
    ),
    ("block size 0", (("text_config.candidate_block_size", 0),), "candidate_block_size = 0"),
    ("block size 24", (("text_config.candidate_block_size", 24),), "must divide 128 / ratio = 128"),
    (
        "few candidates",
        (("text_config.candidate_topk_blocks", 63),),
        "63: times candidate_block_size = 8 gives 504",
    ),
    ("engram key", (("text_config.engram_n_heads", ABSENT),), "engram_n_heads is missing"),
    ("engram classes 0", (("text_config.engram_compressed_vocab_size", 0),), "must lie in [1, vocab_size]"),
    ("engram pad", (("text_config.engram_pad_token_id", -1),), "engram_pad_token_id = -1"),
    ("engram rows", (("text_config.engram_num_embeddings", [384006168, 1]),), "[384006168, 384016682]"),
    ("engram width", (("text_config.engram_head_dim", 250),), "engram_head_dim = 250"),
    ("engram order", (("text_config.engram_max_ngram_size", 1),), "must be at least 2"),
    ("engram layer", (("text_config.engram_layer_ids", [1, 40]),), "layer 40 is outside"),
    ("draft key", (("text_config.dspark_markov_rank", ABSENT),), "dspark_markov_rank is missing"),
    ("draft rank", (("text_config.dspark_markov_rank", 0),), "dspark_markov_rank = 0: must be positive"),
    ("draft k", (("text_config.dspark_num_experts_per_tok", 129),), "[1, 128]"),
    ("draft noise", (("text_config.dspark_noise_token_id", 129280),), "dspark_noise_token_id = 129280"),
    (
        "draft targets",
        (("text_config.dspark_target_layer_ids", [37, 40]),),
        "dspark_target_layer_ids = [37, 40]",
    ),
    ("no targets", (("text_config.dspark_target_layer_ids", []),), "must name a layer"),
    ("vision heads", (("vision_config.num_attention_heads", 15),), "vision_config.num_attention_heads = 15"),
    ("vision patch", (("vision_config.patch_size", True),), "vision_config.patch_size = True"),
    ("vision ratio", (("vision_config.max_wh_ratio", 0.5),), "vision_config.max_wh_ratio = 0.5"),
]


@pytest.mark.parametrize(("changes", "text"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_a_broken_rule_is_a_config_error_that_names_key_value_and_rule(
    released: dict[str, Any], changes: tuple[tuple[str, object], ...], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(change(released, *changes))
    assert text in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    "changes",
    [
        (("text_config.candidate_source_layer_id", None), ("text_config.candidate_block_size", 0)),
        (("text_config.candidate_source_layer_id", -1),),
        (("text_config.engram_layer_ids", []), ("text_config.engram_n_heads", None)),
        (("text_config.engram_num_embeddings", ABSENT),),
        (("text_config.rope_scaling", None),),
        (("text_config.rope_scaling", {}),),
        (("text_config.swiglu_limit", None),),
        (("vision_config", ABSENT), ("image_token_id", ABSENT)),
        (("vision_config.num_hidden_layers", 0),),
        (("text_config.n_shared_experts", 0),),
        (
            ("text_config.num_nextn_predict_layers", 0),
            ("text_config.compress_ratios", [0, 0, *[2] * 18, *[1] * 20]),
            ("text_config.dspark_markov_rank", ABSENT),
        ),
        (("text_config.index_k_source_layer_ids", [2, 8, 14, 20]),),
        (("tokenizer_compatibility", "native"),),
    ],
)
def test_legal_variants_load(released: dict[str, Any], changes: tuple[tuple[str, object], ...]) -> None:
    ModelConfig.from_dict(change(released, *changes))


def test_defaults_of_absent_and_off_keys(released: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(
        change(
            released,
            ("text_config.candidate_source_layer_id", -1),
            ("text_config.engram_layer_ids", ABSENT),
            ("text_config.swiglu_limit", 0),
            ("vision_config.num_hidden_layers", 0),
        )
    )
    assert config.text.candidate_source_layer_id is None
    assert config.text.swiglu_limit is None
    assert config.text.index_k_source_layer_ids == (2, 8, 14, 20)
    assert config.text.use_fp4_sparse_kv is True
    assert config.text.rms_norm_eps == 1e-20
    assert (config.engram.rows, config.engram.columns) == ((), 0)
    assert config.vision is None
    assert not any(layer.reads_candidates for layer in config.topology.layers)


def test_unknown_keys_cause_one_warning_that_lists_them(
    released: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_dict(released)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_dict(change(released, ("colour", 1), ("text_config.hiden_size", 2)))
    (record,) = caplog.records
    assert "colour, text_config.hiden_size" in record.getMessage()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "holds a list, must be a JSON object"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"[" * 100_000, "is not valid JSON"),
        (None, "no such file"),
    ],
)
def test_an_unreadable_file_is_a_config_error_with_its_path(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=text) as caught:
        ModelConfig.load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_all_wrong_keys_are_reported_at_once(released: dict[str, Any]) -> None:
    broken = change(released, ("text_config.hidden_size", "x"), ("text_config.vocab_size", ABSENT))
    with pytest.raises(ConfigError, match=r"vocab_size is missing.*hidden_size = 'x'"):
        ModelConfig.from_dict(broken)


def test_with_text_checks_the_rules_again(released: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(released)
    assert config.with_text(index_topk=4096).text.index_topk == 4096
    with pytest.raises(ConfigError, match="at least index_topk = 99999"):
        config.with_text(index_topk=99999)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_rope_head_dim", 32),
        ("head_dim", 256),
        ("num_attention_heads", 32),
        ("index_head_dim", 64),
        ("hidden_size", 5152),
        ("moe_intermediate_size", 2336),
        ("n_routed_experts", 386),
        ("dspark_n_routed_experts", 126),
        ("engram_head_dim", 96),
        ("candidate_topk_blocks", 2044),
        ("candidate_block_size", 4),
        ("index_n_heads", 64),
        ("num_experts_per_tok", 33),
    ],
)
def test_kernel_rules_are_problems_of_the_gpu_only(released: dict[str, Any], key: str, value: int) -> None:
    problems = gpu_capability_problems(ModelConfig.from_dict(change(released, (f"text_config.{key}", value))))
    assert any(f"text_config.{key} = {value}" in problem for problem in problems)
