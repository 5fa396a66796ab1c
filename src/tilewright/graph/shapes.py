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
