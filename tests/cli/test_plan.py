"""A look before a run: exact counts, the fit, placement on invented clusters, time, what forbids a start."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.cli.generate import generate
from deepinfer_ray.cli.main import app
from deepinfer_ray.cli.plan import plan
from deepinfer_ray.config.load import load_config
from deepinfer_ray.errors import ConfigError, InputError
from deepinfer_ray.fleet.topology import GPU_DOMAIN_LABEL, Node
from deepinfer_ray.job.forecast import forecast
from deepinfer_ray.job.survey import Lengths
from deepinfer_ray.model.synthetic import make_checkpoint
from deepinfer_ray.toy import prompts_path

RELEASED = Path(__file__).parents[2] / "configs/models/deepseek-v4.1-flash"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "tiny"))


@pytest.fixture
def look(model, monkeypatch):
    """look(flags…, nodes=None) → the findings."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(nodes=None, tokens_per_second=None, sets=(), **flags):
        options = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        config = load_config((), sets, {"--model": model, **options}, {})
        cluster = None if nodes is None else ("10.0.0.1:6379", nodes)
        return forecast(config, lambda text: None, nodes=cluster, tokens_per_second=tokens_per_second)

    return run


def node(number, gpus=8, domain=None):
    resources = {"CPU": 64.0, "GPU": float(gpus)}
    labels = {GPU_DOMAIN_LABEL: domain} if domain else {}
    return Node(f"{number:032x}", f"10.0.0.{number}", resources, resources, labels)


def test_exact_counts_of_the_shipped_prompts(look, model):
    found = look(input=[str(prompts_path())], id_column="id", max_tokens=32, device="cpu")
    texts = pq.read_table(prompts_path())["prompt"].to_pylist()
    encoder = TextEncoder.load(model, bos_id=0)
    lengths = sorted(len(encoder.encode_prompt(text)) for text in texts)
    tokens = found["prompt_tokens"]
    assert (found["rows"], found["bad_rows"], found["files"], found["parts"]) == (len(texts), 0, 1, 1)
    assert tokens["total"] == sum(lengths)
    assert (tokens["min"], tokens["max"]) == (lengths[0], lengths[-1])
    assert tokens["median"] == lengths[(len(lengths) - 1) // 2]
    assert sum(bucket["rows"] for bucket in tokens["histogram"]) == len(texts)
    for bucket in tokens["histogram"]:
        assert bucket["rows"] == sum(bucket["from"] <= length <= bucket["to"] for length in lengths)
    assert found["max_completion_tokens"] == 32 * len(texts)
    first = found["first_prompt"]
    assert first["text"] == "<｜begin▁of▁sentence｜>" + texts[0]
    assert first["tokens"] == len(encoder.encode_prompt(texts[0]))
    assert found["problems"] == []


def test_bad_rows_are_counted_with_an_example(look, tmp_path):
    prompts = ["a", None, "", "b" * 90, None]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    found = look(
        input=[str(tmp_path)], max_model_len=64, max_tokens=60, device="cpu", sets=["job.rows_per_part=2"]
    )
    assert (found["rows"], found["bad_rows"], found["parts"]) == (5, 4, 3)
    assert {code: error["rows"] for code, error in found["errors"].items()} == {
        "null_prompt": 2,
        "empty_prompt": 1,
        "prompt_too_long": 1,
    }
    assert found["errors"]["null_prompt"]["row_id"] == "in.parquet#0:1"
    assert "91 tokens, the context takes 64" in found["errors"]["prompt_too_long"]["message"]
    assert found["prompt_tokens"]["total"] == 2
    assert found["max_completion_tokens"] == 60
    assert found["first_prompt"]["row_id"] == "in.parquet#0:0"


def test_chats_are_shown_as_the_model_sees_them(look, tmp_path):
    pq.write_table(
        pa.table({"chat": [[{"role": "user", "content": "hi <｜User｜>"}]]}), tmp_path / "in.parquet"
    )
    found = look(input=[str(tmp_path)], messages_column="chat", device="cpu")
    text = found["first_prompt"]["text"]
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: ")
    assert text.endswith("<｜User｜>hi <｜User｜><｜Assistant｜><think>")


def test_what_forbids_a_job_forbids_its_plan(look, model, tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b"], "id": ["x", "x"]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="the id 'x' of column id occurs twice"):
        look(input=[str(tmp_path)], id_column="id", device="cpu")
    with pytest.raises(InputError, match="has no column text"):
        look(input=[str(tmp_path)], prompt_column="text", device="cpu")
    with pytest.raises(ConfigError, match="no model: give --model"):
        look(model=None)
    with pytest.raises(ConfigError, match="not divisible by ep = 2"):
        look(dp=3, ep=2)
    with pytest.raises(ConfigError, match="is the model's directory"):
        look(input=[str(tmp_path)], output=model)
    with pytest.raises(ConfigError, match="lies inside the input"):
        look(input=[str(tmp_path)], output=str(tmp_path / "out"))
    for speed in (0.0, -5.0):
        with pytest.raises(ConfigError, match=f"--tokens-per-second {speed:g}: a speed is greater than 0"):
            look(tokens_per_second=speed)


def test_nothing_is_written_and_what_is_done_is_seen(look, tmp_path):
    pq.write_table(pa.table({"prompt": list("abcdef")}), tmp_path / "in.parquet")
    out = tmp_path / "out"
    options = {"input": [str(tmp_path / "in.parquet")], "output": str(out), "max_tokens": 10, "device": "cpu"}
    found = look(sets=["job.rows_per_part=2"], **options)
    assert not out.exists()
    assert (found["committed_rows"], found["estimate"]["seconds"]) == (0, None)
    assert found["estimate"]["text"].startswith("unknown: no speed was measured (give --tokens-per-second")
    (out / "_deepinfer").mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a", "b"]}), out / "part-000000-0000.parquet")
    (out / "_deepinfer/summary.json").write_text(json.dumps({"tokens_per_second": 2.0}))
    found = look(sets=["job.rows_per_part=2"], **options)
    assert found["committed_rows"] == 2
    assert found["estimate"]["tokens"] == (6 * 2 + 6 * 10) * 4 // 6
    assert found["estimate"]["seconds"] == pytest.approx(24.0)
    assert "the last run into the output" in found["estimate"]["text"]
    found = look(sets=["job.rows_per_part=2"], tokens_per_second=48.0, **options)
    assert found["estimate"]["seconds"] == pytest.approx(1.0)
    assert (
        "at most 1.0 seconds for 48 tokens at 48 tokens/s (--tokens-per-second)" in found["estimate"]["text"]
    )


def test_placement_on_a_cluster(look):
    nodes = [node(1, domain="a"), node(2, domain="b"), node(3, gpus=0)]
    found = look(nodes, dp=16, ep=8, device="cuda", engram=8)
    assert found["grid"]["ranks"] == 16
    placement = found["placement"]
    assert placement["possible"] is True
    assert "2 gangs, each 8 × {CPU: 1, GPU: 1}, STRICT_PACK within one ray.io/gpu-domain" in placement["text"]
    assert [one["ranks_empty"] for one in placement["nodes"]] == [8, 8, 0]
    assert found["problems"] == []
    assert placement["gangs_now"] == 2
    assert "up to" not in placement["text"]
    free = Node("f" * 32, "10.0.0.4", nodes[0].total, {"CPU": 64.0, "GPU": 7.0}, nodes[0].labels)
    text = look([*nodes, free], dp=8, ep=8, device="cuda", max_gangs=5)["placement"]["text"]
    assert "; up to 5 gangs while there is work for them: room for 2 now, for 3 when the machines" in text
    assert "up to 5 gangs of 8 as long as cores" in look(dp=8, ep=8, max_gangs=5)["placement"]["text"]
    with pytest.raises(ConfigError, match="--max-gangs 1 is less than --dp 16 asks for, 2 gangs from the"):
        look(nodes, dp=16, ep=8, engram=8, max_gangs=1)
    found = look(nodes, dp=32, ep=16, device="cuda", engram=16)
    assert found["placement"]["possible"] is False
    (problem,) = found["problems"]
    assert problem.startswith("the cluster cannot hold the ranks:\n  demand: 2 groups of 16 ×")
    assert "10.0.0.3" in problem


def test_the_released_model_on_one_gpu_a_rank(look):
    found = look(model=str(RELEASED), nodes=[node(1)], dp=8, device="cuda")
    (problem,) = found["problems"]
    assert problem.startswith("EP 1 fits on none of H100, H200, B200")
    assert found["rows"] is None
    assert look(model=str(RELEASED), nodes=[node(1)], dp=8, ep=8, device="cuda")["problems"] == []


def test_the_released_model_without_a_gpu(look):
    """Figures of caches would be about a rank that cannot be."""
    found = look(model=str(RELEASED), dp=2, ep=2, device="cpu")
    cpu = found["cpu"]
    assert (cpu["blocks"], cpu["cache_tokens"]) == (0, 0)
    assert cpu["rank_bytes"] == pytest.approx((148.78 + 94.42 + 2) * 2**30, rel=1e-4)
    assert cpu["problem"].startswith(
        "each of 2 ranks takes 245.2 GiB (weights 148.8, Engram 94.4, caches 2.0), this machine has "
    )
    assert found["problems"] == [f"ranks do not fit on a CPU: {cpu['problem']}"]
    found = look(model=str(RELEASED), dp=8, ep=8)  # for machines with GPUs: told, and no problem
    assert (found["cpu"]["blocks"], found["problems"]) == (0, [])
    tiny = look(device="cpu")
    assert tiny["cpu"]["blocks"] > 0
    assert tiny["problems"] == []


def test_a_model_without_tokenizer_still_gets_its_fit(look):
    found = look(model=str(RELEASED), input=[str(prompts_path())], ep=8)
    (problem,) = found["problems"]
    assert problem.startswith("rows cannot be counted in tokens: ")
    assert "tokenizer.json" in problem
    assert len(found["fit"]) == 24


def test_printed_for_people_and_for_machines(model, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["plan", "--model", model, "--input", str(prompts_path()), "--id-column", "id", "--device", "cpu"]
    runner = CliRunner(env={"COLUMNS": "200"})
    shown = runner.invoke(app, [*words, "--tokens-per-second", "1000"])
    assert shown.exit_code == 0, shown.output
    for text in (
        "rows:        48 in 1 file → 1 part",
        "bad rows:    0",
        "prompt tokens: ",
        "first prompt (toy-00",
    ):
        assert text in shown.stdout
    assert "no cluster (RAY_ADDRESS is not set)" in shown.stdout
    found = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    assert found["rows"] == 48


def test_control_characters_do_not_reach_the_terminal(model, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rows = {"id": ["a\x1b[2J\n", "b\x07"], "prompt": ["two\nlines \x1b]0;x\x07 日本\u200d語", None]}
    pq.write_table(pa.table(rows), tmp_path / "in.parquet")
    words = ["plan", "--model", model, "--input", str(tmp_path), "--id-column", "id", "--device", "cpu"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, words).stdout
    assert "first prompt (a\\x1b[2J\\n, " in shown
    assert "two\nlines \\x1b]0;x\\x07 日本\u200d語" in shown
    assert "null_prompt: 1, e.g. b\\x07: column prompt is null" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_it_takes_every_flag_of_generate():
    names = set(inspect.signature(generate).parameters)
    assert set(inspect.signature(plan).parameters) == names | {"as_json", "tokens_per_second"}


def test_lengths():
    lengths = Lengths()
    for tokens in np.random.default_rng(0).integers(1, 5000, 1001).tolist():
        lengths.rows[tokens] += 1
    flat = sorted(lengths.rows.elements())
    assert (lengths.quantile(0.5), lengths.quantile(1.0), lengths.total) == (flat[500], flat[-1], sum(flat))
    buckets = lengths.histogram()
    assert [bucket["to"] for bucket in buckets] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert sum(bucket["rows"] for bucket in buckets) == 1001
    assert Lengths().as_dict()["histogram"] == []
