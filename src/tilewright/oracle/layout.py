"""From a buffer's storage to the logical values of a declared tensor.

A buffer is storage: it is read from its first element on with the declared dim and stride, never
with its own shape, so that one variant pack serves an engine and the oracle. What comes out has the
declared axis order. Results of engines are read the same way, ragged and reordered ones included.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.oracle.formats import decode, format_of, unpack_nibbles

__all__ = [
    "load",
    "ragged_lengths",
    "reorder_scales_128x4",
    "restore_scales_128x4",
    "row_axis",
    "scale_tile_offsets",
]

_TILE_ROWS = 128
_TILE_COLUMNS = 4


def load(
    record: Any, buffer: torch.Tensor, ragged_offset: torch.Tensor | None = None
) -> torch.Tensor:
    """Logical values of `record` out of `buffer`, in the declared axis order.

    Args:
        record: A tensor record: dim, stride (elements), data_type, reordering_type.
        buffer: Any tensor; its storage from its first element on is read. Its dtype may be wider
            than the declared one (float64 test data). uint8 may stand for an 8-bit float type and
            for two packed 4-bit elements, the low nibble first.
        ragged_offset: B + 1 offsets, for a ragged tensor; multiplied by the record's
            `ragged_offset_multiplier` they count elements. Rows past a sequence's end read as 0.

    Returns:
        A tensor of shape `record.dim`: a view in the buffer's dtype where that is possible, float64
        or int64 where codes had to be decoded.

    Raises:
        BindingError: The declared elements do not fit into the buffer's storage.
    """
    elements = _elements(record, buffer)
    dim, stride = tuple(record.dim), tuple(record.stride)
    if ragged_offset is not None:
        return _load_ragged(record, elements, ragged_offset)
    reordering = getattr(record, "reordering_type", None)
    if getattr(reordering, "name", "NONE") == "F8_128x4":
        offsets = scale_tile_offsets(dim, stride, device=elements.device)
        _require_span(record, int(offsets.max()) + 1 if offsets.numel() else 0, elements)
        return elements[offsets]
    empty = any(extent == 0 for extent in dim)
    last = sum((extent - 1) * step for extent, step in zip(dim, stride, strict=True))
    _require_span(record, 0 if empty else last + 1, elements)
    if empty:
        return elements.new_zeros(dim)
    return torch.as_strided(elements, dim, stride, elements.storage_offset())


def _elements(record: Any, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer's elements from its first one to the end of its storage, as one axis."""
    available = buffer.untyped_storage().nbytes() // buffer.element_size()
    count = max(available - buffer.storage_offset(), 0)
    flat = torch.as_strided(buffer.detach(), (count,), (1,), buffer.storage_offset())
    kind = record.data_type.name
    is_packed_dtype = str(flat.dtype) == "torch.float4_e2m1fn_x2"
    if is_packed_dtype:
        flat = flat.view(torch.uint8)
    if kind == "FP4_E2M1" and flat.dtype == torch.uint8:
        return decode(unpack_nibbles(flat), "FP4_E2M1")
    if kind == "INT4" and flat.dtype in (torch.uint8, torch.int8):
        codes = unpack_nibbles(flat)
        return torch.where(codes >= 8, codes - 16, codes)
    target = format_of(record.data_type)
    if target is not None and target.bits == 8 and flat.dtype == torch.uint8:
        return decode(flat, target)
    return flat


def _require_span(record: Any, needed: int, elements: torch.Tensor) -> None:
    if needed > elements.numel():
        raise BindingError(
            f"tensor {record.name!r} (uid {record.uid}): its storage holds {elements.numel()} "
            f"elements; dim {tuple(record.dim)} with stride {tuple(record.stride)} spans {needed}"
        )


def row_axis(dim: tuple[int, ...]) -> int:
    """The axis that counts rows of a sequence: 2 of (B, H, S, D), 1 of (B, S, ...)."""
    return 2 if len(dim) == 4 else 1


def _offset_elements(record: Any, ragged_offset: torch.Tensor) -> list[int]:
    multiplier = int(getattr(record, "ragged_offset_multiplier", 1) or 1)
    return [int(entry) * multiplier for entry in ragged_offset.reshape(-1).tolist()]


def ragged_lengths(record: Any, ragged_offset: torch.Tensor) -> list[int]:
    """Rows of each sequence, from its offsets and the row stride; at most the declared rows."""
    offsets = _offset_elements(record, ragged_offset)
    axis = row_axis(tuple(record.dim))
    step = max(int(record.stride[axis]), 1)
    lengths = []
    for index in range(int(record.dim[0])):
        rows = -(-(offsets[index + 1] - offsets[index]) // step)
        lengths.append(max(0, min(rows, int(record.dim[axis]))))
    return lengths


def _load_ragged(record: Any, elements: torch.Tensor, ragged_offset: torch.Tensor) -> torch.Tensor:
    dim, stride = tuple(record.dim), tuple(record.stride)
    offsets = _offset_elements(record, ragged_offset)
    if len(offsets) < dim[0] + 1:
        raise BindingError(
            f"tensor {record.name!r} (uid {record.uid}): {len(offsets)} ragged offsets; "
            f"a batch of {dim[0]} needs {dim[0] + 1}"
        )
    lengths = ragged_lengths(record, ragged_offset)
    axis = row_axis(dim)
    dense = elements.new_zeros(dim)
    for index, rows in enumerate(lengths):
        extent = (*dim[1:axis], rows, *dim[axis + 1 :])
        if any(count == 0 for count in extent):
            continue
        last = sum((count - 1) * step for count, step in zip(extent, stride[1:], strict=True))
        _require_span(record, offsets[index] + last + 1, elements)
        start = elements.storage_offset() + offsets[index]
        sequence = torch.as_strided(elements, extent, stride[1:], start)
        dense[index].narrow(axis - 1, 0, rows).copy_(sequence)
    return dense


def scale_tile_offsets(
    dim: tuple[int, ...], stride: tuple[int, ...], *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Where each scale of a tensor in the F8_128x4 layout lies, in elements; shape `dim`, int64.

    The last two axes are a matrix whose column axis (the one that counts blocks of the scaled
    axis) is the one with stride 1, the last if neither or both have it. Tiles of 128 rows by 4
    columns take 512 bytes each, all tiles of a band of rows one after another; within a tile scale
    (r, c) lies at `(r % 32) * 16 + (r // 32) * 4 + c`. Leading axes keep their declared strides if
    these leave room for whole tiles; else the matrices follow one another, padded to whole tiles.

    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    column_axis = len(dim) - 1
    if stride[-2] == 1 and stride[-1] != 1:
        column_axis = len(dim) - 2
    row_axis_ = 2 * len(dim) - 3 - column_axis
    rows, columns = dim[row_axis_], dim[column_axis]
    tiles_across = -(-columns // _TILE_COLUMNS)
    plane = -(-rows // _TILE_ROWS) * tiles_across * _TILE_ROWS * _TILE_COLUMNS
    r = torch.arange(rows, device=device)
    c = torch.arange(columns, device=device)
    tile = (r // _TILE_ROWS)[:, None] * tiles_across + (c // _TILE_COLUMNS)[None, :]
    inside = ((r % 32) * 16 + (r % _TILE_ROWS) // 32 * 4)[:, None] + (c % _TILE_COLUMNS)[None, :]
    offsets = tile * (_TILE_ROWS * _TILE_COLUMNS) + inside
    if column_axis == len(dim) - 2:
        offsets = offsets.T
    leading = [(axis, dim[axis]) for axis in range(len(dim) - 2)]
    declared = [stride[axis] for axis, extent in leading if extent > 1]
    packed = 1
    steps: dict[int, int] = {}
    for axis, extent in reversed(leading):
        steps[axis] = packed * plane
        packed *= extent
    if not declared or min(declared) >= plane:
        steps = {axis: stride[axis] for axis, _ in leading}
    for axis, extent in reversed(leading):
        start = torch.arange(extent, device=device) * (steps[axis] if extent > 1 else 0)
        offsets = start.reshape(extent, *([1] * offsets.dim())) + offsets
    return offsets


def reorder_scales_128x4(scales: torch.Tensor) -> torch.Tensor:
    """Storage (one axis) of row-major scales (..., rows, columns) in the F8_128x4 layout.

    Rows and columns are padded to multiples of 128 and 4; the padding holds zeros.
    """
    offsets = scale_tile_offsets(tuple(scales.shape), _packed(scales.shape), device=scales.device)
    rows, columns = scales.shape[-2:]
    plane = -(-rows // _TILE_ROWS) * -(-columns // _TILE_COLUMNS) * _TILE_ROWS * _TILE_COLUMNS
    planes = scales[..., 0, 0].numel() if scales.numel() else 0
    raw = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    storage = raw.new_zeros(planes * plane)
    storage[offsets.reshape(-1)] = raw.reshape(-1)
    return storage.view(scales.dtype)


def restore_scales_128x4(storage: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """Row-major scales of shape `dim` out of storage in the F8_128x4 layout."""
    offsets = scale_tile_offsets(tuple(dim), _packed(dim), device=storage.device)
    raw = storage.view(torch.uint8) if storage.element_size() == 1 else storage
    return raw.reshape(-1)[offsets].view(storage.dtype)


def _packed(dim: Any) -> tuple[int, ...]:
    strides = [1] * len(dim)
    for axis in range(len(dim) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(int(dim[axis + 1]), 1)
    return tuple(strides)
