"""Vectors of spec/speculative.md §5.4–5.5: the words every device must draw."""

import numpy as np
import pytest
import torch

from deepinfer_ray.engine.philox import (
    CASE_ACCEPT,
    DRAFT_SEED_OFFSET,
    philox_block,
    random_words,
    seed_bits,
    uniform,
)


def words(seed: int, position: int, case: int, count: int = 4) -> torch.Tensor:
    return random_words(torch.from_numpy(seed_bits([seed])), torch.tensor([position]), case, count)[0]


@pytest.mark.parametrize(
    ("seed", "position", "case", "expected", "value"),
    [
        (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8", 0.399046481),
        (42, 7, 0, "e0020480 bedb05bb ee570c01 371038e8", 0.875030756),
        (42, 7, 1, "f7dd2f89 bf20b7d0 6fb7ef7b dee44aaa", None),
        (42, 7, 2, "1ebff96f 2087da6f 9078d257 6ec12c0a", 0.120116793),
        (42 + DRAFT_SEED_OFFSET, 8, 0, "e1ff347c c19a62fd 4be7be44 6385c876", None),
        (2**64 - 1, 10000026, 0, "09d161cf 5b359299 42ec638c 96b8cef5", None),
    ],
)
def test_first_words_and_uniform(
    seed: int, position: int, case: int, expected: str, value: float | None
) -> None:
    got = words(seed, position, case)
    assert [f"{word:08x}" for word in got.tolist()] == expected.split()
    if value is not None:
        assert uniform(got)[0].item() == pytest.approx(value, abs=5e-10)


def test_acceptance_uniforms_of_seed_42() -> None:
    seeds = torch.full((4,), 42)
    got = uniform(random_words(seeds, torch.arange(4), CASE_ACCEPT, 4)[:, 0])
    np.testing.assert_allclose(got, [0.3984137, 0.4824731, 0.5188996, 0.9228392], atol=5e-8)


def test_uniform_never_zero_and_reaches_one() -> None:
    edge = uniform(torch.tensor([0, 2**32 - 1]))
    assert edge[0] == 2.0**-33
    assert edge[1] == 1.0


def test_numpy_and_torch_draw_the_same_words() -> None:
    seeds = seed_bits([0, 42, 2**64 - 1, 2**63])
    positions = np.asarray([0, 7, 10000026, 2**31 - 1])
    by_numpy = philox_block(seeds, positions * 3 + 1, 5)
    by_torch = philox_block(torch.from_numpy(seeds), torch.from_numpy(positions * 3 + 1), 5)
    for left, right in zip(by_numpy, by_torch, strict=True):
        assert left.tolist() == right.tolist()


def test_blocks_continue_the_stream() -> None:
    long = words(7, 3, 0, 16)
    assert long[:4].tolist() == words(7, 3, 0).tolist()
    later = philox_block(torch.tensor([7]), torch.tensor([9]), 2)
    assert long[8:12].tolist() == [word.item() for word in later]


def test_a_row_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(37) * 977, torch.arange(37) * 31
    together = random_words(seeds, positions, 0, 8)
    for row in range(37):
        assert torch.equal(
            together[row], random_words(seeds[row : row + 1], positions[row : row + 1], 0, 8)[0]
        )


def test_negative_seeds_are_bit_patterns() -> None:
    assert seed_bits([-1, 2**64 - 1]).tolist() == [-1, -1]
