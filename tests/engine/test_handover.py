"""A prompt engine and a completion engine together give the bits of one engine; hooks come in their order."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.engine.handover import Handover, PromptSender, SplitEngine, receive
from deepinfer_ray.engine.hooks import EngineHooks
from deepinfer_ray.engine.plan import CommitResult, StepPlan
from deepinfer_ray.engine.request import Request
from deepinfer_ray.engine.sequence import Sequence, Terminal
from deepinfer_ray.errors import ConfigError


def split(lab: Any, *, prompt: dict[str, Any] | None = None, **completion: Any) -> SplitEngine:
    values = {"role": "completion", "preemption": "stop", "snapshots": 0, **completion}
    first = lab.engine(**{"role": "prompt", "hooks": PromptSender(), **(prompt or {})})
    return SplitEngine(first, lab.engine(**values))


def mixed(kit: Any, max_tokens: int = 7) -> list[Request]:
    requests: list[Request] = kit.family([256, 100], [1, 20, 77], seed=1, max_tokens=max_tokens)
    requests += kit.family([10], [3, 7], seed=2, max_tokens=1)
    requests += kit.family([30], [5, 9], seed=3, prompt_logprobs=0, max_tokens=max_tokens)
    requests += kit.family([40], [1], seed=4, max_tokens=max_tokens, repetition_penalty=1.3, min_tokens=3)
    requests += kit.again(requests[:2])
    return requests


def test_mock_model_sees_the_same_cache_on_both_sides(kit: Any) -> None:
    lab, requests = kit.lab("mock"), mixed(kit)
    expected = lab.run(lab.engine(snapshots=0), requests)
    for completion, prompt in (
        ({"zos": True}, {}),
        ({"zos": False, "max_seqs": 2}, {"max_batched_tokens": 128}),
        ({"zos": True, "max_seqs": 1}, {"snapshots": 0}),
    ):
        engine = split(lab, prompt=prompt, **completion)
        results = lab.run(engine, kit.again(requests))
        assert [kit.bits(result) for result in results] == [kit.bits(result) for result in expected]
        assert engine.completion.stats["prompt_tokens"] == 0
        assert not engine.outbox
        for side in (engine.prompt, engine.completion):
            side.scheduler.state.prefixes.clear()
            side.check_integrity()
            assert side.scheduler.state.blocks.num_free == side.scheduler.state.blocks.size - 1
            assert side.scheduler.state.slots.num_free == side.scheduler.state.slots.size - 1


@pytest.mark.parametrize("name", ["tinyB-released", "tinyB-exact"])
def test_real_models_give_the_bits_of_one_engine(kit: Any, name: str) -> None:
    """Prompts of odd and even length, shorter and longer than the window and than a block."""
    lab = kit.lab(name)
    requests = kit.family([128], [1, 2, 60], seed=5, max_tokens=9) + kit.family([3], [1, 2, 12], seed=6)
    expected = lab.run(lab.engine(snapshots=0), requests)
    results = lab.run(split(lab, max_seqs=3), kit.again(requests))
    assert [kit.bits(result) for result in results] == [kit.bits(result) for result in expected]
    assert [result.cached_tokens for result in results[:3]] == [0, 128, 128]


def test_stop_strings_across_the_hand_over(kit: Any) -> None:
    """A stop string that begins in the first token is still seen."""
    lab = kit.lab("mock")
    letters = {3 + ord(letter): 100.0 for letter in "abcdefgh"}
    (probe,) = kit.family([50], [5], seed=7, max_tokens=12, logit_bias=letters, temperature=1.0)
    (free,) = lab.run(lab.engine(snapshots=0), [probe])
    assert len(free.text) == 12
    for stop in (free.text[:2], free.text[0], free.text[3:6], "z"):
        params = probe.params.model_copy(update={"stop": (stop,)})
        request = Request(probe.prompt, params, probe.seed)
        (expected,) = lab.run(lab.engine(snapshots=0), [request])
        (result,) = lab.run(split(lab), kit.again([request]))
        assert kit.bits(result) == kit.bits(expected)
        assert result.text == free.text.partition(stop)[0]


def test_the_completion_engine_sets_the_pace(kit: Any) -> None:
    """Nothing is lost while sequences wait for seats, blocks or slots of the second engine."""
    lab = kit.lab("mock")
    requests = kit.family([100], list(range(1, 20)), seed=8, max_tokens=30)
    expected = lab.run(lab.engine(snapshots=0), requests)
    engine = split(lab, max_seqs=2, num_blocks=7, max_model_len=400)
    most = 0
    for request in kit.again(requests):
        engine.add(request)
    results = []
    while engine.has_unfinished():
        results += engine.step()
        most = max(most, len(engine.outbox))
        engine.check_integrity()
    assert engine.wanted() == engine.prompt.wanted()
    assert 2 <= most <= 2 + engine.prompt.settings.max_seqs
    assert sorted(map(repr, map(kit.bits, results))) == sorted(map(repr, map(kit.bits, expected)))


def test_abort_on_either_side_and_in_between(kit: Any) -> None:
    lab = kit.lab("mock")
    requests = kit.family([60], list(range(1, 7)), seed=9, max_tokens=40)
    engine = split(lab, max_seqs=1, state_slots_ratio=1.0)
    for request in requests:
        engine.add(request)
    results = engine.step() + engine.step()
    between = [handover.request.request_id for handover in engine.outbox]
    assert len(between) > 1
    running = requests[0].request_id
    assert engine.abort(between[0])
    assert not engine.abort(between[0])
    assert engine.abort(running)
    late = kit.again(requests[:1])[0]
    engine.add(late)
    assert engine.abort(late.request_id)
    assert not engine.abort(10**9)
    results += engine.run()
    engine.check_integrity()
    reasons = {result.request_id: result.finish_reason for result in results}
    aborted = {between[0], running, late.request_id}
    assert {request_id for request_id, reason in reasons.items() if reason == "aborted"} == aborted
    assert len(reasons) == len(results) == 7


def test_a_sequence_too_large_for_the_second_engine_ends_with_an_error(kit: Any) -> None:
    lab = kit.lab("mock")
    requests = kit.family([400], [20], seed=10) + kit.family([20], [20], seed=11)
    engine = split(lab, num_blocks=4, max_model_len=200)
    large, small = lab.run(engine, requests)
    assert (large.finish_reason, large.error_code) == ("error", "out_of_blocks")
    assert large.error == "421 tokens need 4 cache blocks, the completion engine has 3"
    assert (small.finish_reason, small.error) == ("length", None)


def test_roles_and_layouts_are_checked(kit: Any) -> None:
    lab = kit.lab("mock")
    with pytest.raises(ConfigError, match="needs a PromptSender as its hooks"):
        SplitEngine(lab.engine(role="prompt"), lab.engine())
    with pytest.raises(ConfigError, match=r"needs scheduler\.role = 'completion', not 'normal'"):
        SplitEngine(lab.engine(role="prompt", hooks=PromptSender()), lab.engine())
    with pytest.raises(ConfigError, match=r"needs scheduler\.role = 'prompt', not 'completion'"):
        lab.engine(role="completion", preemption="stop", hooks=PromptSender())
    engine = split(lab, max_backtracking=5)
    engine.add(kit.family([30], [5])[0])
    with pytest.raises(
        ConfigError, match=r"both engines need the same model, numerics, speculative\.num_drafts"
    ):
        engine.step()


def test_a_handover_can_travel_and_shows_no_token(kit: Any) -> None:
    """As bytes to anywhere; nothing in it refers to the engine that it left."""
    lab = kit.lab("mock")
    requests = kit.family([140], [9], seed=12)
    (expected,) = lab.run(lab.engine(snapshots=0), requests)
    sender = PromptSender()
    first = lab.engine(role="prompt", hooks=sender)
    first.add(requests[0])
    first.run()
    (handover,) = sender.outbox
    layout = first.pools.layout
    assert handover.nbytes == 2 * layout.block_bytes + layout.slot_bytes
    assert repr(handover) == f"Handover({requests[0].request_id}, tokens=150, bytes={handover.nbytes})"
    copy: Handover = pickle.loads(pickle.dumps(handover))
    second = lab.engine(role="completion", preemption="stop", snapshots=0)
    assert receive(second, copy)
    (result,) = second.run()
    second.check_integrity()
    assert kit.bits(result) == kit.bits(expected)
    assert result.prompt_tokens == 149


class Recorder(EngineHooks):
    """Notes every call, and what must hold at it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine: Any = None
        self.copies: list[tuple[int, torch.Tensor]] = []

    def init_pd_split(self, engine: Any) -> None:
        self.calls.append("init_pd_split")

    def post_schedule(self, plan: StepPlan) -> None:
        self.calls.append(f"post_schedule {'P' if plan.is_prompt else 'D'}{plan.num_seqs}")

    def should_copy_state(self, plan: StepPlan) -> np.ndarray:
        return np.flatnonzero((plan.k - plan.q) % 4 == 0)

    def do_copy_state(self, plan: StepPlan, indices: np.ndarray) -> None:
        for index in indices.tolist():
            self.copies.append(
                (int(plan.k[index] - plan.q[index]), self.engine.pools.export_slot(plan.rows[index]))
            )

    def finalize_seq(self, sequence: Sequence) -> None:
        assert sequence.row > 0
        assert self.engine.scheduler.table.n_blocks[sequence.row] > 0
        self.calls.append("finalize_seq")

    def do_save_kvcache(self, plan: StepPlan) -> None:
        self.calls.append("do_save_kvcache")

    def pe_prepare_save_kvcache(self, plan: StepPlan) -> None:
        assert not plan.committed
        self.calls.append("pe_prepare_save_kvcache")

    def pe_do_save_kvcache(self, plan: StepPlan) -> None:
        assert plan.committed
        self.calls.append("pe_do_save_kvcache")

    def send_processed_prompts(self, plan: StepPlan) -> None:
        self.calls.append("send_processed_prompts")

    def process_output(self, terminals: list[Terminal]) -> None:
        self.calls.append(f"process_output {len(terminals)}")

    def post_process_model_outputs(self, plan: StepPlan, result: CommitResult) -> None:
        self.calls.append("post_process_model_outputs")

    def build_extra_metrics_log(self) -> dict[str, Any]:
        return {"hook_calls": len(self.calls)}


@pytest.mark.parametrize("zos", [True, False], ids=["overlapped", "plain"])
def test_hooks_are_called_in_their_order(kit: Any, zos: bool) -> None:
    lab, hooks = kit.lab("mock"), Recorder()
    engine = lab.engine(zos=zos, hooks=hooks, snapshots=0)
    hooks.engine = engine
    lab.run(engine, kit.family([20], [1], max_tokens=3))
    prompt = [
        "post_schedule P1",
        "pe_prepare_save_kvcache",
        "pe_do_save_kvcache",
        "post_process_model_outputs",
    ]
    decode, late = ["post_schedule D1", "do_save_kvcache"], "post_process_model_outputs"
    if zos:  # a decode step is committed in the middle of the next one
        second = [decode[0], late, decode[1]]  # the last of them computes a sequence that has ended
        rest = [*decode, *second, *second, "post_schedule D0", late, "finalize_seq", "do_save_kvcache"]
    else:
        rest = [*decode, late, *decode, late, "post_schedule D0", "finalize_seq", "do_save_kvcache", late]
    assert hooks.calls[:4] == prompt
    assert hooks.calls[4:] == rest
    assert engine.stats["hook_calls"] == len(hooks.calls)
    assert engine.stats["pending"] == 0
    engine.loop.flush()
    assert hooks.calls[-1] == "process_output 0"


def test_hooks_of_a_prompt_engine(kit: Any) -> None:
    lab, hooks = kit.lab("mock"), Recorder()
    engine = lab.engine(role="prompt", hooks=hooks, snapshots=0, max_batched_tokens=128)
    hooks.engine = engine
    lab.run(engine, kit.family([150], [1], max_tokens=1))
    step = [
        "pe_prepare_save_kvcache",
        "pe_do_save_kvcache",
        "send_processed_prompts",
        "post_process_model_outputs",
    ]
    assert hooks.calls[:11] == ["init_pd_split", "post_schedule P1", *step, "post_schedule P1", *step]


def test_state_is_copied_as_it_was_before_the_step(kit: Any) -> None:
    """A copy holds the rings of exactly the tokens before the step's first row."""
    lab, hooks = kit.lab("mock"), Recorder()
    engine = lab.engine(hooks=hooks, snapshots=0, zos=False)
    hooks.engine = engine
    (request,) = kit.family([20], [3], max_tokens=12)
    (result,) = lab.run(engine, [request])
    tokens = np.concatenate([request.prompt, result.token_ids])
    layout = engine.pools.layout
    assert [length for length, _ in hooks.copies] == [24, 28, 32]
    for length, slot in hooks.copies:
        for offset in layout.ring_offsets.values():
            ring = slot[offset : offset + layout.ring_rows * layout.window_record.bytes]
            records = ring.view(torch.float32).view(layout.ring_rows, -1)
            for position in range(length - layout.window, length):
                record = records[position % layout.ring_rows]
                assert record[:2].tolist() == [tokens[position] + 1, position]
