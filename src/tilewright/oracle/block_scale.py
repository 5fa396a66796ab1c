"""Block-scaled quantization: OCP MX (E8M0 scales), NVFP4 (E4M3 scales) and float32 scales.

Each block of `block_size` neighbours along an axis shares one scale; the last block may be short.
With amax = max |x| of a block:

- E8M0 (OCP Microscaling Formats Specification v1.0, 6.3): 2^(floor(log2 amax) - emax), emax 8 for
  E4M3, 15 for E5M2, 2 for E2M1; codes are held to 0 .. 254.
- E4M3 (NVFP4): amax / 6 rounded to E4M3, saturating at 448.
- FLOAT: amax / (largest element), rounded to float32.

An element is x / scale rounded to the nearest, ties to even, saturating. A block of zeros has the
scale 0 (code 0, which is 2^-127, in E8M0) and zero elements. A block whose scale rounds to 0 has
zero elements: its values are below what the format can hold. A NaN in a block makes its scale, and
so the whole block, NaN; with an infinity the scale is the largest and the element saturates (the
specifications leave both cases to the implementation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.oracle.formats import (
    floor_log2,
    format_of,
    power_of_two,
    round_to,
    to_float64,
)
from tilewright.oracle.registry import reference

__all__ = ["Quantized", "block_extents", "block_scales", "dequantize", "quantize", "spread_scales"]


class Quantized(NamedTuple):
    """Exact float64 values of elements and of scales; value = element * scale."""

    elements: torch.Tensor
    scales: torch.Tensor


def block_scales(amax: torch.Tensor, element_type: Any, scale_type: Any) -> torch.Tensor:
    """The scale of each block in float64, from the largest magnitudes of the blocks."""
    element, scale = format_of(element_type), format_of(scale_type)
    if element is None or scale is None:
        raise ValueError(f"no block scales of {element_type!r} elements and {scale_type!r} scales")
    if scale.name == "FP8_E8M0":
        exponent = (floor_log2(amax) - element.max_exponent).clamp(-127, 127)
        exponent = torch.where(amax == 0, -127, exponent)
        exponent = torch.where(torch.isinf(amax), 127, exponent)
        return torch.where(torch.isnan(amax), float("nan"), power_of_two(exponent))
    return round_to(amax / element.max_finite, scale, saturate=True)


def quantize(
    values: torch.Tensor, element_type: Any, scale_type: Any, *, block_size: int, axis: int = -1
) -> Quantized:
    """Quantize blocks of `block_size` along `axis`.

    Returns:
        Elements in the values' shape; scales with `ceil(extent / block_size)` along the axis.
    """
    x = to_float64(values)
    axis = axis % x.dim()
    count = -(-x.shape[axis] // block_size)
    magnitude = x.abs().movedim(axis, -1)
    padded = magnitude.new_zeros((*magnitude.shape[:-1], count * block_size))
    padded[..., : magnitude.shape[-1]] = magnitude
    amax = padded.reshape(*padded.shape[:-1], count, block_size).amax(dim=-1)
    scales = block_scales(amax, element_type, scale_type).movedim(-1, axis)
    extents = [1] * x.dim()
    extents[axis] = block_size
    spread = spread_scales(scales, extents, tuple(x.shape))
    # Division, never a product with a reciprocal: that would move ties.
    quotient = torch.where(spread == 0, 0.0, x / spread)
    elements = round_to(quotient, element_type, saturate=True)
    elements = torch.where(torch.isnan(quotient), float("nan"), elements)
    return Quantized(elements, scales)


def dequantize(
    elements: torch.Tensor, scales: torch.Tensor, extents: Sequence[int]
) -> torch.Tensor:
    """element * scale in float64, `extents` being the block's extent on each axis."""
    x = to_float64(elements)
    return x * spread_scales(to_float64(scales), extents, tuple(x.shape))


def spread_scales(
    scales: torch.Tensor, extents: Sequence[int], dim: tuple[int, ...]
) -> torch.Tensor:
    """Each element's scale, shape `dim`; scales past the last block (padding) are not read."""
    spread = scales
    for axis, extent in enumerate(extents):
        block = torch.arange(dim[axis], device=scales.device) // extent
        # An axis with one scale shares it whatever its extent.
        block = block if scales.shape[axis] > 1 else torch.zeros_like(block)
        spread = spread.index_select(axis, block)
    return spread


def block_extents(
    block_size: int | Sequence[int], dim: Sequence[int], scale_dim: Sequence[int]
) -> list[int]:
    """The block's extent on each axis, from an operation's block_size and its two shapes.

    A sequence names the last axes (or all). One number belongs to the axis that has fewer scales
    than elements; if several have, to the last of these.
    """
    if isinstance(block_size, int):
        sizes = [block_size]
    else:
        sizes = [int(size) for size in block_size]
    if len(sizes) > 1:
        return [1] * (len(dim) - len(sizes)) + sizes
    extents = [1] * len(dim)
    fewer = [axis for axis in range(len(dim)) if scale_dim[axis] < dim[axis]]
    fitting = [axis for axis in fewer if scale_dim[axis] * sizes[0] >= dim[axis]]
    extents[(fitting or fewer or [len(dim) - 1])[-1]] = sizes[0]
    return extents


@reference("block_scale_dequantize")
def _dequantize(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    elements, scales = inputs["input"], inputs["descale"]
    extents = block_extents(operation.block_size, elements.shape, scales.shape)
    values = dequantize(elements, scales, extents)
    return {"out": -values if operation.is_negative_scale else values}


@reference("block_scale_quantize")
def _quantize(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ports = operation.outputs
    y, scale = ports["Y"], ports.get("scale", ports.get("Scale"))
    size = operation.block_size
    block_size = int(size) if isinstance(size, int) else max(int(entry) for entry in size)
    axis = -1 if operation.axis is None else int(operation.axis)
    result = quantize(
        inputs["input"], y.data_type, scale.data_type, block_size=block_size, axis=axis
    )
    elements, scales = result
    if getattr(operation, "transpose", False):
        elements, scales = elements.transpose(-1, -2), scales.transpose(-1, -2)
    scale_port = "scale" if "scale" in ports else "Scale"
    return {"Y": elements, scale_port: _padded(scales, tuple(scale.dim))}


def _padded(scales: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """Scales in a declared shape that may be larger (whole 128x4 tiles); the padding is 0."""
    if tuple(scales.shape) == dim:
        return scales
    out = scales.new_zeros(dim)
    out[tuple(slice(0, extent) for extent in scales.shape)] = scales
    return out
