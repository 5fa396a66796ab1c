"""Tensor maps: what the copy engine of SM90 is told of an operand, encoded when a call is bound.

A map describes a strided tensor of 3 to 5 axes and the box that one copy moves between it and
shared memory. Reads outside the tensor give zeros, writes there are dropped, so the tail of a
head never touches the next one. Source: cuTensorMapEncodeTiled in the CUDA driver API.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError, NotSupportedError
from tilewright.graph.tensor import Tensor
from tilewright.launch.cuda_driver import check, driver
from tilewright.launch.driver_launch import INVALID_CONTEXT, device_context
from tilewright.launch.prepared import TENSOR_MAP_BYTES
from tilewright.launch.prepared import TensorMap as TensorMap

TENSOR_MAP_ALIGNMENT = 64
# Addresses and steps in bytes are multiples of this, and a step is below 2**40.
STEP_BYTES = 16
MAX_STEP_BYTES = 2**40
MAX_RANK = 5
# CUtensorMapDataType, and its swizzle modes by the bytes that are swizzled.
_DATA_TYPES = {DataType.HALF: 6, DataType.FLOAT: 7, DataType.BFLOAT16: 9}
_DATA_TYPES |= dict.fromkeys((DataType.UINT8, DataType.FP8_E4M3, DataType.FP8_E5M2), 0)
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_NO_INTERLEAVE, _FILL_ZERO, _PROMOTE_TO_128_BYTES = 0, 0, 2


def tensor_map(
    tensor: Tensor, slot: int, box: tuple[int, ...], swizzle_bytes: int = 128
) -> TensorMap:
    """The map of an operand as it is declared, moved in boxes of ``box`` elements.

    The box's last axis may be wider than the swizzle: then one copy is several, side by side.

    Raises:
        NotSupportedError: naming the tensor and the rule that its declaration breaks.
    """
    item_bytes = tensor.data_type.bits // 8
    is_flat = tensor.ragged_offset is not None
    dim = (1, *tensor.dim[1:]) if is_flat else tensor.dim
    rule = map_decline_reason(tensor, is_flat=is_flat)
    if rule is not None:
        raise NotSupportedError(f"tensor {tensor.label()}: {rule}")
    # A singleton axis is never stepped: whatever its stride is, one that the driver takes does.
    stride = tuple(
        step if extent > 1 or axis == tensor.rank - 1 else STEP_BYTES
        for axis, (extent, step) in enumerate(zip(dim, tensor.stride, strict=True))
    )
    inner = min(box[-1], (swizzle_bytes or box[-1] * item_bytes) // item_bytes)
    return TensorMap(
        slot,
        tensor.label(),
        tensor.data_type,
        dim,
        (*stride[:-1], 1),
        (*box[:-1], inner),
        swizzle_bytes,
        is_flat,
    )


def scratch_map(
    label: str,
    data_type: DataType,
    offset_bytes: int,
    dim: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int = 128,
) -> TensorMap:
    """The map of a contiguous array in the workspace, ``offset_bytes`` from its start."""
    stride = tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))
    return TensorMap(
        -1, label, data_type, dim, stride, box, swizzle_bytes, scratch_bytes=offset_bytes
    )


def map_decline_reason(tensor: Tensor, *, is_flat: bool = False) -> str | None:
    """Why no tensor map describes the declaration, or None if one does.

    ``is_flat``: the first axis is not stepped, and rows are as many as a call brings.
    """
    if 0 < tensor.alignment_value < STEP_BYTES:
        return (
            f"an alignment of {tensor.alignment_value} bytes is declared; a tensor map needs "
            f"{STEP_BYTES}"
        )
    if tensor.data_type not in _DATA_TYPES:
        return f"data type {tensor.data_type.name} has no tensor map"
    if not 1 <= tensor.rank <= MAX_RANK:
        return f"{tensor.rank} axes; a tensor map has 1 to {MAX_RANK}"
    if min(tensor.dim) < 1 or max(tensor.dim) >= 2**31:
        return f"dim {tensor.dim}; a tensor map takes extents from 1 to 2**31 - 1"
    if tensor.dim[-1] != 1 and tensor.stride[-1] != 1:
        return f"stride {tensor.stride}; a tensor map needs 1 on the last axis"
    item_bytes = tensor.data_type.bits // 8
    for axis, extent in enumerate(tensor.dim[:-1]):
        if is_flat and axis == 0:
            continue
        step_bytes = tensor.stride[axis] * item_bytes
        if extent > 1 and (step_bytes % STEP_BYTES or not 0 < step_bytes < MAX_STEP_BYTES):
            return (
                f"axis {axis} steps by {step_bytes} bytes; a tensor map takes multiples of "
                f"{STEP_BYTES} bytes above 0 and below 2**40"
            )
    return None


_MapMemory = ctypes.c_char * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)


def nothing(device_index: int) -> int:
    """An address that may be read, for the map of a packed operand without a row."""
    return _zeros(device_index).data_ptr()


@functools.cache
def _zeros(device_index: int) -> torch.Tensor:
    return torch.zeros(STEP_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")


class TensorMapEncoder:
    """Encodes one map for the addresses that calls bring.

    A map that was made once is made for another address by writing that into a copy.
    """

    def __init__(self, argument: TensorMap) -> None:
        self.slot = argument.slot
        self.is_flat = argument.is_flat
        self.scratch_bytes = argument.scratch_bytes
        self._label = argument.label
        self._argument = argument
        # (bytes that the operand owns if that matters, its map); replaced as a whole.
        self._known: tuple[int, bytes] | None = None
        rank = argument.rank
        item_bytes = argument.data_type.bits // 8
        # Of a packed operand: from the first head's row to the end of the last one's.
        heads = zip(argument.dim[:-2], argument.stride[:-2], strict=True)
        before = sum((extent - 1) * step for extent, step in heads)
        self._row_bytes = (before + argument.dim[-1]) * item_bytes
        # The driver lists the innermost axis first, and no stride for it.
        steps = [step * item_bytes for step in reversed(argument.stride[:-1])]
        self._leading = (_DATA_TYPES[argument.data_type], rank)
        self._arrays = (
            (ctypes.c_uint64 * rank)(*reversed(argument.dim)),
            (ctypes.c_uint64 * max(rank - 1, 1))(*steps),
            (ctypes.c_uint32 * rank)(*reversed(argument.box)),
            (ctypes.c_uint32 * rank)(*([1] * rank)),
        )
        self._modes = (
            _NO_INTERLEAVE,
            _SWIZZLES[argument.swizzle_bytes],
            _PROMOTE_TO_128_BYTES,
            _FILL_ZERO,
        )

    def encode(self, start: int, stop: int, device_index: int) -> bytes:
        """The 128 bytes of the map for an operand of a device in bytes ``start`` to ``stop``.

        Raises:
            BindingError: if the address is not a multiple of 16 bytes.
            LaunchError: if the driver refuses.
        """
        owned = stop - start if self.is_flat else 0
        if self.is_flat and owned < self._row_bytes:
            # A copy begins at row 0 also where no sequence has one: that must be readable.
            start, owned = nothing(device_index), 0
        if start % STEP_BYTES or not start:
            raise BindingError(
                f"tensor {self._label}: address {start:#x}; this plan reads it through a tensor "
                f"map, which needs a multiple of {STEP_BYTES} bytes. Copy it, or bar the engine "
                "before the graph is built: graph.deselect_engines(['hopper'])"
            )
        memory = _MapMemory()
        skip = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
        place = ctypes.addressof(memory) + skip
        status = self._write(place, start, owned)
        if status == INVALID_CONTEXT:
            with device_context(device_index):
                status = self._write(place, start, owned)
        if status:
            check(status, f"tensor {self._label}: encoding its tensor map")
        made = memory.raw[skip : skip + TENSOR_MAP_BYTES]
        self._known = (owned, made)
        return made

    def _write(self, place: int, start: int, owned: int) -> int:
        """Have the driver write the map; its status."""
        known, library = self._known, driver()
        if known is not None and known[0] == owned:
            ctypes.memmove(place, known[1], TENSOR_MAP_BYTES)
            return int(library.cuTensorMapReplaceAddress(place, start))
        arrays = self._arrays
        if self.is_flat:
            arrays = (self._flat_dim(owned), *arrays[1:])
        return int(
            library.cuTensorMapEncodeTiled(place, *self._leading, start, *arrays, *self._modes)
        )

    def _flat_dim(self, owned_bytes: int) -> ctypes.Array[ctypes.c_uint64]:
        """The extents for a buffer of ``owned_bytes``: as many rows as all heads have of it.

        One element if that is none: a map has no empty axis.
        """
        made = self._argument
        if owned_bytes < self._row_bytes:
            return (ctypes.c_uint64 * made.rank)(*([1] * made.rank))
        step_bytes = made.stride[-2] * (made.data_type.bits // 8)
        rows = (owned_bytes - self._row_bytes) // step_bytes + 1
        dim = (made.dim[-1], rows, *reversed(made.dim[:-2]))
        return (ctypes.c_uint64 * made.rank)(*dim)
