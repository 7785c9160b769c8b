"""Prefill tokens and wall-clock time of rows with common beginnings, prefix reuse off and on side by side.

Knows: workloads of random prompts with common heads, and of several completions a row. Does not know: how
prefixes are found or kept. Both engines run the same rows of a tiny synthetic checkpoint, alternating, each
repetition with new tokens so that nothing kept from an earlier one helps; their results must be equal.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_ray.engine.request import RequestResult, SamplingParams
from deepinfer_ray.llm import LLM

MAX_LEN = 1024
MAX_SEQS = 16


@dataclass(frozen=True)
class Workload:
    """`heads` heads of `head_tokens`, their rows taking turns; each row adds `tail_tokens` of its own."""

    name: str
    rows: int
    heads: int
    head_tokens: int
    tail_tokens: int
    n: int = 1
    output_tokens: int = 8

    def prompts(self, seed: int, vocab_size: int) -> list[np.ndarray]:
        """int32 token ids of each row."""
        random = np.random.default_rng(seed)
        heads = random.integers(3, vocab_size, (self.heads, self.head_tokens), dtype=np.int32)
        tails = random.integers(3, vocab_size, (self.rows, self.tail_tokens), dtype=np.int32)
        return [np.concatenate([heads[row % self.heads], tails[row]]) for row in range(self.rows)]

    @property
    def prompt_tokens(self) -> int:
        return self.rows * self.n * (self.head_tokens + self.tail_tokens)


WORKLOADS = (
    Workload("one head of 512", rows=32, heads=1, head_tokens=512, tail_tokens=32),
    Workload(
        "one head of 512, long outputs", rows=32, heads=1, head_tokens=512, tail_tokens=32, output_tokens=64
    ),
    Workload("four heads of 512 in turn", rows=32, heads=4, head_tokens=512, tail_tokens=32),
    Workload("eight completions a row", rows=4, heads=4, head_tokens=0, tail_tokens=300, n=8),
    Workload("nothing shared", rows=16, heads=16, head_tokens=0, tail_tokens=300),
)


def _measure(llm: LLM, workload: Workload, seed: int) -> tuple[float, int, list[list[int]]]:
    """Seconds, prefilled tokens and the outputs of one run."""
    prompts = workload.prompts(seed, llm.model_config.text.vocab_size)
    params = SamplingParams(
        temperature=1.0, max_tokens=workload.output_tokens, ignore_eos=True, n=workload.n, seed=seed
    )
    before, start = llm.stats["prompt_tokens"], time.perf_counter()
    results: list[RequestResult] = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - start
    tokens = [each.token_ids.tolist() for result in results for each in result.completions]
    return seconds, llm.stats["prompt_tokens"] - before, tokens


def run(
    workloads: tuple[Workload, ...] = WORKLOADS, repetitions: int = 3, numerics: str = "released"
) -> list[dict[str, Any]]:
    """One row a workload: prefilled tokens and median seconds without and with reuse, and their ratios."""
    from deepinfer_ray.model.synthetic import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_checkpoint(path, preset="tiny", seed=0)
        options: dict[str, Any] = {
            "numerics": numerics,
            "max_num_seqs": MAX_SEQS,
            "max_model_len": MAX_LEN,
            "device": "cpu",
        }
        off = LLM(path, **options, cache={"prefix_reuse": False})
        on = LLM(path, **options)
        return [
            _compare(off, on, workload, range(1000 * index, 1000 * index + repetitions))
            for index, workload in enumerate(workloads)
        ]


def _compare(off: LLM, on: LLM, workload: Workload, seeds: range) -> dict[str, Any]:
    seconds: list[tuple[float, float]] = []
    prefilled_off = prefilled_on = 0
    for seed in seeds:
        without, prefilled_off, expected = _measure(off, workload, seed)
        with_reuse, prefilled_on, tokens = _measure(on, workload, seed)
        if tokens != expected:
            raise RuntimeError(f"{workload.name}: prefix reuse changed the outputs of seed {seed}")
        seconds.append((without, with_reuse))
    plain, reusing = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "workload": workload.name,
        "rows": workload.rows * workload.n,
        "prompt_tokens": workload.prompt_tokens,
        "prefill_off": prefilled_off,
        "prefill_on": prefilled_on,
        "saved": round(1 - prefilled_on / prefilled_off, 3),
        "seconds_off": round(plain, 3),
        "seconds_on": round(reusing, 3),
        "ratio": round(plain / reusing, 2),
    }
