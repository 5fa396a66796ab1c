"""Layer, instance, adaptive layer and RMS normalization, forward.

With mean and variance (biased) over the normalized axes:

    Y = (x - mean) inv_variance scale + bias,   inv_variance = (variance + epsilon)^-1/2

and RMSNorm with inv_variance = (mean of x^2 + epsilon)^-1/2 and no mean. The normalized axes
are, for layernorm and rmsnorm, those on which scale has an extent other than 1; for
adalayernorm the same but axis 0, on which scale has one entry a sample; for instancenorm the
spatial axes (2 and on), scale being (1, C, 1, ...). In the TRAINING phase mean and inv_variance
are outputs, with extent 1 on the normalized axes.

Statistics are float32 whatever the operands are (float64 for float64).
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
from tilewright.graph.tensor import Tensor as TensorRecord
from tilewright.records import record
from tilewright.torch_dtypes import to_torch

Tensor = torch.Tensor
ReadScalar = Callable[[Operands], float]

_HALVES = (DataType.HALF, DataType.BFLOAT16)
# From this many elements on, composing in the output beats a fused call and a copy: the copy,
# and the pages of the temporary, then cost more than a few more calls.
_IN_PLACE_FROM = 1 << 16


@record(frozen=True)
class Layout:
    """Which axes are normalized."""

    axes: tuple[int, ...]
    # The axes' extents and the number of elements that a statistic is over.
    shape: tuple[int, ...]
    count: int
    # True if they are the last axes, as ATen's function takes them.
    are_last: bool
    # True if scale has the extents of the normalized axes, so ATen's function applies it.
    affine_inside: bool


def layout_of(kind: str, source: TensorRecord, scale: TensorRecord) -> Layout:
    """The layout of normalization ``kind`` ("layernorm", "rmsnorm_backward", ...).

    Raises:
        NotSupportedError: if scale does not broadcast to the input.
    """
    fits = len(scale.dim) == len(source.dim) and all(
        have in (1, want) for have, want in zip(scale.dim, source.dim, strict=True)
    )
    if not fits:
        raise NotSupportedError(
            f"tensor {scale.label()} has dim {scale.dim}; expected 1 or the extent of the input "
            f"{source.dim} on each axis"
        )
    rank = len(source.dim)
    varying = tuple(axis for axis, extent in enumerate(scale.dim) if extent != 1)
    if kind.startswith("instancenorm"):
        axes = tuple(range(2, rank))
    elif kind.startswith("adalayernorm"):
        axes = tuple(axis for axis in varying if axis != 0)
    else:
        axes = varying
    if not axes:
        # Extent 1 everywhere: the last axis is as good as any other.
        axes = (rank - 1,)
    are_last = axes == tuple(range(rank - len(axes), rank))
    shape = tuple(source.dim[axis] for axis in axes)
    # A single channel's scale varies nowhere, and yet is no scale of the spatial axes.
    inside = set(varying) <= set(axes) and all(scale.dim[axis] == source.dim[axis] for axis in axes)
    return Layout(axes, shape, math.prod(shape), are_last, inside)


def scalar_reader(operation: Any, port: str, device: torch.device) -> ReadScalar:
    """A function that reads the one-element input ``port`` on the host, at each call.

    Raises:
        NotSupportedError: if reading would wait for a device.
    """
    record = operation.inputs.get(port)
    if record is None:
        raise NotSupportedError(f"{operation.kind}: input {port!r} is absent")
    if device.type != "cpu" and not record.is_pass_by_value:
        raise NotSupportedError(
            f"tensor {record.label()} ({port}) lies on {device.type}; the ATen engine reads it on "
            "the host, so it must be passed by value"
        )

    def read(inputs: Operands) -> float:
        return inputs[port].item()

    return read


def require_dim(record: TensorRecord | None, dim: Sequence[int], what: str) -> None:
    """Require that ``record``, if present, has this dim.

    Raises:
        NotSupportedError: naming the tensor, its dim and the expected one.
    """
    if record is not None and record.dim != tuple(dim):
        raise NotSupportedError(
            f"tensor {record.label()} has dim {record.dim}; expected {tuple(dim)}: {what}"
        )


def statistics_dim(source: TensorRecord, layout: Layout) -> tuple[int, ...]:
    """The dim of a statistic: 1 on the normalized axes."""
    return tuple(1 if axis in layout.axes else extent for axis, extent in enumerate(source.dim))


@implements_dense("layernorm", "instancenorm", "adalayernorm")
def prepare_layernorm(operation: Any, device: torch.device) -> Kernel:
    """Y, and in the TRAINING phase mean and inv_variance, of input, scale, bias and epsilon."""
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    bias = operation.inputs.get("bias")
    y = operation.outputs["Y"]
    layout = layout_of(operation.kind, source, scale)
    require_dim(y, source.dim, "Y has the input's dim")
    require_dim(bias, scale.dim, "bias has the scale's dim")
    for port in ("mean", "inv_variance"):
        require_dim(
            operation.outputs.get(port),
            statistics_dim(source, layout),
            "a statistic has extent 1 on the normalized axes",
        )
    small = math.prod(source.dim) < _IN_PLACE_FROM
    if layout.affine_inside and layout.are_last and (small or y.data_type.bits < 32):
        return _prepare_fused(operation, layout, device)
    return _prepare_composed(operation, layout, device)


def _prepare_fused(operation: Any, layout: Layout, device: torch.device) -> Kernel:
    """ATen's function, and a copy of its result into Y: the fewest calls."""
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    bias, y = operation.inputs.get("bias"), operation.outputs["Y"]
    affine = [scale] if bias is None else [scale, bias]
    dtype = affine_dtype = casts.compute_dtype((source, y))
    save = _statistics_saver(operation, layout)
    if device.type == "cpu" and source.data_type is y.data_type and y.data_type in _HALVES:
        # On CPUs the function takes a 16-bit input beside a float32 scale, computes in float32
        # and rounds Y once. With a scale of the input's own type it does so too, but rounds the
        # statistics that it returns.
        dtype = to_torch(source.data_type)
        if save is None and all(record.data_type is source.data_type for record in affine):
            affine_dtype = dtype
    load = casts.loader(source, dtype, device)
    load_scale = casts.loader(scale, affine_dtype, device)
    load_bias = casts.loader(bias, affine_dtype, device) if bias is not None else None
    epsilon = scalar_reader(operation, "epsilon", device)
    store = casts.storer(y)
    shape, axes = list(layout.shape), layout.axes
    on_host = device.type == "cpu"

    def run(inputs: Operands, outputs: Operands) -> None:
        shift = load_bias(inputs["bias"]).reshape(shape) if load_bias is not None else None
        x = load(inputs["input"])
        result, mean, inverse = torch.native_layer_norm(
            x,
            shape,
            load_scale(inputs["scale"]).reshape(shape),
            shift,
            epsilon(inputs),
        )
        store(outputs["Y"], result)
        if save is not None:
            if on_host and not bool(mean.isfinite().all()):
                # ATen's running formula makes NaN of a row with an infinity; the sum does not.
                mean = torch.mean(x.to(mean.dtype), axes, keepdim=True)
            save(outputs, mean, inverse)

    return run


def _prepare_composed(operation: Any, layout: Layout, device: torch.device) -> Kernel:
    """Any axes and scales, computed in Y itself where its type allows: no large temporary."""
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    bias, y = operation.inputs.get("bias"), operation.outputs["Y"]
    dtype = casts.compute_dtype((source, y))
    load, apply_affine = casts.loader(source, dtype, device), _affine(scale, bias, dtype, device)
    epsilon = scalar_reader(operation, "epsilon", device)
    store = None if casts.is_plain(y, dtype) else casts.storer(y)
    owns_x = not casts.is_plain(source, dtype)
    save = _statistics_saver(operation, layout)
    axes, per_element = layout.axes, 1.0 / layout.count if layout.count else math.nan

    def run(inputs: Operands, outputs: Operands) -> None:
        x = load(inputs["input"])
        mean = torch.mean(x, axes, keepdim=True)
        if store is None:
            result = torch.sub(x, mean, out=outputs["Y"])
        else:
            result = x.sub_(mean) if owns_x else x - mean
        squares = _sum_of_squares(result, axes)
        inverse = squares.mul_(per_element).add_(epsilon(inputs)).rsqrt_()
        result.mul_(inverse)
        apply_affine(result, inputs)
        if store is not None:
            store(outputs["Y"], result)
        if save is not None:
            save(outputs, mean, inverse)

    return run


@implements_dense("rmsnorm")
def prepare_rmsnorm(operation: Any, device: torch.device) -> Kernel:
    """Y, and in the TRAINING phase inv_variance, of input, scale, bias or none, and epsilon."""
    source, scale = operation.inputs["input"], operation.inputs["scale"]
    bias = operation.inputs.get("bias")
    y, saved = operation.outputs["Y"], operation.outputs.get("inv_variance")
    layout = layout_of(operation.kind, source, scale)
    require_dim(y, source.dim, "Y has the input's dim")
    require_dim(bias, scale.dim, "bias has the scale's dim")
    require_dim(saved, statistics_dim(source, layout), "extent 1 on the normalized axes")
    dtype = casts.compute_dtype((source, y))
    load, apply_affine = casts.loader(source, dtype, device), _affine(scale, bias, dtype, device)
    epsilon = scalar_reader(operation, "epsilon", device)
    # A plain output is computed in place: this is memory-bound, and one buffer less counts.
    store = None if casts.is_plain(y, dtype) else casts.storer(y)
    owns_x = not casts.is_plain(source, dtype)
    save = casts.storer(saved) if saved is not None else None
    axes, per_element = layout.axes, 1.0 / layout.count if layout.count else math.nan

    def run(inputs: Operands, outputs: Operands) -> None:
        x = load(inputs["input"])
        squares = _sum_of_squares(x, axes)
        inverse = squares.mul_(per_element).add_(epsilon(inputs)).rsqrt_()
        if store is None:
            result = torch.mul(x, inverse, out=outputs["Y"])
        else:
            result = x.mul_(inverse) if owns_x else x * inverse
        apply_affine(result, inputs)
        if store is not None:
            store(outputs["Y"], result)
        if save is not None:
            save(outputs["inv_variance"], inverse)

    return run


def _affine(
    scale: TensorRecord, bias: TensorRecord | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Operands], None]:
    """A function that multiplies a result by the call's scale and adds its bias, in place."""
    load_scale = casts.loader(scale, dtype, device)
    load_bias = casts.loader(bias, dtype, device) if bias is not None else None

    def apply(result: Tensor, inputs: Operands) -> None:
        # Two calls: addcmul takes a slower path where a row is broadcast.
        result.mul_(load_scale(inputs["scale"]))
        if load_bias is not None:
            result.add_(load_bias(inputs["bias"]))

    return apply


def _sum_of_squares(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The sum of x^2 over ``axes``, kept with extent 1; a new tensor."""
    if axes == (x.dim() - 1,):
        # One pass and no product in memory; over other axes ATen's norm is several times slower.
        norm: Tensor = torch.linalg.vector_norm(x, 2, axes, keepdim=True)
        return norm.mul_(norm)
    return torch.sum(x * x, axes, keepdim=True)


def _statistics_saver(
    operation: Any, layout: Layout
) -> Callable[[Operands, Tensor, Tensor], None] | None:
    """Writes mean and inv_variance where the operation has them as outputs."""
    mean = operation.outputs.get("mean")
    inverse = operation.outputs.get("inv_variance")
    if mean is None and inverse is None:
        return None
    store_mean = casts.storer(mean) if mean is not None else None
    store_inverse = casts.storer(inverse) if inverse is not None else None
    # ATen leaves the mean over nothing unset.
    nothing = layout.count == 0

    def save(outputs: Operands, mean_value: Tensor, inverse_value: Tensor) -> None:
        if nothing:
            mean_value.fill_(math.nan)
            inverse_value.fill_(math.nan)
        if store_mean is not None:
            store_mean(outputs["mean"], mean_value)
        if store_inverse is not None:
            store_inverse(outputs["inv_variance"], inverse_value)

    return save
