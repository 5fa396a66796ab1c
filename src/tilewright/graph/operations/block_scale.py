"""Block-scaled formats: quantize and dequantize (OCP Microscaling 1.0, and NVIDIA's NVFP4).

A block is ``block_size`` neighbouring elements along one axis, the last one perhaps shorter. With
amax the largest magnitude of a block, the scale's data type decides the scale:

    FP8_E8M0: 2 ** (floor(log2 amax) - emax), emax 8 for E4M3, 15 for E5M2, 2 for E2M1
    FP8_E4M3, FLOAT: amax / (the largest number of the element type)

Elements are input / scale, rounded to nearest even, saturating; dequantized is element times scale.
A scale tensor of reordering F8_128x4 is stored in tiles of 128 rows by 4 block columns, and has its
extents rounded up to whole tiles.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import ClassVar

from tilewright.dtypes import DataType
from tilewright.graph.builder import Builder
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.tensor import Tensor
from tilewright.records import record

TILE_ROWS, TILE_COLUMNS = 128, 4
ELEMENT_TYPES = (DataType.FP8_E4M3, DataType.FP8_E5M2, DataType.FP4_E2M1)
SCALE_TYPES = (DataType.FP8_E8M0, DataType.FP8_E4M3, DataType.FLOAT)
WIDE_TYPES = (DataType.FLOAT, DataType.HALF, DataType.BFLOAT16, DataType.DOUBLE)


def block_counts(dim: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """The scale's dim for elements of ``dim`` in blocks of this extent an axis."""
    return tuple(-(-extent // block) for extent, block in zip(dim, blocks, strict=True))


def tiled_dim(dim: Sequence[int], row_axis: int, column_axis: int) -> tuple[int, ...]:
    """``dim`` rounded up to whole 128x4 tiles of rows and block columns."""
    tiled = list(dim)
    tiled[row_axis] = -(-dim[row_axis] // TILE_ROWS) * TILE_ROWS
    tiled[column_axis] = -(-dim[column_axis] // TILE_COLUMNS) * TILE_COLUMNS
    return tuple(tiled)


def tile_axes(scale: Tensor) -> tuple[int, int]:
    """The row and the block-column axis of a tiled scale: the last two, columns of stride 1."""
    rank = scale.rank
    if scale.stride[rank - 2] == 1 and scale.stride[rank - 1] != 1:
        return rank - 1, rank - 2
    return rank - 2, rank - 1


def holds_scales(scale: Tensor, needed: Sequence[int]) -> bool:
    """True if ``scale`` has the needed extents, or is tiled and has them in whole tiles."""
    if scale.dim == tuple(needed):
        return True
    tiled = scale.reordering_type is tensor_reordering.F8_128x4
    if not tiled or scale.rank != len(needed) or scale.rank < 2:
        return False
    return scale.dim == tiled_dim(needed, *tile_axes(scale))


@operation_kind("block_scale_dequantize")
@record(frozen=True, kw_only=True, eq=False)
class BlockScaleDequantize(Operation):
    """out = input times the descale of its block, negated if ``is_negative_scale``.

    ``block_size`` is one number, for the last axis whose extents agree with it, or a number an
    axis (1 where blocks do not run), aligned at the last axis.
    """

    required: ClassVar = ("input", "descale")
    produces: ClassVar = ("out",)

    block_size: tuple[int, ...] = ()
    is_negative_scale: bool = False

    def infer(self) -> None:
        """The output has the input's dim and axis order."""
        source = self.inputs["input"]
        self.fill("out", source.dim, order_of=source)

    def check(self) -> None:
        """The descale has one entry a block, and the types are of a block-scaled format."""
        source = self.inputs["input"]
        self.blocks()
        self.require_dim("out", source.dim, "dequantizing keeps the dim")
        elements = (*ELEMENT_TYPES, DataType.INT8, DataType.INT4)
        self.require_type("input", elements, "block-scaled elements are narrow")
        self.require_type("descale", SCALE_TYPES, "the types of block scales")
        self.require_type("out", WIDE_TYPES, "dequantized elements are wide")

    def blocks(self) -> tuple[int, ...]:
        """The block's extent on each axis of the input.

        Raises:
            GraphError: if no axis has that many blocks.
        """
        source, descale = self.inputs["input"], self.inputs["descale"]
        rank, sizes = source.rank, self.block_size
        if not sizes or len(sizes) > rank or min(sizes) < 1:
            self.fail(
                f"block_size is {sizes}; expected positive numbers, one or up to one an axis of "
                f"tensor {source.label()} of rank {rank}"
            )
        if len(sizes) > 1:
            choices = [(1,) * (rank - len(sizes)) + sizes]
        else:
            choices = [
                tuple(sizes[0] if axis == blocked else 1 for axis in range(rank))
                for blocked in reversed(range(rank))
            ]
        for blocks in choices:
            if holds_scales(descale, block_counts(source.dim, blocks)):
                return blocks
        self.fail(
            f"tensor {descale.label()} (descale) has dim {descale.dim}; expected "
            f"{block_counts(source.dim, choices[0])}: one entry a block of {sizes} of tensor "
            f"{source.label()} {source.dim}"
        )


@operation_kind("block_scale_quantize")
@record(frozen=True, kw_only=True, eq=False)
class BlockScaleQuantize(Operation):
    """Y and scale of input, in blocks along ``axis`` (the last one if None).

    With ``transpose`` both outputs have their last two axes swapped.
    """

    required: ClassVar = ("input",)
    produces: ClassVar = ("Y", "scale")
    required_outputs: ClassVar = ("scale",)

    block_size: int = 0
    axis: int | None = None
    transpose: bool = False

    def infer(self) -> None:
        """Y has the input's dim, scale one entry a block, in whole tiles if it is tiled."""
        source, scale = self.inputs["input"], self.outputs["scale"]
        axis = self._axis()
        order = None if self.transpose else source
        self.fill("Y", self._swap(source.dim), order_of=order)
        needed = self._needed()
        if scale.reordering_type is not tensor_reordering.F8_128x4:
            self.fill("scale", needed, order_of=order)
            return
        rank = source.rank
        blocked = 2 * rank - 3 - axis if self.transpose and axis >= rank - 2 else axis
        if rank < 2 or blocked < rank - 2:
            self.fail(
                f"tensor {scale.label()} (scale) has reordering F8_128x4 and blocks run along "
                f"axis {axis} of {source.dim}; expected one of the last two axes"
            )
        rows = 2 * rank - 3 - blocked
        dim = tiled_dim(needed, rows, blocked)
        # Tiles are packed with the block columns fastest, whichever axis they are.
        stride = [1] * rank
        stride[rows] = dim[blocked]
        step = dim[rows] * dim[blocked]
        for outer in reversed(range(rank - 2)):
            stride[outer] = max(step, 1)
            step *= dim[outer]
        self.fill("scale", dim, stride=stride)

    def check(self) -> None:
        """Dims and types of both outputs are those of a block-scaled format."""
        source, scale = self.inputs["input"], self.outputs["scale"]
        self.require_dim("Y", self._swap(source.dim), "the elements of the input")
        needed = self._needed()
        if not holds_scales(scale, needed):
            self.fail(
                f"tensor {scale.label()} (scale) has dim {scale.dim}; expected {needed}: one entry "
                f"a block of {self.block_size} along axis {self._axis()} of {source.dim}"
            )
        self.require_type("input", WIDE_TYPES, "what is quantized is wide")
        self.require_type("Y", ELEMENT_TYPES, "block-scaled elements; call set_data_type")
        self.require_type("scale", SCALE_TYPES, "the types of block scales; call set_data_type")

    def _axis(self) -> int:
        source = self.inputs["input"]
        if self.block_size < 1:
            self.fail(f"block_size is {self.block_size}; expected at least 1")
        axis = source.rank - 1 if self.axis is None else self.axis
        if not -source.rank <= axis < source.rank:
            self.fail(
                f"axis is {axis}; expected {-source.rank} to {source.rank - 1}: tensor "
                f"{source.label()} has rank {source.rank}"
            )
        if self.transpose and source.rank < 2:
            self.fail(
                f"tensor {source.label()} (input) has dim {source.dim}; expected two axes or "
                "more: transpose swaps the last two"
            )
        return axis % source.rank

    def _needed(self) -> tuple[int, ...]:
        source, axis = self.inputs["input"], self._axis()
        blocks = [self.block_size if other == axis else 1 for other in range(source.rank)]
        return self._swap(block_counts(source.dim, blocks))

    def _swap(self, dim: tuple[int, ...]) -> tuple[int, ...]:
        return (*dim[:-2], dim[-1], dim[-2]) if self.transpose else dim


class BlockScaleMethods(Builder):
    """Declares quantization to and from block-scaled formats."""

    def block_scale_dequantize(
        self,
        input: Tensor,
        descale: Tensor,
        block_size: int | Sequence[int],
        is_negative_scale: bool = False,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input times the descale of each block; the result has the input's dim.

        ``input`` is of FP8, FP4_E2M1, INT8 or INT4, ``descale`` of FP8_E8M0, FP8_E4M3 or FLOAT with
        one entry a block. ``block_size`` is in elements: a number, for the last axis whose extents
        agree with it, or one an axis. ``is_negative_scale`` negates the result.

        Raises:
            GraphError: at ``validate`` if ``descale`` has no entry a block, or for a type that
                is not of a block-scaled format.
        """
        operation = self.append(
            BlockScaleDequantize,
            {"input": input, "descale": descale},
            name=name,
            compute_data_type=compute_data_type,
            block_size=_sizes(block_size),
            is_negative_scale=is_negative_scale,
        )
        return operation.outputs["out"]

    def block_scale_quantize(
        self,
        input: Tensor,
        block_size: int,
        axis: int | None = None,
        transpose: bool = False,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor]:
        """[Y, scale] of ``input`` in blocks of ``block_size`` elements along ``axis`` (the last).

        Call ``set_data_type`` on both: Y is FP8_E4M3, FP8_E5M2 or FP4_E2M1; scale is FP8_E8M0 (OCP
        Microscaling 1.0), FP8_E4M3 (NVFP4) or FLOAT, with the number of blocks on ``axis``. With
        ``transpose`` both have their last two axes swapped.

        Raises:
            GraphError: at ``validate`` for an axis or a type that does not fit.
        """
        operation = self.append(
            BlockScaleQuantize,
            {"input": input},
            name=name,
            compute_data_type=compute_data_type,
            block_size=block_size,
            axis=axis,
            transpose=transpose,
        )
        return [operation.outputs["Y"], operation.outputs["scale"]]


def _sizes(given: object) -> object:
    """A single number as a sequence of one; what is wrong is left for the attribute's check."""
    try:
        return (operator.index(given),)  # type: ignore[arg-type]
    except TypeError:
        return given
