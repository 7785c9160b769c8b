"""`RankGrid` against a definition by enumeration, the published examples, and the text of every error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.grid import GROUP_KINDS, KINDS_WITH_CPU_TWIN, RankGrid


def brute_force(D: int, C: int, E: int, N: int) -> dict[str, object] | None:
    """Every group by enumeration of (replica, dp, cp), or None when a rule of the spec is broken."""
    if N == 0:
        N = C * D
    W = max(C * D, N)
    if (C * D) % E or W % (C * D) or W % N or (C % E and E % C):
        return None
    coords = [(replica, d, c) for replica in range(W // (C * D)) for d in range(D) for c in range(C)]

    def by(key: object) -> list[list[int]]:
        table: dict[object, list[int]] = {}
        for r in range(W):
            table.setdefault(key(r), []).append(r)  # type: ignore[operator]
        return list(table.values())

    groups = {
        "world": by(lambda r: 0),
        "local": by(lambda r: r),
        "dp": by(lambda r: (coords[r][0], coords[r][2])),
        "cp": by(lambda r: coords[r][:2]),
        "ep": by(lambda r: r // E),
        "ep_in_dp": by(lambda r: r // E),
        "engram": by(lambda r: r // N),
    }
    gang = list(range(W))  # flood fill over shared collectives
    for _ in range(W):
        for kind in ("cp", "ep", "engram"):
            for members in groups[kind]:
                lowest = min(gang[m] for m in members)
                for m in members:
                    gang[m] = lowest
    return {"W": W, "coords": coords, "groups": groups, "gang": gang}


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 24))
def test_every_grid_equals_its_enumeration(D: int, C: int, E: int, N: int) -> None:
    expected = brute_force(D, C, E, N)
    if expected is None:
        with pytest.raises(ConfigError, match=r"must be 0|must nest"):
            RankGrid.build(dp=D, cp=C, ep=E, engram=N)
        return
    grid = RankGrid.build(dp=D, cp=C, ep=E, engram=N)
    W, coords, gang = expected["W"], expected["coords"], expected["gang"]
    assert grid.world_size == W
    assert grid.num_engines == W // C
    for kind in GROUP_KINDS:
        assert grid.groups(kind) == expected["groups"][kind], kind  # type: ignore[index]
        for r in range(W):  # type: ignore[arg-type]
            assert r in grid.group_of(kind, r)
            assert grid.group_of(kind, r) in grid.groups(kind)
    for r in range(W):  # type: ignore[arg-type]
        place = grid.place(r)
        assert (place.replica, place.dp_rank, place.cp_rank) == coords[r]  # type: ignore[index]
        assert grid.rank_of(*coords[r]) == r  # type: ignore[index]
        assert place.engine * C + place.cp_rank == r
        assert place.dp_rank == place.engine % D
        assert grid.group_of("ep", r)[place.ep_rank] == r
        assert grid.group_of("engram", r)[place.engram_rank] == r
        assert place.is_driver == (grid.engine_driver(place.engine) == r)
        own_gang = [m for m in range(W) if gang[m] == gang[r]]  # type: ignore[arg-type,index]
        assert grid.gangs()[place.gang] == own_gang
        assert grid.vote_group(r) == [m for m in grid.group_of("dp", r) if m in own_gang]


def test_published_example_of_eight_ranks() -> None:
    grid = RankGrid.build(dp=4, cp=2, ep=4)
    assert grid.groups("cp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.engram == 8
    assert grid.num_replicas == 1


def test_a_larger_engram_world_holds_replicas() -> None:
    grid = RankGrid.build(dp=4, cp=2, ep=4, engram=16)
    assert grid.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert grid.groups("engram") == [list(range(16))]
    assert grid.num_replicas == 2
    assert grid.place(9).replica == 1


def test_automatic_sizes() -> None:
    assert RankGrid.build(ep=8, cp=2).dp == 4
    assert RankGrid.build(ep=1, cp=2).dp == 1
    assert RankGrid.build(dp=3, cp=2).engram == 6


def test_ranks_without_a_collective_are_gangs_of_one() -> None:
    grid = RankGrid.build(dp=3, cp=1, ep=1, engram=1)
    assert grid.independent
    assert grid.gangs() == [[0], [1], [2]]
    assert [grid.vote_group(r) for r in range(3)] == [[0], [1], [2]]
    assert not RankGrid.build(dp=3, cp=1, ep=1).independent, "a table sharded over all ranks ties them"


def test_votes_stay_within_a_gang() -> None:
    grid = RankGrid.build(dp=4, cp=1, ep=2, engram=1)
    assert grid.gangs() == [[0, 1], [2, 3]]
    assert grid.vote_group(3) == [2, 3]
    assert grid.group_of("dp", 3) == [0, 1, 2, 3]


def test_twins_are_kinds() -> None:
    assert set(GROUP_KINDS) > KINDS_WITH_CPU_TWIN


def test_rank_seed_is_seed_plus_rank() -> None:
    assert RankGrid.build(dp=4).rank_seed(100, 3) == 103


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"dp": 3, "cp": 2, "ep": 4}, r"\(C·D\) mod E = \(2·3\) mod 4 = 2, must be 0"),
        ({"dp": 3, "cp": 4, "ep": 6}, r"neither 4 mod 6 = 4 nor 6 mod 4 = 2 is 0"),
        ({"dp": 4, "engram": 6}, r"W mod \(C·D\) = max\(1·4, 6\) mod 4 = 2, must be 0"),
        ({"dp": 6, "engram": 4}, r"W mod N = max\(1·6, 4\) mod 4 = 2, must be 0"),
        ({"ep": 0}, r"parallel\.ep must be an integer >= 1, got 0"),
        ({"cp": 0}, r"parallel\.cp must be an integer >= 1, got 0"),
        ({"dp": -1}, r"parallel\.dp must be an integer >= 0, got -1"),
        ({"engram": -2}, r"parallel\.engram must be an integer >= 0, got -2"),
        ({"dp": 2.0}, r"parallel\.dp must be an integer >= 0, got 2\.0"),
        ({"dp": True}, r"parallel\.dp must be an integer >= 0, got True"),
    ],
)
def test_each_error_shows_its_equation_with_numbers(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RankGrid.build(**sizes)


def test_questions_outside_the_world_are_refused() -> None:
    grid = RankGrid.build(dp=2, cp=2, ep=1)
    with pytest.raises(ConfigError, match=r"rank 4 is outside \[0, 4\) of D=2 C=2 E=1 N=4"):
        grid.place(4)
    with pytest.raises(ConfigError, match=r"0 <= e < W // C = 4 // 2 = 2, got 2"):
        grid.engine_driver(2)
    with pytest.raises(ConfigError, match=r"dp rank 2 is outside \[0, 2\)"):
        grid.rank_of(0, 2, 0)
    with pytest.raises(ConfigError, match="no group is called 'tp'"):
        grid.groups("tp")  # type: ignore[arg-type]
