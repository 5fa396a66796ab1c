"""Where a tensor's elements are, seen through moves and broadcasting. Pure; needs no Triton.

An access maps an index to an offset: each axis is a mixed-radix number whose digits have strides.
So transposing, slicing, reshaping and broadcasting are changes of the access, and no element moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.errors import NotSupportedError

# (extent, stride) of a digit; an axis lists its digits, slowest first.
Digit = tuple[int, int]
Dim = tuple[int, ...]


@dataclass(frozen=True)
class Access:
    """``offset`` in elements, and the digits of each axis."""

    offset: int
    axes: tuple[tuple[Digit, ...], ...]

    @property
    def dim(self) -> Dim:
        """The extents of the index that is mapped."""
        return tuple(math.prod(extent for extent, _ in axis) for axis in self.axes)

    def expanded(self, dim: Dim) -> Access:
        """Broadcast to ``dim``: aligned at the last axis, an extent of 1 repeats."""
        axes = ((),) * (len(dim) - len(self.axes)) + self.axes
        joined = []
        for extent, axis in zip(dim, axes, strict=True):
            own = math.prod(count for count, _ in axis)
            joined.append(axis if own == extent else _digits([(extent, 0)]))
        return Access(self.offset, tuple(joined))

    def permuted(self, order: Sequence[int]) -> Access:
        """Axis i is axis order[i] of this one."""
        return Access(self.offset, tuple(self.axes[axis] for axis in order))

    def sliced(self, slices: Sequence[tuple[int, int | None, int]]) -> Access:
        """(start, stop, step) of the first axes, as Python has them; steps are positive.

        Raises:
            NotSupportedError: for a slice through an axis that no single stride steps.
        """
        offset, axes = self.offset, list(self.axes)
        for position, (start, stop, step) in enumerate(slices):
            axis = axes[position]
            extent = math.prod(count for count, _ in axis)
            chosen = range(*slice(start, stop, step).indices(extent))
            if chosen == range(extent):
                continue
            if len(axis) > 1:
                raise NotSupportedError(
                    f"a slice of axis {position} after a reshape that no stride expresses"
                )
            stride = axis[0][1] if axis else 0
            offset += chosen.start * stride
            # A step that leads to nothing may be of any size.
            axes[position] = _digits([(len(chosen), stride * step if len(chosen) > 1 else 0)])
        return Access(offset, tuple(axes))

    def reshaped(self, dim: Dim) -> Access:
        """Row-major regrouping of the digits into axes of ``dim``.

        Raises:
            NotSupportedError: if an extent would need part of a digit.
        """
        digits = [digit for axis in self.axes for digit in axis]
        axes = []
        for extent in reversed(dim):
            axis: list[Digit] = []
            left = extent
            while left > 1:
                count, stride = digits.pop()
                taken = math.gcd(count, left)
                if taken not in (count, left):
                    raise NotSupportedError(
                        f"a reshape from {self.dim} to {dim} splits an axis unevenly"
                    )
                axis.insert(0, (taken, stride))
                if taken < count:
                    digits.append((count // taken, stride * taken))
                left //= taken
            axes.insert(0, _digits(axis))
        return Access(self.offset, tuple(axes))


def access_of(dim: Dim, stride: Sequence[int]) -> Access:
    """The access of a bound tensor."""
    return Access(0, tuple(_digits([pair]) for pair in zip(dim, stride, strict=True)))


def _digits(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    """Without digits of extent 1, and with neighbours that step as one joined."""
    joined: list[Digit] = []
    for extent, stride in digits:
        if extent == 1:
            continue
        if joined and joined[-1][1] == stride * extent:
            joined[-1] = (joined[-1][0] * extent, stride)
        else:
            joined.append((extent, stride))
    return tuple(joined)


@dataclass(frozen=True)
class Axis:
    """An axis that every access steps by one stride. ``strides`` follow the accesses."""

    extent: int
    strides: tuple[int, ...]


def common_axes(accesses: Sequence[Access], position: int) -> list[Axis]:
    """Axis ``position`` of all accesses, split until each has one stride a part, slowest first.

    Raises:
        NotSupportedError: if the accesses split it at places that are not nested.
    """
    extent = accesses[0].dim[position]
    # Products of the faster digits, at which some access changes its stride.
    marks = {1, extent}
    for access in accesses:
        inner = 1
        for count, _ in reversed(access.axes[position]):
            inner *= count
            marks.add(inner)
    ordered = sorted(marks)
    axes = []
    for low, high in itertools.pairwise(ordered):
        if high % low:
            raise NotSupportedError(f"an axis of {extent} is split at {low} and at {high}")
        strides = tuple(_stride_at(access.axes[position], low) for access in accesses)
        axes.insert(0, Axis(high // low, strides))
    return axes


def _stride_at(digits: tuple[Digit, ...], place: int) -> int:
    """The step of an index by ``place``, which is no more than its digits' product."""
    inner = 1
    for count, stride in reversed(digits):
        if place < inner * count:
            if place % inner:
                raise NotSupportedError(f"an axis is split at {inner} and at {place}")
            return stride * (place // inner)
        inner *= count
    return 0


def merged(axes: Sequence[Axis]) -> list[Axis]:
    """Neighbours (slowest first) joined where every access steps them as one."""
    joined: list[Axis] = []
    for axis in axes:
        if axis.extent == 1:
            continue
        steps = tuple(stride * axis.extent for stride in axis.strides)
        if joined and joined[-1].strides == steps:
            joined[-1] = Axis(joined[-1].extent * axis.extent, axis.strides)
        else:
            joined.append(axis)
    return joined
