"""Step inputs: token and n-gram gathers against golden/ops/engram_zos and against plain Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer_ray.engine.inputs import (
    HistoryReader,
    InFlight,
    StepRows,
    block_after_gap,
    gather_in_flight,
    prompt_scores,
    sample_rows,
)
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.sequence import Sequence
from deepinfer_ray.engine.table import SequenceTable

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "ops" / "engram_zos.safetensors"
PAD, ORDER, VOCAB = 5, 4, 40
LOOKUP = (np.arange(VOCAB) * 7 % 23).astype(np.int32)


def make_plan(
    rows: list[int], q: list[int], k: list[int], is_prompt: bool = False, **more: object
) -> StepPlan:
    count = len(rows)
    zeros = np.zeros(count, np.int32)
    values: dict[str, object] = {
        "last_chunk": np.ones(count, np.bool_),
        "remap": np.full(count, -1, np.int32),
        **more,
    }
    return StepPlan(
        step=0,
        is_prompt=is_prompt,
        rows=np.asarray(rows, np.int64),
        seq_ids=np.asarray(rows, np.int64),
        q=np.asarray(q, np.int32),
        k=np.asarray(k, np.int32),
        num_tokens=sum(q),
        draft_read=zeros,
        draft_write=zeros,
        **values,  # type: ignore[arg-type]
    )


def make_table(num_drafts: int = 0, compress: np.ndarray | None = LOOKUP) -> SequenceTable:
    return SequenceTable(8, 4, 64, num_drafts, compress)


def put(table: SequenceTable, row: int, tokens: list[int], prompt_len: int, **params: object) -> Sequence:
    request = Request(np.asarray(tokens[:prompt_len], np.int32), SamplingParams(**params), seed=row)  # type: ignore[arg-type]
    sequence = Sequence(request, row, prompt_len, np.asarray(tokens, np.int32))
    table.assign(row, sequence, 1, row)
    return sequence


def window_by_hand(tokens: list[int], position: int) -> list[int]:
    out, blocked = [], False
    for back in range(ORDER):
        place = position - back
        blocked = blocked or place < 0 or tokens[place] >= VOCAB
        out.append(PAD if blocked else int(LOOKUP[tokens[place]]))
    return out


def test_golden_gather_across_an_in_flight_step() -> None:
    golden = {name: tensor.long() for name, tensor in load_file(GOLDEN).items()}
    q = golden["seqlens_q"]
    seq = torch.repeat_interleave(torch.arange(len(q)), q)
    step = torch.arange(len(seq)) - (q.cumsum(0) - q)[seq]
    previous = InFlight(
        golden["prev_sampled_token_ids"],
        golden["prev_predict_token_ids"],
        golden["prev_num_accepted_tokens"],
    )
    _, windows = gather_in_flight(
        golden["remap"],
        golden["curr_fresh"],
        golden["curr_fresh"],
        golden["win_compressed"],
        previous,
        golden["lookup_table"],
        7,
        (seq, step),
        order=4,
    )
    assert torch.equal(windows, golden["ngram_token_ids"])


def test_prompt_chunks_read_across_their_border_and_stop_at_images() -> None:
    table = make_table()
    first, second = [3, 9, VOCAB + 1, 4, 5, 6, 7], [8, 11, 12]
    put(table, 2, first, 7)
    put(table, 5, second, 3)
    plan = make_plan([2, 5], [4, 3], [7, 3], is_prompt=True)
    ids, windows = HistoryReader(table, ORDER, PAD).tokens(plan, StepRows.of(plan))
    assert ids.tolist() == first[3:] + second
    expected = [window_by_hand(first, p) for p in range(3, 7)] + [window_by_hand(second, p) for p in range(3)]
    assert windows.tolist() == expected


def test_decode_rows_continue_into_the_drafts() -> None:
    table = make_table(num_drafts=2)
    tokens = [3, 9, 4, 5]
    put(table, 1, tokens, 3)
    table.draft[1] = [21, 22]
    plan = make_plan([1], [3], [6])
    ids, windows = HistoryReader(table, ORDER, PAD).tokens(plan, StepRows.of(plan))
    assert ids.tolist() == [5, 21, 22]
    assert windows.tolist() == [window_by_hand([*tokens, 21, 22], p) for p in (3, 4, 5)]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_overlapped_gather_equals_the_committed_truth(num_drafts: int, seed: int) -> None:
    """Launching before the previous commit must give the tokens that launching after it would give."""
    generator = np.random.default_rng(seed)
    table = make_table(num_drafts)
    truth: dict[int, list[int]] = {}
    rows = [1, 2, 3, 4]
    for row in rows:
        length = int(generator.integers(1, 9))
        truth[row] = generator.integers(0, VOCAB, length).tolist()
        put(table, row, truth[row], length)
        table.draft[row] = generator.integers(0, VOCAB, num_drafts)
    previous_rows = [3, 1, 4]
    remap = [previous_rows.index(row) if row in previous_rows else -1 for row in rows]
    accepted = generator.integers(0, num_drafts + 1, 3)
    sampled = generator.integers(0, VOCAB, 3)
    proposals = generator.integers(0, VOCAB, (3, num_drafts))

    lengths = [len(truth[row]) for row in rows]
    plan = make_plan(rows, [num_drafts + 1] * 4, [n + num_drafts for n in lengths], remap=np.asarray(remap))
    fresh, fresh_compressed, window = HistoryReader(table, ORDER, PAD).overlapped(plan)
    step_rows = StepRows.of(plan)
    ids, windows = gather_in_flight(
        torch.from_numpy(plan.remap),
        torch.from_numpy(fresh).long(),
        torch.from_numpy(fresh_compressed).long(),
        torch.from_numpy(window).long(),
        InFlight(torch.from_numpy(sampled), torch.from_numpy(proposals), torch.from_numpy(accepted)),
        torch.from_numpy(LOOKUP).long(),
        PAD,
        (torch.from_numpy(step_rows.seq_of_row), torch.from_numpy(step_rows.row_in_seq)),
        order=ORDER,
    )

    for row, index in zip(rows, remap, strict=True):
        if index >= 0:  # what the commit of the previous step will append
            truth[row] += [*table.draft[row, : accepted[index]].tolist(), int(sampled[index])]
            table.draft[row] = proposals[index]
        table.tokens[row, : len(truth[row])] = truth[row]
        table.compressed[row, : len(truth[row])] = LOOKUP[truth[row]]
        table.len[row] = len(truth[row])
    later = make_plan(rows, [num_drafts + 1] * 4, [len(truth[row]) + num_drafts for row in rows])
    want_ids, want_windows = HistoryReader(table, ORDER, PAD).tokens(later, StepRows.of(later))
    assert ids.tolist() == want_ids.tolist()
    assert windows.tolist() == want_windows.tolist()


def test_block_after_gap_is_sticky() -> None:
    assert block_after_gap(np.asarray([[4, -1, 6, 7], [-1, 2, 3, 4], [1, 2, 3, 4]]), 9).tolist() == [
        [4, 9, 9, 9],
        [9, 9, 9, 9],
        [1, 2, 3, 4],
    ]


def test_sampling_columns_and_edits_follow_the_rows() -> None:
    table = make_table()
    put(table, 1, [3, 4, 6], 2, temperature=0.0, min_tokens=2, stop_token_ids=[9])
    put(table, 2, [3], 1, temperature=0.7, top_p=0.5, top_k=3, logprobs=2, seed=1)
    put(table, 3, [3, 5], 1, repetition_penalty=1.3)
    plan = make_plan([1, 2, 3], [1, 1, 1], [3, 1, 2])
    rows = sample_rows(plan, table, np.asarray([0, 2]))
    assert rows.temperature.tolist() == [0.0, 1.0]
    assert rows.positions.tolist() == [3, 2]
    assert rows.seeds.tolist() == [1, 3]
    assert rows.edits is not None
    logits = torch.ones(2, VOCAB)
    rows.edits.apply(logits)
    assert torch.isinf(logits[0]).nonzero()[:, 0].tolist() == [1, 9]
    assert (logits[1] != 1).nonzero()[:, 0].tolist() == [3, 5]
    plain = sample_rows(plan, table, np.asarray([1]))
    assert plain.edits is None
    assert (plain.top_p[0], plain.top_k[0], plain.top_logprobs[0]) == (0.5, 3, 2)


def test_prompt_scores_cover_each_position_once_over_all_chunks() -> None:
    table = make_table()
    tokens = [3, 9, 4, 5, 6, 7]
    put(table, 1, tokens, 6, prompt_logprobs=0)
    put(table, 2, [8, 8], 2)
    seen: dict[int, int] = {}
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        plan = make_plan([2, 1], [2, end - begin], [2, end], is_prompt=True)
        scores = prompt_scores(plan, table)
        if end == 6:
            assert scores is None  # the last prompt token predicts the first output
            continue
        assert scores is not None
        ((index, first, count),) = scores.spans
        assert index == 1
        assert scores.rows.tolist() == list(range(2, 2 + count))
        seen.update(zip(range(first, first + count), scores.targets.tolist(), strict=True))
    assert seen == dict(enumerate(tokens[1:], start=1))


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_model_without_engram_has_empty_windows(num_drafts: int) -> None:
    table = make_table(num_drafts, compress=None)
    put(table, 1, [3, 9, 4], 2)
    put(table, 2, [8], 1)
    reader = HistoryReader(table, 0, 2)
    chunk = make_plan([1], [2], [2], is_prompt=True)
    assert reader.tokens(chunk, StepRows.of(chunk))[1].shape == (2, 0)
    plan = make_plan([2, 1], [num_drafts + 1] * 2, [1 + num_drafts, 3 + num_drafts])
    rows = StepRows.of(plan)
    ids, windows = reader.tokens(plan, rows)
    assert ids.tolist() == [8, *[0] * num_drafts, 4, *[0] * num_drafts]
    assert windows.shape == (2 * (num_drafts + 1), 0)
    fresh_ids, fresh_compressed, window = reader.overlapped(plan)
    _, gathered = gather_in_flight(
        torch.tensor([-1, 0]),
        torch.from_numpy(fresh_ids).long(),
        torch.from_numpy(fresh_compressed).long(),
        torch.from_numpy(window).long(),
        InFlight(torch.tensor([7]), torch.zeros(1, num_drafts, dtype=torch.int64), torch.tensor([0])),
        None,
        2,
        (torch.from_numpy(rows.seq_of_row), torch.from_numpy(rows.row_in_seq)),
        order=0,
    )
    assert gathered.shape == (2 * (num_drafts + 1), 0)


def test_uneven_draft_counts_give_the_same_rows_as_even_ones() -> None:
    table = make_table(num_drafts=2)
    put(table, 1, [3, 9, 4, 5], 3)
    put(table, 2, [8], 1)
    table.draft[1], table.draft[2] = [21, 22], [23, 24]
    reader = HistoryReader(table, ORDER, PAD)
    even, uneven = make_plan([1, 2], [3, 3], [6, 3]), make_plan([1, 2], [2, 3], [5, 3])
    ids, windows = reader.tokens(even, StepRows.of(even))
    some_ids, some_windows = reader.tokens(uneven, StepRows.of(uneven))
    assert some_ids.tolist() == ids[[0, 1, 3, 4, 5]].tolist()
    assert some_windows.tolist() == windows[[0, 1, 3, 4, 5]].tolist()
