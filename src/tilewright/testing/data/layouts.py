"""One tensor in each layout that a kernel may wrongly take for a contiguous one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.testing.data.cases import Built, DataCase, make, recipe
from tilewright.testing.data.draws import Draws, cast, dtype_name, dtype_of, poison

__all__ = ["LAYOUTS", "layout", "layouts"]

LAYOUTS = (
    "contiguous",
    "permuted",
    "padded",
    "strided",
    "expanded",
    "offset",
    "wide_singleton",
)
"""contiguous; permuted: axes stored in another order; padded: rows with NaN gaps; strided: every
second element, NaN between; expanded: stride 0 along one axis; offset: the first element is not
the storage's first, NaN before it; wide_singleton: axes of extent 1 with a stride above 2**31."""

# A stride that no 32-bit index can hold; on an axis of extent 1 it must not matter.
_WIDE = 2**33 + 8
_PADDING = 8


def layout(
    generator: torch.Generator,
    *,
    dim: Sequence[int],
    layout: str,
    dtype: torch.dtype | str = torch.float32,
) -> DataCase:
    """A tensor `x` (`dim`, random numbers) in a layout of `LAYOUTS`.

    Facts: `strides`, and `axis`, the axis that an expanded tensor repeats.

    Raises:
        ValueError: An unknown layout or dtype.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r}; expected one of {', '.join(LAYOUTS)}")
    parameters = {"dim": [int(n) for n in dim], "layout": layout, "dtype": dtype_name(dtype)}
    return make("layout", generator, parameters)


def layouts(
    generator: torch.Generator, *, dim: Sequence[int], dtype: torch.dtype | str = torch.float32
) -> list[DataCase]:
    """One case for each of `LAYOUTS`."""
    return [layout(generator, dim=dim, layout=name, dtype=dtype) for name in LAYOUTS]


def strides_of(layout: str, dim: Sequence[int], order: Sequence[int]) -> list[int]:
    """Element strides; `order` lists the axes from the outermost to the innermost in memory."""
    strides, step = [0] * len(dim), 2 if layout == "strided" else 1
    for position, axis in enumerate(reversed(order)):
        strides[axis] = step
        extent = dim[axis] + (_PADDING if layout == "padded" and position == 0 else 0)
        step *= max(extent, 1)
    return strides


@recipe("layout")
def _build(draws: Draws, *, dim: list[int], layout: str, dtype: str) -> Built:
    rank, kind = len(dim), dtype_of(dtype)
    order = list(range(rank))
    facts: dict[str, Any] = {}
    if layout == "permuted":
        order = draws.permutation("order", rank).tolist()
        if order == sorted(order):
            order.reverse()
    strides = strides_of(layout, dim, order)
    offset = 0
    if layout == "expanded" and rank:
        repeated = [axis for axis in range(rank) if dim[axis] > 1] or [0]
        axis = repeated[draws.integer("axis", 0, len(repeated))]
        strides = strides_of(layout, [1 if n == axis else e for n, e in enumerate(dim)], order)
        strides[axis] = 0
        facts["axis"] = axis
    elif layout == "offset":
        offset = draws.integer("offset", 1, 64)
    elif layout == "wide_singleton":
        strides = [_WIDE if extent == 1 else s for extent, s in zip(dim, strides, strict=True)]
    reach = sum((extent - 1) * s for extent, s in zip(dim, strides, strict=True))
    span = 1 + reach if math.prod(dim) else 0
    storage = poison(offset + span, kind)
    x = storage.as_strided(dim, strides, offset)
    shape = [1 if s == 0 else extent for extent, s in zip(dim, strides, strict=True)]
    if math.prod(dim):
        once = storage.as_strided(shape, strides, offset)
        once.copy_(cast(_numbers(draws, shape, kind), kind))
    return Built({"x": x}, {"strides": strides, "offset": offset, **facts})


def _numbers(draws: Draws, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return draws.normal("x", shape)
    return draws.integers("x", shape, 0, 2 if dtype is torch.bool else 100)
