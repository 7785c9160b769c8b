"""Damaged and mistaken checkpoints: each gives its own error, in the order of spec/model.md §2.5."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ray.errors import CheckpointError, ConfigError, DeepInferError
from deepinfer_ray.model.checkpoint import INDEX_NAME, Checkpoint
from deepinfer_ray.model.synthetic import make_checkpoint

Break = Callable[["Damage"], None]


class Damage:
    """A copy of a good checkpoint and the ways to spoil it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shard_of(self, name: str) -> Path:
        return self.path / self.index()["weight_map"][name]

    def index(self) -> dict[str, Any]:
        return json.loads((self.path / INDEX_NAME).read_text())

    def edit_index(self, edit: Callable[[dict[str, str]], object]) -> None:
        index = self.index()
        edit(index["weight_map"])
        (self.path / INDEX_NAME).write_text(json.dumps(index))

    def edit_config(self, key: str, value: object) -> None:
        config = json.loads((self.path / "config.json").read_text())
        config["text_config"][key] = value
        (self.path / "config.json").write_text(json.dumps(config))

    def edit_header(self, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
        """Change the header of the shard that holds `name`; data stay where they are."""
        shard = self.shard_of(name)
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        self.put_header(shard, json.dumps(header).encode(), raw[8 + length :])

    @staticmethod
    def put_header(shard: Path, header: bytes, data: bytes) -> None:
        shard.write_bytes(len(header).to_bytes(8, "little") + header + data)

    def remove(self, *names: str) -> None:
        """Take tensors out of index and headers, as if they had never been stored."""
        for name in names:
            self.edit_header(name, lambda header, name=name: header.pop(name))
            self.edit_index(lambda weights, name=name: weights.pop(name))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("good") / "checkpoint"
    return make_checkpoint(out, "tiny", seed=5, layers=3, experts=3, engram_rows=100, workers=1)


@pytest.fixture
def damage(good: Path, tmp_path: Path) -> Damage:
    return Damage(Path(shutil.copytree(good, tmp_path / "checkpoint")))


SINK = "layers.0.attn.attn_sink"
WQ = "layers.0.attn.wq_a.weight"
W1 = "layers.1.ffn.experts.1.w1.weight"
TABLE = "layers.1.engram.embed.weight"


def _entry(name: str, key: str, value: object) -> Break:
    return lambda damage: damage.edit_header(name, lambda header: header[name].__setitem__(key, value))


def _all_wrong(damage: Damage) -> None:
    def edit(header: dict[str, Any]) -> None:
        for name, entry in header.items():
            if name != "__metadata__":
                entry["dtype"] = {"BF16": "F16", "I8": "U8", "F32": "I32"}.get(entry["dtype"], "U8")

    damage.edit_header(SINK, edit)


def _rename_in_shard(damage: Damage, old: str, new: str) -> None:
    damage.edit_header(old, lambda header: header.__setitem__(new, header.pop(old)))


CASES: list[tuple[str, Break, str]] = [
    ("no index", lambda d: (d.path / INDEX_NAME).unlink(), "no such file; a checkpoint needs its index"),
    ("index not json", lambda d: (d.path / INDEX_NAME).write_text("{"), "is not valid JSON"),
    ("index not utf-8", lambda d: (d.path / INDEX_NAME).write_bytes(b"\xff\xff"), "is not valid JSON"),
    ("index a list", lambda d: (d.path / INDEX_NAME).write_text("[]"), "holds no weight_map"),
    ("index empty", lambda d: d.edit_index(dict.clear), "holds no weight_map"),
    ("index nests", lambda d: (d.path / INDEX_NAME).write_text("[" * 99_999), "is not valid JSON"),
    ("index value", lambda d: d.edit_index(lambda w: w.__setitem__(WQ, 7)), "which is not a file name"),
    (
        "index leaves",
        lambda d: d.edit_index(lambda w: w.__setitem__(WQ, "../x")),
        "'../x', which is not a file name",
    ),
    (
        "shard gone",
        lambda d: d.shard_of(WQ).unlink(),
        "1 of 10 shards are missing: model-00003-of-00010.safetensors",
    ),
    (
        "shard a directory",
        lambda d: (d.shard_of(WQ).unlink(), d.shard_of(WQ).mkdir()),
        "1 of 10 shards are missing",
    ),
    (
        "norm not folded",
        lambda d: d.edit_index(lambda w: w.__setitem__("layers.0.hc_attn_norm.weight", w[WQ])),
        "layers.0.hc_attn_norm.weight: the norm weight must be folded into hc_*_fn",
    ),
    (
        "head norm not folded",
        lambda d: d.edit_index(lambda w: w.__setitem__("hc_head_norm.weight", w[WQ])),
        "hc_head_norm.weight: the norm weight must be folded",
    ),
    (
        "both names in the index",
        lambda d: d.edit_index(lambda w: w.__setitem__("model." + WQ, w[WQ])),
        f"holds both {WQ} and model.{WQ}, which are the same tensor",
    ),
    (
        "both names in a shard",
        lambda d: d.edit_header(WQ, lambda h: h.__setitem__("model." + WQ, h[WQ])),
        f"holds both {WQ} and model.{WQ}",
    ),
    ("shard empty", lambda d: d.shard_of(WQ).write_bytes(b""), "too short for a safetensors header"),
    ("shard short", lambda d: d.shard_of(WQ).write_bytes(b"1234567"), "holds 7 bytes"),
    (
        "header length 0",
        lambda d: d.shard_of(WQ).write_bytes(bytes(64)),
        "header length 0 is outside [1, 56]",
    ),
    (
        "header longer than file",
        lambda d: d.shard_of(WQ).write_bytes((1000).to_bytes(8, "little") + b"{}"),
        "header length 1000 is outside [1, 2]",
    ),
    (
        "header longer than allowed",
        lambda d: os.truncate(d.shard_of(WQ), 8) or d.shard_of(WQ).write_bytes(b"\xff" * 8 + b"{}"),
        "header length 18446744073709551615 is outside",
    ),
    (
        "header of the wrong kind",
        lambda d: d.put_header(d.shard_of(WQ), b"[]", b""),
        "the header is not a JSON object",
    ),
    (
        "header not json",
        lambda d: d.put_header(d.shard_of(WQ), b"{'a'}", b""),
        "the header is not valid JSON",
    ),
    (
        "header key twice",
        lambda d: d.put_header(d.shard_of(WQ), b'{"a":1,"a":2}', b""),
        "the key 'a' occurs twice",
    ),
    ("an html page", lambda d: d.shard_of(WQ).write_bytes(b"<html>Not found</html>"), "no safetensors file"),
    (
        "entry no object",
        lambda d: d.edit_header(WQ, lambda h: h.__setitem__(WQ, 3)),
        "header entry is not an object",
    ),
    ("dtype no text", _entry(WQ, "dtype", 3), "dtype 3 is not a text"),
    ("shape negative", _entry(WQ, "shape", [-128, -128]), "shape [-128, -128] is not a list of sizes"),
    ("shape no list", _entry(WQ, "shape", None), "shape None is not a list of sizes"),
    ("one offset", _entry(WQ, "data_offsets", [0]), "data_offsets [0] are not two integers"),
    ("offsets swapped", _entry(WQ, "data_offsets", [16384, 0]), "data_offsets [16384, 0] lie outside"),
    ("offset negative", _entry(WQ, "data_offsets", [-1, 16383]), "lie outside the file's"),
    ("offsets past the end", _entry(WQ, "data_offsets", [10**12, 10**12 + 16384]), "lie outside the file's"),
    (
        "bytes do not fit",
        _entry(WQ, "data_offsets", [0, 100]),
        "hold 100 bytes, but F8_E4M3 [128, 128] needs 16384",
    ),
    (
        "truncated file",
        lambda d: os.truncate(d.shard_of(WQ), d.shard_of(WQ).stat().st_size - 1),
        "lie outside the file's",
    ),
    (
        "in the index only",
        lambda d: d.edit_header(WQ, lambda h: h.pop(WQ)),
        f"{WQ} (model-00003-of-00010.safetensors) in the index but not in the shard that it names",
    ),
    (
        "many in the index only",
        lambda d: d.edit_header(SINK, lambda h: h.clear()),
        "and 38 more (48 tensors) in the index but not in the shard",
    ),
    (
        "index names another shard",
        lambda d: d.edit_index(lambda w: w.__setitem__(WQ, w["embed.weight"])),
        f"{WQ} (model-00002-of-00010.safetensors) in the index but not in the shard",
    ),
    (
        "plain tensor gone",
        lambda d: d.remove("norm.weight"),
        "the checkpoint is incomplete: missing norm.weight",
    ),
    ("scale gone", lambda d: d.remove("layers.0.attn.wq_a.scale"), "missing layers.0.attn.wq_a.scale"),
    ("two gone", lambda d: d.remove("head.weight", SINK), f"missing {SINK}, head.weight"),
    ("bias_vl gone", lambda d: d.remove("layers.0.ffn.gate.bias_vl"), "missing layers.0.ffn.gate.bias_vl"),
    ("table gone", lambda d: d.remove(TABLE), f"missing {TABLE}"),
    ("draft gone", lambda d: d.remove("mtp.2.norm.weight"), "missing mtp.2.norm.weight"),
    ("tower gone", lambda d: d.remove("image_end"), "missing image_end"),
    (
        "half an expert",
        lambda d: d.remove(W1, "layers.1.ffn.experts.1.w2.scale"),
        "layers.1.ffn.experts: 1 of 3 experts incomplete or missing: 1 (w1.weight w2.scale)",
    ),
    (
        "too few experts",
        lambda d: d.edit_config("n_routed_experts", 4),
        "layers.0.ffn.experts: 1 of 4 experts incomplete or missing: 3 (w1.weight w1.scale",
    ),
    (
        "too many experts",
        lambda d: d.edit_config("n_routed_experts", 2),
        "layers.2.ffn.experts: holds experts [2], but config.json says 2",
    ),
    (
        "sink bf16",
        lambda d: (_entry(SINK, "dtype", "BF16")(d), _entry(SINK, "shape", [16])(d)),
        "BF16 [16], the model needs F32 [8]",
    ),
    ("same bytes, other dtype", _entry(WQ, "dtype", "U8"), f"{WQ} is U8 [128, 128], the model needs F8_E4M3"),
    (
        "unknown dtype",
        _entry(WQ, "dtype", "F4"),
        f"{WQ} is F4 [128, 128], the model needs F8_E4M3 [128, 128]",
    ),
    (
        "transposed",
        _entry("layers.0.attn.wo_b.weight", "shape", [64, 256]),
        "is F8_E4M3 [64, 256], the model needs",
    ),
    ("flat", _entry(WQ, "shape", [16384]), "is F8_E4M3 [16384], the model needs F8_E4M3 [128, 128]"),
    ("table rows", _entry(TABLE, "shape", [45, 256]), "the model needs F8_E4M3 [90, 128]"),
    ("all wrong", _all_wrong, "and 38 more (48 tensors); nothing is cast, convert the checkpoint"),
    (
        "no config",
        lambda d: (d.path / "config.json").unlink(),
        "no such file; a checkpoint directory must hold",
    ),
    (
        "wrong width",
        lambda d: d.edit_config("head_dim", 256),
        "kv_norm.weight is BF16 [128], the model needs BF16 [256]",
    ),
    ("config rule", lambda d: d.edit_config("num_key_value_heads", 2), "num_key_value_heads = 2: only 1"),
]


@pytest.mark.parametrize(("spoil", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_damage_has_its_own_error(damage: Damage, spoil: Break, text: str) -> None:
    Checkpoint.open(damage.path, drafter=True, vision=True).close()
    spoil(damage)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Checkpoint.open(damage.path, drafter=True, vision=True)
    message = str(caught.value)
    assert text in message
    assert str(damage.path) in message
    assert caught.value.__cause__ is None, "the text of another library would be shown as the cause"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is not a directory; give the directory that holds config\.json"
    ):
        Checkpoint.open(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["mtp.2.norm.weight", "image_end", "vision.norm.weight"])
def test_a_text_run_needs_neither_drafter_nor_tower(damage: Damage, name: str) -> None:
    damage.remove(name)
    Checkpoint.open(damage.path).close()


def test_a_stored_but_unused_tensor_of_the_wrong_kind_is_still_an_error(damage: Damage) -> None:
    _entry("mtp.2.norm.weight", "dtype", "F16")(damage)
    with pytest.raises(CheckpointError, match=r"mtp\.2\.norm\.weight is F16"):
        Checkpoint.open(damage.path)


def test_a_file_that_shrinks_after_opening(damage: Damage) -> None:
    with Checkpoint.open(damage.path) as checkpoint:
        shard = checkpoint.shard_path(WQ)
        os.truncate(shard, checkpoint.entry(WQ).begin + 100)
        with pytest.raises(CheckpointError, match=r"attn\.wq_a\.weight ends after 100 of 16384 bytes"):
            checkpoint.read(WQ)


def test_a_file_that_vanishes_after_opening(damage: Damage) -> None:
    with Checkpoint.open(damage.path) as checkpoint:
        checkpoint.shard_path(WQ).unlink()
        with pytest.raises(CheckpointError, match="cannot be opened"):
            checkpoint.read(WQ)


def test_loading_that_takes_too_long_is_given_up(good: Path) -> None:
    now = [0.0]
    with Checkpoint.open(good) as checkpoint:
        with checkpoint.loading(limit_s=1800, clock=lambda: now[0]):
            checkpoint.read(WQ)
            now[0] = 1801.0
            with pytest.raises(CheckpointError, match="loading takes longer than 1800 s"):
                checkpoint.read(WQ)
        checkpoint.read(WQ)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda c: c.read("layers.9.attn.attn_sink"), "holds no tensor layers.9.attn.attn_sink"),
        (lambda c: c.read_rows(WQ, 0, 129), r"rows \[0, 129\) are outside its shape \[128, 128\]"),
        (lambda c: c.read_rows(WQ, -1, 3), r"rows \[-1, 3\)"),
        (lambda c: c.read_experts("layers.1", [3]), "holds no tensor layers.1.ffn.experts.3.w1.weight"),
        (lambda c: c.read_engram_rows(1, 90, 96), "start outside its 90 rows"),
        (lambda c: c.read_engram_rows(0, 0, 1), "holds no tensor layers.0.engram"),
        (lambda c: c.read_rows_into(WQ, 0, c.read(SINK)), "it cannot fill rows of torch.float32"),
    ],
)
def test_reading_what_is_not_there(good: Path, read: Callable[[Checkpoint], object], text: str) -> None:
    with Checkpoint.open(good) as checkpoint, pytest.raises(DeepInferError, match=text):
        read(checkpoint)
