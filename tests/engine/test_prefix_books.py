"""Which prefixes are kept, who may start from them, and when they are given up: the scheduler's side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.block_manager import BlockPool, IntegrityError
from deepinfer_ray.engine.prefix_cache import PrefixCache, SharePoints
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.sequence import Sequence
from deepinfer_ray.engine.simulation import Loop, create_scheduler
from deepinfer_ray.errors import ConfigError


def tokens(*parts: tuple[int, int]) -> np.ndarray:
    """int32: `count` times `token` for each (token, count)."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def make_loop(**settings: Any) -> Loop:
    values = {"prefix_snapshots": 8, "prefix_min_saved_tokens": 1, "num_drafts": 0, **settings}
    return Loop(create_scheduler(**values))


def add(loop: Loop, prompt: np.ndarray, max_tokens: int = 4, **keywords: Any) -> Sequence:
    own = {name: keywords.pop(name) for name in {"checkpoints", "image_spans"} & keywords.keys()}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **keywords)
    return loop.scheduler.add(Request(prompt, params, request_id=loop.take_id()), **own)


def prefill_tokens(loop: Loop, max_turns: int = 500) -> int:
    """Query rows of all prompt steps until nothing is left; books checked after every step."""
    total = 0
    for _ in range(max_turns):
        if not loop.scheduler.has_unfinished:
            break
        turn = loop.turn()
        total += int(turn.plan.q.sum()) if turn.plan.is_prompt else 0
        loop.scheduler.check_integrity()
    loop.flush()
    loop.scheduler.check_integrity()
    assert not loop.scheduler.has_unfinished
    return total


# -- where a prompt may be shared -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, []),
        (2, [1]),
        (128, [127]),
        (129, [128]),
        (130, [128, 129]),
        (257, [128, 256]),
        (300, [128, 256, 299]),
    ],
)
def test_points_are_blocks_and_all_but_the_last_token(length: int, expected: list[int]) -> None:
    """At least one token is always computed: P <= N - 1."""
    assert list(SharePoints.of(tokens((5, length))).lengths) == expected


def test_points_without_the_last_one_and_before_an_image() -> None:
    prompt = tokens((5, 400))
    assert SharePoints.of(prompt, whole=False).lengths == (128, 256, 384)
    assert SharePoints.of(prompt, end=256).lengths == (128, 256)
    assert SharePoints.of(prompt, end=255).lengths == (128,)
    assert SharePoints.of(prompt, end=399).lengths == (128, 256, 384, 399)


def test_a_key_names_all_tokens_before_its_point() -> None:
    base = tokens((5, 300))
    keys = SharePoints.of(base).keys
    assert len(set(keys)) == 3
    for place in (0, 127, 128, 255, 256, 298, 299):
        other = base.copy()
        other[place] += 1
        same = [one == two for one, two in zip(keys, SharePoints.of(other).keys, strict=True)]
        assert same == [place >= point for point in (128, 256, 299)]
    longer = SharePoints.of(tokens((5, 301)))
    assert longer.keys[:2] == keys[:2]
    assert longer.keys[2] not in keys


# -- what is kept -----------------------------------------------------------------------------------------


def test_rows_that_share_a_head_prefill_it_once() -> None:
    loop = make_loop()
    rows = [add(loop, tokens((5, 512), (10 + row, 30))) for row in range(10)]
    assert prefill_tokens(loop) == 512 + 10 * 30
    assert [row.cached_tokens for row in rows] == [0] + [512] * 9
    assert loop.scheduler.state.prefixes.num_hits == 9


def test_a_chunk_ends_at_a_prefix_only_if_another_waiting_request_shares_it() -> None:
    loop = make_loop(max_seqs=8)
    add(loop, tokens((5, 300)))
    add(loop, tokens((6, 300)))
    assert [chunk[1:] for chunk in loop.turn().chunks] == [(300, 300), (300, 300)]
    add(loop, tokens((5, 280), (7, 20)))
    assert prefill_tokens(loop) == 300  # the first is gone: nothing was kept for this one
    assert len(loop.scheduler.state.prefixes) == 0


def test_the_longest_common_prefix_is_kept_not_every_block() -> None:
    loop = make_loop()
    for tail in (1, 2):
        add(loop, tokens((5, 500), (tail, 50)))
    turn = loop.turn()
    assert [chunk[1:] for chunk in turn.chunks] == [(384, 384)]
    assert turn.plan.save_states.shape == (1, 2)
    assert len(loop.scheduler.state.prefixes) == 1


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_boundary_is_forced_only_before_the_slack_of_the_rings(drafts: int) -> None:
    """A snapshot of P is right as long as at most slack = drafts + 1 further tokens were computed."""
    for tail in range(1, 12):
        loop = make_loop(num_drafts=drafts)
        rows = [add(loop, tokens((5, 128), (10 + row, tail))) for row in range(2)]
        chunks = [chunk[1] for chunk in loop.turn().chunks]
        assert chunks == ([128 + tail] if tail <= drafts + 1 else [128])
        assert prefill_tokens(loop) == 2 * tail - (tail if tail <= drafts + 1 else 0)
        assert rows[1].cached_tokens == 128


def test_prefixes_of_prefixes() -> None:
    """Four rows share 128 tokens, two of them 384: both lengths are kept."""
    loop = make_loop()
    rows = [
        add(loop, tokens((5, 128), (family, 256), (10 * family + row, 9)))
        for family in (1, 2)
        for row in range(2)
    ]
    assert prefill_tokens(loop) == 128 + 2 * 256 + 4 * 9
    assert [row.cached_tokens for row in rows] == [0, 384, 128, 384]


def test_others_go_on_in_the_step_that_leaves_a_prefix() -> None:
    """A forced boundary does not close the batch; who waits for that prefix does."""
    loop = make_loop()
    donor, other, sharer, last = (
        add(loop, prompt)
        for prompt in (tokens((5, 200), (1, 9)), tokens((6, 50)), tokens((5, 200)), tokens((7, 9)))
    )
    assert [chunk[:2] for chunk in loop.turn().chunks] == [(donor.request_id, 128), (other.request_id, 50)]
    assert [chunk[:2] for chunk in loop.turn().chunks] == [
        (donor.request_id, 81),
        (sharer.request_id, 72),
        (last.request_id, 9),
    ]


def test_role_prompt_waits_for_a_prefix_of_the_same_step() -> None:
    loop = make_loop(role="prompt", zos=False)
    donor, sharer = add(loop, tokens((5, 200))), add(loop, tokens((5, 150), (6, 9)))
    assert [chunk[0] for chunk in loop.turn().chunks] == [donor.request_id]
    assert {chunk[0] for chunk in loop.turn().chunks} == {donor.request_id, sharer.request_id}
    assert sharer.cached_tokens == 128


def test_a_prefix_that_saves_too_little_is_not_kept() -> None:
    counts = {}
    for others in (1, 2):
        loop = make_loop(prefix_min_saved_tokens=256)
        for row in range(1 + others):
            add(loop, tokens((5, 128), (10 + row, 9)))
        counts[others] = prefill_tokens(loop)
    assert counts == {1: 2 * 137, 2: 128 + 3 * 9}


def test_rows_with_prompt_logprobs_compute_every_row_but_leave_prefixes() -> None:
    loop = make_loop()
    donor = add(loop, tokens((5, 300)), prompt_logprobs=0)
    asks = add(loop, tokens((5, 300)), prompt_logprobs=0)
    takes = add(loop, tokens((5, 256), (6, 9)))
    assert prefill_tokens(loop) == 300 + 300 + 9
    assert (donor.cached_tokens, asks.cached_tokens, takes.cached_tokens) == (0, 0, 256)


def test_nothing_behind_an_image_is_shared() -> None:
    loop = make_loop()
    for tail in (1, 2):
        add(loop, tokens((5, 500), (tail, 9)), image_spans=[(200, 300)])
    assert prefill_tokens(loop) == 509 + (509 - 128)


def test_a_request_takes_no_prefix_longer_than_truncation_allows() -> None:
    """Consumer rings are right only up to N - keep (attention spec §15)."""
    loop = make_loop(keep_tokens=140)
    rows = [add(loop, tokens((5, 384), (row, 9))) for row in (1, 2)]
    prefill_tokens(loop)
    assert [row.cached_tokens for row in rows] == [0, 0]  # 384 > 393 - 140, and nothing shorter is kept
    loop = make_loop(keep_tokens=140)
    rows = [add(loop, tokens((5, 256), (row, 140))) for row in (1, 2)]
    prefill_tokens(loop)
    assert [row.cached_tokens for row in rows] == [0, 256]


def test_a_checkpoint_of_the_request_is_kept_beside_a_forced_one() -> None:
    loop = make_loop()
    first = add(loop, tokens((5, 256), (1, 60)), checkpoints=[100, 300])
    add(loop, tokens((5, 256), (2, 9)))
    cuts = []
    while loop.scheduler.has_unfinished:
        cuts += [chunk[2] for chunk in loop.turn().chunks if chunk[0] == first.request_id]
    loop.flush()
    assert cuts[:4] == [100, 256, 300, 316]


def test_without_chunks_only_whole_prompts_are_shared() -> None:
    loop = make_loop(chunked_prefill=False)
    rows = [add(loop, tokens((5, 300))) for _ in range(3)] + [add(loop, tokens((5, 256), (6, 44)))]
    assert prefill_tokens(loop) == 300 + 1 + 1 + 300
    assert [row.cached_tokens for row in rows] == [0, 299, 299, 0]


def test_off_means_off() -> None:
    loop = make_loop(prefix_snapshots=0)
    rows = [add(loop, tokens((5, 300))) for _ in range(3)]
    assert prefill_tokens(loop) == 900
    assert [row.cached_tokens for row in rows] == [0, 0, 0]
    assert rows[0].share is None


def test_a_preempted_request_starts_again_from_its_prefix() -> None:
    loop = make_loop(num_blocks=9, max_model_len=700, prefix_block_fraction=0.5)
    rows = [add(loop, tokens((5, 256), (10 + row, 60)), max_tokens=200) for row in range(4)]
    prefill_tokens(loop)
    assert loop.scheduler.num_preempted > 0
    assert all(len(loop.results[row.request_id].token_ids) == 200 for row in rows)


# -- what is given up -------------------------------------------------------------------------------------


def test_running_sequences_take_back_the_blocks_of_kept_prefixes() -> None:
    """No preemption as long as a prefix could be given up."""
    loop = make_loop(num_blocks=12, max_seqs=2, max_model_len=1100, prefix_block_fraction=0.5)
    for row in range(2):
        add(loop, tokens((5, 512), (10 + row, 9)), max_tokens=4)
    prefill_tokens(loop)
    state = loop.scheduler.state
    assert (len(state.prefixes), state.blocks.num_free) == (1, 7)
    assert state.used_fraction == pytest.approx(1 / 12)
    add(loop, tokens((6, 400)), max_tokens=600)
    prefill_tokens(loop, 1000)
    assert (len(state.prefixes), loop.scheduler.num_preempted, state.prefixes.num_evicted) == (0, 0, 1)


def test_admission_takes_back_blocks_but_not_those_it_starts_from() -> None:
    loop = make_loop(num_blocks=8, max_seqs=2, prefix_block_fraction=0.9)
    for row in range(2):
        add(loop, tokens((5, 256), (10 + row, 9)), max_tokens=1)
    for row in range(2):
        add(loop, tokens((6, 256), (10 + row, 9)), max_tokens=1)
    prefill_tokens(loop)
    state = loop.scheduler.state
    assert (len(state.prefixes), state.blocks.num_free) == (2, 3)
    late = add(loop, tokens((5, 256), (1, 500)), max_tokens=1)
    other = add(loop, tokens((6, 256), (1, 9)), max_tokens=1)  # its prefix was used more recently, and goes
    prefill_tokens(loop)
    assert (late.cached_tokens, other.cached_tokens) == (256, 0)
    assert len(state.prefixes) == 1
    assert state.blocks.num_free == 5


def test_prompts_are_admitted_above_the_watermark_of_blocks_that_would_be_given_back() -> None:
    loop = make_loop(num_blocks=11, max_seqs=3, prefix_block_fraction=0.9, max_batched_tokens=1024)
    for row in range(2):
        add(loop, tokens((5, 896), (10 + row, 9)), max_tokens=1)
    prefill_tokens(loop)
    running = add(loop, tokens((6, 380)), max_tokens=200)
    loop.turn()
    assert loop.scheduler.state.blocks.used_fraction > 0.9
    waiting = add(loop, tokens((7, 20)), max_tokens=1)
    for _ in range(80):
        loop.turn()
    assert waiting.ended
    assert not running.ended
    prefill_tokens(loop)


def test_least_recently_used_goes_first_and_never_one_that_somebody_waits_for() -> None:
    loop = make_loop(prefix_snapshots=2, max_seqs=1, num_blocks=40)
    heads = (5, 6)
    for head in heads:
        for row in range(2):
            add(loop, tokens((head, 128), (10 + row, 9)), max_tokens=1)
    prefill_tokens(loop)
    add(loop, tokens((5, 128), (20, 9)), max_tokens=1)  # 5 is the more recent one now
    prefill_tokens(loop)
    for row in range(2):
        add(loop, tokens((7, 128), (10 + row, 9)), max_tokens=1)
    assert prefill_tokens(loop) == 128 + 9 + 9
    for head, expected in ((6, 0), (5, 128)):
        probe = add(loop, tokens((head, 128), (30, 9)), max_tokens=1)
        prefill_tokens(loop)
        assert probe.cached_tokens == expected
    # Both kept prefixes are waited for: a third is not kept at their expense.
    waiting = [add(loop, tokens((head, 128), (40, 9)), max_tokens=1) for head in (8, 8, 5, 7)]
    prefill_tokens(loop)
    assert [row.cached_tokens for row in waiting] == [0, 0, 128, 128]


def test_the_budget_counts_each_block_once() -> None:
    blocks = BlockPool(20, "block")
    cache = PrefixCache(blocks, range(50, 54), max_blocks=4, slack=1)
    waiting = [
        Sequence(Request(prompt, SamplingParams()), index, len(prompt), prompt)
        for index, prompt in enumerate(
            [
                tokens((5, 513)),
                tokens((5, 256), (6, 257)),
                tokens((5, 513)),
                tokens((7, 300)),
                tokens((7, 300)),
            ]
        )
    ]
    for sequence in waiting:
        cache.joined(sequence)
    own = blocks.take(5)
    cache.left(waiting[0])
    assert cache.next_cut(waiting[0], 0, 513, 513) == 256
    assert len(cache.keep(waiting[0], 256, own)) == 1
    assert len(cache.keep(waiting[0], 513, own)) == 1  # 512: two blocks more than the first, four in all
    cache.publish()
    cache.left(waiting[3])
    other = blocks.take(3)
    assert cache.next_cut(waiting[3], 0, 300, 300) is None
    assert cache.keep(waiting[3], 300, other) == []  # both others are waited for
    for sequence in waiting[1:3]:
        cache.left(sequence)
    assert len(cache.keep(waiting[3], 300, other)) == 1  # now the older one goes, then the other
    assert cache.num_evicted == 2
    refs = np.zeros(20, np.int64)
    cache.add_refs(refs)
    assert refs[other].tolist() == [1, 1, 1]
    assert refs[own].tolist() == [0] * 5


def test_wrong_books_are_named() -> None:
    loop = make_loop()
    for row in range(2):
        add(loop, tokens((5, 256), (row, 9)))
    loop.turn()
    cache = loop.scheduler.state.prefixes
    cache._free.pop()
    with pytest.raises(IntegrityError, match="of 8 snapshots 7 are free or in use"):
        loop.scheduler.check_integrity()
    cache._free.append(
        max(set(cache.snapshots) - set(cache._free) - {next(iter(cache._kept.values())).snapshot})
    )
    cache._held[3] += 1
    with pytest.raises(IntegrityError, match="count of blocks that kept prefixes hold"):
        loop.scheduler.check_integrity()
    cache._held[3] -= 1
    cache._demand[b"nobody"] = 1
    with pytest.raises(IntegrityError, match="share points are counted"):
        loop.scheduler.check_integrity()


def test_clear_gives_everything_back() -> None:
    loop = make_loop()
    for row in range(3):
        add(loop, tokens((5, 256), (row, 9)))
    prefill_tokens(loop)
    state = loop.scheduler.state
    assert state.blocks.num_free < state.blocks.size - 1
    state.prefixes.clear()
    loop.scheduler.check_integrity()
    assert state.blocks.num_free == state.blocks.size - 1


def test_a_prefix_shows_no_digest() -> None:
    loop = make_loop()
    for row in range(2):
        add(loop, tokens((5, 256), (row, 9)))
    loop.turn()
    entry = next(iter(loop.scheduler.state.prefixes._kept.values()))
    assert repr(entry) == f"KeptPrefix(256 tokens, snapshot={entry.snapshot})"


def test_the_fraction_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"cache\.prefix_budget_fraction is 1\.5; it must be in \[0, 1\)"):
        create_scheduler(prefix_block_fraction=1.5)
