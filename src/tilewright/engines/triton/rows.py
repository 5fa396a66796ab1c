"""How kernels over rows and columns address operands: each along at most two axes.

A row is what a statistic is over; its elements are the columns. Axes that every operand steps
alike are joined, and what remains may be one or two axes of rows and one or two of columns.
Pure; needs no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

MAX_AXES = 2


@dataclass(frozen=True)
class Steps:
    """Elements from a row, and from a column, to the next one of the outer and the inner axis."""

    row_outer: int
    row_inner: int
    column_outer: int
    column_inner: int

    @property
    def varies_by_row(self) -> bool:
        """True if some row has other elements than the first."""
        return bool(self.row_outer or self.row_inner)

    @property
    def varies_by_column(self) -> bool:
        """True if some column has another element than the first."""
        return bool(self.column_outer or self.column_inner)


@dataclass(frozen=True)
class Plane:
    """Rows and columns of a shape, and every operand's steps through them.

    Row r is at ``r // inner_rows * row_outer + r % inner_rows * row_inner``; columns likewise.
    With one axis the inner extent is all there is.
    """

    rows: int
    columns: int
    inner_rows: int
    inner_columns: int
    row_axes: int
    column_axes: int
    steps: Mapping[str, Steps]

    def is_row_contiguous(self, name: str) -> bool:
        """True if an operand's neighbours in memory are of different rows."""
        steps = self.steps[name]
        return steps.row_inner == 1 and steps.column_inner != 1


def plane(
    tensors: Mapping[str, Tensor],
    dim: Sequence[int],
    columns: Sequence[int],
    *,
    in_declared_order: bool = False,
) -> Plane:
    """The plane of a shape ``dim`` whose axes ``columns`` are the normalized ones.

    An operand may have extent 1 where the shape has more: it is then the same all along. Rows go
    as the first tensor lies in memory, or ``in_declared_order``.

    Raises:
        NotSupportedError: if rows or columns need more than two axes, or a tensor does not fit.
    """
    views = {name: _view(name, tensor, tuple(dim)) for name, tensor in tensors.items()}
    row_axes = [axis for axis in range(len(dim)) if axis not in set(columns)]
    rows = _joined(views, dim, row_axes, "rows", in_declared_order)
    across = _joined(views, dim, list(columns), "columns", False)
    steps = {
        name: Steps(rows[0][1][number], rows[1][1][number], across[0][1][number], last)
        for number, (name, last) in enumerate(zip(tensors, across[1][1], strict=True))
    }
    return Plane(
        rows[0][0] * rows[1][0],
        across[0][0] * across[1][0],
        max(rows[1][0], 1),
        max(across[1][0], 1),
        2 if rows[0][0] != 1 else 1,
        2 if across[0][0] != 1 else 1,
        steps,
    )


def only_operation(graph: DeclaredGraph, family: str) -> Operation:
    """The graph's single operation.

    Raises:
        NotSupportedError: if it has several.
    """
    if len(graph.operations) != 1:
        raise NotSupportedError(
            f"graph {graph.name!r} has {len(graph.operations)} operations; the Triton {family} "
            "take graphs of one"
        )
    return graph.operations[0]


def is_packed(tensor: Tensor) -> bool:
    """True if the elements follow one another in declared order; singleton strides do not count."""
    step = 1
    for extent, stride in zip(reversed(tensor.dim), reversed(tensor.stride), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


_Axis = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class _View:
    """A tensor in the rank of the shape, aligned at the last axis."""

    tensor: Tensor
    dim: tuple[int, ...]
    stride: tuple[int, ...]


def _view(name: str, tensor: Tensor, dim: tuple[int, ...]) -> _View:
    rank = len(dim)
    lead = max(0, rank - tensor.rank)
    view = _View(
        tensor,
        ((1,) * lead + tuple(tensor.dim))[-rank:],
        ((0,) * lead + tuple(tensor.stride))[-rank:],
    )
    fits = all(have in (1, want) for have, want in zip(view.dim, dim, strict=True))
    if not fits or any(extent != 1 for extent in tensor.dim[: max(0, tensor.rank - rank)]):
        raise NotSupportedError(
            f"tensor {tensor.label()} ({name}) has dim {tensor.dim}; the kernel takes 1 or the "
            f"extent of {dim} on each axis"
        )
    return view


def _joined(
    tensors: Mapping[str, _View],
    dim: Sequence[int],
    axes: Sequence[int],
    what: str,
    in_declared_order: bool,
) -> list[_Axis]:
    """(extent, step of each tensor) of the outer and the inner axis; an absent one has extent 1.

    By the first tensor's strides, what lies together in memory is joined in whatever order it was
    declared.
    """
    first = next(iter(tensors.values()))
    merged: list[_Axis] = []
    if not in_declared_order:
        axes = sorted(axes, key=lambda axis: -abs(first.stride[axis]))
    for axis in axes:
        extent = dim[axis]
        if extent == 1:
            continue
        steps = tuple(t.stride[axis] if t.dim[axis] != 1 else 0 for t in tensors.values())
        if merged and merged[-1][1] == tuple(step * extent for step in steps):
            merged[-1] = (merged[-1][0] * extent, steps)
        else:
            merged.append((extent, steps))
    if len(merged) > MAX_AXES:
        raise NotSupportedError(
            f"tensor {first.tensor.label()} has stride {first.stride} over dim {first.dim}; the "
            f"kernel steps {what} along at most two axes"
        )
    none = (1, tuple(0 for _ in tensors))
    return [none] * (MAX_AXES - len(merged)) + merged
