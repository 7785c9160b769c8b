"""Which kind of step comes next, alone and in a group (spec/engine.md §3)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.phase_vote import (
    Agreement,
    InProcessGroup,
    PhaseVote,
    SingleRank,
    VoteGroup,
    agree_num_blocks,
)
from deepinfer_ray.engine.simulation import Loop, create_scheduler
from deepinfer_ray.errors import ConfigError, RankFailure


class Scripted:
    """A group of two whose other rank votes by script; records what was asked."""

    size = 2

    def __init__(self, other_wants: bool = False, other_found: bool = False) -> None:
        self.answers = [other_wants, other_found]
        self.votes: list[int] = []

    def minimum(self, value: int) -> int:
        other = self.answers[len(self.votes) % 2]
        self.votes.append(value)
        is_all = len(self.votes) == 1 and not self.any_point
        return min(value, int(other) if is_all else 1 - int(other))

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return values

    any_point = False


@pytest.mark.parametrize(
    ("step", "idle", "point"),
    [
        (0, False, "all"),
        (1, False, None),
        (69, False, None),
        (70, False, "all"),
        (71, False, None),
        (100, False, "any"),
        (140, False, "all"),
        (200, False, "any"),
        (210, False, "all"),
        (699, False, None),
        (700, False, "any"),  # both coincide: any
        (1, True, "any"),
        (0, True, "any"),
        (70, True, "any"),
    ],
)
@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_points(step: int, idle: bool, point: str | None, mine: bool, other: bool) -> None:
    group = Scripted(other_wants=other, other_found=other)
    group.any_point = point == "any"
    vote = PhaseVote(group, 70, 100, idle_fast_path=True)
    vote.decode_step = step
    tried: list[bool] = []

    def try_prefill() -> bool:
        tried.append(True)
        return True

    prefill = vote.decide(lambda: mine, try_prefill, idle)
    passed = {"all": mine and other, "any": mine or other, None: False}[point]
    assert prefill == passed
    assert len(group.votes) == {True: 2, False: 1}[passed] if point else not group.votes
    assert bool(tried) == (passed and mine)  # who wants nothing admits nothing, but votes
    assert vote.decode_step == (0 if passed else step + 1)


def test_second_vote_keeps_a_failed_admission_from_starving_decode() -> None:
    """`want` looks at the queue head only; an empty prompt step would reset the counter for ever."""
    vote = PhaseVote(SingleRank(), 70, 100, idle_fast_path=False)
    assert not vote.decide(lambda: True, lambda: False, False)
    assert (vote.decode_step, vote.num_votes) == (1, 2)


@pytest.mark.parametrize(("all_interval", "any_interval"), [(1, 1), (1, 5), (4, 6), (7, 3), (70, 100)])
def test_intervals(all_interval: int, any_interval: int) -> None:
    vote = PhaseVote(SingleRank(), all_interval, any_interval, idle_fast_path=False)
    points = []
    for step in range(60):
        before = vote.num_votes
        vote.decide(lambda: False, lambda: False, False)
        if vote.num_votes > before:
            points.append(step)
    assert points == [s for s in range(60) if s % all_interval == 0 or (s and s % any_interval == 0)]


@pytest.mark.parametrize(
    ("ranks", "fast", "expected"),
    [
        # (unfinished, decodable, wants) of each rank
        ([(1, 0, 1)], True, (True, True)),
        ([(1, 1, 1)], True, (True, False)),
        ([(1, 0, 0)], True, (True, False)),
        ([(0, 0, 0)], True, (False, False)),
        ([(1, 0, 1)], False, (True, False)),
        ([(1, 0, 1), (0, 0, 0)], True, (True, True)),
        ([(1, 0, 1), (1, 1, 0)], True, (True, False)),
        ([(0, 0, 0), (0, 0, 0)], True, (False, False)),
        ([(1, 0, 1), (1, 0, 1), (1, 0, 1)], True, (True, True)),
        ([(1, 0, 1), (1, 0, 1), (1, 1, 1)], True, (True, False)),
    ],
)
def test_agreement(ranks: list[tuple[int, int, int]], fast: bool, expected: tuple[bool, bool]) -> None:
    def agree(group: VoteGroup, rank: int) -> Agreement:
        unfinished, decodable, wants = map(bool, ranks[rank])
        return PhaseVote(group, 70, 100, fast).agree(unfinished, decodable, wants)

    answers = on_all_ranks(len(ranks), agree)
    assert answers == [Agreement(*expected)] * len(ranks)


def on_all_ranks(size: int, work: Any) -> list[Any]:
    """`work(group member, rank)` on threads of one group; the answers by rank."""
    group = InProcessGroup(size)
    answers: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            answers[rank] = work(group.member(rank), rank)
        except BaseException as error:
            failures.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return answers


def test_reductions_of_the_in_process_group() -> None:
    def work(group: VoteGroup, rank: int) -> tuple[int, list[int]]:
        vector = np.array([rank, -rank, 5, 0], np.int32)
        return group.minimum(10 - rank), group.maximum(vector).tolist()

    assert on_all_ranks(4, work) == [(7, [3, 0, 5, 0])] * 4


def test_a_rank_that_leaves_fails_the_others() -> None:
    def work(group: VoteGroup, rank: int) -> int:
        if rank == 1:
            raise RuntimeError("gone")
        return group.minimum(0)

    with pytest.raises((RankFailure, RuntimeError)):
        on_all_ranks(2, work)


def test_a_missing_rank_times_out_by_name() -> None:
    group = InProcessGroup(2, timeout_s=0.05)
    with pytest.raises(RankFailure, match=r"rank 0 waited 0.05 s for the other 1 ranks of the vote"):
        group.member(0).minimum(1)


@pytest.mark.parametrize(
    ("counts", "agreed"), [([100, 98], 98), ([101, 99], 98), ([64, 64], 64), ([3, 9], 2)]
)
def test_block_count_is_the_minimum_and_even(counts: list[int], agreed: int) -> None:
    """A mean over the ranks would promise blocks that the smallest rank does not have (D8)."""
    assert on_all_ranks(2, lambda group, rank: agree_num_blocks(group, counts[rank])) == [agreed] * 2


def test_no_blocks_left() -> None:
    with pytest.raises(ConfigError, match="the cache holds 1 blocks here and 0 on the smallest rank"):
        agree_num_blocks(SingleRank(), 1)


RECORDED = {"prefill_all_interval": 70, "prefill_any_interval": 100}
"""The intervals of the recorded traces."""

# -- in a scheduler ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fast", "waited"), [(True, 0), (False, 69)])
def test_late_request_on_an_idle_engine(fast: bool, waited: int) -> None:
    """Parity spins placeholders until the next point; the fast path admits at once."""
    loop = Loop(create_scheduler(idle_fast_path=fast, **RECORDED))
    loop.add(10, 1)
    assert loop.turn().plan.is_prompt
    assert not loop.turn().plan.is_prompt
    loop.add(10, 1)  # nothing runs now
    turns = 0
    while not loop.turn().plan.is_prompt:
        turns += 1
    assert turns == waited
    loop.run()
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("fast", [True, False])
def test_running_work_keeps_its_decode_steps(fast: bool) -> None:
    """A rank that decodes is interrupted at points only: right behind a prompt step, then after 70."""
    loop = Loop(
        create_scheduler(max_model_len=2048, max_batched_tokens=2048, idle_fast_path=fast, **RECORDED)
    )
    loop.add(10, 2000)
    assert loop.turn().plan.is_prompt
    loop.add(10, 1)
    assert loop.turn().plan.is_prompt
    assert not loop.turn().plan.is_prompt
    loop.add(10, 1)
    kinds = [loop.turn().plan.is_prompt for _ in range(70)]
    assert kinds == [False] * 69 + [True]


@pytest.mark.parametrize(("fast", "first_prompt"), [(True, 0), (False, 100)])
def test_work_on_one_of_two_ranks(fast: bool, first_prompt: int) -> None:
    def work(group: VoteGroup, rank: int) -> list[tuple[bool, int]]:
        loop = Loop(create_scheduler(votes=group, idle_fast_path=fast, **RECORDED))
        if rank == 0:
            loop.add(30, 2)
        steps = []
        while (agreement := loop.scheduler.agree()).unfinished:
            plan = loop.turn(agreement).plan
            steps.append((plan.is_prompt, plan.num_seqs))
        loop.flush()
        loop.scheduler.check_integrity()
        return steps

    mine, other = on_all_ranks(2, work)
    assert mine[first_prompt] == (True, 1)
    assert other[first_prompt] == (True, 0)  # takes part without a row
    assert not any(is_prompt for is_prompt, _ in mine[:first_prompt])
    assert [kind for kind, _ in mine] == [kind for kind, _ in other]


def test_any_point_bounds_the_wait_beside_a_busy_rank() -> None:
    """Rank 1 decodes for long and wants nothing; rank 0's request still starts at the ANY point."""

    def work(group: VoteGroup, rank: int) -> int:
        loop = Loop(create_scheduler(votes=group, prefill_all_interval=7, prefill_any_interval=10))
        loop.add(10, 2 if rank == 0 else 900)
        waited = -1
        late = None
        for step in range(60):
            agreement = loop.scheduler.agree()
            if rank == 0 and step == 4:
                late = loop.add(10, 2)
            turn = loop.turn(agreement)
            if late is not None and waited < 0 and turn.plan.is_prompt and turn.plan.num_seqs:
                waited = step - 4
        return waited

    waited, _ = on_all_ranks(2, work)
    assert 0 <= waited <= 10
