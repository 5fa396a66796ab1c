"""Storage of declared tensors: values written where dim and stride say, and outputs to fill.

A buffer here is one axis of all the elements that it owns, in the declared type (bytes for packed
4-bit types), so that any declared layout can be bound to it.
"""

from __future__ import annotations

import math

import torch

from tilewright.dtypes import DataType
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.shapes import self_overlaps, span_elements
from tilewright.graph.tensor import Tensor
from tilewright.testing.detectors.sparse import untouched_bytes
from tilewright.torch_dtypes import to_torch

# Scale tiles of the F8_128x4 order: rows and columns are padded to these.
_TILE_ROWS = 128
_TILE_COLUMNS = 4
# What allocators give anyway; a stricter declaration asks for more.
_USUAL_ALIGNMENT_BYTES = 64
# Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of FP4_E2M1.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E8M0_BIAS = 127
_SPARSE_FACTOR = 4


def element_span(tensor: Tensor) -> int:
    """How many elements the storage of a tensor without ragged offset holds."""
    span = span_elements(tensor.dim, tensor.stride)
    if tensor.reordering_type is tensor_reordering.F8_128x4 and len(tensor.dim) >= 2:
        return max(span, _tiled_elements(tensor.dim))
    return span


def values_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the values that ``store`` takes: the dim, or one axis of tiled storage."""
    if tensor.reordering_type is tensor_reordering.NONE:
        return tensor.dim
    return (element_span(tensor),)


def new_storage(tensor: Tensor, elements: int) -> torch.Tensor:
    """Zeroed storage of ``elements`` elements of the tensor's type.

    Untouched pages cost no memory, so that a stride of gigabytes is no matter.

    Raises:
        MemoryError: if the address space has no room.
    """
    dtype = to_torch(tensor.data_type)
    size_bytes = tensor.data_type.span_bytes(elements)
    alignment = max(tensor.alignment_value, _USUAL_ALIGNMENT_BYTES)
    raw = untouched_bytes(size_bytes + alignment)
    start = -raw.data_ptr() % alignment
    return raw[start : start + size_bytes].view(dtype)


def is_sparse(tensor: Tensor) -> bool:
    """True if a dense tensor's storage is mostly gaps, which are better left untouched."""
    return element_span(tensor) > _SPARSE_FACTOR * math.prod(tensor.dim)


def store(tensor: Tensor, values: torch.Tensor) -> torch.Tensor:
    """Storage that holds ``values`` (numbers, of ``values_shape(tensor)``), rounded to the type."""
    elements = element_span(tensor)
    storage = new_storage(tensor, elements)
    if tensor.data_type.is_sub_byte:
        nibbles = torch.zeros(elements + elements % 2, dtype=torch.uint8)
        _place(tensor, nibbles[:elements], _codes(values, tensor.data_type))
        storage.copy_(nibbles[0::2] | (nibbles[1::2] << 4))
    else:
        _place(tensor, storage, convert(values, tensor.data_type))
    return storage


def store_flat(tensor: Tensor, values: torch.Tensor) -> torch.Tensor:
    """Storage of a ragged tensor: ``values`` (one axis) are all of its elements."""
    storage = new_storage(tensor, values.numel())
    storage.copy_(convert(values, tensor.data_type))
    return storage


def convert(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """``values`` in the torch dtype of ``data_type``, to nearest, 8-bit floats saturating."""
    dtype = to_torch(data_type)
    if values.dtype is dtype:
        return values
    if data_type is DataType.FP8_E8M0:
        exponent = torch.log2(values.to(torch.float64)).round().to(torch.int64) + _E8M0_BIAS
        return exponent.clamp(0, 254).to(torch.uint8).view(dtype)
    if data_type in (DataType.FP8_E4M3, DataType.FP8_E5M2):
        limit = data_type.layout.largest
        return values.to(torch.float32).clamp(-limit, limit).to(dtype)
    return values.to(dtype)


def logical_view(tensor: Tensor, storage: torch.Tensor) -> torch.Tensor:
    """The storage of a dense tensor as its dim; packed types stay one axis of bytes."""
    if tensor.data_type.is_sub_byte or tensor.reordering_type is not tensor_reordering.NONE:
        return storage
    return storage.as_strided(tensor.dim, tensor.stride)


def poison(tensor: Tensor, storage: torch.Tensor) -> None:
    """Fill an output with NaN, or a value that no result has by chance, before it is computed."""
    target = storage
    if tensor.ragged_offset is None and is_sparse(tensor):
        target = logical_view(tensor, storage)
    if target.dtype.is_floating_point and target.element_size() > 1:
        target.fill_(math.nan)
    elif target.dtype is torch.bool:
        target.fill_(True)
    elif target.element_size() == 1:
        # All ones is NaN in each of the 8-bit floats.
        target.view(torch.uint8).fill_(0xFF)
    else:
        target.fill_(torch.iinfo(target.dtype).max)


def _place(tensor: Tensor, storage: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.reordering_type is not tensor_reordering.NONE:
        storage.copy_(values)
    elif self_overlaps(tensor.dim, tensor.stride):
        # Elements that share a place: the last one written stays, for all of them.
        target, source = storage, values.flatten()
        if storage.element_size() == 1:
            # By their bytes: not every 8-bit type can be indexed.
            target, source = storage.view(torch.uint8), source.view(torch.uint8)
        target[element_offsets(tensor).flatten()] = source
    else:
        storage.as_strided(tensor.dim, tensor.stride).copy_(values)


def element_offsets(tensor: Tensor) -> torch.Tensor:
    """Where each element of a dense tensor lies in its storage: shape dim, int64."""
    offsets = torch.zeros(tensor.dim, dtype=torch.int64)
    for axis, (extent, step) in enumerate(zip(tensor.dim, tensor.stride, strict=True)):
        shape = [1] * len(tensor.dim)
        shape[axis] = extent
        offsets += (torch.arange(extent) * (step if extent > 1 else 0)).reshape(shape)
    return offsets


def _codes(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    if data_type is DataType.INT4:
        return values.to(torch.int64).clamp(-8, 7).to(torch.uint8) & 15
    magnitude = values.to(torch.float32).abs()
    code = torch.bucketize(magnitude, torch.tensor(_E2M1_MIDPOINTS)).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def _tiled_elements(dim: tuple[int, ...]) -> int:
    # Which of the last two axes is tiled by 128 depends on the strides; room for both orders.
    def padded(rows: int, columns: int) -> int:
        return (-(-rows // _TILE_ROWS) * _TILE_ROWS) * (-(-columns // _TILE_COLUMNS) * 4)

    plane = max(padded(dim[-2], dim[-1]), padded(dim[-1], dim[-2]))
    return math.prod(dim[:-2]) * plane
