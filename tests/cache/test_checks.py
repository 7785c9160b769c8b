"""One failing case for every rule of attention spec §19, with the text that the reader gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.cache import checks
from deepinfer_ray.cache.checks import PlanError, StepLimits
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.metadata import build_decode
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.numerics import Numerics


@pytest.fixture(scope="module")
def layout(flash: ModelConfig) -> CacheLayout:
    return CacheLayout.build(flash, Numerics(), 5)


# Rule 1: load segments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[4, 0, 8, 0]], r"load segment 0 reads block 4, outside \[-1, 4\)"),
        ([[-2, 0, 8, 0]], r"load segment 0 reads block -2"),
        ([[1, 60, 68, 0]], r"load segment 0 reads \[60, 68\) of a block of 64 records"),
        ([[1, 9, 3, 0]], r"load segment 0 reads \[9, 3\)"),
        ([[1, 0, 4, 0], [1, 0, 5, 4]], r"load segment 1 writes rows \[4, 9\) of 8"),
        ([[1, 0, 8, -1]], r"load segment 0 writes rows \[-1, 7\)"),
        ([[1, 0, 5, 0], [2, 0, 4, 4]], r"load segments write row 4 2 times"),
        ([[1, 0, 4, 0], [2, 0, 3, 5]], r"no load segment writes row 4 of 8"),
    ],
)
def test_bad_load_segments(segments: list[list[int]], message: str):
    with pytest.raises(PlanError, match=message):
        checks.check_segments(np.array(segments, np.int32), 64, 4, 8)


def test_good_load_segments_pass():
    checks.check_segments(np.array([[1, 0, 4, 0], [-1, 0, 3, 4], [3, 63, 64, 7]], np.int32), 64, 4, 8)


# Rules 2, 3, 5, 6: a step's inputs -----------------------------------------------------------------------


def step(layout: CacheLayout, *, is_prefill: bool = True, rope_rows: int = 1000, **changes: Any) -> None:
    inputs: dict[str, Any] = {
        "q": [3, 1],
        "k": [200, 10],
        "state_ids": [1, 2],
        "block_tables": [[1, 2], [3, 0]],
        "num_blocks_of": [2, 1],
    }
    inputs |= changes
    limits = StepLimits(layout, (1, 2), num_blocks=8, num_slots=4, max_blocks=64, rope_rows=rope_rows)
    limits.check(is_prefill=is_prefill, **{name: np.array(value) for name, value in inputs.items()})


def test_a_good_step_passes(layout: CacheLayout):
    step(layout)
    step(layout, is_prefill=False, q=[6, 1], valid_start=[0, 0])
    step(layout, state_ids=[0, 0])  # padding rows share slot 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": [3, 11]}, "sequence 1 has q_len 11 and k_len 10; 0 <= q <= k must hold"),
        ({"q": [-1, 1]}, "sequence 0 has q_len -1"),
        ({"valid_start": [198, 0]}, "sequence 0 has window history from 198 on, after its first query 197"),
        (
            {"k": [300, 10]},
            r"sequence 0 of length 300 needs 3 blocks of 128 entries \(ratio 1\); its table has 2",
        ),
        ({"num_blocks_of": [2, 65]}, "sequence 1 has 65 blocks; a table holds 64"),
        ({"block_tables": [[1, 2], [8, 0]]}, r"block 8 in column 0 of sequence 1 is outside \[0, 8\)"),
        ({"block_tables": [[1, -1], [3, 0]]}, "block -1 in column 1 of sequence 0"),
        ({"rope_rows": 199}, "position 199 is outside the rotary table of 199 rows"),
        ({"state_ids": [1, 4]}, r"state slots \[1, 4\] are outside \[0, 4\)"),
        ({"state_ids": [2, 2]}, r"two sequences of a step share a state slot: \[2, 2\]"),
        (
            {"is_prefill": False, "q": [7, 1]},
            "a decode step with 7 rows a sequence needs max_backtracking >= 7; it is 6",
        ),
    ],
)
def test_bad_steps(layout: CacheLayout, changes: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        step(layout, **changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ring_rows", 132, "6 rows a sequence needs S >= 133; it is 132"),
        ("state_rows", 6, "6 rows a sequence needs C >= 7; it is 6"),
    ],
)
def test_rings_too_short_for_a_verification(layout: CacheLayout, field: str, value: int, message: str):
    with pytest.raises(PlanError, match=message):
        checks.check_rows_per_sequence(dataclasses.replace(layout, **{field: value}), np.array([6, 1]))


def test_max_num_blocks():
    assert checks.max_num_blocks(1) == 64
    assert checks.max_num_blocks(64 * 128) == 64
    assert checks.max_num_blocks(64 * 128 + 1) == 128
    assert checks.max_num_blocks(1048576 + 10) == 8256


def test_block_geometry():
    checks.check_geometry(128, (1, 2), 8)
    with pytest.raises(ConfigError, match="block_tokens 129 is not a multiple of compression ratio 2"):
        checks.check_geometry(129, (2,))
    with pytest.raises(
        ConfigError, match=r"candidate blocks of 48 entries cross cache blocks of 128 entries .*= 32"
    ):
        checks.check_geometry(128, (1,), 48)


# Rule 4: stores and loads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1, -1, 16], r"window store slot 16 is outside \[0, 16\)"),
        ([-2, 3], r"window store slot -2 is outside \[0, 16\) \(only -1 skips\)"),
        ([5, -1, 5, -1, 5], "window store slot 5 is written 3 times in one call"),
    ],
)
def test_bad_store_slots(slots: list[int], message: str):
    with pytest.raises(PlanError, match=message):
        checks.check_store_slots("window", torch.tensor(slots), 16)


@pytest.mark.parametrize(("ids", "bad"), [([[0, 16]], 16), ([[-2, 0]], -2)])
def test_bad_load_ids(ids: list[list[int]], bad: int):
    with pytest.raises(PlanError, match=rf"window key id {bad} is outside \[-1, 16\)"):
        checks.check_load_ids("window key", torch.tensor(ids), 16)


def test_two_sequences_with_one_tail_block_are_found(layout: CacheLayout):
    meta = build_decode(
        layout,
        (1, 2),
        q=np.array([1, 1]),
        k=np.array([8, 8]),
        state_ids=np.array([1, 2]),
        block_tables=np.array([[3], [3]]),
        input_ids=np.zeros(2),
        ngram_ids=np.zeros((2, 0)),
    )
    with pytest.raises(PlanError, match="ratio-1 entry store slot 391 is written 2 times"):
        checks.check_metadata(meta, layout, 8, 4)
    with pytest.raises(PlanError, match=r"window store slot 275 is outside \[0, 268\)"):
        checks.check_metadata(meta, layout, 8, 2)


# Rules 8, 10 ------------------------------------------------------------------------------------------


def test_dense_indices_must_fit_int32():
    checks.check_dense_indices(256, 8192, 128)
    with pytest.raises(ConfigError, match="2048 rows x 8192 blocks x 128 entries = 2147483648 dense indices"):
        checks.check_dense_indices(2048, 8192, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_bytes": 3128352 + 33}, "slot bytes 3128385 is not a multiple of 32"),
        ({"slot_bytes": 3128352}, r"slot bytes 3128352 is not a multiple of 528 \(remainder 480\)"),
        ({"block_bytes": 114048 + 32}, "block bytes 114080 is not a multiple of 128"),
        ({"block_bytes": 114048 + 128}, "block bytes 114176 is not a multiple of 288"),
        (
            {"state_offsets": {2: 70756}},
            "offset of the compression state of layer 2 70756 is not a multiple of 32",
        ),
        ({"ring_rows": 132}, r"window rings have S = 132 rows; .* W \+ rows - 1 = 133"),
        ({"state_rows": 6}, r"compression state rings have C = 6 rows; .* r \+ rows - 1 = 7"),
    ],
)
def test_bad_layouts(layout: CacheLayout, changes: dict[str, Any], message: str):
    checks.check_layout(layout)
    with pytest.raises(ConfigError, match=message):
        checks.check_layout(dataclasses.replace(layout, **changes))
