"""n completions of one prompt share its cache and are the results of n single requests with derived seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threads

from deepinfer_ray.engine.request import Request, SamplingParams, completion_seed
from deepinfer_ray.llm import LLM

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"


def siblings(prompt: np.ndarray, n: int, seed: int | None = None, **params: Any) -> list[Request]:
    values = {"max_tokens": 8, "temperature": 1.0, "logprobs": 1, "ignore_eos": True, **params}
    return [
        Request(prompt, SamplingParams(**values), completion_seed(0, "row", seed, index))
        for index in range(n)
    ]


def alone(kit: Any, lab: Any, requests: list[Request], **settings: Any) -> list[Any]:
    """Each request by itself in an engine without sharing."""
    return [
        kit.bits(lab.run(lab.engine(snapshots=0, **settings), kit.again([request]))[0])
        for request in requests
    ]


@pytest.mark.parametrize("length", [2, 3, 128, 129, 130, 255])
@pytest.mark.parametrize("zos", [True, False], ids=["overlapped", "plain"])
def test_siblings_compute_one_token_of_their_prompt(kit: Any, length: int, zos: bool) -> None:
    lab = kit.lab("mock")
    prompt = np.random.default_rng(length).integers(3, 500, length).astype(np.int32)
    requests = siblings(prompt, 5, max_tokens=4)
    engine = lab.engine(zos=zos)
    results = lab.run(engine, requests)
    assert [result.cached_tokens for result in results] == [0] + [length - 1] * 4
    assert engine.stats["prompt_tokens"] == length + 4
    assert len({tuple(result.token_ids.tolist()) for result in results}) > 1
    assert [kit.bits(result) for result in results] == alone(kit, lab, requests)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_seqs": 1},
        {"max_seqs": 2, "max_batched_tokens": 128},
        {"chunked_prefill": False},
        {"num_blocks": 7, "max_model_len": 400, "prefix_block_fraction": 0.5},
        {"snapshots": 1},
        {"idle_fast_path": False, "prefill_all_interval": 4},
        {"max_backtracking": 4},
    ],
    ids=lambda values: "-".join(f"{name}={value}" for name, value in values.items()),
)
def test_siblings_of_several_rows_in_every_schedule(kit: Any, settings: dict[str, Any]) -> None:
    """Also where a sibling comes to its seat long after the first one has moved on."""
    lab = kit.lab("mock")
    random = np.random.default_rng(1)
    requests = [
        request
        for length in (150, 259, 40)
        for request in siblings(
            random.integers(3, 500, length).astype(np.int32), 4, seed=length, max_tokens=5
        )
    ]
    results = lab.run(lab.engine(**settings), requests)
    assert [kit.bits(result) for result in results] == alone(kit, lab, requests)
    assert sum(result.cached_tokens for result in results) >= 3 * (149 + 258)


def test_siblings_share_with_other_rows_of_the_same_head(kit: Any) -> None:
    lab = kit.lab("mock")
    random = np.random.default_rng(2)
    head = random.integers(3, 500, 256)
    prompts = [np.concatenate([head, random.integers(3, 500, 30)]).astype(np.int32) for _ in range(2)]
    requests = [request for prompt in prompts for request in siblings(prompt, 3)]
    engine = lab.engine()
    results = lab.run(engine, requests)
    assert [result.cached_tokens for result in results] == [0, 285, 285, 256, 285, 285]
    assert engine.stats["prompt_tokens"] == 256 + 2 * 30 + 4
    assert [kit.bits(result) for result in results] == alone(kit, lab, requests)


def test_an_aborted_sibling_leaves_the_others_alone(kit: Any) -> None:
    lab = kit.lab("mock")
    prompt = np.random.default_rng(3).integers(3, 500, 200).astype(np.int32)
    requests = siblings(prompt, 4)
    engine = lab.engine()
    for request in requests:
        engine.add(request)
    results = {result.request_id: result for result in engine.step()}
    engine.abort(requests[0].request_id)
    engine.abort(requests[2].request_id)
    results |= {result.request_id: result for result in engine.run()}
    engine.check_integrity()
    expected = alone(kit, lab, requests)
    for index in (1, 3):
        assert kit.bits(results[requests[index].request_id]) == expected[index]
        assert results[requests[index].request_id].cached_tokens == 199
    assert results[requests[0].request_id].finish_reason == "aborted"


def test_real_model_gives_the_bits_of_single_requests(kit: Any) -> None:
    lab = kit.lab("tinyB-released")
    random = np.random.default_rng(4)
    requests = [
        request
        for length in (150, 151)  # a group of the compressor is open, or is not, where the siblings start
        for request in siblings(random.integers(3, 500, length).astype(np.int32), 3, prompt_logprobs=None)
    ]
    results = lab.run(lab.engine(), requests)
    assert [result.cached_tokens for result in results] == [0, 149, 149, 0, 150, 150]
    assert [kit.bits(result) for result in results] == alone(kit, lab, requests, zos=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.mark.usefixtures("one_thread")
def test_generate_with_n_gives_the_completions_of_single_calls() -> None:
    """The public way: one prompt with n = 4 against four calls that name the derived seeds."""
    prompt = np.random.default_rng(5).integers(3, 500, 120).tolist()
    values = {"temperature": 1.0, "max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    options: dict[str, Any] = {"scheduler": {"max_seqs": 4}, "device": "cpu"}
    with LLM(TINY, **options) as llm:
        (result,) = llm.generate(prompt_token_ids=[prompt], sampling_params={**values, "n": 4})
        seed = llm.config.runtime.seed
    assert [each.cached_tokens for each in result.completions] == [0, 119, 119, 119]
    with LLM(TINY, **options, cache={"prefix_reuse": False}) as llm:
        singles = [
            llm.generate(
                prompt_token_ids=[prompt],
                sampling_params={**values, "seed": completion_seed(seed, "0", None, index)},
            )[0]
            for index in range(4)
        ]
    assert [single.cached_tokens for single in singles] == [0, 0, 0, 0]
    for completion, single in zip(result.completions, singles, strict=True):
        assert completion.token_ids.tolist() == single.token_ids.tolist()
        assert completion.logprobs.tolist() == single.logprobs.tolist()
        assert completion.top_logprobs == single.top_logprobs
        assert completion.text == single.text
    assert len({tuple(each.token_ids.tolist()) for each in result.completions}) > 1
