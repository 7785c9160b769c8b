"""The benchmark of bounded replay: both modes agree, short prompts are untouched, less work for long ones."""

from __future__ import annotations

from deepinfer_ray.bench.replay import run
from deepinfer_ray.cli.bench import BENCHES


def test_a_small_run() -> None:
    short, long = run((90, 280), rows=2, repetitions=1)
    assert (short["layer_rows"], short["tokens_agree"]) == (1.0, 1.0)
    assert 0.5 < long["layer_rows"] < 0.8
    assert 0.0 <= long["tokens_agree"] <= 1.0
    assert min(long["seconds_off"], long["seconds_mask"], long["seconds_compact"]) > 0
    assert BENCHES["replay"][0] == "deepinfer_ray.bench.replay"
