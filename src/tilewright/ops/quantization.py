"""Block-scaled quantization of torch tensors: MXFP8, MXFP4 and NVFP4.

``block`` neighbouring elements along one axis share a scale. With amax their largest magnitude:

    mxfp8_e4m3, mxfp8_e5m2, mxfp4: scale = 2 ** (floor(log2 amax) - emax), emax 8, 15, 2; block 32
    nvfp4: scale = amax / 6 rounded to E4M3; block 16
    element = x / scale, rounded to nearest even, ties included, saturating

Sources: OCP Microscaling Formats Specification 1.0; NVIDIA's description of NVFP4, whose second
scale, one a tensor, is the caller's: divide by it before, multiply by it after.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError, NotSupportedError
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK, Tensor, packed_strides
from tilewright.ops.arguments import (
    FLOAT_TYPES,
    require_choice,
    require_device,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.custom import is_traced, register, require_operator_arguments
from tilewright.ops.plan_cache import operands_key, run
from tilewright.ops.streams import on_its_stream
from tilewright.torch_dtypes import to_torch


class _Format(NamedTuple):
    elements: DataType
    scales: DataType
    block: int


FORMATS = {
    "mxfp8_e4m3": _Format(DataType.FP8_E4M3, DataType.FP8_E8M0, 32),
    "mxfp8_e5m2": _Format(DataType.FP8_E5M2, DataType.FP8_E8M0, 32),
    "mxfp4": _Format(DataType.FP4_E2M1, DataType.FP8_E8M0, 32),
    "nvfp4": _Format(DataType.FP4_E2M1, DataType.FP8_E4M3, 16),
}
SCALE_LAYOUTS = ("plain", "128x4")
_TILE_ROWS, _TILE_COLUMNS = 128, 4


class _Blocks(NamedTuple):
    """How a tensor is cut; in the order of the operators. ``axis`` counts from the front."""

    format: str
    axis: int
    block: int
    scale_layout: str

    @property
    def types(self) -> _Format:
        """The data types of the format."""
        return FORMATS[self.format]

    @property
    def is_packed(self) -> bool:
        """True if two elements share a byte."""
        return self.types.elements.bits == 4


@on_its_stream
def quantize(
    x: torch.Tensor,
    format: str,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_layout: str = "plain",
    engine: str | None = None,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements, scales) of ``x``, in blocks along ``axis``: x / scale, to nearest even.

    The scale of a block is 2 ** (floor(log2 amax) - emax) in the MX formats, emax the exponent of
    the element type's largest number, and amax / 6 rounded to E4M3 in nvfp4.

    Args:
        x: one to eight axes, any strides and float type.
        format: "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4" or "nvfp4".
        axis: the axis that blocks run along; its last block may be shorter.
        block: elements a block; default the format's own, 32 or 16.
        scale_layout: "plain": x's shape with the number of blocks on ``axis``. "128x4": the tiles
            that block-scaled matrix instructions read (``axis`` one of the last two; both extents
            rounded up to 128 rows and 4 blocks, the rest 0).
        engine: run this engine or raise.
        stream: where to run.

    Returns:
        Elements, row-major: of x's shape in torch.float8_e4m3fn or float8_e5m2, or uint8 of two
        4-bit codes a byte, the first in the low half, with half of x's last extent. Scales in
        torch.float8_e8m0fnu, or float8_e4m3fn for nvfp4. A block of zeros gives zeros.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if x requires grad, or no engine takes the call.

    Sources: OCP Microscaling Formats 1.0; NVIDIA's NVFP4.
    """
    require_float("x", require_tensor("x", x))
    blocks = _blocks(format, axis, block, scale_layout, x.dim())
    if blocks.is_packed and x.shape[-1] % 2:
        raise BindingError(
            f"x: shape {tuple(x.shape)}; expected an even last extent: {format} packs two "
            "elements a byte"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotSupportedError("quantize: x requires grad; rounding has none, use torch.no_grad")
    if is_traced(x):
        require_operator_arguments(engine, stream)
        made: tuple[torch.Tensor, torch.Tensor] = _quantize(x, *blocks, engine)
        return made
    return _run_quantize(x, blocks, engine, stream)


@on_its_stream
def dequantize(
    elements: torch.Tensor,
    scales: torch.Tensor,
    format: str,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_layout: str = "plain",
    dtype: torch.dtype = torch.float32,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Elements times the scales of their blocks, in ``dtype``, a float type.

    ``elements`` and ``scales`` are what ``quantize`` gives for ``format``, ``axis``, ``block`` and
    ``scale_layout``. The result has the shape of what was quantized: of 4-bit elements, twice as
    many on the last axis as there are bytes.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    require_tensor("elements", elements)
    blocks = _blocks(format, axis, block, scale_layout, elements.dim())
    require_choice("dtype", dtype, FLOAT_TYPES)
    if elements.dtype is not to_torch(blocks.types.elements):
        raise BindingError(
            f"elements: data type {elements.dtype}; expected {to_torch(blocks.types.elements)} "
            f"of {format}"
        )
    if blocks.is_packed and not elements.is_contiguous():
        raise BindingError(
            f"elements: strides {elements.stride()}; expected row-major, as two share a byte"
        )
    scale_type = to_torch(blocks.types.scales)
    if require_tensor("scales", scales).dtype is not scale_type:
        raise BindingError(f"scales: data type {scales.dtype}; expected {scale_type} of {format}")
    shape, stride = _scales_layout(_dim(elements, blocks), blocks)
    require_shape("scales", scales, shape, f"one scale a block, layout {scale_layout}")
    require_device("scales", scales, elements.device)
    if scale_layout != "plain" and scales.stride() != stride:
        raise BindingError(
            f"scales: strides {scales.stride()}; expected {stride}, as tiles lie in memory"
        )
    if is_traced(elements, scales):
        require_operator_arguments(engine, stream)
        x: torch.Tensor = _dequantize(elements, scales, *blocks, dtype, engine)
        return x
    return _run_dequantize(elements, scales, blocks, dtype, engine, stream)


def _blocks(format: str, axis: int, block: int | None, scale_layout: str, rank: int) -> _Blocks:
    require_choice("format", format, tuple(FORMATS))
    require_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    if not 1 <= rank <= MAX_RANK:
        raise BindingError(f"x: {rank} axes; expected 1 to {MAX_RANK}")
    lowest = -2 if scale_layout == "128x4" else -rank
    if not -rank <= axis < rank or (axis % rank) - rank < lowest:
        raise BindingError(
            f"axis: got {axis}; expected {lowest} to -1, or the same counted from the front, for "
            f"{rank} axes and layout {scale_layout}"
        )
    if scale_layout == "128x4" and rank < 2:
        raise BindingError("scale_layout: '128x4' of one axis; expected two axes or more")
    size = FORMATS[format].block if block is None else block
    if not isinstance(size, int) or size < 1:
        raise BindingError(f"block: got {block!r}; expected an int >= 1")
    return _Blocks(format, axis % rank, size, scale_layout)


def _dim(elements: torch.Tensor, blocks: _Blocks) -> tuple[int, ...]:
    """The shape of what the elements stand for."""
    *outer, last = elements.shape
    return (*outer, 2 * last if blocks.is_packed else last)


def _scales_layout(
    dim: tuple[int, ...], blocks: _Blocks
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the scales."""
    shape = list(dim)
    shape[blocks.axis] = -(-dim[blocks.axis] // blocks.block)
    if blocks.scale_layout == "plain":
        return tuple(shape), packed_strides(shape)
    # The rows are the other one of the last two axes; the blocks have stride 1.
    rows = 2 * len(dim) - 3 - blocks.axis
    shape[rows] = -(-shape[rows] // _TILE_ROWS) * _TILE_ROWS
    shape[blocks.axis] = -(-shape[blocks.axis] // _TILE_COLUMNS) * _TILE_COLUMNS
    stride = list(packed_strides(shape))
    stride[rows], stride[blocks.axis] = shape[blocks.axis], 1
    return tuple(shape), tuple(stride)


def _empty_results(x: torch.Tensor, blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    dim = tuple(x.shape)
    shape = (*dim[:-1], dim[-1] // 2) if blocks.is_packed else dim
    elements = x.new_empty(shape, dtype=to_torch(blocks.types.elements))
    scales = torch.empty_strided(
        *_scales_layout(dim, blocks), dtype=to_torch(blocks.types.scales), device=x.device
    )
    return elements, scales


def _run_quantize(
    x: torch.Tensor, blocks: _Blocks, engine: str | None, stream: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    elements, scales = _empty_results(x, blocks)
    inputs, outputs = {"x": x}, {"elements": elements, "scales": scales}

    def declare(graph: DeclaredGraph) -> None:
        source = graph.tensor(x.shape, x.stride(), x.dtype, name="x")
        made = graph.block_scale_quantize(source, blocks.block, blocks.axis)
        made[0].set_data_type(blocks.types.elements).set_dim(x.shape)
        made[0].set_stride(packed_strides(x.shape))
        made[1].set_data_type(blocks.types.scales)
        _lay_out_scales(made[1], scales, blocks)
        for tensor, name in zip(made, outputs, strict=True):
            tensor.set_output(True).set_name(name)

    key = (blocks, operands_key(inputs), operands_key(outputs))
    run("quantize", key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    return elements, scales


def _run_dequantize(
    elements: torch.Tensor,
    scales: torch.Tensor,
    blocks: _Blocks,
    dtype: torch.dtype,
    engine: str | None,
    stream: Any,
) -> torch.Tensor:
    dim = _dim(elements, blocks)
    x = elements.new_empty(dim, dtype=dtype)
    inputs, outputs = {"elements": elements, "scales": scales}, {"x": x}

    def declare(graph: DeclaredGraph) -> None:
        stride = packed_strides(dim) if blocks.is_packed else elements.stride()
        source = graph.tensor(dim, stride, blocks.types.elements, name="elements")
        descale = graph.tensor(data_type=blocks.types.scales, name="scales")
        _lay_out_scales(descale, scales, blocks)
        sizes = [blocks.block if axis == blocks.axis else 1 for axis in range(len(dim))]
        made = graph.block_scale_dequantize(source, descale, sizes)
        made.set_output(True).set_name("x").set_data_type(dtype).set_stride(x.stride())

    key = (blocks, operands_key(inputs), operands_key(outputs))
    run("dequantize", key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    return x


def _lay_out_scales(tensor: Tensor, scales: torch.Tensor, blocks: _Blocks) -> None:
    tensor.set_dim(scales.shape).set_stride(scales.stride())
    if blocks.scale_layout == "128x4":
        tensor.set_reordering_type(tensor_reordering.F8_128x4)


_BLOCKS = "str format, int axis, SymInt block, str scale_layout"
_quantize = register(
    "quantize",
    f"(Tensor x, {_BLOCKS}, str? engine) -> (Tensor, Tensor)",
    lambda x, *rest: _run_quantize(x, _Blocks(*rest[:-1]), rest[-1], None),
    lambda x, *rest: _empty_results(x, _Blocks(*rest[:-1])),
)
_dequantize = register(
    "dequantize",
    f"(Tensor elements, Tensor scales, {_BLOCKS}, ScalarType dtype, str? engine) -> Tensor",
    lambda elements, scales, *rest: _run_dequantize(
        elements, scales, _Blocks(*rest[:-2]), rest[-2], rest[-1], None
    ),
    lambda elements, scales, *rest: elements.new_empty(
        _dim(elements, _Blocks(*rest[:-2])), dtype=rest[-2]
    ),
)
