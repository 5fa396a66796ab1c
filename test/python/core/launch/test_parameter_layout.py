"""Where a kernel's parameters are: tensor maps are not at their natural alignment in the block."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import LaunchError, NotSupportedError
from tilewright.launch import cuda_driver, driver_launch, tensor_maps
from tilewright.launch.kernel_frames import BoundLaunch
from tilewright.launch.prepared import Constant, KernelLaunch, Operand
from tilewright.launch.tensor_maps import TensorMap, scratch_map

pytestmark = pytest.mark.L0

# A map of 3 axes first, then a pointer, a number, and Triton's two own pointers. The constant bank
# begins at 0x210 on SM90, so that the first multiple of 64 in it is 0x30 into the block.
OFFSETS = [0x30, 0xB0, 0xB4, 0xB8, 0xC0, 0xC8, 0xD0, 0xD8, 0xE0, 0xE8, 0xF0]
SIZES = [128, 4, 4, 4, 8, 8, 8, 8, 4, 8, 8]


class Library:
    """A driver that tells where parameters are."""

    def cuFuncGetParamInfo(self, function: int, position: int, offset: Any, size: Any) -> int:
        if position >= len(OFFSETS):
            return 1
        offset._obj.value, size._obj.value = OFFSETS[position], SIZES[position]
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        return 0


def launch(arguments: int) -> KernelLaunch:
    mapped = TensorMap(0, "q", DataType.HALF, (2, 16, 64), (4096, 64, 1), (1, 16, 64), 128)
    memory = ctypes.create_string_buffer(8)
    return KernelLaunch(
        "k",
        ctypes.addressof(memory),
        (1, 1, 1),
        128,
        0,
        ["tensordesc", "*fp16", *["i32"] * arguments],
        [mapped, Operand(1), *[Constant(7)] * arguments],
    )


def bound_to(mapped: TensorMap) -> BoundLaunch:
    """A block whose first parameter is a map."""
    memory = ctypes.create_string_buffer(8)
    made = KernelLaunch(
        "k",
        ctypes.addressof(memory),
        (1, 1, 1),
        128,
        0,
        ["tensordesc", "*fp16", "i32"],
        [mapped, Operand(0), Constant(7)],
    )
    return BoundLaunch(made, 0)


class Encoder:
    """A driver that writes what it is told into the first words of a map."""

    def cuTensorMapEncodeTiled(self, place: int, kind: int, rank: int, start: int, *_: Any) -> int:
        ctypes.memmove(place, struct.pack("<3Q", kind, rank, start), 24)
        return 0

    def cuTensorMapReplaceAddress(self, place: int, start: int) -> int:
        ctypes.memmove(place + 16, struct.pack("<Q", start), 8)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    monkeypatch.setattr(driver_launch, "launch_function", lambda: None)
    return made


def test_parameters_are_where_the_driver_says(library: Library) -> None:
    made = launch(1)
    assert made.offsets == OFFSETS and made.size == 0xF8
    assert struct.unpack_from("<i", made.template, 0xE0) == (7,)
    assert struct.unpack_from("<3i", made.template, 0xB0) == (2, 16, 64)
    block = bytearray(made.template)
    made.fill(block, [0x1000, 0x2000], (), 0)
    assert struct.unpack_from("<Q", block, 0xD8) == (0x2000,)


def test_a_map_of_the_workspace_follows_the_workspace(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_maps, "driver", Encoder)
    sums = scratch_map("sums", DataType.FLOAT, 256, (2, 48, 32), (1, 16, 32))
    assert sums.stride == (48 * 32, 32, 1)
    bound = bound_to(sums)
    for workspace in (0x10000, 0x20000, 0x20000, 0x10000):
        bound.fill([0x1000], [0x2000], (), workspace)
        assert struct.unpack_from("<3Q", bound.block, 0x30) == (7, 3, workspace + 256)
        assert struct.unpack_from("<Q", bound.block, 0xD8) == (0x1000,)


def test_the_first_map_of_a_block_is_written_wherever_the_operand_is(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty tensor of CUDA is at address 0, and a block's map that nobody wrote is no map.
    monkeypatch.setattr(tensor_maps, "driver", Encoder)
    monkeypatch.setattr(tensor_maps, "nothing", lambda device_index: 0x4000)
    packed = TensorMap(
        0, "k", DataType.HALF, (2, 16, 64), (4096, 64, 1), (1, 16, 64), 128, is_flat=True
    )
    bound = bound_to(packed)
    bound.fill([0], [0], (), 0)
    assert struct.unpack_from("<3Q", bound.block, 0x30) == (6, 3, 0x4000)


def test_a_kernel_with_fewer_parameters_is_an_error(library: Library) -> None:
    with pytest.raises(LaunchError, match="where parameter 11 is"):
        launch(2)


def test_a_driver_that_cannot_say_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "driver", lambda: object())
    monkeypatch.setattr(driver_launch, "launch_function", lambda: None)
    with pytest.raises(NotSupportedError, match="cuFuncGetParamInfo"):
        launch(1)
