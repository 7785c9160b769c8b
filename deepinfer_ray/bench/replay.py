"""Bounded replay of the consumer layers (`prefill.truncation_mode`): work saved, time, tokens that agree.

Knows: random prompts through a tiny synthetic checkpoint with the mode off, `mask` and `compact`. Does not
know: how rows are left out. Replay is an approximation for prompts longer than the kept tokens, so agreement
with `off` is reported and nothing is demanded of it (random weights: it says little about a trained model);
`mask` and `compact` must agree in every token.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_ray.engine.request import RequestResult, SamplingParams
from deepinfer_ray.llm import LLM

KEEP = 140
"""Kept tokens, the value that the mode's authors give as their example."""
PROMPTS = (100, 300, 600, 900)
OUTPUT_TOKENS = 16
MAX_LEN = 1024


def _measure(llm: LLM, prompts: list[np.ndarray]) -> tuple[float, float, list[list[int]]]:
    """Seconds, those until all first tokens, and the greedy outputs."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompt_token_ids=prompts, sampling_params=first)
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    results: list[RequestResult] = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    return prefill, time.perf_counter() - start, [result.token_ids.tolist() for result in results]


def run(
    lengths: tuple[int, ...] = PROMPTS, rows: int = 8, repetitions: int = 3, keep: int = KEEP
) -> list[dict[str, Any]]:
    """One row a prompt length. layer_rows: share of (row, layer) pairs of the prefill that are computed."""
    from deepinfer_ray.model.synthetic import make_checkpoint

    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_checkpoint(path, preset="tiny", seed=0)
        common: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_seqs": rows, "device": "cpu"}
        common["cache"] = {"prefix_reuse": False}
        engines = {"off": LLM(path, **common)}
        for mode in ("mask", "compact"):
            engines[mode] = LLM(path, **common, prefill={"truncation_mode": mode, "keep_tokens": keep})
        topology = engines["off"].model_config.topology
        consumers = 1 - topology.n_prefill_layer / topology.num_layers
        for length in lengths:
            seconds: dict[str, list[float]] = {mode: [] for mode in engines}
            agreed = total = 0
            for seed in range(repetitions):
                random = np.random.default_rng([length, seed])
                prompts = [random.integers(3, 500, length, dtype=np.int32) for _ in range(rows)]
                outputs = {}
                for mode, llm in engines.items():
                    prefill, _, outputs[mode] = _measure(llm, prompts)
                    seconds[mode].append(prefill)
                if outputs["mask"] != outputs["compact"]:
                    raise RuntimeError(f"prompts of {length} tokens: mask and compact gave different tokens")
                pairs = [
                    (a, b)
                    for one, other in zip(outputs["off"], outputs["compact"], strict=True)
                    for a, b in zip(one, other, strict=True)
                ]
                agreed, total = agreed + sum(a == b for a, b in pairs), total + len(pairs)
            median = {mode: statistics.median(values) for mode, values in seconds.items()}
            kept = min(keep, length) / length
            found.append(
                {
                    "prompt_tokens": length,
                    "layer_rows": round(1 - consumers * (1 - kept), 3),
                    "seconds_off": round(median["off"], 3),
                    "seconds_mask": round(median["mask"], 3),
                    "seconds_compact": round(median["compact"], 3),
                    "ratio": round(median["off"] / median["compact"], 2),
                    "tokens_agree": round(agreed / total, 3),
                }
            )
    return found
