"""Every size and offset of attention spec §10, and the same rules at other widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer_ray.cache.checks import check_layout
from deepinfer_ray.cache.layout import CacheLayout, RecordFormat
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.numerics import Numerics

RELEASED = Numerics()
EXACT = Numerics("exact")


def test_record_sizes():
    sizes = [
        RecordFormat.of(kind, width) for kind, width in (("fp8", 512), ("fp4_kv", 512), ("fp4_index", 128))
    ]
    assert [(r.data_bytes, r.scale_bytes, r.bytes) for r in sizes] == [
        (512, 16, 528),
        (256, 32, 288),
        (64, 4, 68),
    ]
    assert RecordFormat.of("f32", 512).bytes == 2048


def test_record_width_must_divide_into_groups():
    with pytest.raises(ConfigError, match=r"48 values does not divide into groups of 32 \(fp8\)"):
        RecordFormat.of("fp8", 48)


@pytest.mark.parametrize(
    ("fp4", "parts", "payload", "block_bytes", "per_token"),
    [
        (
            True,
            {
                2: ((0, 4352), (4352, 18432)),
                8: ((22784, 4352), (27136, 18432)),
                14: ((45568, 4352), (49920, 18432)),
                20: ((68352, 8704), (77056, 36864)),
            },
            113920,
            114048,
            891,
        ),
        (
            False,
            {
                2: ((0, 4352), (4352, 33792)),
                8: ((38144, 4352), (42496, 33792)),
                14: ((76288, 4352), (80640, 33792)),
                20: ((114432, 8704), (123136, 67584)),
            },
            190720,
            194304,
            1518,
        ),
    ],
)
def test_block_table_of_the_spec(
    flash: ModelConfig,
    fp4: bool,
    parts: dict[int, tuple[tuple[int, int], ...]],
    payload: int,
    block_bytes: int,
    per_token: int,
):
    layout = CacheLayout.build(flash.with_text(use_fp4_sparse_kv=fp4), RELEASED, 5)
    got = {
        layer: tuple(
            (part.offset, part.bytes) for part in (layout.index_parts[layer], layout.main_parts[layer])
        )
        for layer in layout.main_parts
    }
    assert got == parts
    assert [layout.main_parts[layer].entries for layer in (2, 8, 14, 20)] == [64, 64, 64, 128]
    assert layout.block_payload_bytes == payload
    assert layout.block_bytes == block_bytes
    assert layout.bytes_per_token == per_token
    assert layout.index_parts[20].scale_offset - layout.index_parts[20].offset == 128 * 64


def test_state_slot_with_five_drafts(flash: ModelConfig):
    layout = CacheLayout.build(flash, RELEASED, 5)
    assert (layout.ring_rows, layout.state_rows, layout.max_backtracking) == (134, 7, 6)
    assert layout.ring_stride == 134 * 528 == 70752
    assert layout.ring_offsets == {layer: layer * 70752 for layer in range(43)}
    assert layout.state_offsets == {layer: 43 * 70752 + i * 28672 for i, layer in enumerate((2, 8, 14))}
    assert layout.stored_ring_layers * layout.ring_stride == 1415040
    assert layout.state_stride == 28672
    assert layout.slot_bytes == 3128928
    assert layout.ring_pitch * 528 == layout.slot_bytes


@pytest.mark.parametrize(
    ("extra", "ring_rows", "slot_bytes"), [(128, 262, 6035040), (262, 396, 9077376), (268, 402, 9213600)]
)
def test_state_slot_with_extra_state(flash: ModelConfig, extra: int, ring_rows: int, slot_bytes: int):
    layout = CacheLayout.build(flash, RELEASED, 5, extra_ring_rows=extra)
    assert (layout.ring_rows, layout.slot_bytes) == (ring_rows, slot_bytes)


def test_state_slot_without_drafts(flash: ModelConfig):
    ours = CacheLayout.build(flash, RELEASED, 0)
    assert (ours.ring_rows, ours.state_rows, ours.ring_stride) == (129, 2, 68128)
    assert len(ours.ring_offsets) == 40
    assert ours.state_offsets[2] == 2725120
    assert ours.slot_bytes == 2749824
    kept = CacheLayout.build(flash, RELEASED, 0, with_draft_rings=True)
    assert (len(kept.ring_offsets), kept.state_offsets[2], kept.slot_bytes) == (43, 2929504, 2954688)


def test_exact_mode_takes_raw_records(flash: ModelConfig):
    layout = CacheLayout.build(flash, EXACT, 5)
    assert (layout.window_record.bytes, layout.main_record.bytes, layout.index_record.bytes) == (
        2048,
        2048,
        512,
    )
    assert layout.index_record.scale_bytes == 0
    assert layout.main_parts[2].offset == 64 * 512
    assert layout.block_bytes == (3 * 64 + 128) * (2048 + 512)
    assert layout.ring_stride == 134 * 2048
    check_layout(layout)


def test_small_model_follows_the_same_rules(build: Callable[..., CacheLayout]):
    layout = build(5)
    assert (layout.window_record.bytes, layout.main_record.bytes, layout.index_record.bytes) == (66, 36, 17)
    assert layout.ring_rows == 22
    assert layout.ring_stride == 1472  # 22 * 66 = 1452, to a multiple of 32
    assert layout.index_parts[2].bytes == 64 * 17
    assert layout.main_parts[2].offset == 1088
    assert layout.block_bytes % 36 == layout.block_bytes % 128 == 0
    assert layout.slot_bytes % 66 == layout.slot_bytes % 32 == 0
    check_layout(layout)


def test_backtracking_can_be_raised_but_not_lowered(build: Callable[..., CacheLayout]):
    assert build(5, max_backtracking=2).max_backtracking == 6
    raised = build(2, max_backtracking=8)
    assert (raised.ring_rows, raised.state_rows) == (16 + 8, 2 + 7)


def test_divide_follows_the_numeric_variant(build: Callable[..., CacheLayout]):
    assert not build(0).divide
    assert build(0, variant="reference").divide


def test_negative_options_are_refused(build: Callable[..., CacheLayout]):
    with pytest.raises(ConfigError, match="num_drafts -1"):
        build(-1)


def test_block_must_hold_whole_groups(build: Callable[..., CacheLayout]):
    with pytest.raises(ConfigError, match="block_tokens 15 is not a multiple of compression ratio 2"):
        build(0, block_tokens=15)
