"""The pull queue and the search for killer rows, without Ray: a small simulation plays the ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer_ray.engine.request import RequestResult, SamplingParams
from deepinfer_ray.errors import RankFailure
from deepinfer_ray.fleet.backend import WorkItem, WorkResult
from deepinfer_ray.fleet.router import Router
from deepinfer_ray.fleet.suspects import RestartBudget

PARAMS = SamplingParams()


def item(key: int) -> WorkItem:
    return WorkItem(key, np.array([1, key], np.int32), PARAMS, seed=key)


def done(work: WorkItem) -> WorkResult:
    return WorkResult(work.key, RequestResult(work.key, work.prompt, "", "stop", 2), work.attempts)


def router_with(ranks: int, rows: int, wanted: int = 4) -> Router:
    router = Router()
    for rank in range(ranks):
        router.rank_up(rank)
        router.credit(rank, wanted, 0)
    router.add(item(key) for key in range(rows))
    return router


def keys(given: dict[int, list[WorkItem]]) -> dict[int, list[int]]:
    return {rank: [work.key for work in works] for rank, works in given.items()}


def test_rows_go_out_only_against_credits() -> None:
    router = router_with(ranks=2, rows=20, wanted=3)
    given = router.assign()
    assert {rank: len(works) for rank, works in given.items()} == {0: 3, 1: 3}
    assert router.num_pending == 14
    assert router.assign() == {}, "credits are spent"
    assert router.wanted() == 0


def test_few_rows_spread_over_all_ranks() -> None:
    assert keys(router_with(ranks=4, rows=3, wanted=8).assign()) == {0: [0], 1: [1], 2: [2]}


def test_rows_go_out_in_arrival_order() -> None:
    assert keys(router_with(ranks=1, rows=3, wanted=8).assign()) == {0: [0, 1, 2]}


def test_rows_on_their_way_count_against_an_older_report() -> None:
    router = router_with(ranks=1, rows=10, wanted=4)
    assert len(router.assign()[0]) == 4
    router.credit(0, wanted=4, received=0)  # a report from before the four arrived
    assert router.assign() == {}
    router.credit(0, wanted=1, received=4)
    assert len(router.assign()[0]) == 1


def test_a_rank_without_credits_holds_nothing() -> None:
    router = router_with(ranks=2, rows=30, wanted=2)
    ran = {0: 0, 1: 0}
    pending = router.assign()
    for _ in range(200):  # rank 1 finishes at once, rank 0 never
        for work in pending.get(1, []):
            assert router.finished(1, done(work)) is not None
            ran[1] += 1
        router.credit(1, wanted=2, received=router.load(1).sent)  # type: ignore[union-attr]
        pending = router.assign()
    assert ran[1] == 28
    assert len(router.load(0).in_flight) == 2  # type: ignore[union-attr]
    router.check_integrity()


def test_wanted_is_what_the_caller_should_send() -> None:
    router = router_with(ranks=2, rows=3, wanted=4)
    assert router.wanted() == 5
    router.assign()
    assert router.wanted() == 5
    assert Router().wanted() == 0


def test_a_key_in_use_is_refused() -> None:
    router = router_with(ranks=1, rows=2)
    with pytest.raises(ValueError, match="row key 1 is already queued or in flight"):
        router.add([item(1)])
    work = router.assign()[0][1]
    router.finished(0, done(work))
    router.add([item(1)])


def test_a_result_of_a_lost_rank_is_ignored() -> None:
    router = router_with(ranks=1, rows=1)
    work = router.assign()[0][0]
    router.lost(0)
    assert router.finished(0, done(work)) is None
    router.rank_up(0)
    assert router.finished(0, done(work)) is None, "the new actor of the same number does not have it yet"


def test_lost_machine_puts_rows_back_in_front_unsuspected() -> None:
    router = router_with(ranks=1, rows=6, wanted=3)
    router.assign()
    assert router.lost(0, blame_rows=False) == []
    router.rank_up(0)
    router.credit(0, 6, 0)
    given = router.assign()[0]
    assert [work.key for work in given] == [0, 1, 2, 3, 4, 5]
    assert [work.attempts for work in given] == [2, 2, 2, 1, 1, 1]


def test_a_rank_that_will_go_away_ends_what_it_has_and_gets_nothing_new() -> None:
    router = router_with(ranks=2, rows=3, wanted=2)
    given = keys(router.assign())
    router.withdraw(0)
    router.withdraw(7)  # not up: nothing to withdraw
    assert router.wanted() == 4 - 3 - len(given[0]) % 2
    router.add(item(key) for key in range(10, 14))
    assert 0 not in router.assign()
    for key in given[0]:
        assert router.finished(0, done(item(key))) is not None
    router.credit(0, 2, len(given[0]))
    assert router.assign() == {}
    assert router.lost(0, blame_rows=False) == []
    router.rank_up(0)
    router.credit(0, 2, 0)
    assert len(router.assign()[0]) == 2, "its successor is fed"
    router.check_integrity()


def test_suspects_run_in_halves_and_alone() -> None:
    router = router_with(ranks=2, rows=12, wanted=4)
    first = router.assign()
    assert sorted(map(len, first.values())) == [4, 4]
    router.lost(1)
    router.rank_up(1)
    router.credit(1, 4, 0)
    given = router.assign()
    assert keys(given) == {1: [work.key for work in first[1]][:2]}, "half of the suspects and nothing else"
    router.credit(1, 2, 2)
    assert 1 not in router.assign(), "a rank that runs suspects takes no other row"
    assert router.wanted() == 0


def test_a_rank_is_emptied_for_waiting_suspects() -> None:
    """Both ranks are always busy with other rows; suspects must not wait for ever."""
    router = router_with(ranks=2, rows=0, wanted=4)
    router.add(item(key) for key in range(8))
    router.assign()
    router.lost(0)
    router.add(item(key) for key in range(100, 140))
    for _ in range(12):  # rank 1 finishes its oldest row whenever it may take another
        load = router.load(1)
        assert load is not None
        oldest = next(iter(load.in_flight.values()))
        router.finished(1, done(oldest))
        router.credit(1, 4 - len(load.in_flight), load.sent)
        router.assign()
        if load.alone:
            break
    assert load.alone
    assert set(load.in_flight) <= {0, 2, 4, 6}


class Cluster:
    """Ranks that die when they hold a killer row, else finish their rows in random order."""

    def __init__(self, router: Router, ranks: int, room: int, killers: set[int], seed: int) -> None:
        self.router, self.room, self.killers = router, room, killers
        self.random = random.Random(seed)
        self.held: dict[int, list[WorkItem]] = {}
        self.received: dict[int, int] = {}
        self.budget = RestartBudget(3)
        self.results: dict[int, WorkResult] = {}
        self.deaths = 0
        for rank in range(ranks):
            self.up(rank)

    def up(self, rank: int) -> None:
        self.held[rank], self.received[rank] = [], 0
        self.router.rank_up(rank)
        self.router.credit(rank, self.room, 0)

    def turn(self) -> None:
        for rank, works in self.router.assign().items():
            self.held[rank] += works
            self.received[rank] += len(works)
        rank = self.random.choice(list(self.held))
        held = self.held[rank]
        if any(work.key in self.killers for work in held):
            self.deaths += 1
            convicted = self.router.lost(rank)
            for result in convicted:
                self.keep(result)
            if not convicted:
                self.budget.death(len(held), "a killer row")
            self.up(rank)
        elif held:
            work = held.pop(self.random.randrange(len(held)))
            result = self.router.finished(rank, done(work))
            assert result is not None
            self.keep(result)
        self.router.credit(rank, self.room - len(self.held[rank]), self.received[rank])
        self.router.check_integrity()

    def turns(self, limit: int) -> None:
        for _ in range(limit):
            if len(self.results) == 64:
                break
            self.turn()

    def keep(self, result: WorkResult) -> None:
        assert result.key not in self.results
        self.results[result.key] = result
        self.budget.progress()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ranks", "killers"), [(1, {17}), (3, {17}), (2, {3, 40, 41}), (2, set())])
def test_every_row_ends_once_and_only_killers_are_convicted(ranks: int, killers: set[int], seed: int) -> None:
    router = Router()
    router.add(item(key) for key in range(64))
    cluster = Cluster(router, ranks, room=32, killers=killers, seed=seed)
    cluster.turns(5000)
    assert len(cluster.results) == 64
    guilty = {key for key, result in cluster.results.items() if result.result.error_code == "rank_killer"}
    assert guilty == killers
    assert cluster.deaths <= 9 * len(killers), "log2(rows in flight) deaths a killer, and two alone"
    innocents = [result.attempts for key, result in cluster.results.items() if key not in killers]
    assert max(innocents) <= 1 + cluster.deaths


def test_an_engine_that_always_dies_is_given_up() -> None:
    router = Router()
    router.add(item(key) for key in range(64))
    cluster = Cluster(router, 1, room=64, killers=set(range(64)), seed=0)
    with pytest.raises(RankFailure, match=r"died 7 times without a row ending in between \(limit 3"):
        cluster.turns(5000)
    assert cluster.results == {}


def test_budget_counts_only_deaths_without_progress() -> None:
    budget = RestartBudget(2)
    for _ in range(10):
        budget.death(8, "x")
        budget.death(8, "x")
        budget.progress()
    for rows in (8, 4, 2, 1, 8, 4, 2, 1):  # bisection of two rows
        budget.death(rows, "x")
    with pytest.raises(RankFailure, match="the last cause: the end"):
        budget.death(3, "the end")


def test_budget_of_zero_allows_no_death() -> None:
    with pytest.raises(RankFailure, match=r"limit 0"):
        RestartBudget(0).death(0, "x")


def test_prompts_are_not_shown() -> None:
    assert "prompt_len=2" in repr(item(5))
    assert "array" not in repr(item(5)) + repr(done(item(5)))
