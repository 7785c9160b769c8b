"""What drafting engines consist of: slots, positions, random words, the edges of a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drafting_lab import EOS, TINY, VOCAB, Lab, bits, prompt, run

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine import drafting, inputs
from deepinfer_ray.engine.build import prepare
from deepinfer_ray.engine.draft_pool import DraftPool
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.inputs import InFlight, repaired_positions, rows_of_lengths
from deepinfer_ray.engine.mock import MockModel, byte_tokenizer, mock_config
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.errors import ConfigError


def test_forced_outputs_come_out_with_the_models_own_logprobs(lab: Lab) -> None:
    """Free places go on from them, with drafts as without."""
    random = np.random.default_rng(3)
    forced = [prompt(random, 7), np.array([5, -1, 9], np.int32), np.array([4], np.int32)]
    requests = [
        Request(
            prompt(random, 20),
            SamplingParams(temperature=0.0, max_tokens=9, logprobs=0, ignore_eos=True),
            forced=ids,
        )
        for ids in forced
    ]
    without = run(lab.engine(0), requests)
    for ids, result in zip(forced, without, strict=True):
        kept = ids >= 0
        assert result.token_ids[: len(ids)][kept].tolist() == ids[kept].tolist()
    for zos in (False, True):
        assert bits(run(lab.engine(zos=zos), requests)) == bits(without)


def test_a_model_without_its_drafter_is_refused() -> None:
    model = MockModel(mock_config(VOCAB))
    settings = SchedulerSettings(num_blocks=16, vocab_size=VOCAB, num_drafts=2, max_model_len=100, max_seqs=2)
    pools = CachePools(model.layout(2), 16, settings.num_state_slots)
    with pytest.raises(ConfigError, match="loaded without its draft layers; set it to 0"):
        Engine(
            model,
            pools,
            byte_tokenizer(VOCAB),
            EngineConfig(),
            compress=np.zeros(VOCAB, np.int32),
            settings=settings,
        )


@pytest.mark.parametrize("drafts", [5, 6])
def test_more_drafts_than_were_trained_are_told_of(drafts: int, caplog: pytest.LogCaptureFixture) -> None:
    prepare(TINY, EngineConfig().with_values(speculative={"num_drafts": drafts}), "cpu")
    said = [message for message in caplog.messages if "dspark_block_size" in message]
    assert len(said) == (drafts > 5)
    assert all(
        f"num_drafts = {drafts}, but the drafter of this checkpoint was trained for 5" in m for m in said
    )


def test_more_drafts_than_were_trained_change_no_token(
    lab: Lab, greedy: tuple[list[Request], list[Any]]
) -> None:
    requests, without = greedy
    assert bits(run(lab.engine(9, zos=True), requests[:8])) == without[:8]


def test_which_random_words_rows_and_drafts_draw(lab: Lab) -> None:
    """Positions and seeds of spec/speculative.md §5.5: rows far apart, drafts at their own place, with a seed
    of their own."""
    engine = lab.engine(3, zos=False)
    for index in range(2):
        engine.add(Request(prompt(np.random.default_rng(index), 7 + index), SamplingParams(), seed=2**64 - 5))
    while (plan := engine.loop.last_plan) is None or plan.is_prompt:
        engine.step()
    table = engine.scheduler.table
    rows = inputs.verify_rows(plan, table)
    assert plan.q.tolist() == [4, 4]
    first = (plan.k - plan.q + 1).tolist()
    assert sorted(first) == [8, 9], "the prompt's first token stands at 7 or 8, its successor is sampled"
    assert rows.positions.tolist() == [base + j * 10_000_019 for base in first for j in range(4)]
    assert rows.seeds.tolist() == [-5] * 8
    for place in range(3):
        drafts = inputs.draft_rows(plan, table, place)
        assert drafts.positions.tolist() == [base + 1 + place for base in first]
        assert drafts.seeds.tolist() == [1_000_000_007 - 5] * 2
    engine.close()


def test_a_draft_draws_at_the_place_where_its_token_will_stand(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the step accepted before it."""
    seen: list[list[int]] = []
    sample = drafting.sample

    def watched(logits: torch.Tensor, rows: Any, *args: Any, **more: Any) -> Any:
        seen.append((torch.from_numpy(rows.positions) + more["shift"]).tolist())
        return sample(logits, rows, *args, **more)

    monkeypatch.setattr(drafting, "sample", watched)
    engine = lab.engine(3, zos=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add(Request(prompt(np.random.default_rng(1), 9), params, seed=4))
    accepted = set()
    while not engine.step():
        plan = engine.loop.last_plan
        assert plan is not None
        if not plan.is_prompt:
            row = int(plan.rows[0])
            length = int(engine.scheduler.table.len[row])
            assert seen == [[length + place] for place in range(3)]
            accepted.add(int(engine.scheduler.table.accepted[row]))
        seen.clear()
    assert len(accepted) > 1


def test_a_request_that_ends_asks_for_no_verification(lab: Lab) -> None:
    """Its confidences are 0 from the step on that emits its end, in an accepted draft too (§2.2)."""
    engine = lab.engine(zos=False)
    drafting_ = engine.loop.drafting
    assert drafting_ is not None
    made, ended = drafting_.outputs, []

    def watched(plan: Any, host: dict[str, np.ndarray]) -> Any:
        outputs = made(plan, host)
        assert outputs.accepted is not None
        assert outputs.confidence is not None
        for index in range(plan.num_seqs):
            emitted = [*outputs.accepted[index], outputs.sampled[index]]
            ends = EOS in emitted or 17 in emitted
            assert (outputs.confidence[index] == 0).all() == ends
            ended.append((ends, EOS in emitted[:-1] or 17 in emitted[:-1]))
        return outputs

    drafting_.outputs = watched  # type: ignore[method-assign]
    random = np.random.default_rng(4)
    likely = {EOS: 3.0, 17: 3.0}
    params = SamplingParams(temperature=0.9, max_tokens=40, logit_bias=likely, stop_token_ids=[17])
    run(engine, [Request(prompt(random, 20), params, seed=index) for index in range(24)])
    assert (True, True) in ended, "an end inside accepted drafts"
    assert (False, False) in ended


def test_slot_zero_keeps_its_placeholders() -> None:
    pool = DraftPool(3, 2, 40, "cpu")
    rows = pool.write_rows(torch.tensor([0, 1, 3]), 1)
    assert rows.tolist() == [pool.nowhere * 2 + 1, 3, 7]
    assert pool.ids[:2].tolist() == [39, 39]
    assert pool.logprobs[:2].exp().sum(1).tolist() == [1.0, 1.0]
    assert pool.logprobs[:2, 39].tolist() == [0.0, 0.0]
    assert pool.confidence[:2].tolist() == [1.0, 1.0]
    assert pool.logprobs.nbytes + pool.ids.nbytes + pool.confidence.nbytes == DraftPool.bytes_of(3, 2, 40)


def test_lengths_and_positions_of_a_step_whose_predecessor_is_in_flight() -> None:
    cu, seq, place = rows_of_lengths(torch.tensor([3, 1, 2]), 6)
    assert cu.tolist() == [0, 3, 4, 6]
    assert seq.tolist() == [0, 0, 0, 1, 2, 2]
    assert place.tolist() == [0, 1, 2, 0, 0, 1]
    previous = InFlight(torch.zeros(2), torch.zeros(2, 5), torch.tensor([1, 5]))
    # The host counted 6 rows for the step in flight; sequence 0 was second in it, sequence 2 first, 1 is new.
    base, remap = torch.tensor([100, 50, 70]), torch.tensor([1, -1, 0])
    assert repaired_positions(base, remap, previous, (seq, place)).tolist() == [100, 101, 102, 50, 66, 67]
