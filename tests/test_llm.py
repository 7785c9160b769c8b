"""`LLM` on a small checkpoint: order, errors, n, seeds, defaults, options."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import deepinfer_ray
from deepinfer_ray import LLM, SamplingParams
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.engine.request import completion_seed
from deepinfer_ray.errors import ConfigError, DeepInferError

TINY = Path(__file__).parent / "data" / "golden" / "tinyB"
PROMPTS = [np.random.default_rng(5).integers(3, 500, n).tolist() for n in (40, 7, 23)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(TINY, max_model_len=128, max_num_seqs=4, device="cpu") as made:
        yield made


def test_one_result_each_in_input_order_errors_included(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5)
    prompts = [PROMPTS[0], [], PROMPTS[1], [9999], [3] * 129, PROMPTS[2]]
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    assert [result.error_code for result in results] == [
        None,
        "empty_prompt",
        None,
        "bad_token_id",
        "prompt_too_long",
        None,
    ]
    assert [result.finish_reason for result in results[1::2]] == ["error", "error", "length"]
    alone = [llm.generate(prompt_token_ids=[prompt], sampling_params=params)[0] for prompt in PROMPTS]
    assert [r.token_ids.tolist() for r in results if not r.error] == [r.token_ids.tolist() for r in alone]


def test_text_prompts_get_one_bos(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    (by_text,) = llm.generate("ray4", params)
    ids = llm.get_tokenizer().encode("ray4", add_special_tokens=False).ids
    (by_ids,) = llm.generate(prompt_token_ids=[[0, *ids]], sampling_params=params)
    assert by_text.token_ids.tolist() == by_ids.token_ids.tolist()
    assert by_text.prompt_tokens == 1 + len(ids)


def test_token_ids_win_over_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    both = llm.generate(["nonsense"], params, prompt_token_ids=[PROMPTS[1]])
    ids_only = llm.generate(prompt_token_ids=[PROMPTS[1]], sampling_params=params)
    assert both[0].token_ids.tolist() == ids_only[0].token_ids.tolist()


def test_n_completions_equal_single_requests_with_derived_seeds(llm: LLM) -> None:
    (result,) = llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=SamplingParams(n=3, seed=7))
    assert len(result.completions) == 3
    assert result.completions[0] is result
    for index, completion in enumerate(result.completions):
        seed = completion_seed(0, "unused", 7, index)
        (single,) = llm.generate(
            prompt_token_ids=PROMPTS[:1], sampling_params={"seed": seed, "max_tokens": 16}
        )
        assert single.token_ids.tolist() == completion.token_ids.tolist()
    assert len({tuple(completion.token_ids.tolist()) for completion in result.completions}) > 1


def test_unseeded_prompts_differ_and_a_fresh_object_repeats_them(llm: LLM) -> None:
    def draw() -> list[list[int]]:
        with LLM(TINY, max_model_len=128, max_num_seqs=4, device="cpu", seed=3) as fresh:
            results = fresh.generate(prompt_token_ids=[PROMPTS[0]] * 2)
            return [result.token_ids.tolist() for result in results]

    first, second = draw(), draw()
    assert first == second
    assert first[0] != first[1]


def test_parameters_one_each_mappings_and_lengths(llm: LLM) -> None:
    params = [{"max_tokens": 2, "temperature": 0.0}, SamplingParams(max_tokens=3, temperature=0.0)]
    results = llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=params)
    assert [len(result.token_ids) for result in results] == [2, 3]
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=params[:1])
    with pytest.raises(ValueError, match="1 prompts, but 2 prompt_token_ids"):
        llm.generate(["a"], prompt_token_ids=PROMPTS[:2])
    with pytest.raises(ValueError, match="prompts is a mapping; give a text or a list of texts"):
        llm.generate({"prompt": "a"})
    with pytest.raises(ValueError, match="give prompts or prompt_token_ids"):
        llm.generate()
    with pytest.raises(ValueError, match="temperature"):
        llm.generate("a", {"temperature": -1})
    with pytest.raises(ValueError, match=r"^unknown parameter 'max_token'; did you mean 'max_tokens'"):
        llm.generate("a", {"max_token": 3})
    with pytest.raises(ValueError, match="unknown parameter 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.0)
    assert llm.generate([]) == []


def test_options_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'scheduler\.max_seqs'"):
        LLM(TINY, max_seq=4)
    with pytest.raises(ConfigError, match="max_position_embeddings = 256"):
        LLM(TINY, max_model_len=512)
    with pytest.raises(ConfigError, match="num_drafts = 128"):
        LLM(TINY, num_drafts=128)
    with pytest.raises(ConfigError, match="holds no blocks"):
        LLM(TINY, device="cpu", cache={"cpu_budget_bytes": 1000})
    with pytest.raises(ConfigError, match=r"0\.8 of 2 cache blocks"):
        LLM(TINY, device="cpu", max_model_len=256, cache={"num_blocks_override": 2})
    with pytest.raises(ConfigError, match=r"unknown|must be"):
        LLM(TINY, device="tpu")
    with pytest.raises(ConfigError, match="no such file or directory; a checkpoint directory must hold"):
        LLM(TINY.parent / "absent")
    with pytest.raises(ConfigError, match=r"give the checkpoint's directory or its config\.json"):
        LLM(next(TINY.glob("*.safetensors")))


def test_a_closed_object_says_so() -> None:
    made = LLM(TINY, max_model_len=64, max_num_seqs=1, device="cpu")
    made.close()
    made.close()
    with pytest.raises(DeepInferError, match="closed"):
        made.generate("a")


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    target = tmp_path / "model"
    shutil.copytree(TINY, target)
    (target / "generation_config.json").write_text(
        json.dumps({"temperature": 0.0, "top_p": 0.9, "eos_token_id": [1, 2]})
    )
    defaults = GenerationDefaults.load(target)
    assert defaults == GenerationDefaults(0.0, 0.9, (1, 2))
    assert defaults.params(max_tokens=3) == SamplingParams(temperature=0.0, top_p=0.9, max_tokens=3)
    with LLM(target, max_model_len=128, max_num_seqs=2, device="cpu") as made:
        by_default = made.generate(prompt_token_ids=PROMPTS[:1])[0]
        greedy = made.generate(prompt_token_ids=PROMPTS[:1], sampling_params=SamplingParams(temperature=0.0))[
            0
        ]
    assert by_default.token_ids.tolist() == greedy.token_ids.tolist()
    for text, words in (("{", "cannot be read"), ("[]", "JSON object"), ('{"top_p": 2}', "top_p")):
        (target / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            GenerationDefaults.load(target)
    (target / "generation_config.json").write_text('{"eos_token_id": [1, "x"]}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        GenerationDefaults.load(target)


def test_the_package_names_its_api_and_imports_no_ray() -> None:
    assert deepinfer_ray.RequestResult.__name__ == "RequestResult"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        deepinfer_ray.Nothing  # noqa: B018
    code = (
        "import sys, deepinfer_ray, deepinfer_ray.engine, deepinfer_ray.model\n"
        "import deepinfer_ray.llm, deepinfer_ray.engine.engine, deepinfer_ray.model.v41\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('ray', 'pyarrow', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
