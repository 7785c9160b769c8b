"""Reading checkpoints: bytes equal to the stored ones, only what is asked for, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.model.checkpoint import INDEX_NAME, Checkpoint
from deepinfer_ray.model.engram_ids import checked_compressed_ids, compressed_ids, load_tokenizer
from deepinfer_ray.model.synthetic import make_checkpoint

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


@pytest.mark.parametrize("name", ["tinyA", "tinyB", "tinyV"])
def test_every_golden_tensor_is_read_as_stored(name: str) -> None:
    stored = load_file(GOLDEN / name / "model.safetensors")
    with Checkpoint.open(GOLDEN / name, drafter=True, vision=True) as checkpoint:
        assert set(checkpoint.names()) == set(stored)
        assert all(same_bytes(checkpoint.read(tensor), stored[tensor]) for tensor in stored)


def test_rows_experts_and_table_shares() -> None:
    stored = load_file(GOLDEN / "tinyB" / "model.safetensors")
    with Checkpoint.open(GOLDEN / "tinyB") as checkpoint:
        assert same_bytes(checkpoint.read_rows("embed.weight", 7, 19), stored["embed.weight"][7:19])
        experts = checkpoint.read_experts("layers.3", [4, 1, 4])
        for place, expert in enumerate([4, 1, 4]):
            prefix = f"layers.3.ffn.experts.{expert}"
            gate_up = torch.cat([stored[f"{prefix}.w1.weight"], stored[f"{prefix}.w3.weight"]])
            scales = [stored[f"{prefix}.{w}.scale"].view(torch.uint8) for w in ("w1", "w3")]
            assert same_bytes(experts.w13[place], gate_up)
            assert experts.w13_scale[place].view(torch.uint8).equal(torch.cat(scales))
            assert same_bytes(experts.w2[place], stored[f"{prefix}.w2.weight"])
            assert same_bytes(experts.w2_scale[place], stored[f"{prefix}.w2.scale"])
        weight, scale = checkpoint.read_engram_rows(1, 256, 320)
        assert same_bytes(weight[:48], stored["layers.1.engram.embed.weight"][256:])
        assert same_bytes(scale[:48], stored["layers.1.engram.embed.scale"][256:])
        assert not weight[48:].view(torch.uint8).any()
        assert scale[48:].float().eq(1).all()


@pytest.mark.parametrize(
    ("index_prefix", "shard_prefix"), [("model.", ""), ("", "model."), ("model.", "model.")]
)
def test_the_prefix_model_is_optional_on_either_side(
    tmp_path: Path, index_prefix: str, shard_prefix: str
) -> None:
    stored = load_file(GOLDEN / "tinyB" / "model.safetensors")
    save_file({shard_prefix + name: tensor for name, tensor in stored.items()}, tmp_path / "x.safetensors")
    weight_map = {index_prefix + name: "x.safetensors" for name in stored}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((GOLDEN / "tinyB" / "config.json").read_bytes())
    with Checkpoint.open(tmp_path, drafter=True) as checkpoint:
        assert "layers.0.attn.attn_sink" in checkpoint
        assert same_bytes(checkpoint.read("norm.weight"), stored["norm.weight"])


def test_unknown_tensors_are_ignored(tmp_path: Path) -> None:
    stored = load_file(GOLDEN / "tinyB" / "model.safetensors")
    stored["mtp.0.embed.weight"] = torch.zeros(2, dtype=torch.float64)
    save_file(stored, tmp_path / "x.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(stored, "x.safetensors")}))
    (tmp_path / "config.json").write_bytes((GOLDEN / "tinyB" / "config.json").read_bytes())
    Checkpoint.open(tmp_path, drafter=True).close()


MEASURE = """
import sys
import torch
from deepinfer_ray.model.checkpoint import Checkpoint

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

before = peak()
kept = []
with Checkpoint.open(sys.argv[1], drafter=True, vision=True) as checkpoint:
    for layer in range(checkpoint.config.topology.num_layers):
        kept.extend(checkpoint.read_experts(f"layers.{layer}", [0, 1, 2, 3]))
    for name in checkpoint.names():
        if ".experts." not in name and ".engram.embed." not in name:
            kept.append(checkpoint.read(name))
    rows = checkpoint.config.engram.rows[0]
    kept.extend(checkpoint.read_engram_rows(1, 0, rows // 2))
print(peak() - before, sum(tensor.nbytes for tensor in kept))
"""


def test_peak_memory_is_what_is_kept_and_little_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that keeps half the experts and half of one table. The limit is 256 MiB above what is kept."""
    # Values do not matter here: files of zeros that take no disk and no time.
    monkeypatch.setattr("deepinfer_ray.model.synthetic.chunk_bytes", lambda *_: [])
    make_checkpoint(tmp_path / "big", "tiny-gpu", engram_rows=1_500_000)
    size = sum(file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors"))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "big")]
    output = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    growth, kept = map(int, output.split())
    assert size > 500 * 2**20
    assert 200 * 2**20 < kept < size * 0.6
    assert growth <= kept + 64 * 2**20


def test_compressed_ids_are_the_golden_ones() -> None:
    for name in ("tinyA", "tinyB"):
        golden = load_file(GOLDEN / name / "expected_exact.safetensors")["engram.token_map"]
        ids = checked_compressed_ids(GOLDEN / name, 103)
        assert ids.tolist() == golden.tolist()
        assert compressed_ids(load_tokenizer(GOLDEN / name / "tokenizer.json")).tolist() == ids.tolist()


def test_a_tokenizer_of_another_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"103 compressed ids, but config.json says .* = 104"):
        checked_compressed_ids(GOLDEN / "tinyA", 104)


@pytest.mark.parametrize(("content", "text"), [(None, "no such file"), ("{}", "is not a usable tokenizer")])
def test_a_bad_tokenizer_file_is_a_checkpoint_error(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=text):
        load_tokenizer(tmp_path)
