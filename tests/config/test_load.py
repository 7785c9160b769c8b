"""Engine and job options: sources, precedence, and what a mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ray.config.base import field_paths
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.job import RunConfig
from deepinfer_ray.config.load import FLAGS, OPTION_ALIASES, from_options, load_config
from deepinfer_ray.config.sections import parse_token_blacklist
from deepinfer_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"


def load(**sources: Any) -> RunConfig:
    return load_config(**{"environ": {}, **sources})


def test_precedence_is_flags_then_set_then_environment_then_yaml_then_default(tmp_path: Path) -> None:
    low, high = tmp_path / "low.yaml", tmp_path / "high.yaml"
    low.write_text(
        "scheduler: {max_seqs: 2, prefill_all_interval: 2, min_chunk_tokens: 2}\n"
        "cache: {graph_reserve_bytes: 2}\n"
    )
    high.write_text("scheduler:\n  max_seqs: 3\n")
    environ = {
        "DEEPINFER_RAY__SCHEDULER__MAX_SEQS": "4",
        "DEEPINFER_RAY__SCHEDULER__PREFILL_ALL_INTERVAL": "4",
    }
    assert load(files=[low]).scheduler.max_seqs == 2
    assert load(files=[low, high]).scheduler.max_seqs == 3
    assert load(files=[low, high], environ=environ).scheduler.max_seqs == 4
    sets = ["scheduler.max_seqs=5"]
    assert load(files=[low, high], environ=environ, sets=sets).scheduler.max_seqs == 5
    config = load(files=[low, high], environ=environ, sets=sets, flags={"--max-num-seqs": 6})
    assert config.scheduler.max_seqs == 6
    assert config.scheduler.prefill_all_interval == 4
    assert config.scheduler.min_chunk_tokens == 2
    assert config.scheduler.prefill_any_interval == 16
    assert config.cache.graph_reserve_bytes == 2


def test_every_flag_and_alias_names_an_option() -> None:
    known = set(field_paths(RunConfig))
    assert set(FLAGS.values()) <= known
    assert set(OPTION_ALIASES.values()) <= set(field_paths(EngineConfig))


def test_interface_flags_are_all_mapped() -> None:
    flags = (
        "--model --input --output --prompt-column --messages-column --token-ids-column --id-column "
        "--sampling-column --schema-column --tools-column --image-column --max-tokens --temperature --top-p "
        "--top-k --min-p --seed --n --stop --num-drafts --dp --cp --ep --engram --max-gangs --max-model-len "
        "--max-num-seqs --max-num-batched-tokens --numerics --device --max-error-rate --allow-changed "
        "--limit --deadline --on-too-long --retry-errors --output-prefix"
    )
    ours = {"--chat-column", "--reasoning-effort"}
    assert set(flags.split()) | ours == set(FLAGS)


def test_texts_become_values_of_the_options_type() -> None:
    config = load(
        sets=[
            "eplb.verbose=true",
            "sampling.token_blacklist=7",
            "speculative.num_drafts=2",
            "speculative.confidence_temperature=[1, 1.5]",
            "scheduler.zos=null",
            "cache.memory_utilization=0.5",
            "job.input=[a.parquet, b.parquet]",
            "job.deadline_s=1h30m",
        ]
    )
    assert config.eplb.verbose is True
    assert config.sampling.blacklisted_ids == (7,)
    assert config.speculative.confidence_temperature == (1.0, 1.5)
    assert config.scheduler.zos is None
    assert config.cache.memory_utilization == 0.5
    assert config.job.input == ("a.parquet", "b.parquet")
    assert config.job.deadline_s == 5400


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        (
            {"sets": ["scheduler.max_sesq=1"]},
            "'scheduler.max_sesq' (from --set scheduler.max_sesq); did you mean 'scheduler.max_seqs'?",
        ),
        ({"sets": ["schedulr.max_seqs=1"]}, "did you mean 'scheduler'?"),
        ({"sets": ["cache.max_seqs=1"]}, "did you mean 'scheduler.max_seqs'?"),
        (
            {"environ": {"DEEPINFER_RAY__CACHE__BLOCK_SIZ": "1"}},
            "(from environment variable DEEPINFER_RAY__CACHE__BLOCK_SIZ); did you mean 'cache.block_size'?",
        ),
        ({"sets": ["zzzzzz=1"]}, "unknown key 'zzzzzz'"),
        (
            {"sets": ["scheduler.max_seqs=abc"]},
            "scheduler.max_seqs = 'abc' (from --set scheduler.max_seqs): must be a valid integer",
        ),
        ({"sets": ["scheduler.max_seqs=0"]}, "must be greater than or equal to 1"),
        ({"sets": ["scheduler.max_seqs"]}, "write --set block.option=value"),
        ({"sets": ["=3"]}, "write --set block.option=value"),
        ({"sets": ["scheduler..max_seqs=3"]}, "is not a key"),
        ({"sets": ["scheduler=3"]}, "scheduler = '3' (from --set scheduler): must be a block of options"),
        ({"sets": ["scheduler.max_seqs=3", "scheduler.max_seqs.x=3"]}, "reaches into 'scheduler.max_seqs'"),
        ({"sets": ["numerics=fast"]}, "must be 'exact' or 'released'"),
        ({"sets": ["cache.memory_utilization=1.5"]}, "must be less than or equal to 1"),
        ({"sets": ["cache.memory_utilization=nan"]}, "must be a finite number"),
        ({"sets": ["cache.block_size=64"]}, "cache.block_size"),
        ({"sets": ["prefill.truncation_mode=mask"]}, "needs keep_tokens"),
        ({"sets": ["eplb.interval=50"]}, "window = 100 must not exceed interval = 50"),
        ({"sets": ["sampling.token_blacklist=3..1"]}, "strictly increasing"),
        ({"sets": ["sampling.token_blacklist=a"]}, "'a' is neither a token id nor a range"),
        ({"sets": ["scheduler.role=completion"]}, "set scheduler.preemption = 'stop'"),
        (
            {
                "sets": [
                    "scheduler.role=completion",
                    "scheduler.preemption=stop",
                    "parallel.cp=2",
                    "parallel.dp=1",
                ]
            },
            "needs parallel.cp = 1, not 2",
        ),
        ({"sets": ["speculative.confidence_temperature=[1,2]"]}, "has 2 values, needs one or num_drafts = 0"),
        ({"sets": ["speculative.confidence_temperature=0"]}, "must be positive"),
        ({"sets": ["speculative.num_drafts=33"]}, "num_drafts = 33 is more than 32, the longest block"),
        (
            {"flags": {"--dp": 2, "--ep": 3}},
            "dp * cp = 2 * 1 = 2 is not divisible by ep = 3 (from --dp, --ep)",
        ),
        (
            {"flags": {"--dp": 2, "--engram": 3}},
            "world = max(dp * cp, engram) = 3 is not divisible by dp * cp = 2",
        ),
        ({"flags": {"--dp": 6, "--engram": 4}}, "world = 6 is not divisible by engram = 4"),
        (
            {"flags": {"--max-num-batched-tokens": 200}},
            "200 is less than scheduler.max_seqs * (1 + speculative.num_drafts) = 256 * 1 = 256",
        ),
        (
            {"flags": {"--max-num-batched-tokens": 100, "--max-num-seqs": 1}},
            "must be greater than or equal to 128",
        ),
        (
            {"sets": ["scheduler.chunked_prefill=false", "scheduler.max_batched_tokens=1000"]},
            "set scheduler.chunked_prefill",
        ),
        ({"sets": ["scheduler.prefill_max_sum_k=10"]}, "longest prompt, 4096 tokens"),
        ({"sets": ["scheduler.min_chunk_tokens=9999"]}, "no chunk could be scheduled"),
        (
            {"sets": ["scheduler.max_model_len=8192", "cache.num_blocks_override=64"]},
            "0.8 of 64 cache blocks hold 6553",
        ),
        (
            {"flags": {"--prompt-column": "p", "--messages-column": "m"}},
            "only one of prompt_column, messages_column",
        ),
        ({"flags": {"--top-k": 0}}, "use -1 to switch it off"),
        ({"flags": {"--temperature": -1.0}}, "job.sampling.temperature = -1.0 (from --temperature)"),
        ({"flags": {"--stop": ("",)}}, "a stop string is empty"),
        ({"flags": {"--deadline": "soon"}}, "'soon' is not a duration"),
        ({"flags": {"--on-too-long": "cut"}}, "must be 'error' or 'truncate-left'"),
        ({"flags": {"--nope": 1}}, "unknown flag --nope"),
    ],
)
def test_a_mistake_names_key_value_and_source(sources: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("scheduler: [", "line 1: is not valid YAML"),
        ("- a\n", "must hold a mapping of option blocks, not a list"),
        (
            "scheduler:\n  max_seqs: 1\n  max_seqs: 2\n",
            "line 3: is not valid YAML: key 'max_seqs' given twice",
        ),
        ("scheduler:\n  max_seqs: yes\n", "max_seqs = true is a true/false value"),
        ("1: 2\n", "must hold a mapping of option blocks"),
        ("scheduler: !!python/object:os.system {}\n", "is not valid YAML"),
        ("scheduler:\n  max_seqs: 1.5\n", "scheduler.max_seqs = 1.5"),
        ("scheduler: null\n", "scheduler = None"),
    ],
)
def test_a_bad_file_names_itself_and_the_line(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(files=[file])
    assert text in str(caught.value)
    assert "options.yaml" in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(files=[tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("configs/engine/*.yaml")) + sorted(ROOT.glob("configs/job/*.yaml"))
)
def test_shipped_files_load(file: Path) -> None:
    load(files=[file])


def test_options_of_the_python_api() -> None:
    config = from_options(
        EngineConfig, {"max_num_seqs": 4, "scheduler": {"min_chunk_tokens": 3}, "cache.block_size": 128}
    )
    assert (config.scheduler.max_seqs, config.scheduler.min_chunk_tokens) == (4, 3)
    with pytest.raises(
        ConfigError, match=r"unknown option 'max_nun_seqs'; did you mean 'scheduler.max_seqs'\?"
    ):
        from_options(EngineConfig, {"max_nun_seqs": 4})
    with pytest.raises(ConfigError, match=r"from option max_num_seqs"):
        from_options(EngineConfig, {"max_num_seqs": "many"})


def test_sizes_of_the_default_options_with_five_drafts() -> None:
    """spec/engine.md §1.2, §6.1."""
    config = EngineConfig().with_values(speculative={"num_drafts": 5})
    assert config.runtime_max_model_len == 4096 + 16
    assert config.max_batched_tokens == 4096
    assert config.max_backtracking == 6
    assert config.num_state_slots == 308
    plain = config.with_values(scheduler={"zos": False})
    assert plain.runtime_max_model_len == 4096 + 10
    none = EngineConfig()
    assert none.runtime_max_model_len == 4097
    assert none.with_values(scheduler={"zos": False}).runtime_max_model_len == 4096
    assert none.max_backtracking == 1
    assert config.with_values(scheduler={"max_seqs": 1024}).max_batched_tokens == 6144


def test_resolve_writes_out_what_was_derived() -> None:
    model = ModelConfig.load(GOLDEN / "tinyB")
    resolved = EngineConfig().with_values(parallel={"ep": 4}).resolve(model)
    assert resolved.scheduler.max_model_len == 256
    assert resolved.scheduler.max_batched_tokens == 4096
    assert resolved.scheduler.zos is True
    assert (resolved.parallel.dp, resolved.parallel.engram) == (4, 4)
    assert resolved.cache.max_backtracking == 1
    assert resolved.resolve(model) == resolved
    assert json.loads(resolved.to_json())["scheduler"]["max_model_len"] == 256


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"scheduler": {"max_model_len": 257}}, "exceeds the model's max_position_embeddings = 256"),
        ({"prefill": {"truncation_mode": "mask", "keep_tokens": 16}}, "16 + 1 = 17"),
        ({"cache": {"num_blocks_override": 2}}, "0.8 of 2 cache blocks hold 204"),
    ],
)
def test_rules_between_options_and_model(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig().with_values(**values).resolve(ModelConfig.load(GOLDEN / "tinyB"))
    assert text in str(caught.value)


def test_compact_needs_engram_and_targets_on_one_side() -> None:
    model = ModelConfig.load(GOLDEN / "tinyB")
    options = EngineConfig().with_values(prefill={"truncation_mode": "compact", "keep_tokens": 20})
    options.resolve(model)
    with pytest.raises(ConfigError, match=r"all Engram layers before layer 4, but \[5\] are consumers"):
        options.resolve(model.with_text(engram_layer_ids=[1, 5], engram_num_embeddings=None))
    with pytest.raises(ConfigError, match=r"draft target layers \[3, 7\] on one side of layer 4"):
        options.resolve(model.with_text(dspark_target_layer_ids=[3, 7]))


def test_drafts_need_draft_layers() -> None:
    model = ModelConfig.load(GOLDEN / "tinyB")
    ratios = list(model.text.compress_ratios)[:8]
    undrafted = model.with_text(num_nextn_predict_layers=0, compress_ratios=ratios)
    with pytest.raises(ConfigError, match="the checkpoint has no draft layers"):
        EngineConfig().with_values(speculative={"num_drafts": 5}).resolve(undrafted)


@pytest.mark.parametrize(("backend", "drafts"), [("cuda", 5), ("cpu", 0), ("auto", 0)])
def test_drafts_where_a_gpu_is_named_and_the_checkpoint_drafts(backend: str, drafts: int) -> None:
    model = ModelConfig.load(GOLDEN / "tinyB")
    config = EngineConfig().with_values(runtime={"backend": backend})
    assert config.num_drafts == 0
    assert config.resolve(model).speculative.num_drafts == drafts
    ratios = list(model.text.compress_ratios)[:8]
    undrafted = model.with_text(num_nextn_predict_layers=0, compress_ratios=ratios)
    assert config.resolve(undrafted).speculative.num_drafts == 0
    assert config.with_values(speculative={"num_drafts": 2}).resolve(model).num_drafts == 2
    assert config.with_values(speculative={"num_drafts": 0}).resolve(model).num_drafts == 0


def test_capacity_says_what_to_change() -> None:
    EngineConfig().check_capacity(41)
    with pytest.raises(ConfigError, match=r"needs 4097 positions, but 0.8 of 40 cache blocks hold 4096"):
        EngineConfig().check_capacity(40)
    with pytest.raises(ConfigError, match=r"gives 1 cache blocks.*raise cache.memory_utilization"):
        EngineConfig().check_capacity(1)


def test_blacklist_ranges() -> None:
    assert parse_token_blacklist("0..3, 7") == (0, 1, 2, 3, 7)
    assert parse_token_blacklist(" ") == ()


def test_the_ranks_part_of_a_run_has_no_job() -> None:
    run = load(flags={"--max-num-seqs": 3, "--output": "out"})
    assert type(run.engine) is EngineConfig
    assert run.engine.scheduler.max_seqs == 3
    assert run.job.source_column == ("prompt", "prompt")
