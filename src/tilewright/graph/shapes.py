"""Arithmetic on shapes and strides. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence


def broadcast_dims(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """The broadcast of two shapes (aligned at the last axis), or None if they do not fit."""
    rank = max(len(first), len(second))
    left = (1,) * (rank - len(first)) + tuple(first)
    right = (1,) * (rank - len(second)) + tuple(second)
    result = []
    for a, b in zip(left, right, strict=True):
        if a != b and 1 not in (a, b):
            return None
        result.append(b if a == 1 else a)
    return tuple(result)


def element_count(dim: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(dim)


def span_elements(dim: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to one past the last that a strided view touches.

    0 if any extent is 0. Strides are non-negative; a singleton axis contributes nothing,
    whatever its stride.
    """
    if 0 in dim:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(dim, stride, strict=True))


def self_overlaps(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """True if two indices of the view may name one element.

    Axes are nested by stride: each stride must step past the whole span of the smaller ones.
    Views that interleave without touching (rare, and never made by slicing a dense tensor)
    are reported as overlapping.
    """
    if 0 in dim:
        return False
    axes = sorted((step, extent) for extent, step in zip(dim, stride, strict=True) if extent > 1)
    reach = 0
    for step, extent in axes:
        if step <= reach:
            return True
        reach += (extent - 1) * step
    return False


def view_strides(
    dim: Sequence[int], stride: Sequence[int], new_dim: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides under which ``new_dim`` names the same elements in row-major order, moving none.

    None if no strides do. Both shapes have the same number of elements. Neighbouring axes that
    step as one are merged, and each merged axis must be a product of whole new ones.
    """
    if 0 in dim:
        inner = [[max(extent, 1) for extent in new_dim[axis + 1 :]] for axis in range(len(new_dim))]
        return tuple(math.prod(extents) for extents in inner)
    axes = [(extent, step) for extent, step in zip(dim, stride, strict=True) if extent != 1]
    merged: list[tuple[int, int]] = []
    for extent, step in reversed(axes):
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, step))
    strides = [1] * len(new_dim)
    left, step = 1, 1
    following = iter(merged)
    for axis in reversed(range(len(new_dim))):
        extent = new_dim[axis]
        if extent == 1:
            strides[axis] = step
            continue
        if left == 1:
            left, step = next(following, (1, 1))
        if left % extent:
            return None
        strides[axis] = step
        left //= extent
        step *= extent
    return tuple(strides)
