"""Pools of ids: order, references, borders, and the errors that name a wrong id (spec/engine.md §6)."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_ray.engine.block_manager import BlockPool, Fit, IntegrityError, SlotStack
from deepinfer_ray.errors import ConfigError


def references(pool: BlockPool, **counts: int) -> np.ndarray:
    expected = np.zeros(pool.size, np.int64)
    for name, count in counts.items():
        expected[int(name[1:])] = count
    return expected


def test_first_ids_are_one_two_three() -> None:
    pool = BlockPool(5, "block")
    assert pool.take(3).tolist() == [1, 2, 3]
    pool.check_integrity(references(pool, _1=1, _2=1, _3=1))


def test_freed_ids_come_back_last_in_the_order_of_freeing() -> None:
    pool = BlockPool(6, "block")
    pool.take(3)
    pool.free([3, 1])
    assert pool.free_ids().tolist() == [4, 5, 3, 1]
    assert pool.take(4).tolist() == [4, 5, 3, 1]
    pool.check_integrity(references(pool, _1=1, _2=1, _3=1, _4=1, _5=1))


def test_zero_is_never_handed_out() -> None:
    pool = BlockPool(4, "block")
    for _ in range(20):
        ids = pool.take(3)
        assert 0 not in ids
        pool.free(ids)


def test_a_pinned_id_survives_its_first_owner() -> None:
    pool = BlockPool(4, "block")
    ids = pool.take(2)
    pool.pin(ids[:1])
    pool.free(ids[::-1])
    assert pool.num_free == 2
    pool.check_integrity(references(pool, _1=1))
    pool.free(ids[:1])
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("size", "taken", "count", "fit"),
    [
        (8, 0, 0, Fit.OK),
        (8, 0, 1, Fit.OK),
        (8, 0, 7, Fit.OK),
        (8, 0, 8, Fit.NEVER),
        (8, 0, 9, Fit.NEVER),
        (8, 1, 7, Fit.LATER),
        (8, 1, 6, Fit.OK),
        (8, 7, 1, Fit.LATER),
        (8, 7, 0, Fit.OK),
        (8, 7, 8, Fit.NEVER),
        (2, 0, 1, Fit.OK),
        (2, 1, 1, Fit.LATER),
        (2, 0, 2, Fit.NEVER),
    ],
)
def test_never_later_ok(size: int, taken: int, count: int, fit: Fit) -> None:
    pool = BlockPool(size, "block")
    pool.take(taken)
    assert pool.can_take(count) is fit


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda pool: pool.free([3]), "block 3 was freed, but it is not in use"),
        (lambda pool: pool.free([1, 2, 3]), "block 3 was freed, but it is not in use"),
        (lambda pool: pool.free([0]), "block 0 was freed, but it is not in use"),
        (lambda pool: pool.free([-1]), "block -1 was freed, but it is not in use"),
        (lambda pool: pool.free([8]), "block 8 was freed, but it is not in use"),
        (lambda pool: pool.pin([4]), "block 4 was pinned, but it is not in use"),
        (lambda pool: pool.take(6), "6 blocks were taken, but 5 are free: ask can_take first"),
    ],
)
def test_misuse_names_the_id(act: object, message: str) -> None:
    pool = BlockPool(8, "block")
    pool.take(2)
    with pytest.raises(IntegrityError, match=message):
        act(pool)  # type: ignore[operator]


def test_a_refused_free_changes_nothing() -> None:
    pool = BlockPool(8, "block")
    pool.take(2)
    with pytest.raises(IntegrityError):
        pool.free([1, 5])
    pool.check_integrity(references(pool, _1=1, _2=1))


def test_pool_needs_an_id_beside_the_sentinel() -> None:
    with pytest.raises(ConfigError, match="a pool of 1 state slots has none to hand out"):
        BlockPool(1, "state slot")


def test_integrity_names_the_leaked_id() -> None:
    pool = BlockPool(8, "block")
    pool.take(3)
    with pytest.raises(IntegrityError, match="block 3 has 1 references, its owners hold 0"):
        pool.check_integrity(references(pool, _1=1, _2=1))


def test_integrity_sees_an_id_lost_from_the_free_list() -> None:
    pool = BlockPool(8, "block")
    pool._free -= 1
    with pytest.raises(IntegrityError, match="6 blocks are on the free list, 7 of 7 have no owner"):
        pool.check_integrity(references(pool))


def test_used_fraction_counts_the_sentinel() -> None:
    pool = BlockPool(10, "block")
    assert pool.used_fraction == 0.1
    pool.take(8)
    assert pool.used_fraction == 0.9


@pytest.mark.parametrize("seed", range(20))
def test_random_use_matches_a_plain_model(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 20))
    pool = BlockPool(size, "block")
    free, refs = list(range(1, size)), [0] * size
    for _ in range(300):
        used = [i for i in range(1, size) if refs[i]]
        action = random.integers(3)
        if action == 0 and free:
            count = int(random.integers(1, len(free) + 1))
            expected, free = free[:count], free[count:]
            assert pool.take(count).tolist() == expected
            for i in expected:
                refs[i] = 1
        elif used:
            chosen = random.permutation(used)[: random.integers(1, len(used) + 1)].tolist()
            if action == 1:
                pool.pin(chosen)
            else:
                pool.free(chosen)
            for i in chosen:
                refs[i] += 1 if action == 1 else -1
                if refs[i] == 0:
                    free.append(i)
        assert pool.free_ids().tolist() == free
        pool.check_integrity(np.array(refs))


def test_draft_slots_last_in_first_out() -> None:
    slots = SlotStack(4)
    assert [slots.take(), slots.take(), slots.take()] == [1, 2, 3]
    slots.free(1)
    slots.free(3)
    assert [slots.take(), slots.take()] == [3, 1]
    assert slots.num_used == 3
    slots.free(0)
    assert slots.num_used == 3


def test_draft_slot_misuse() -> None:
    slots = SlotStack(1)
    slots.take()
    with pytest.raises(IntegrityError, match="all 1 draft slots are in use"):
        slots.take()
    slots.free(1)
    with pytest.raises(IntegrityError, match="draft slot 1 was freed, but it is not in use"):
        slots.free(1)
