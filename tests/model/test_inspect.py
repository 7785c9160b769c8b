"""`inspect`: the released accounting to the byte, problems of real directories, the command's output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from deepinfer_ray.cli.inspect_cmd import inspect
from deepinfer_ray.cli.make_checkpoint import make_checkpoint
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.model.inspect import inspect_checkpoint, packed_scale_growth
from deepinfer_ray.model.tensors import expected_tensors, shard_group
from deepinfer_ray.parallel.expert_map import physical_experts

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "configs" / "models" / "deepseek-v4.1-flash"
GOLDEN = ROOT / "tests" / "data" / "golden"
GIB = 2**30


@pytest.fixture(scope="module")
def released() -> dict[str, Any]:
    return inspect_checkpoint(RELEASED)


def test_the_released_config_enumerates_to_the_published_totals(released: dict[str, Any]) -> None:
    assert released["tensors"] == 96_085
    assert released["bytes"] == 510_286_023_000
    assert released["parameters"] == 763_205_315_794
    assert released["problems"] == []


def test_components_of_the_release(released: dict[str, Any]) -> None:
    """spec/model.md §5."""
    rows = {row["name"]: (row["tensors"], row["parameters"], row["bytes"]) for row in released["components"]}
    assert rows == {
        "Routed experts": (92_160, 543_581_798_400, 288_777_830_400),
        "Shared experts": (240, 1_415_577_600, 1_416_960_000),
        "Attention": (520, 5_064_696_320, 5_069_721_600),
        "Indexer + compressor": (43, 61_868_544, 81_835_008),
        "Router gates": (120, 78_673_920, 157_409_280),
        "mHC": (240, 39_323_760, 157_295_040),
        "Layer norms + final norm": (81, 414_720, 829_440),
        "Embedding": (1, 661_913_600, 1_323_827_200),
        "Head": (1, 661_913_600, 1_323_827_200),
        "Engram tables": (4, 196_613_849_600, 202_758_032_400),
        "Engram projections": (8, 314_654_720, 315_043_840),
        "DSpark experts": (2_304, 13_589_544_960, 7_219_445_760),
        "DSpark other": (97, 635_817_570, 713_428_872),
        "Vision + aligner + image vectors": (266, 485_268_480, 970_536_960),
    }


@pytest.mark.parametrize(
    ("ep", "experts", "routed", "draft", "device", "share"),
    [
        (1, (384, 128), 268.95, 6.72, 286.62, 188.83),
        (2, (192, 64), 134.47, 3.36, 148.78, 94.42),
        (4, (96, 32), 67.24, 1.68, 79.86, 47.21),
        (8, (48, 16), 33.62, 0.84, 45.41, 23.60),
        (16, (24, 8), 16.81, 0.42, 28.18, 11.80),
        (32, (12, 4), 8.40, 0.21, 19.56, 5.90),
        (48, (8, 3), 5.60, 0.16, 16.71, 3.93),
        (64, (6, 2), 4.20, 0.11, 15.25, 2.95),
    ],
)
def test_bytes_of_a_rank(
    released: dict[str, Any],
    ep: int,
    experts: tuple[int, int],
    routed: float,
    draft: float,
    device: float,
    share: float,
) -> None:
    """spec/model.md §5, second table."""
    rows = [row for row in released["ranks"] if row["ep"] == ep]
    assert [row["rank"] for row in rows] == list(range(ep))
    for row in rows:
        assert (row["experts"], row["draft_experts"]) == experts
        for part, wanted in (
            ("routed_bytes", routed),
            ("draft_routed_bytes", draft),
            ("replicated_bytes", 10.95),
            ("bytes", device),
            ("engram_bytes", share),
        ):
            assert row[part] / GIB == pytest.approx(wanted, abs=0.0051)


def test_packed_scales_add_what_the_specification_says() -> None:
    assert packed_scale_growth(expected_tensors(ModelConfig.load(RELEASED))) == 224_065_024


def test_physical_experts() -> None:
    """spec/model.md §2.6."""
    assert [physical_experts(384, ep) for ep in (1, 8, 48, 5)] == [384, 384, 384, 385]
    assert physical_experts(128, 48) == 144
    assert physical_experts(384, 8, requested=3) == 392


def test_the_release_has_48_shards() -> None:
    groups = {shard_group(spec.name) for spec in expected_tensors(ModelConfig.load(RELEASED))}
    assert len(groups) == 48
    assert {"vision", "embed", "layers.0", "head", "mtp.2", "engram.14"} <= groups


@pytest.mark.parametrize("name", ["tinyA", "tinyB", "tinyV"])
def test_golden_checkpoints_have_no_problem(name: str) -> None:
    report = inspect_checkpoint(GOLDEN / name)
    assert report["problems"] == []
    index = json.loads((GOLDEN / name / "model.safetensors.index.json").read_text())
    assert report["tensors"] == len(index["weight_map"])


def test_problems_are_listed_together(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tinyB", tmp_path / "c", ignore=shutil.ignore_patterns("expected_*"))
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["text_config"] |= {"n_routed_experts": 7, "engram_compressed_vocab_size": 104, "vocab_size": 600}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    problems = "\n".join(inspect_checkpoint(tmp_path / "c")["problems"])
    assert "layers.0.ffn.experts: 1 of 7 experts incomplete or missing: 6" in problems
    assert "embed.weight is BF16 [512, 64], the model needs BF16 [600, 64]" in problems
    assert "103 compressed ids, but config.json says engram_compressed_vocab_size = 104" in problems


def test_a_directory_without_index_but_with_shards_is_a_problem(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "tinyB" / "config.json", tmp_path)
    assert inspect_checkpoint(tmp_path)["problems"] == []
    shutil.copy(GOLDEN / "tinyB" / "model.safetensors", tmp_path)
    problems = inspect_checkpoint(tmp_path)["problems"]
    assert any("a checkpoint needs its index" in problem for problem in problems)
    assert any("must hold tokenizer.json" in problem for problem in problems)


@pytest.fixture(scope="module")
def app() -> Typer:
    app = Typer()
    app.command()(inspect)
    app.command()(make_checkpoint)
    return app


@pytest.mark.parametrize("form", [[], ["--model"]])
def test_json_has_the_fixed_shape(app: Typer, form: list[str]) -> None:
    result = CliRunner().invoke(app, ["inspect", *form, str(RELEASED / "config.json"), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {"tensors", "bytes", "parameters", "components", "ranks", "problems"} <= set(report)
    assert {"name", "tensors", "parameters", "bytes"} <= set(report["components"][0])
    assert {"ep", "rank", "bytes"} <= set(report["ranks"][0])


def test_tables_for_people(app: Typer) -> None:
    result = CliRunner().invoke(app, ["inspect", str(GOLDEN / "tinyB")], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "holds 719 tensors" in " ".join(result.stdout.split())
    assert "Routed experts" in result.stdout
    assert "CPU only: text_config.head_dim = 64" in result.stdout


def test_problems_fail_the_command(app: Typer, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tinyB", tmp_path / "c", ignore=shutil.ignore_patterns("expected_*"))
    (tmp_path / "c" / "tokenizer.json").unlink()
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "c"), "--json"])
    assert isinstance(result.exception, CheckpointError)
    assert result.exception.exit_code == 2
    assert len(json.loads(result.stdout)["problems"]) == 1


def test_make_checkpoint_then_inspect(app: Typer, tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    cuts = ["--layers", "3", "--experts", "2", "--engram-rows", "100"]
    arguments = ["make-checkpoint", "--preset", "tiny", "--out", out, "--seed", "7", *cuts]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == out
    assert inspect_checkpoint(out)["problems"] == []
