"""Meeting of the ranks: a rank that does not come, ranks of other grids; what a lost rank looks like."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepinfer_ray.errors import RankFailure
from deepinfer_ray.parallel.channel import Channel
from deepinfer_ray.parallel.grid import RankGrid
from deepinfer_ray.parallel.groups import ProcessGroups, Store
from deepinfer_ray.parallel.rank_group import RankGroup

GRID = RankGrid.build(dp=2, cp=2, ep=4)


def test_a_missing_rank_is_a_failure_after_the_time_out() -> None:
    store = Store("127.0.0.1", "alone")
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 0 of 4 at 127.0.0.1:\d+: the ranks .* did not all meet"):
        ProcessGroups.connect(GRID, 0, store.rendezvous, connect_timeout_s=0.5)
    assert time.monotonic() - started < 10
    assert not dist.is_initialized()


def test_nobody_serves_at_an_unknown_address() -> None:
    with pytest.raises(RankFailure, match=r"no rendezvous can be served at 192\.0\.2\.1"):
        Store("192.0.2.1", "nowhere", timeout_s=1.0)


def test_a_rank_on_its_own_needs_no_groups() -> None:
    groups = ProcessGroups.single()
    assert groups.place.is_driver
    groups.check_alike("anything")
    assert groups.for_model().ep.size == 1
    groups.close()


def _rank(rank: int, meet: Any, queue: Any, grid: RankGrid) -> None:
    """Sees all groups, then rank 3 dies while the others wait for it in a sum."""
    try:
        groups = ProcessGroups.connect(grid, rank, meet, timeout_s=10.0, connect_timeout_s=10.0)
        members = [
            [int(part) for part in group.gather(torch.tensor([rank])).flatten()]
            for group in (groups.cp, groups.ep, groups.engram, groups.gang)
        ]
        votes = groups.votes.minimum(rank + 5) if rank % 2 == 0 else None
        groups.check_alike("same")
        queue.put((rank, members, votes))
        if rank == 3:
            queue.close()
            queue.join_thread()  # its last words are out
            os._exit(9)
        started = time.monotonic()
        groups.gang.sum(torch.ones(1))
    except RankFailure as error:
        queue.put((rank, str(error), time.monotonic() - started if "started" in locals() else None))


def _processes(grids: list[RankGrid]) -> list[Any]:
    context = multiprocessing.get_context("fork")
    store, queue = Store("127.0.0.1", "gang"), context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, store.rendezvous, queue, grid))
        for rank, grid in enumerate(grids)
    ]
    for process in processes:
        process.start()
    expected = 7 if len(set(grids)) == 1 else 4
    answers = [queue.get(timeout=60) for _ in range(expected)]
    for process in processes:
        process.join(30)
    return answers


def test_groups_of_a_gang_and_the_death_of_a_rank() -> None:
    answers = _processes([GRID] * 4)
    members = {answer[0]: answer[1:] for answer in answers if isinstance(answer[1], list)}
    assert members[2] == ([[2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]], 5)
    assert members[1] == ([[0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]], None)
    failures = {answer[0]: answer[1:] for answer in answers if isinstance(answer[1], str)}
    assert sorted(failures) == [0, 1, 2]
    for message, seconds in failures.values():
        assert "a sum failed, another rank of the group is gone or too slow" in message
        assert seconds < 10, "a closed connection is noticed at once"


def _silent(rank: int, meet: Any, queue: Any) -> None:
    """Rank 1 lives, but does not come to the sum."""
    groups = ProcessGroups.connect(RankGrid.build(dp=2, ep=2), rank, meet, timeout_s=1.5)
    started = time.monotonic()
    if rank == 1:
        time.sleep(8)
        return
    try:
        groups.ep.sum(torch.ones(1))
    except RankFailure as error:
        queue.put((str(error), time.monotonic() - started))


def test_a_rank_that_hangs_is_waited_for_as_long_as_the_configuration_says() -> None:
    context = multiprocessing.get_context("fork")
    store, queue = Store("127.0.0.1", "silent"), context.Queue()
    processes = [
        context.Process(target=_silent, args=(rank, store.rendezvous, queue), daemon=True) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    message, seconds = queue.get(timeout=60)
    processes[1].kill()
    for process in processes:
        process.join(30)
    assert message.startswith("gang rank 0 of 2: a sum failed, another rank of the group is gone or too slow")
    assert "(parallel.timeout_s)" in message
    assert 1.0 < seconds < 7


def test_ranks_of_different_grids_refuse_each_other() -> None:
    answers = _processes([GRID, GRID, RankGrid.build(dp=4, cp=1, ep=4), GRID])
    assert all("was started for D=" in answer[1] for answer in answers)


def test_records_with_tensors_through_a_channel(run_ranks: Any) -> None:
    record = ("forward", {"a": torch.arange(5), "b": [torch.ones(2, 3, dtype=torch.bool), None]}, 3.5)

    def rank(group: RankGroup) -> Any:
        channel = Channel(group)
        if group.rank == 0:
            channel.send(record)
            channel.send("no tensor")
            return None
        return channel.receive(), channel.receive()

    for got in run_ranks(3, rank)[1:]:
        (what, tensors, number), text = got
        assert (what, number, text) == ("forward", 3.5, "no tensor")
        assert torch.equal(tensors["a"], record[1]["a"])
        assert torch.equal(tensors["b"][0], torch.ones(2, 3, dtype=torch.bool))
