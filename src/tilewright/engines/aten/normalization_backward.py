"""Layer, instance, adaptive layer and RMS normalization, backward.

With g the incoming gradient, n the normalized input (x - mean) inv_variance (RMSNorm: x
inv_variance), w = g scale, and averages over the normalized axes:

    DX = inv_variance (w - average(w) - n average(w n))     (RMSNorm: without average(w))
    DScale = sum of g n,  DBias = sum of g, over the axes that scale broadcasts along

Sums run in float32 whatever the operands' types are (float64 for float64), and over any
strides: a gradient may be expanded (stride 0) or a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.normalization import (
    Layout,
    layout_of,
    require_dim,
    statistics_dim,
)
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.graph.tensor import Tensor as TensorRecord

Tensor = torch.Tensor
_fused_backward = torch.ops.aten.native_layer_norm_backward.default


@implements_dense("layernorm_backward", "instancenorm_backward", "adalayernorm_backward")
def prepare_layernorm_backward(operation: Any, device: torch.device) -> Kernel:
    """DX, DScale and DBias of grad, input, scale, mean and inv_variance."""
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    layout = _checked_layout(operation)
    dtype = casts.compute_dtype((source, operation.outputs["DX"]))
    load = casts.port_loader(operation.inputs, dtype, device)
    write = _writer(operation)
    if layout.affine_inside and layout.are_last and 0 not in source.dim:
        shape = list(layout.shape)

        def run_fused(inputs: Operands, outputs: Operands) -> None:
            weight = load(inputs, "scale").reshape(shape)
            dx, dscale, dbias = _fused_backward(
                load(inputs, "grad"),
                load(inputs, "input"),
                shape,
                # ATen's function reads the statistics as packed, whatever their strides say.
                load(inputs, "mean").contiguous(),
                load(inputs, "inv_variance").contiguous(),
                weight,
                weight,  # only asked whether there is a bias
                [True, True, True],
            )
            write(outputs, dx, dscale.reshape(scale.dim), dbias.reshape(scale.dim))

        return run_fused
    axes, summed = layout.axes, _summed_axes(scale)

    def run(inputs: Operands, outputs: Operands) -> None:
        grad, inverse = load(inputs, "grad"), load(inputs, "inv_variance")
        normalized = (load(inputs, "input") - load(inputs, "mean")).mul_(inverse)
        weighted = grad * load(inputs, "scale")
        average = torch.mean(weighted * normalized, axes, keepdim=True)
        dx = weighted.sub_(torch.mean(weighted, axes, keepdim=True))
        dx = dx.sub_(normalized * average).mul_(inverse)
        write(outputs, dx, _sum(grad * normalized, summed), _sum(grad, summed))

    return run


@implements_dense("rmsnorm_backward")
def prepare_rmsnorm_backward(operation: Any, device: torch.device) -> Kernel:
    """DX, DScale and, if the operation has it, DBias of grad, input, scale and inv_variance."""
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    layout = _checked_layout(operation)
    dtype = casts.compute_dtype((source, operation.outputs["DX"]))
    load = casts.port_loader(operation.inputs, dtype, device)
    write = _writer(operation)
    axes, summed = layout.axes, _summed_axes(scale)
    has_bias = operation.outputs.get("DBias") is not None

    def run(inputs: Operands, outputs: Operands) -> None:
        grad, inverse = load(inputs, "grad"), load(inputs, "inv_variance")
        normalized = load(inputs, "input") * inverse
        weighted = grad * load(inputs, "scale")
        average = torch.mean(weighted * normalized, axes, keepdim=True)
        dx = weighted.sub_(normalized * average).mul_(inverse)
        dbias = _sum(grad, summed) if has_bias else None
        write(outputs, dx, _sum(grad * normalized, summed), dbias)

    return run


def _checked_layout(operation: Any) -> Layout:
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    layout = layout_of(operation.kind, source, scale)
    require_dim(operation.inputs["grad"], source.dim, "the gradient has the input's dim")
    require_dim(operation.outputs["DX"], source.dim, "DX has the input's dim")
    for port in ("DScale", "DBias"):
        require_dim(operation.outputs.get(port), scale.dim, f"{port} has the scale's dim")
    for port in ("mean", "inv_variance"):
        require_dim(
            operation.inputs.get(port),
            statistics_dim(source, layout),
            "a statistic has extent 1 on the normalized axes",
        )
    return layout


def _writer(operation: Any) -> Callable[[Operands, Tensor, Tensor, Tensor | None], None]:
    stores = {port: casts.storer(record) for port, record in operation.outputs.items()}

    def write(outputs: Operands, dx: Tensor, dscale: Tensor, dbias: Tensor | None) -> None:
        for port, value in (("DX", dx), ("DScale", dscale), ("DBias", dbias)):
            if value is not None and port in stores:
                stores[port](outputs[port], value)

    return write


def _summed_axes(scale: TensorRecord) -> tuple[int, ...]:
    return tuple(axis for axis, extent in enumerate(scale.dim) if extent == 1)


def _sum(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    # ATen takes an empty list of axes for all of them.
    return torch.sum(value, axes, keepdim=True) if axes else value
