"""Attention on FP8 tensors with one power-of-two scale (FP8_E8M0) a block of 32 elements.

Blocks lie along the axis that a product sums over (OCP Microscaling Formats (MX) 1.0): the head
size in the products for S and dP, the sequence in those for O, dV (dO_T), dQ (k_T) and dK (q_T).
Operands are dequantized to float32 and attention runs on them; P and dS are not rounded. Delta is
rowsum(dO_f16 * o_f16).

Scales lie plainly by their strides, or in the F8_128x4 order: each (batch, head) plane is then the
tiles of a matrix whose columns count blocks, with no gap, whichever of its axes is declared first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.engines.aten.attention_compose import (
    BackwardRecipe,
    ForwardRecipe,
    compose_backward,
    compose_forward,
)
from tilewright.engines.aten.attention_forward import RoundedProducts
from tilewright.engines.aten.attention_parts import PartBuilder
from tilewright.engines.aten.attention_spec import read_spec
from tilewright.engines.aten.block_scale import unpack_scales_128x4
from tilewright.engines.aten.registry import Kernel, implements
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.operations.block_scale import TILE_COLUMNS, TILE_ROWS

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]
Number = float | Tensor
_BLOCK = 32
_SEQUENCE, _DEPTH = 2, 3
_FORWARD_AXES = {"q": _DEPTH, "k": _DEPTH, "v": _SEQUENCE}
_BACKWARD_AXES = {
    "q": _DEPTH,
    "k": _DEPTH,
    "v": _DEPTH,
    "dO": _DEPTH,
    "q_T": _SEQUENCE,
    "k_T": _SEQUENCE,
    "dO_T": _SEQUENCE,
}


@implements("sdpa_mxfp8")
def prepare_sdpa_mxfp8(operation: Any, device: torch.device) -> Kernel:
    """MXFP8 attention forward."""
    return compose_mxfp8_forward(operation, device, device.type == "cpu")


@implements("sdpa_mxfp8_backward")
def prepare_sdpa_mxfp8_backward(operation: Any, device: torch.device) -> Kernel:
    """MXFP8 attention backward."""
    return compose_mxfp8_backward(operation, device, device.type == "cpu")


def compose_mxfp8_forward(operation: Any, device: torch.device, on_host: bool) -> Kernel:
    """The composition on dequantized operands."""
    spec = read_spec(operation)

    def begin(builder: PartBuilder, inputs: Operands) -> tuple[Number, RoundedProducts]:
        amax_p, amax_o = (torch.zeros((), dtype=spec.compute, device=device) for _ in range(2))
        return 1.0, RoundedProducts(None, 1.0, 1.0, 1.0, amax_p, amax_o)

    recipe = ForwardRecipe(read=_reader(operation, _FORWARD_AXES), begin=begin)
    return compose_forward(operation, spec, device, on_host, recipe)


def compose_mxfp8_backward(operation: Any, device: torch.device, on_host: bool) -> Kernel:
    """The composed backward on dequantized operands, of which each product has its own."""
    spec = read_spec(operation)
    recipe = BackwardRecipe(
        read=_reader(operation, _BACKWARD_AXES),
        saved={
            "o": "o_f16",
            "d_o": "dO",
            "stats": "stats",
            "q_grad": "q_T",
            "k_grad": "k_T",
            "d_o_grad": "dO_T",
            "d_o_delta": "dO_f16",
        },
        sides={"k_T": "keys"},
    )
    return compose_backward(operation, spec, device, on_host, recipe)


def _reader(operation: Any, axes: Mapping[str, int]) -> Callable[[Operands], Operands]:
    """A function that dequantizes the operands of ``axes``, by port and block axis."""
    scales = {
        port: (f"descale_{port}", axis, _scale_reader(operation, port, axis))
        for port, axis in axes.items()
    }

    def read(inputs: Operands) -> Operands:
        values = dict(inputs)
        for port, (scale_port, axis, read_scale) in scales.items():
            operand = inputs[port]
            scale = read_scale(inputs[scale_port]).repeat_interleave(_BLOCK, axis)
            for cut in (_SEQUENCE, _DEPTH):
                scale = scale.narrow(cut, 0, operand.shape[cut])
            values[port] = scale.mul_(operand.to(torch.float32))
        return values

    return read


def _scale_reader(operation: Any, port: str, axis: int) -> Callable[[Tensor], Tensor]:
    """A function from stored scales to float32 (B, H, rows, columns) in the declared axes."""
    record, title = operation.inputs[f"descale_{port}"], operation.title()
    if operation.inputs[port].ragged_offset is not None:
        raise NotSupportedError(
            f"{title}: {port} is ragged; this engine takes block scales of dense sequences only"
        )
    if record.reordering_type is tensor_reordering.NONE:
        return lambda stored: stored.to(torch.float32)
    row_axis = _DEPTH if axis == _SEQUENCE else _SEQUENCE
    rows, columns = record.dim[row_axis], record.dim[axis]
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        raise NotSupportedError(
            f"{title}: descale_{port} has dim {record.dim}; with F8_128x4 axis {row_axis} must be "
            f"a multiple of {TILE_ROWS} and axis {axis} of {TILE_COLUMNS}"
        )
    steps = {record.stride[row_axis], record.stride[axis]}
    inner = columns if record.stride[axis] == 1 else rows
    if steps != {1, inner}:
        raise NotSupportedError(
            f"{title}: descale_{port} has stride {record.stride}; with F8_128x4 the tiles of a "
            "(batch, head) plane must follow one another without a gap"
        )

    def read(stored: Tensor) -> Tensor:
        planes = stored if stored.stride(_DEPTH) == 1 else stored.transpose(_SEQUENCE, _DEPTH)
        values = planes.to(torch.float32).reshape(*stored.shape[:2], rows, columns)
        scales = unpack_scales_128x4(values)
        return scales.transpose(_SEQUENCE, _DEPTH) if axis == _SEQUENCE else scales

    return read
