"""Convolution (a cross-correlation): forward, data gradient and filter gradient.

Declared axes are N, C, spatial for images, K, C / groups, spatial for filters, with any
strides; 1 to 3 spatial axes. With p = pre_padding, s = stride and d = dilation, on each axis:

    out[n, k, i] = sum over c, r of image[n, c, s i - p + d r] weight[k, c, r]

where elements outside the image are 0. Arithmetic runs in float32, never in TF32 (in float64 for
float64 and integer operands), except on CUDA devices, whose 16-bit convolutions accumulate in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.full_float32 import in_full_float32
from tilewright.engines.aten.matmul import product_dtype
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor as TensorRecord
from tilewright.records import record

Tensor = torch.Tensor
# The overload itself: finding it at each call would cost microseconds.
_backward_function = torch.ops.aten.convolution_backward.default


@record(frozen=True)
class Geometry:
    """What ATen is told: one symmetric padding, or 0 and an image padded beforehand."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    # Before and after each spatial axis, where the two differ on some axis; else empty.
    extra: tuple[tuple[int, int], ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What ATen's functions take after their tensors; no output padding, not transposed."""
        zeros = [0] * len(self.stride)
        return (self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def padded(self, extent: Sequence[int]) -> tuple[int, ...]:
        """Spatial extents of an image after the padding that ATen does not do."""
        if not self.extra:
            return tuple(extent)
        pairs = zip(extent, self.extra, strict=True)
        return tuple(size + before + after for size, (before, after) in pairs)

    def pad(self, image: Tensor) -> Tensor:
        """``image`` with the padding that ATen does not do."""
        if not self.extra:
            return image
        # Last axis first, as constant_pad_nd wants it.
        flat = [amount for pair in reversed(self.extra) for amount in pair]
        return torch.constant_pad_nd(image, flat)

    def crop(self, padded_image: Tensor, extent: Sequence[int]) -> Tensor:
        """The part of a padded image that ``pad`` was given."""
        for axis, (before, _) in enumerate(self.extra):
            padded_image = padded_image.narrow(2 + axis, before, extent[axis])
        return padded_image


@implements_dense("conv_fprop")
def prepare_conv_fprop(operation: Any, device: torch.device) -> Kernel:
    """The convolution of image (N, C, ...) with weight (K, C / groups, ...) into out."""
    image, weight = operation.inputs["image"], operation.inputs["weight"]
    out = operation.outputs["out"]
    geometry = _geometry(operation, image, weight, out)
    dtype = _arithmetic_dtype(device, image, weight, out)
    load_image = casts.loader(image, dtype, device)
    load_weight = casts.loader(weight, dtype, device)
    arguments = geometry.arguments

    def compute(inputs: Operands) -> Tensor:
        x = geometry.pad(load_image(inputs["image"]))
        return torch.convolution(x, load_weight(inputs["weight"]), None, *arguments)

    return _finish(_precise(compute, dtype, device), (image, weight), out)


@implements_dense("conv_dgrad")
def prepare_conv_dgrad(operation: Any, device: torch.device) -> Kernel:
    """The gradient of the image from loss (the output's gradient) and filter, into out."""
    loss, weight = operation.inputs["loss"], operation.inputs["filter"]
    out = operation.outputs["out"]
    geometry = _geometry(operation, out, weight, loss)
    dtype = _arithmetic_dtype(device, loss, weight, out)
    load_loss = casts.loader(loss, dtype, device)
    load_weight = casts.loader(weight, dtype, device)
    padded_dim = (*out.dim[:2], *geometry.padded(out.dim[2:]))

    def compute(inputs: Operands) -> Tensor:
        gradient = load_loss(inputs["loss"])
        # Only the image's shape is read: a single element stands for it.
        image = gradient.new_empty(1).expand(padded_dim)
        result = _backward(
            gradient, image, load_weight(inputs["filter"]), geometry, (True, False, False)
        )[0]
        return geometry.crop(result, out.dim[2:])

    return _finish(_precise(compute, dtype, device), (loss, weight), out)


@implements_dense("conv_wgrad")
def prepare_conv_wgrad(operation: Any, device: torch.device) -> Kernel:
    """The gradient of the filter from image and loss (the output's gradient), into out."""
    image, loss = operation.inputs["image"], operation.inputs["loss"]
    out = operation.outputs["out"]
    geometry = _geometry(operation, image, out, loss)
    dtype = _arithmetic_dtype(device, image, loss, out)
    load_image = casts.loader(image, dtype, device)
    load_loss = casts.loader(loss, dtype, device)

    def compute(inputs: Operands) -> Tensor:
        gradient = load_loss(inputs["loss"])
        weight = gradient.new_empty(1).expand(out.dim)
        return _backward(
            gradient,
            geometry.pad(load_image(inputs["image"])),
            weight,
            geometry,
            (False, True, False),
        )[1]

    return _finish(_precise(compute, dtype, device), (image, loss), out)


def _backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    geometry: Geometry,
    wanted: tuple[bool, bool, bool],
) -> Sequence[Tensor]:
    result: Sequence[Tensor] = _backward_function(
        gradient,
        image,
        weight,
        None,
        *geometry.arguments,
        wanted,
    )
    return result


def _precise(
    compute: Callable[[Operands], Tensor], dtype: torch.dtype, device: torch.device
) -> Callable[[Operands], Tensor]:
    """``compute``, which rounds no float32 operand to TF32."""
    if device.type != "cuda" or dtype is not torch.float32:
        return compute
    return lambda inputs: in_full_float32(compute, inputs)


def _finish(
    compute: Callable[[Operands], Tensor], operands: Sequence[TensorRecord], out: TensorRecord
) -> Kernel:
    """A kernel that stores ``compute``; empty operands make an output of zeros (empty sums)."""
    if any(0 in record.dim for record in (*operands, out)):
        return lambda inputs, outputs: _zero(outputs["out"])
    store = casts.storer(out)
    return lambda inputs, outputs: store(outputs["out"], compute(inputs))


def _zero(output: Tensor) -> None:
    casts.as_bytes(output).zero_() if output.element_size() == 1 else output.zero_()


def _arithmetic_dtype(device: torch.device, *records: TensorRecord) -> torch.dtype:
    types = {record.data_type for record in records}
    if device.type == "cuda" and len(types) == 1:
        if types == {DataType.HALF}:
            return torch.float16
        if types == {DataType.BFLOAT16}:
            return torch.bfloat16
    return product_dtype(*records)


def _geometry(
    operation: Any, image: TensorRecord, weight: TensorRecord, result: TensorRecord
) -> Geometry:
    """The geometry, checked against the dims of the image, the filter and the result."""
    spatial = len(image.dim) - 2
    if not 1 <= spatial <= 3 or len(weight.dim) != spatial + 2 or len(result.dim) != spatial + 2:
        raise NotSupportedError(
            f"tensor {image.label()} has dim {image.dim}, {weight.label()} {weight.dim} and "
            f"{result.label()} {result.dim}; convolutions take 1 to 3 spatial axes, the same "
            "number in all three"
        )
    pre, post = _paddings(operation, spatial)
    stride = _each(getattr(operation, "stride", None), spatial, 1, "stride")
    dilation = _each(getattr(operation, "dilation", None), spatial, 1, "dilation")
    if min(pre + post) < 0 or min(stride + dilation) < 1:
        raise NotSupportedError(
            f"convolution with padding {pre}, {post}, stride {stride}, dilation {dilation}; "
            "paddings are at least 0, strides and dilations at least 1"
        )
    channels, filter_channels = image.dim[1], weight.dim[1]
    groups = channels // filter_channels if filter_channels else 1
    if groups * filter_channels != channels or (groups and weight.dim[0] % groups):
        raise NotSupportedError(
            f"tensor {weight.label()} has dim {weight.dim} for an image of dim {image.dim}; the "
            "image's channels are groups times the filter's, and groups divide its outputs"
        )
    expected = [image.dim[0], weight.dim[0]]
    for axis in range(spatial):
        reach = dilation[axis] * (weight.dim[2 + axis] - 1) + 1
        room = image.dim[2 + axis] + pre[axis] + post[axis] - reach
        expected.append(room // stride[axis] + 1 if room >= 0 else 0)
    if tuple(expected) != result.dim:
        raise NotSupportedError(
            f"tensor {result.label()} has dim {result.dim}; the convolution of {image.dim} with "
            f"{weight.dim} has {tuple(expected)}"
        )
    if pre == post:
        return Geometry(stride, pre, dilation, max(groups, 1), ())
    extra = tuple(zip(pre, post, strict=True))
    return Geometry(stride, (0,) * spatial, dilation, max(groups, 1), extra)


def _paddings(operation: Any, spatial: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    common = getattr(operation, "padding", None)
    pre = getattr(operation, "pre_padding", None)
    post = getattr(operation, "post_padding", None)
    return (
        _each(pre if pre else common, spatial, 0, "pre_padding"),
        _each(post if post else common, spatial, 0, "post_padding"),
    )


def _each(given: Any, spatial: int, default: int, what: str) -> tuple[int, ...]:
    """One value a spatial axis: the default where nothing is given, one value for all."""
    if given is None or (not isinstance(given, int) and len(given) == 0):
        return (default,) * spatial
    values = (given,) * spatial if isinstance(given, int) else tuple(given)
    if len(values) == 1:
        values *= spatial
    if len(values) != spatial:
        raise NotSupportedError(
            f"convolution {what} is {values}; expected {spatial} values, one a spatial axis"
        )
    return tuple(math.trunc(value) for value in values)
