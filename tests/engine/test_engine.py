"""The engine on the mock model: every token against an oracle without caches, batches, chunks or loops."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from threads import one_thread

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine import sampler
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.logits_processors import LogitEdits, needs_edits
from deepinfer_ray.engine.mock import MockModel, byte_tokenizer, expected_logits, mock_config
from deepinfer_ray.engine.philox import seed_bits
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.sampler import SampleRows
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.timeline import Timeline
from deepinfer_ray.errors import ConfigError

VOCAB, EOS, ORDER, MAX_LEN = 512, 1, 4, 600
COMPRESS = (np.arange(VOCAB) * 31 % 103).astype(np.int32)
PAD = int(COMPRESS[2])
TOKENIZER = byte_tokenizer(VOCAB)


def make_engine(
    num_blocks: int = 64,
    model: MockModel | None = None,
    config: EngineConfig | None = None,
    defaults: GenerationDefaults | None = None,
    timeline: Timeline | None = None,
    **settings: object,
) -> Engine:
    model = model or MockModel(mock_config(VOCAB))
    values: dict[str, object] = {"max_model_len": MAX_LEN, "max_seqs": 8, **settings}
    resolved = SchedulerSettings(
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        eos_token_id=EOS,
        **values,  # type: ignore[arg-type]
    )
    pools = CachePools(model.layout(), num_blocks, resolved.num_state_slots)
    pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
    return Engine(
        model,
        pools,
        TOKENIZER,
        config or EngineConfig(),
        compress=COMPRESS,
        settings=resolved,
        defaults=defaults,
        timeline=timeline,
    )


def window(tokens: list[int]) -> torch.Tensor:
    last = len(tokens) - 1
    return torch.tensor([int(COMPRESS[tokens[last - r]]) if last >= r else PAD for r in range(ORDER)])


def oracle(prompt: list[int], params: SamplingParams, seed: int = 0) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and finish reason of one request, from its tokens alone."""
    model = MockModel(mock_config(VOCAB))
    tokens, logprobs = list(prompt), []
    limit = params.max_tokens or 10**9
    while True:
        logits = expected_logits(model, tokens, window(tokens))[None]
        edits = LogitEdits()
        output = np.asarray(tokens[len(prompt) :], np.int32)
        if needs_edits(params):
            ends = [*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))]
            edits.add_row(0, params, np.asarray(prompt, np.int32), output, ends)

        def column(value: float, dtype: type) -> np.ndarray:
            return np.asarray([value], dtype)

        rows = SampleRows(
            column(params.temperature, np.float32),
            column(params.top_p, np.float32),
            column(params.top_k, np.int32),
            column(params.min_p, np.float32),
            seed_bits([seed]),
            column(len(tokens), np.int64),
            column(0, np.int32),
            edits,
        )
        drawn = sampler.sample(logits, rows)
        assert drawn.logprobs is not None
        token = int(drawn.tokens[0])
        tokens.append(token)
        logprobs.append(float(drawn.logprobs[0]))
        count = len(tokens) - len(prompt)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return tokens[len(prompt) :], logprobs, "stop"
        if count == limit or len(tokens) > MAX_LEN:
            return tokens[len(prompt) :], logprobs, "length"


Work = list[tuple[list[int], SamplingParams, int]]


def make_work(count: int, seed: int = 0, longest: int = 200, max_tokens: int = 24) -> Work:
    generator = np.random.default_rng(seed)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 3, "logit_bias": {EOS: 4.5}},
    ]
    work = []
    for index in range(count):
        prompt = generator.integers(3, VOCAB, int(generator.integers(1, longest))).tolist()
        params = SamplingParams(
            max_tokens=int(generator.integers(3, max_tokens)),
            logprobs=0,
            **kinds[index % len(kinds)],  # type: ignore[arg-type]
        )
        work.append((prompt, params, index + 1))
    return work


@pytest.fixture(scope="module")
def work() -> Work:
    return make_work(14)


@pytest.fixture(scope="module")
def truth(work: Work) -> list[tuple[list[int], list[float], str]]:
    return [oracle(*item) for item in work]


def run(engine: Engine, work: Work, order: list[int] | None = None) -> list[RequestResult]:
    """Results in the order of `work`, requests added in `order`; books balance at the end."""
    order = order or list(range(len(work)))
    numbers = {}
    for index in order:
        prompt, params, seed = work[index]
        request = Request(np.asarray(prompt, np.int32), params, seed=seed)
        numbers[request.request_id] = index
        engine.add(request)
    results: dict[int, RequestResult] = {}
    for result in engine.run():
        assert numbers[result.request_id] not in results, "a request ended twice"
        results[numbers[result.request_id]] = result
    engine.check_integrity()
    assert not engine.has_unfinished()
    return [results[index] for index in range(len(work))]


def check(results: list[RequestResult], truth: list[tuple[list[int], list[float], str]]) -> None:
    for result, (tokens, logprobs, reason) in zip(results, truth, strict=True):
        assert result.token_ids.tolist() == tokens
        assert result.finish_reason == reason
        assert result.logprobs is not None
        assert result.logprobs.tolist() == logprobs  # bitwise


# ------------------------------------------------------------------ the same tokens whatever happens around


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(("max_seqs", "budget"), [(1, 16), (3, 100), (3, None), (16, 16), (16, None)])
def test_tokens_equal_the_oracle(
    work: Work, truth: list[tuple[list[int], list[float], str]], zos: bool, max_seqs: int, budget: int | None
) -> None:
    engine = make_engine(zos=zos, max_seqs=max_seqs, max_batched_tokens=budget, num_blocks=256)
    check(run(engine, work), truth)


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_tokens_survive_shuffling_and_a_preemption_storm(
    work: Work, truth: list[tuple[list[int], list[float], str]], zos: bool
) -> None:
    order = np.random.default_rng(1).permutation(len(work)).tolist()
    crowded: Work = []
    for index in order[:10]:  # 121 … 128 tokens: every one needs a second block while the pool is full
        crowded.append((work[index][0][:1] * (121 + index % 7), work[index][1], work[index][2]))
    engine = make_engine(zos=zos, num_blocks=8, max_model_len=640, max_batched_tokens=96, max_seqs=7)
    results = run(engine, crowded)
    check(results, [oracle(*item) for item in crowded])
    assert engine.stats["preempted"] > 0
    engine = make_engine(zos=zos, num_blocks=256, max_seqs=5, prefill_all_interval=3, prefill_any_interval=4)
    check(run(engine, work, order), truth)


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("parity", [False, True])
def test_late_arrivals_join_and_everything_ends_once(
    work: Work, truth: list[tuple[list[int], list[float], str]], zos: bool, parity: bool
) -> None:
    engine = make_engine(zos=zos, num_blocks=256, max_seqs=4, idle_fast_path=not parity)
    pending = iter(enumerate(work))
    numbers: dict[int, int] = {}
    results: dict[int, RequestResult] = {}
    for step in itertools.count():
        if step % 3 == 0 and (arrival := next(pending, None)) is not None:
            index, (prompt, params, seed) = arrival
            request = Request(np.asarray(prompt, np.int32), params, seed=seed)
            numbers[request.request_id] = index
            engine.add(request)
        results |= {numbers[result.request_id]: result for result in engine.step()}
        if len(results) == len(work):
            break
        assert step < 5000
    check([results[index] for index in range(len(work))], truth)
    engine.run()
    engine.check_integrity()


def test_a_request_without_max_tokens_fills_the_context() -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    (result,) = run(make_engine(max_model_len=60, max_batched_tokens=64), [([5, 6, 7], params, 0)])
    assert (result.finish_reason, len(result.token_ids)) == ("length", 58)


# ------------------------------------------------------------------ aborts and failures


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_abort_at_any_moment_gives_one_record_and_disturbs_nobody(
    work: Work, truth: list[tuple[list[int], list[float], str]], zos: bool, after: int
) -> None:
    engine = make_engine(zos=zos, num_blocks=256, max_batched_tokens=64, max_seqs=4)
    requests = [Request(np.asarray(p, np.int32), params, seed=s) for p, params, s in work[:6]]
    for request in requests:
        engine.add(request)
    results = [result for _ in range(after) for result in engine.step()]
    victims = [request.request_id for request in requests[::2]]
    alive = [victim for victim in victims if engine.abort(victim)]
    assert not engine.abort(10**9)
    results += engine.run()
    engine.check_integrity()
    assert sorted(r.request_id for r in results) == sorted(r.request_id for r in requests)
    by_id = {result.request_id: result for result in results}
    for request, (tokens, _, reason) in zip(requests, truth[:6], strict=True):
        result = by_id[request.request_id]
        if request.request_id in alive:
            assert result.finish_reason == "aborted"
            assert tokens[: len(result.token_ids)] == result.token_ids.tolist()
        else:
            assert (result.token_ids.tolist(), result.finish_reason) == (tokens, reason)


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_a_row_without_a_distribution_fails_alone(zos: bool) -> None:
    model = MockModel(mock_config(VOCAB), fail_token=2)
    engine = make_engine(model=model, zos=zos)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    good, bad = [5, 6, 7, 8], [5, 6, 7, 2]
    results = run(engine, [(good, params, 0), (bad, params, 0), (good, params, 0)])
    expected = oracle(good, params)[0]
    assert results[0].token_ids.tolist() == results[2].token_ids.tolist() == expected
    assert (results[1].finish_reason, results[1].error_code) == ("error", "internal")
    assert "no usable distribution" in (results[1].error or "")


@pytest.mark.parametrize(
    ("prompt", "params", "code", "words"),
    [
        ([], {}, "empty_prompt", "no token"),
        ([3, 512], {}, "bad_token_id", r"512 at position 1"),
        ([-1], {}, "bad_token_id", "-1 at position 0"),
        ([[1, 2]], {}, "wrong_type", "flat list"),
        (None, {}, "wrong_type", "flat list"),
        ([[1], [2, 3]], {}, "wrong_type", "flat list"),
        ([0.5], {}, "wrong_type", "flat list"),
        ([3] * 601, {}, "prompt_too_long", "601 prompt tokens"),
        ([3], {"stop_token_ids": [600]}, "bad_sampling_params", "token 600"),
        ([3], {"logit_bias": {-4: 1.0}}, "bad_sampling_params", "token -4"),
        ([3], {"logprobs": 600}, "bad_sampling_params", "600 alternatives"),
        ([3], {"structured_outputs": {"jsn": {}}}, "bad_schema", "did you mean 'json'?"),
    ],
)
def test_what_can_never_run_ends_with_its_code(
    prompt: list[int], params: dict[str, object], code: str, words: str
) -> None:
    engine = make_engine()
    engine.add(Request(prompt, SamplingParams(**params)))  # type: ignore[arg-type]
    assert engine.has_unfinished()
    (result,) = engine.run()
    assert (result.finish_reason, result.error_code) == ("error", code)
    assert words in (result.error or "")
    assert len(result.token_ids) == 0


def test_prompt_as_long_as_the_context_gives_one_token() -> None:
    engine = make_engine()
    results = run(engine, [([7] * MAX_LEN, SamplingParams(ignore_eos=True), 0)])
    assert (results[0].finish_reason, len(results[0].token_ids)) == ("length", 1)


# ------------------------------------------------------------------ text and stops


def byte_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


class Scripted(MockModel):
    """Says given texts: the script of a prompt is found by the prompt's first token."""

    def __init__(self, scripts: dict[int, list[int]]) -> None:
        super().__init__(mock_config(VOCAB))
        self.scripts, self.position_of = scripts, 0
        self.first_of_state: dict[int, int] = {}

    def forward(self, meta, pools):  # type: ignore[no-untyped-def]
        output = super().forward(meta, pools)
        last = meta.ring_positions[meta.last_rows] // pools.layout.state_rows
        state = last[meta.seq_of_row]
        hidden = torch.zeros(meta.num_rows, 2)
        for row in range(meta.num_rows):
            position, slot = int(meta.positions[row]), int(state[row])
            if position == 0:
                self.first_of_state[slot] = int(meta.input_ids[row])
            script = self.scripts[self.first_of_state[slot]]
            hidden[row, 0] = script[min(position, len(script) - 1)]
        output.hidden = hidden
        return output

    def logits(self, hidden):  # type: ignore[no-untyped-def]
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float() * 50


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    ("said", "params", "text", "reason", "count"),
    [
        ("héllo 👍", {}, "héllo 👍", "stop", 12),
        ("abcSTOPdef", {"stop": "STOP"}, "abc", "stop", 7),
        ("abcSTOPdef", {"stop": ["STOP"], "include_stop_str_in_output": True}, "abcSTOP", "stop", 7),
        ("ab終わりcd", {"stop": ["x", "終わり"]}, "ab", "stop", 11),
        ("abSTO", {"stop": "STOP"}, "abSTO", "stop", 6),
        ("abSTO", {"stop": "STOP", "max_tokens": 4}, "abST", "length", 4),
        ("SSabSS", {"stop": "SS", "min_tokens": 3}, "SSab", "stop", 6),
        ("abcd", {"stop_token_ids": [3 + ord("c")]}, "ab", "stop", 3),
        ("abcd", {"stop_token_ids": [3 + ord("c")], "include_stop_str_in_output": True}, "abc", "stop", 3),
        ("abcd", {"stop_token_ids": [3 + ord("c")], "stop": "zz"}, "ab", "stop", 3),
        ("ab👍", {"max_tokens": 4}, "ab\ufffd", "length", 4),
        ("ab", {"ignore_eos": True, "max_tokens": 5}, "ab", "length", 5),
    ],
)
def test_text_and_stops(
    zos: bool, said: str, params: dict[str, object], text: str, reason: str, count: int
) -> None:
    engine = make_engine(model=Scripted({200: [*byte_ids(said), EOS]}), zos=zos)
    values = {"temperature": 0.0, "max_tokens": 40, **params}
    (result,) = run(engine, [([200], SamplingParams(**values), 0)])  # type: ignore[arg-type]
    assert (result.text, result.finish_reason, len(result.token_ids)) == (text, reason, count)


def test_stop_strings_survive_preemption() -> None:
    scripts = {200 + i: [*(byte_ids("ab" * (20 + i))), *byte_ids("STOP!")] for i in range(6)}
    prompts: Work = [
        ([200 + i] + [5] * 100, SamplingParams(temperature=0.0, stop="STOP", max_tokens=300), 0)
        for i in range(6)
    ]
    for script in scripts.values():  # the prompt's own positions come first
        script[:0] = [5] * 100
    engine = make_engine(
        model=Scripted(scripts), num_blocks=9, max_model_len=800, max_seqs=6, max_batched_tokens=1024
    )
    results = run(engine, prompts)
    assert engine.stats["preempted"] > 0
    assert [result.text for result in results] == ["ab" * (20 + i) for i in range(6)]


def test_further_eos_ids_of_the_checkpoint_stop_too() -> None:
    engine = make_engine(
        model=Scripted({200: byte_ids("abcd")}),
        defaults=GenerationDefaults(eos_token_ids=(EOS, 3 + ord("c"))),
    )
    (result,) = run(engine, [([200], SamplingParams(temperature=0.0, max_tokens=9), 0)])
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("ab", "stop", 3)


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("budget", [16, 4096])
def test_prompt_and_top_logprobs(zos: bool, budget: int) -> None:
    prompt = np.random.default_rng(2).integers(3, VOCAB, 50).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=0, ignore_eos=True)
    others: Work = [([9] * 20, SamplingParams(max_tokens=4, logprobs=1), 1), ([8], SamplingParams(), 2)]
    engine = make_engine(zos=zos, max_batched_tokens=budget)
    result, second, third = run(engine, [(prompt, params, 0), *others])
    model = MockModel(mock_config(VOCAB))
    tokens = [*prompt, *result.token_ids.tolist()]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.shape == (49,)
    for position in range(1, 50):
        logits = expected_logits(model, tokens[:position], window(tokens[:position]))
        want = torch.log_softmax(logits, -1)[tokens[position]].item()
        assert result.prompt_logprobs[position - 1] == pytest.approx(want, abs=2e-6)
    assert result.top_logprobs is not None
    assert result.logprobs is not None
    assert [len(row) for row in result.top_logprobs] == [3] * 6
    for index, row in enumerate(result.top_logprobs):
        assert row[0] == (tokens[50 + index], pytest.approx(result.logprobs[index]))
    assert second.top_logprobs is not None
    assert [len(row) for row in second.top_logprobs] == [1] * len(second.token_ids)
    assert (third.logprobs, third.top_logprobs, third.prompt_logprobs) == (None, None, None)


# ------------------------------------------------------------------ around the loop


def test_wanted_counts_down_and_up() -> None:
    engine = make_engine(max_seqs=8)
    assert engine.wanted() == 10
    for _ in range(4):
        engine.add(Request(np.asarray([3], np.int32), SamplingParams(max_tokens=2, temperature=0.0)))
    assert engine.wanted() == 6
    engine.run()
    assert engine.wanted() == 10


def test_stats_add_up(work: Work) -> None:
    engine = make_engine(num_blocks=256)
    results = run(engine, work)
    stats = engine.stats
    assert stats["prompt_tokens"] == sum(len(prompt) for prompt, _, _ in work)
    assert stats["completion_tokens"] == sum(len(result.token_ids) for result in results)
    assert sum(stats["finished"].values()) == len(work)
    assert stats["kv_cache_usage"] == stats["state_cache_usage"] == 0
    assert stats["completion_tokens_per_second"] > 0
    json.dumps(stats)


def test_timeline_shows_the_commit_behind_the_next_forward(tmp_path: Path) -> None:
    timeline = Timeline()
    engine = make_engine(timeline=timeline, zos=True)
    run(engine, [([5] * 10, SamplingParams(max_tokens=6, ignore_eos=True), 0)])
    starts = {(name, step): start for name, step, start, _ in timeline.spans}
    decode = [step for name, step, _, _ in timeline.spans if name == "forward"][1:]
    for step in decode[:-1]:
        assert starts["forward", step + 1] < starts["commit", step] < starts["sample", step + 1]
    timeline.write(tmp_path / "trace.json", rank=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"].split()[0] for event in events if event["ph"] == "X"} >= {"forward", "commit"}
    assert all(event["pid"] == 3 for event in events)


def test_blacklisted_tokens_are_never_sampled(work: Work) -> None:
    config = EngineConfig(sampling={"token_blacklist": "3..511"})  # type: ignore[arg-type]
    engine = make_engine(config=config, num_blocks=256)
    assert {token for result in run(engine, work) for token in result.token_ids.tolist()} <= {0, 1, 2}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: make_engine(config=EngineConfig(sampling={"token_blacklist": "600"})), "token 600"),  # type: ignore[arg-type]
        (lambda: make_engine(num_drafts=2, max_seqs=2), "num_drafts is 2"),
        (lambda: make_engine(num_blocks=4), "decrease scheduler.max_model_len"),
    ],
)
def test_engine_refuses_what_it_cannot_keep(build: Callable[[], Engine], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
