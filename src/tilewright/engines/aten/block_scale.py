"""Block-scaled formats: quantize and dequantize (OCP MX 1.0 and NVIDIA's NVFP4).

A block is ``block_size`` neighbouring elements along one axis that share a scale. With amax the
largest magnitude of the block, and the scale's data type:

    FP8_E8M0: 2 ** (floor(log2 amax) - emax), emax the element type's largest exponent (OCP MX
              1.0, section 6.3), held to 2**-127 .. 2**127; NaN if the block holds one
    FP8_E4M3: amax / (the element type's largest number), rounded to nearest even (NVFP4)
    FLOAT:    amax / (the element type's largest number)

An element is x / scale rounded to nearest even, saturating; it is 0 where the scale is 0. The
quotient is that of float64, so no tie is made by an earlier rounding. Dequantized is element
times scale.

A scale tensor of reordering F8_128x4 lies in memory as tiles of 128 rows and 4 block columns,
512 scales each: row r and column c of a tile at (r % 32) * 16 + (r // 32) * 4 + c, tiles of one
row of tiles after one another (the layout that block-scaled matrix instructions read).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.operations.block_scale import (
    TILE_COLUMNS,
    TILE_ROWS,
    holds_scales,
    tile_axes,
)
from tilewright.graph.tensor import Tensor as TensorRecord

Tensor = torch.Tensor

_ROW_GROUPS, _ROWS_A_GROUP = 4, 32

# The exponent of the largest number of each element type (emax of OCP MX 1.0, table 1).
_EMAX = {DataType.FP8_E4M3: 8, DataType.FP8_E5M2: 15, DataType.FP4_E2M1: 2}
_SCALE_TYPES = (DataType.FP8_E8M0, DataType.FP8_E4M3, DataType.FLOAT)


def unpack_scales_128x4(stored: Tensor) -> Tensor:
    """Scales in row-major order from the order that F8_128x4 stores them in.

    Args:
        stored: (..., R, C), R a multiple of 128 and C of 4: the stored sequence, cut into R rows
            of C. Any one-byte or wider type.
    """
    *batch, rows, columns = stored.shape
    tiles = stored.reshape(
        *batch,
        rows // TILE_ROWS,
        columns // TILE_COLUMNS,
        _ROWS_A_GROUP,
        _ROW_GROUPS,
        TILE_COLUMNS,
    )
    return _swap_columns_and_row_groups(tiles).reshape(*batch, rows, columns)


def pack_scales_128x4(scales: Tensor) -> Tensor:
    """The inverse of ``unpack_scales_128x4``: (..., R, C) in stored order."""
    *batch, rows, columns = scales.shape
    tiles = scales.reshape(
        *batch,
        rows // TILE_ROWS,
        _ROW_GROUPS,
        _ROWS_A_GROUP,
        columns // TILE_COLUMNS,
        TILE_COLUMNS,
    )
    return _swap_columns_and_row_groups(tiles).reshape(*batch, rows, columns)


def _swap_columns_and_row_groups(tiles: Tensor) -> Tensor:
    # (..., row tile, column tile, row, row group, column) <-> (..., row tile, row group, row,
    # column tile, column): one permutation, its own inverse.
    return tiles.transpose(-4, -2)


@implements_dense("block_scale_dequantize")
def prepare_block_scale_dequantize(operation: Any, device: torch.device) -> Kernel:
    """out = input times the descale of its block; is_negative_scale negates the descale."""
    source, descale = operation.inputs["input"], operation.inputs["descale"]
    out = operation.outputs[_only(operation.outputs)]
    port = _only(operation.outputs)
    if source.dim != out.dim:
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; dequantizing {source.dim} keeps its dim"
        )
    blocks = operation.blocks()
    dtype = casts.compute_dtype((source, descale, out))
    load = casts.loader(source, dtype, device)
    load_scale = _scale_loader(descale, dtype, device)
    store = casts.storer(out)
    sign = -1.0 if getattr(operation, "is_negative_scale", False) else 1.0

    def run(inputs: Operands, outputs: Operands) -> None:
        scale = load_scale(inputs["descale"])
        for axis, block in enumerate(blocks):
            scale = _spread(scale, axis, block, source.dim[axis])
        if sign < 0:
            scale = -scale
        store(outputs[port], load(inputs["input"]) * scale)

    return run


@implements_dense("block_scale_quantize")
def prepare_block_scale_quantize(operation: Any, device: torch.device) -> Kernel:
    """Y and scale of input; with ``transpose`` both have their last two axes swapped."""
    source = operation.inputs["input"]
    y, scale = operation.outputs["Y"], operation.outputs["scale"]
    rank, block = len(source.dim), int(operation.block_size)
    axis = _quantized_axis(operation, rank)
    if y.data_type not in _EMAX:
        raise NotSupportedError(
            f"tensor {y.label()} has data type {y.data_type.name}; block-scaled elements are "
            f"{', '.join(t.name for t in _EMAX)}"
        )
    if scale.data_type not in _SCALE_TYPES:
        raise NotSupportedError(
            f"tensor {scale.label()} has data type {scale.data_type.name}; block scales are "
            f"{', '.join(t.name for t in _SCALE_TYPES)}"
        )
    swap = bool(getattr(operation, "transpose", False))
    count = -(-source.dim[axis] // block)
    scale_dim = list(source.dim)
    scale_dim[axis] = count
    expected_y = _swapped(source.dim) if swap else source.dim
    if y.dim != tuple(expected_y):
        raise NotSupportedError(
            f"tensor {y.label()} has dim {y.dim}; expected {tuple(expected_y)} for an input of "
            f"{source.dim}"
        )
    store_scale = _scale_storer(scale, tuple(_swapped(scale_dim) if swap else scale_dim))
    load = casts.loader(source, casts.compute_dtype((source,)), device)
    store = casts.storer(y)
    make_scale = _scale_maker(scale.data_type, y.data_type)
    extent = source.dim[axis]

    def run(inputs: Operands, outputs: Operands) -> None:
        x = load(inputs["input"]).movedim(axis, -1)
        short = count * block - extent
        padded = torch.constant_pad_nd(x, [0, short]) if short else x
        groups = padded.reshape(*x.shape[:-1], count, block)
        scales = make_scale(_amax(groups)).to(torch.float64)
        quotient = groups.to(torch.float64) / scales.unsqueeze(-1)
        quotient = torch.where(scales.unsqueeze(-1) == 0, 0.0, quotient)
        elements = quotient.reshape(padded.shape).narrow(-1, 0, extent).movedim(-1, axis)
        scales = scales.movedim(-1, axis)
        if swap:
            elements, scales = elements.transpose(-1, -2), scales.transpose(-1, -2)
        store(outputs["Y"], elements)
        store_scale(outputs["scale"], scales)

    return run


def _amax(groups: Tensor) -> Tensor:
    if groups.numel() == 0:
        return groups.new_zeros(groups.shape[:-1])
    return groups.abs().amax(-1)


def _scale_maker(scale_type: DataType, element_type: DataType) -> Callable[[Tensor], Tensor]:
    """A function from amax (...) to the scale, already rounded to its type, in a wider one."""
    if scale_type is DataType.FP8_E8M0:
        emax = _EMAX[element_type]

        def power_of_two(amax: Tensor) -> Tensor:
            # frexp gives m * 2**e with m in [0.5, 1), so floor(log2) is e - 1, exactly.
            _, exponent = torch.frexp(torch.where(torch.isfinite(amax), amax, 1.0))
            code = (exponent.to(torch.int64) - 1 - emax).clamp(-127, 127)
            code = torch.where(amax == 0, -127, code)
            code = torch.where(torch.isinf(amax), 127, code)
            # A power of two is its exponent field alone.
            power = ((code + 1023) << 52).view(torch.float64)
            return torch.where(torch.isnan(amax), math.nan, power)

        return power_of_two
    largest = element_type.layout.largest
    if scale_type is DataType.FLOAT:
        return lambda amax: (amax.to(torch.float64) / largest).to(torch.float32)
    limit = scale_type.layout.largest

    def rounded(amax: Tensor) -> Tensor:
        quotient = casts.to_narrower(amax.to(torch.float64) / largest)
        return quotient.clamp(max=limit).to(torch.float8_e4m3fn).to(torch.float32)

    return rounded


def _spread(scale: Tensor, axis: int, block: int, extent: int) -> Tensor:
    """Each scale repeated over its block, cut to ``extent``."""
    if block == 1 and scale.shape[axis] == extent:
        return scale
    if scale.shape[axis] == 1 and block >= extent:
        return scale
    return scale.repeat_interleave(block, axis).narrow(axis, 0, extent)


def _check_tiled(scale: TensorRecord) -> tuple[int, int]:
    row_axis, column_axis = tile_axes(scale)
    rows, columns = scale.dim[row_axis], scale.dim[column_axis]
    whole = rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0
    packed = scale.stride[column_axis] == 1 and scale.stride[row_axis] == columns
    if not whole or not packed or scale.data_type.bits != 8:
        raise NotSupportedError(
            f"tensor {scale.label()} has dim {scale.dim}, strides {scale.stride} and type "
            f"{scale.data_type.name}; reordering F8_128x4 takes 8-bit scales, rows a multiple of "
            f"{TILE_ROWS}, block columns a multiple of {TILE_COLUMNS} with stride 1, and no gap "
            "between rows"
        )
    return row_axis, column_axis


def _scale_loader(scale: TensorRecord, dtype: torch.dtype, device: torch.device) -> casts.Loader:
    load = casts.loader(scale, dtype, device)
    if scale.reordering_type.name == "NONE":
        return load
    _require_128x4(scale)
    row_axis, column_axis = _check_tiled(scale)
    if row_axis < column_axis:
        return lambda operand: unpack_scales_128x4(load(operand))
    return lambda operand: unpack_scales_128x4(load(operand).transpose(-1, -2)).transpose(-1, -2)


def _scale_storer(scale: TensorRecord, needed: tuple[int, ...]) -> casts.Storer:
    """Stores scales of dim ``needed``; tiles are filled up with scales of 0."""
    store = casts.storer(scale)
    if not holds_scales(scale, needed):
        raise NotSupportedError(
            f"tensor {scale.label()} has dim {scale.dim}; expected {needed}, or with reordering "
            f"F8_128x4 rows and block columns rounded up to {TILE_ROWS} and {TILE_COLUMNS}"
        )
    if scale.reordering_type.name == "NONE":
        return store
    _require_128x4(scale)
    row_axis, column_axis = _check_tiled(scale)
    transposed = row_axis > column_axis
    # constant_pad_nd counts from the last axis.
    missing = [have - want for have, want in zip(scale.dim, needed, strict=True)]
    padding = [amount for gap in reversed(missing) for amount in (0, gap)]

    def store_tiled(output: Tensor, value: Tensor) -> None:
        padded = torch.constant_pad_nd(value, padding)
        if transposed:
            store(output, pack_scales_128x4(padded.transpose(-1, -2)).transpose(-1, -2))
        else:
            store(output, pack_scales_128x4(padded))

    return store_tiled


def _require_128x4(scale: TensorRecord) -> None:
    if scale.reordering_type.name != "F8_128x4":
        raise NotSupportedError(
            f"tensor {scale.label()} has reordering {scale.reordering_type.name}; block scales "
            "take NONE or F8_128x4"
        )


def _quantized_axis(operation: Any, rank: int) -> int:
    given = operation.axis
    axis = rank - 1 if given is None else int(given)
    if not -rank <= axis < rank or int(operation.block_size) < 1:
        raise NotSupportedError(
            f"block_scale_quantize axis {axis}, block_size {operation.block_size}; expected an "
            f"axis of the input (rank {rank}) and a positive size"
        )
    return axis % rank


def _swapped(dim: Sequence[int]) -> tuple[int, ...]:
    return (*dim[:-2], dim[-1], dim[-2])


def _only(ports: Any) -> str:
    (port,) = ports
    return str(port)
