"""Tokens/s with and without drafts side by side, and how many drafts are verified and accepted.

Knows: a tiny synthetic checkpoint whose drafter is made to know its target, wholly, in part or not at all.
Does not know: how drafts are made or verified. All modes of one drafter run the same requests on the same
weights; greedy requests must give the same tokens in all of them.

The figures of a drafter that knows its target wholly are the most that drafting can gain on this machine; a
real drafter lies between the others.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_ray.bench.markov_twin import make_markov_twin
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import capacity_of, position_bound, prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.numerics import Mode, Numerics

DRAFTS = 5
MAX_LEN = 512
DRAFTERS = {"equal to the target": 0.0, "knows a part of it": 0.15, "knows nothing": None}
"""Drafter -> share of the layers in the target (see `make_markov_twin`); None: both as they were made."""
MODES: dict[str, dict[str, Any]] = {
    "no drafts": {"num_drafts": 0},
    f"{DRAFTS} drafts": {"num_drafts": DRAFTS},
    f"{DRAFTS} drafts, scheduled lengths": {"num_drafts": DRAFTS, "varlen": True},
}


@dataclass(frozen=True)
class Workload:
    """sequences at a time, requests in all, tokens of each prompt and output."""

    sequences: int = 8
    requests: int = 16
    prompt_tokens: int = 32
    output_tokens: int = 64

    def make(self, temperature: float, vocab_size: int, seed: int) -> list[Request]:
        random = np.random.default_rng(seed)
        params = SamplingParams(temperature=temperature, max_tokens=self.output_tokens, ignore_eos=True)
        return [
            Request(random.integers(3, vocab_size, self.prompt_tokens, dtype=np.int32), params, seed=index)
            for index in range(self.requests)
        ]


def _config(workload: Workload, numerics: Mode, mode: dict[str, Any]) -> EngineConfig:
    return EngineConfig().with_values(
        numerics=numerics,
        scheduler={"max_seqs": workload.sequences, "max_model_len": MAX_LEN},
        speculative=mode,
        observability={"log_interval": 0},
    )


def _engine(directory: Path, model: TextModel, config: EngineConfig) -> Engine:
    parts = prepare(directory, config, "cpu")
    capacity = capacity_of(parts)
    pools = CachePools(parts.layout, capacity.num_blocks, capacity.num_slots + capacity.num_snapshots)
    return Engine(
        model, pools, parts.tokenizer, parts.config, compress=parts.compress, defaults=parts.defaults
    )


def _measure(engine: Engine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Seconds and outputs of one run."""
    for request in requests:
        engine.add(request)
    start = time.perf_counter()
    results = {result.request_id: result.token_ids.tolist() for result in engine.run()}
    return time.perf_counter() - start, [results[request.request_id] for request in requests]


def _row(engine: Engine, seconds: float, workload: Workload) -> dict[str, Any]:
    """Lengths are means over the steps of a sequence; `tokens/step` counts the newest token too."""
    stats, tokens = engine.stats, workload.requests * workload.output_tokens
    verified, accepted = (np.array(stats.get(f"{name}_lengths", [1])) for name in ("verified", "accepted"))
    places = np.arange(len(verified))
    steps = max(int(verified.sum()), 1)
    return {
        "tokens/s": round(tokens / seconds, 1),
        "verified": round(float(verified @ places) / steps, 2),
        "accepted": round(float(accepted @ places) / steps, 2),
        "tokens/step": round(float(accepted @ places) / steps + 1, 2),
    }


def run(
    workload: Workload = Workload(),
    repetitions: int = 3,
    numerics: Mode = "released",
    drafters: Sequence[str] = tuple(DRAFTERS),
) -> list[dict[str, Any]]:
    """One row for each drafter, temperature and mode; the fastest of `repetitions` alternating runs."""
    from deepinfer_ray.model.synthetic import make_checkpoint

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_checkpoint(directory, "tiny", seed=0)
        bound = position_bound(_config(workload, numerics, {"num_drafts": 0}))
        for drafter in drafters:
            share = DRAFTERS[drafter]
            with Checkpoint.open(directory, drafter=True) as checkpoint:
                model = load_text_model(
                    checkpoint,
                    Numerics(numerics),
                    max_positions=bound,
                    drafter=True,
                )
            if share is not None:
                make_markov_twin(model, share)
            for temperature in (0.0, 1.0):
                rows += _compare(directory, model, drafter, temperature, workload, repetitions, numerics)
    return rows


def _compare(
    directory: Path,
    model: TextModel,
    drafter: str,
    temperature: float,
    workload: Workload,
    repetitions: int,
    numerics: Mode,
) -> list[dict[str, Any]]:
    """All modes of one drafter and temperature."""
    vocab = model.config.text.vocab_size
    best: dict[str, tuple[float, Engine]] = {}
    for repetition in range(repetitions):
        outputs = []
        for mode, options in MODES.items():
            engine = _engine(directory, model, _config(workload, numerics, options))
            seconds, tokens = _measure(engine, workload.make(temperature, vocab, repetition))
            outputs.append(tokens)
            if mode not in best or seconds < best[mode][0]:
                best[mode] = (seconds, engine)
            engine.close()
        if temperature == 0.0 and any(other != outputs[0] for other in outputs[1:]):
            raise AssertionError(f"drafter {drafter!r}: drafts changed greedy tokens")
    plain = best[next(iter(MODES))][0]
    return [
        {
            "drafter": drafter,
            "temperature": temperature,
            "mode": mode,
            **_row(engine, seconds, workload),
            "speed-up": round(plain / seconds, 2),
        }
        for mode, (seconds, engine) in best.items()
    ]
