"""The benchmark of prefix reuse: equal outputs, fewer prefilled tokens, both times of a row."""

from __future__ import annotations

from deepinfer_ray.bench.prefix import WORKLOADS, Workload, run
from deepinfer_ray.cli.bench import BENCHES


def test_a_small_run() -> None:
    shared = Workload("shared", rows=6, heads=2, head_tokens=256, tail_tokens=9, output_tokens=2)
    apart = Workload("apart", rows=3, heads=3, head_tokens=0, tail_tokens=140, output_tokens=2)
    first, second = run((shared, apart), repetitions=1)
    assert (first["prefill_off"], first["prefill_on"]) == (6 * 265, 2 * 256 + 6 * 9)
    assert first["saved"] == round(1 - 566 / 1590, 3)
    assert first["seconds_off"] > 0
    assert first["seconds_on"] > 0
    assert (second["prefill_on"], second["saved"]) == (420, 0.0)


def test_prompts_follow_from_their_seed_and_take_turns() -> None:
    workload = next(each for each in WORKLOADS if each.heads == 4 and each.head_tokens)
    prompts = workload.prompts(3, 500)
    assert [prompt.tolist() for prompt in workload.prompts(3, 500)] == [prompt.tolist() for prompt in prompts]
    assert sum(map(len, prompts)) * workload.n == workload.prompt_tokens
    heads = [tuple(prompt[:512].tolist()) for prompt in prompts]
    assert heads[:4] == heads[4:8]
    assert len(set(heads)) == 4


def test_it_is_on_the_command_line() -> None:
    assert BENCHES["prefix"][0] == "deepinfer_ray.bench.prefix"
