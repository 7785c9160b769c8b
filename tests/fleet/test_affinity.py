"""Rows that begin alike prefer the rank that has their beginning, and nobody waits for it."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.fleet.affinity import HEAD_TOKENS, PrefixHomes
from deepinfer_ray.fleet.backend import WorkItem
from deepinfer_ray.fleet.router import Router


def prompt(head: int, tail: int, length: int = 200) -> np.ndarray:
    tokens = np.full(length, head, np.int32)
    tokens[HEAD_TOKENS:] = tail
    return tokens


def router(*wanted: int) -> Router:
    made = Router()
    for rank, rows in enumerate(wanted):
        made.rank_up(rank)
        made.credit(rank, rows, 0)
    return made


def items(heads: list[int], first: int = 0) -> list[WorkItem]:
    return [
        WorkItem(first + index, prompt(head, index), SamplingParams(), seed=0)
        for index, head in enumerate(heads)
    ]


def test_heads_stay_together_when_ranks_are_equally_free() -> None:
    fleet = router(8, 8)
    fleet.add(items([1, 2] * 4))
    given = fleet.assign()
    heads = {rank: {int(item.prompt[0]) for item in rows} for rank, rows in given.items()}
    assert heads == {0: {1}, 1: {2}}


def test_one_head_for_all_rows_still_uses_every_rank() -> None:
    fleet = router(16, 16, 16)
    fleet.add(items([7] * 30))
    counts = [len(rows) for rows in fleet.assign().values()]
    assert sum(counts) == 30
    assert len(counts) == 3
    assert min(counts) >= 6


def test_no_row_waits_for_a_full_home() -> None:
    fleet = router(2, 5)
    fleet.add(items([3] * 7))
    assert {rank: len(rows) for rank, rows in fleet.assign().items()} == {0: 2, 1: 5}
    assert fleet.num_pending == 0


def test_a_lost_rank_is_nobodys_home() -> None:
    homes = PrefixHomes()
    assert homes.choose(prompt(1, 0), {0: 4, 1: 4}) == 0
    assert homes.choose(prompt(1, 1), {0: 3, 1: 4}) == 0
    homes.forget(0)
    assert homes.choose(prompt(1, 2), {0: 3, 1: 4}) == 1


def test_short_prompts_have_no_home() -> None:
    homes = PrefixHomes()
    assert homes.choose(prompt(1, 0, length=31), {0: 4, 1: 4}) == 0
    assert homes.choose(prompt(1, 0, length=31), {0: 3, 1: 4}) == 1


@pytest.mark.parametrize("length", [32, 128, 4000])
def test_equal_prompts_of_any_length_meet(length: int) -> None:
    """The completions of one row find each other's cache."""
    homes = PrefixHomes()
    assert homes.choose(prompt(1, 1, length), {0: 4, 1: 3}) == 0
    assert homes.choose(prompt(1, 1, length), {0: 3, 1: 4}) == 0
    assert homes.choose(prompt(1, 1, length), {0: 1, 1: 4}) == 1  # half as free: the other becomes one too
    assert homes.choose(prompt(1, 1, length), {0: 2, 1: 3}) == 1


def test_old_heads_are_forgotten() -> None:
    homes = PrefixHomes(max_heads=3)
    for head in range(10, 14):
        homes.choose(prompt(head, 0), {0: 4, 1: 4})
    assert homes.choose(prompt(10, 1), {0: 3, 1: 4}) == 1
    assert homes.choose(prompt(13, 1), {0: 3, 1: 4}) == 0
