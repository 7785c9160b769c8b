"""Synthetic checkpoints: the stored format, the counts of the specification, the same bytes for a seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from deepseek_recipe import DeepseekV41Encoding
from deepseek_recipe import Tokenizer as RecipeTokenizer
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer_ray.config.hf import ModelConfig, gpu_capability_problems
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.model.checkpoint import INDEX_NAME, Checkpoint
from deepinfer_ray.model.engram_ids import checked_compressed_ids
from deepinfer_ray.model.presets import preset_config
from deepinfer_ray.model.synthetic import make_checkpoint
from deepinfer_ray.model.tensors import VISION, expected_tensors
from deepinfer_ray.ops.formats import dequant_fp8_weight, dequant_mxfp4_weight
from deepinfer_ray.toy import prompts_path
from deepinfer_ray.toy.tokenizer import CONTROL_TOKENS, byte_tokenizer
from deepinfer_ray.toy.words import PIECES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", "tiny", seed=3)


def digest(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def preset(name: str, **cuts: int) -> ModelConfig:
    data = preset_config(name, **cuts)  # type: ignore[arg-type]
    data["text_config"]["engram_compressed_vocab_size"] = 100
    return ModelConfig.from_dict(data)


def test_tiny_has_the_counts_of_the_specification(tiny: Path) -> None:
    """spec/model.md §6.1."""
    with Checkpoint.open(tiny, drafter=True, vision=True) as checkpoint:
        specs = expected_tensors(checkpoint.config)
        assert set(checkpoint.names()) == {spec.name for spec in specs}
    text = [spec for spec in specs if spec.component != VISION]
    assert (len(text), sum(s.parameters for s in text), sum(s.nbytes for s in text)) == (
        834,
        9724514,
        9134088,
    )
    assert sum(spec.parameters for spec in specs if spec.component == VISION) == 211200
    assert checkpoint.config.engram.rows == (3252, 3496)


def test_shards_are_split_like_the_release_and_other_readers_accept_them(tiny: Path) -> None:
    index = json.loads((tiny / INDEX_NAME).read_text())
    shards = set(index["weight_map"].values())
    assert shards == {file.name for file in tiny.glob("*.safetensors")}
    assert len(shards) == 16  # vision, embed, 8 layers, head, 3 draft layers, 2 tables
    total = 0
    for shard in shards:
        with safe_open(tiny / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no iterator protocol)
                assert index["weight_map"][name] == shard
                total += file.get_tensor(name).nbytes
    assert total == index["metadata"]["total_size"]


def test_values_follow_the_recipe(tiny: Path) -> None:
    """spec/model.md §6.4, after dequantization."""
    with Checkpoint.open(tiny) as c:
        wq = dequant_fp8_weight(c.read("layers.2.attn.wq_b.weight"), c.read("layers.2.attn.wq_b.scale"))
        w2 = dequant_mxfp4_weight(
            c.read("layers.2.ffn.experts.1.w2.weight"), c.read("layers.2.ffn.experts.1.w2.scale")
        )
        for weight in (wq, w2):
            assert weight.std().item() * weight.shape[1] ** 0.5 == pytest.approx(1, abs=0.05)
        assert c.read("embed.weight").float().std().item() == pytest.approx(1, abs=0.02)
        norm = c.read("layers.0.attn_norm.weight").float()
        assert (norm.mean().item(), norm.std().item()) == pytest.approx((1, 0.1), abs=0.03)
        assert c.read("layers.5.hc_attn_base").tolist() == [
            *(-3, 3, -3, -3),
            *(0, 0, 0, 0),
            *(3, -3, -3, -3, -3, 3, -3, -3, -3, -3, 3, -3, -3, -3, -3, 3),
        ]
        assert not c.read("layers.0.attn.attn_sink").any()
        assert c.read("layers.0.hc_ffn_scale").eq(0.01).all()
        assert not c.read("layers.0.ffn.gate.bias").equal(c.read("layers.0.ffn.gate.bias_vl"))
        assert c.read("layers.1.engram.q_weight").eq(1).all()
        first, second = (c.read(f"layers.2.ffn.experts.{e}.w1.weight") for e in (0, 1))
        assert not first.equal(second)


def test_the_seed_decides_every_byte(tiny: Path, tmp_path: Path) -> None:
    assert digest(make_checkpoint(tmp_path / "same", "tiny", seed=3, workers=1)) == digest(tiny)
    other = digest(make_checkpoint(tmp_path / "other", "tiny", seed=4))
    assert {name for name, value in digest(tiny).items() if other[name] == value} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        INDEX_NAME,
    }


def test_a_tensor_of_many_chunks_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one 32-row block: rows and scale rows must meet without gap or overlap."""
    monkeypatch.setattr("deepinfer_ray.model.synthetic.CHUNK_ELEMENTS", 1)
    path = make_checkpoint(tmp_path / "chunks", "tiny", layers=3, experts=2, engram_rows=100)
    with Checkpoint.open(path) as c:
        weight, scale = c.read("layers.1.engram.wkv.weight"), c.read("layers.1.engram.wkv.scale")
        blocks = dequant_fp8_weight(weight, scale).view(-1, 32, weight.shape[1]).std((1, 2))
        assert (blocks * weight.shape[1] ** 0.5 - 1).abs().max() < 0.1
        assert (c.read("embed.weight").float().view(-1, 32 * 128).std(1) - 1).abs().max() < 0.1


def test_tokenizer_and_config_belong_together(tiny: Path) -> None:
    config = ModelConfig.load(tiny)
    ids = checked_compressed_ids(tiny, config.text.engram_compressed_vocab_size)
    assert len(ids) == config.text.vocab_size
    assert ids[:3].tolist() == [0, 1, 2]
    assert config.text.engram_compressed_vocab_size < config.text.vocab_size  # letter case falls together


@pytest.mark.parametrize(
    "text", ["plain text", "héllo", "世界", "👩‍🚀", "a\u0301\n\t ", "\x00\x7f", "<think>x</think>"]
)
def test_text_survives_encoding(tiny: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "<" not in text:
        assert len(ids) == len(text.encode())


def test_special_tokens_are_spelled_and_placed_as_the_config_says(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    names = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        "<｜System｜>",
        "<｜deepseek_image｜>",
    ]
    assert [tokenizer.token_to_id(name) for name in names] == [0, 1, 2, 499, 500]
    for name in CONTROL_TOKENS:
        assert tokenizer.encode(f"a{name}b", add_special_tokens=False).ids[1] == tokenizer.token_to_id(name)
    # Decoding for the parser keeps what marks reasoning and tool calls, and drops BOS and EOS.
    ids = tokenizer.encode("<｜end▁of▁sentence｜></think>｜DSML｜<｜User｜>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "</think>｜DSML｜<｜User｜>"
    assert json.loads((tiny / "tokenizer_config.json").read_text())["add_bos_token"] is False


def test_ids_that_no_text_encodes_to_are_words_and_then_placeholders(tiny: Path) -> None:
    assert len(set(PIECES)) == len(PIECES)
    small, large = Tokenizer.from_file(str(tiny / "tokenizer.json")), byte_tokenizer(1024, 1000, None)
    assert [small.decode([token]) for token in range(259, 262)] == [" the", " of", " and"]
    assert not [token for token in range(512) if "holder" in small.decode([token])]
    first, last = 259 + len(PIECES) - 1, 259 + len(PIECES)
    assert [large.decode([token]) for token in (first, last)] == ["ward", f"<｜place▁holder▁no▁{last}｜>"]
    assert len(small.encode(" the thing", add_special_tokens=False).ids) == 10


def test_the_chat_encoder_accepts_the_tokenizer(tiny: Path) -> None:
    tokenizer = RecipeTokenizer.from_file(str(tiny / "tokenizer.json"))
    DeepseekV41Encoding().with_tokenizer(tokenizer)


def test_the_real_vocabulary_has_the_control_tokens_at_their_real_ids() -> None:
    tokenizer = byte_tokenizer(129280, 128799, 129264)
    assert tokenizer.get_vocab_size() == 129280
    assert {name: tokenizer.token_to_id(name) for name in CONTROL_TOKENS} == CONTROL_TOKENS
    assert tokenizer.encode("<think>é", add_special_tokens=False).ids[0] == 128821
    with pytest.raises(ConfigError, match="vocab_size = 280: a byte-level tokenizer with all control tokens"):
        byte_tokenizer(280, 270, None)


def test_tiny_gpu_breaks_no_kernel_rule() -> None:
    config = preset("tiny-gpu")
    assert gpu_capability_problems(config) == []
    specs = [spec for spec in expected_tensors(config) if spec.component != VISION]
    assert 170e6 < sum(spec.parameters for spec in specs) < 190e6


def test_slice_has_real_dimensions_in_at_most_12_gb() -> None:
    config = preset("slice")
    released = ModelConfig.load(Path(__file__).parents[2] / "configs/models/deepseek-v4.1-flash")
    cut = {
        "num_hidden_layers",
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "index_k_source_layer_ids",
        "candidate_source_layer_id",
        "n_routed_experts",
        "dspark_n_routed_experts",
        "dspark_target_layer_ids",
        "engram_layer_ids",
        "engram_num_embeddings",
        "engram_vocab_size",
        "engram_compressed_vocab_size",
    }
    assert config.text.model_dump(exclude=cut) == released.text.model_dump(exclude=cut)
    assert config.vision == released.vision
    assert gpu_capability_problems(config) == []
    assert 8e9 < sum(spec.nbytes for spec in expected_tensors(config)) <= 12e9


@pytest.mark.parametrize("layers", [3, 4, 5, 6, 8, 9, 10, 14, 20, 40, 41])
def test_any_number_of_layers_has_every_role(layers: int) -> None:
    topology = preset("slice", layers=layers).topology
    assert topology.num_layers == layers
    assert topology.ratios == (1, 2)
    assert topology.candidate_source == topology.n_prefill_layer
    assert any(layer.engram is not None for layer in topology.backbone)
    if layers >= 4:
        assert any(layer.reads_candidates for layer in topology.backbone)


@pytest.mark.parametrize("rows", [6000, 10_000, 123_457, 1_000_000])
def test_engram_rows_are_near_the_wanted_number(rows: int) -> None:
    assert rows * 0.9 < max(preset("slice", engram_rows=rows).engram.rows) <= rows


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ({"layers": 2}, "--layers 2: at least 3"),
        ({"experts": 0}, "--experts 0: must be positive"),
        ({"engram_rows": 5}, "--engram-rows 5: at least "),
    ],
)
def test_impossible_cuts_are_config_errors(tmp_path: Path, cuts: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_checkpoint(tmp_path / "x", "tiny", **cuts)
    assert list(tmp_path.iterdir()) == []


def test_only_a_new_or_empty_directory_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "empty", "tiny", layers=3, experts=2, engram_rows=100)
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        make_checkpoint(tmp_path / "empty", "tiny")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        make_checkpoint(tmp_path / "file", "tiny")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[tuple[memoryview, int]]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepinfer_ray.model.synthetic.chunk_bytes", fail)
    with pytest.raises(Exception, match="No space left on device") as caught:
        make_checkpoint(tmp_path / "x", "tiny")
    assert type(caught.value).__name__ == "OutputError"
    assert list(tmp_path.iterdir()) == []


def test_shipped_prompts() -> None:
    table = pq.read_table(prompts_path())
    assert table.column_names == ["id", "prompt"]
    assert table.num_rows == 48
    assert len(set(table["id"].to_pylist())) == 48
    assert all(table["prompt"].to_pylist())
    assert prompts_path().stat().st_size < 100_000


def test_values_are_finite(tiny: Path) -> None:
    with Checkpoint.open(tiny) as c:
        for name in c.names():
            tensor = c.read(name)
            if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32):
                assert tensor.float().isfinite().all(), name
