"""How row kernels address operands: rows along at most two axes, elements along the last.

Shared by every kernel that works on whole rows of the last axis. Pure; needs no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

Steps = tuple[int, int]


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


def require_vector(vector: Tensor, x: Tensor, name: str, max_width: int) -> None:
    """Require that ``vector`` spans the last axis of ``x`` alone, of at most ``max_width``.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    width = x.dim[-1]
    if vector.dim[-1] != width or any(extent != 1 for extent in vector.dim[:-1]):
        raise NotSupportedError(
            f"tensor {vector.label()} ({name}) has dim {vector.dim}; the kernel normalizes the "
            f"last axis of {x.dim} alone"
        )
    if not 1 <= width <= max_width:
        raise NotSupportedError(
            f"tensor {x.label()} (input) has {width} elements a row; the kernel takes 1 to "
            f"{max_width}"
        )


def row_steps(tensors: Sequence[Tensor]) -> tuple[int, int, tuple[Steps, ...]]:
    """(rows, inner rows, (outer step, inner step) of each tensor), steps in elements.

    Row r is at ``r // inner * outer_step + r % inner * inner_step``.

    Raises:
        NotSupportedError: if the leading axes need more than two steps.
    """
    axes = _merged_axes(tensors)
    if len(axes) > 2:
        first = tensors[0]
        raise NotSupportedError(
            f"tensor {first.label()} has stride {first.stride} over dim {first.dim}; the kernel "
            "steps rows along at most two axes"
        )
    none = (1, tuple(0 for _ in tensors))
    (outer, outer_steps), (inner, inner_steps) = [none] * (2 - len(axes)) + axes
    steps = tuple(zip(outer_steps, inner_steps, strict=True))
    return outer * inner, max(inner, 1), steps


def is_packed(tensor: Tensor) -> bool:
    """True if the elements follow one another in declared order; singleton strides do not count."""
    step = 1
    for extent, stride in zip(reversed(tensor.dim), reversed(tensor.stride), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _merged_axes(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """(extent, step of each tensor) of the leading axes, neighbours joined where all allow it."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, extent in enumerate(tensors[0].dim[:-1]):
        if extent == 1:
            continue
        steps = tuple(tensor.stride[axis] for tensor in tensors)
        if merged and merged[-1][1] == tuple(step * extent for step in steps):
            merged[-1] = (merged[-1][0] * extent, steps)
        else:
            merged.append((extent, steps))
    return merged
