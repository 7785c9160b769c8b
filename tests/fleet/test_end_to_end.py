"""A golden checkpoint through rank actors: the same results as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.llm import LLM

pytestmark = pytest.mark.ray

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4}


def test_two_ranks_give_the_results_of_one_process(cluster: Any) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 256, length).astype(np.int32) for length in (5, 40, 17, 1, 63, 9, 150, 30)]
    params = [
        SamplingParams(temperature=0.0 if index % 2 else 0.8, seed=index, max_tokens=6 + index, logprobs=1)
        for index in range(len(prompts))
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank: bitwise equality is promised at equal thread counts
    try:
        with LLM(TINY, device="cpu", **OPTIONS) as alone:
            expected = alone.generate(prompt_token_ids=prompts, sampling_params=params)
    finally:
        torch.set_num_threads(threads)
    with LLM(TINY, device="cpu", dp=2, **OPTIONS) as fleet:
        got = fleet.generate(prompt_token_ids=prompts, sampling_params=params)
        done = [rank["done"] for rank in fleet.stats["ranks"]]
    assert sum(done) == len(prompts)
    assert all(done), "a rank got nothing"
    for one, other in zip(expected, got, strict=True):
        assert one.error is None
        assert (one.token_ids.tolist(), one.text, one.finish_reason) == (
            other.token_ids.tolist(),
            other.text,
            other.finish_reason,
        )
        assert one.logprobs is not None
        assert other.logprobs is not None
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_missing_checkpoint_is_named_by_the_rank(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    fleet = RayFleet(tmp_path, None, 1, device="cpu", options=FleetOptions(cpus_per_rank=0.5))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        fleet.start()
