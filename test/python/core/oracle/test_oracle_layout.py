"""From storage to logical values: strides, ragged sequences, packed types, scale tiles."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError
from tilewright.graph.enums import tensor_reordering
from tilewright.oracle import layout

pytestmark = pytest.mark.L0


def _record(
    dim: tuple[int, ...], stride: tuple[int, ...], data_type: str = "FLOAT", **rest: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        uid=1, name="t", dim=dim, stride=stride, data_type=DataType[data_type], **rest
    )


def test_a_buffer_is_read_by_the_declaration_and_never_by_its_shape() -> None:
    """With H equal to S, a (B, S, H, D) buffer under a (B, H, S, D) declaration."""
    buffer = torch.arange(2 * 3 * 3 * 2.0).reshape(2, 3, 3, 2)
    found = layout.load(_record((2, 3, 3, 2), (18, 2, 6, 1)), buffer)
    assert torch.equal(found, buffer.transpose(1, 2))
    assert not torch.equal(found, buffer)


def test_reading_starts_at_the_buffers_first_element() -> None:
    buffer = torch.arange(20.0)[5:]
    found = layout.load(_record((2, 3), (4, 1)), buffer)
    assert found.tolist() == [[5.0, 6.0, 7.0], [9.0, 10.0, 11.0]]


def test_broadcast_strides_and_large_singleton_strides() -> None:
    found = layout.load(_record((2, 1, 2), (0, 2**40, 1)), torch.tensor([3.0, 4.0]))
    assert found.tolist() == [[[3.0, 4.0]], [[3.0, 4.0]]]
    assert layout.load(_record((0, 3), (3, 1)), torch.zeros(0)).shape == (0, 3)


def test_a_short_storage_is_refused() -> None:
    with pytest.raises(BindingError, match=r"'t'.*holds 11 elements.*spans 12"):
        layout.load(_record((3, 4), (4, 1)), torch.zeros(11))


def test_uint8_stands_for_eight_and_four_bit_types() -> None:
    found = layout.load(
        _record((2,), (1,), "FP8_E4M3"), torch.tensor([0x38, 0xFE], dtype=torch.uint8)
    )
    assert found.tolist() == [1.0, -448.0]
    packed = torch.tensor([0x21, 0xF7], dtype=torch.uint8)
    # Strides count elements, four of them here: 0.5, 1, 6, -6.
    found = layout.load(_record((2, 2), (1, 2), "FP4_E2M1"), packed)
    assert found.tolist() == [[0.5, 6.0], [1.0, -6.0]]
    assert layout.load(_record((4,), (1,), "INT4"), packed).tolist() == [1, 2, 7, -1]


def test_wider_test_data_is_read_as_it_is() -> None:
    found = layout.load(_record((2,), (1,), "FP8_E4M3"), torch.tensor([0.1, 1e9]).double())
    assert found.tolist() == [torch.tensor(0.1).double().item(), 1e9]


def test_ragged_sequences_token_major() -> None:
    """Packed (T, H, D) with lengths 2, 0, 3, declared (B, H, S, D)."""
    packed = torch.arange(5 * 2 * 2.0).reshape(5, 2, 2)
    record = _record((3, 2, 3, 2), (12, 2, 4, 1))
    offsets = torch.tensor([0, 8, 8, 20], dtype=torch.int32).reshape(4, 1, 1, 1)
    found = layout.load(record, packed, offsets)
    assert layout.ragged_lengths(record, offsets) == [2, 0, 3]
    assert torch.equal(found[0, :, :2], packed[:2].transpose(0, 1))
    assert torch.equal(found[2], packed[2:].transpose(0, 1))
    assert (found[0, :, 2:] == 0).all() and (found[1] == 0).all()


def test_ragged_statistics_head_major_with_a_multiplier() -> None:
    """Packed (H, T): offsets count tokens, the multiplier makes elements of them."""
    packed = torch.arange(2 * 5.0).reshape(2, 5)
    record = _record((2, 2, 3, 1), (3, 5, 1, 1), ragged_offset_multiplier=1)
    found = layout.load(record, packed, torch.tensor([0, 2, 5]))
    assert found[0, 1, :, 0].tolist() == [5.0, 6.0, 0.0]
    assert found[1, 0, :, 0].tolist() == [2.0, 3.0, 4.0]
    # Interleaved heads: two elements a token.
    record = _record((2, 2, 3, 1), (6, 1, 2, 1), ragged_offset_multiplier=2)
    found = layout.load(record, torch.arange(10.0), torch.tensor([0, 2, 5]))
    assert found[1, 1, :, 0].tolist() == [5.0, 7.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32])
def test_ragged_tensors_of_other_types(dtype: torch.dtype) -> None:
    packed = torch.arange(10).to(torch.float32).to(dtype)
    found = layout.load(_record((2, 2, 3, 1), (6, 1, 2, 1)), packed, torch.tensor([0, 4, 10]))
    assert found.dtype == dtype
    assert found.to(torch.float64)[1, 1, :, 0].tolist() == [5.0, 7.0, 9.0]
    assert found.to(torch.float64)[0, :, 2].tolist() == [[0.0], [0.0]]


def test_a_ragged_end_past_the_storage_is_refused() -> None:
    record = _record((2, 1, 3, 2), (6, 6, 2, 1))
    offsets = torch.tensor([0, 2, 8])
    assert layout.load(record, torch.zeros(8), offsets).shape == (2, 1, 3, 2)
    with pytest.raises(BindingError, match="storage"):
        layout.load(record, torch.zeros(7), offsets)
    with pytest.raises(BindingError, match="2 ragged offsets"):
        layout.load(record, torch.zeros(8), offsets[:2])


def test_scale_tiles_by_hand() -> None:
    """Offsets within a tile: (r % 32) * 16 + (r // 32) * 4 + c; tiles of 512 side by side."""
    offsets = layout.scale_tile_offsets((256, 8), (8, 1))
    by_hand = {
        (0, 0): 0,
        (0, 3): 3,
        (1, 0): 16,
        (32, 0): 4,
        (96, 1): 13,
        (127, 3): 511,
        (0, 4): 512,
        (128, 0): 1024,
        (255, 7): 2047,
    }
    assert {where: int(offsets[where]) for where in by_hand} == by_hand
    assert sorted(offsets.reshape(-1).tolist()) == list(range(2048))


def test_scale_tiles_whose_columns_come_first() -> None:
    """(B, blocks, N) with blocks contiguous: rows are N."""
    turned = layout.scale_tile_offsets((2, 4, 128), (512, 1, 4))
    plain = layout.scale_tile_offsets((2, 128, 4), (512, 4, 1))
    assert torch.equal(turned, plain.transpose(1, 2))
    assert int(turned[1].min()) == 512


def test_unpadded_scales_take_whole_tiles_plane_by_plane() -> None:
    scales = torch.arange(2 * 3 * 5 * 7, dtype=torch.int32).reshape(2, 3, 5, 7)
    storage = layout.reorder_scales_128x4(scales)
    assert storage.numel() == 2 * 3 * 128 * 8
    assert int(storage[1024 + 16 + 1]) == int(scales[0, 1, 1, 1])
    assert int(storage[1024 + 512]) == int(scales[0, 1, 0, 4])
    assert torch.equal(layout.restore_scales_128x4(storage, (2, 3, 5, 7)), scales)
    record = _record(
        (2, 3, 5, 7), (105, 35, 7, 1), "INT32", reordering_type=tensor_reordering.F8_128x4
    )
    assert torch.equal(layout.load(record, storage), scales)


def test_reordered_eight_bit_scales() -> None:
    codes = torch.randint(0, 255, (2, 128, 4), generator=torch.Generator().manual_seed(0))
    scales = codes.to(torch.uint8).view(torch.float8_e8m0fnu)
    storage = layout.reorder_scales_128x4(scales)
    record = _record(
        (2, 128, 4), (512, 4, 1), "FP8_E8M0", reordering_type=tensor_reordering.F8_128x4
    )
    for stored in (storage, storage.view(torch.uint8)):
        found = layout.load(record, stored).to(torch.float64)
        assert torch.equal(found, scales.to(torch.float64))
    assert math.isclose(float(found[0, 0, 0]), 2.0 ** (int(codes[0, 0, 0]) - 127))
