"""Reductions and generated statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["generate_statistics", "reduce"]


def reduce(values: torch.Tensor, mode: str, axes: Sequence[int]) -> torch.Tensor:
    """Reduce float64 values over `axes`, which stay as extent 1.

    Args:
        values: Any shape.
        mode: ADD sum; MUL product; MIN, MAX; AMAX max |x|; AVG mean; NORM1 sum |x|; NORM2
            sqrt(sum x^2); MUL_NO_ZEROS product of the elements that are not zero.
        axes: Which; none of them gives the elementwise meaning (AMAX |x|, NORM2 |x|, ...).

    NaN propagates. Over nothing: ADD, NORM1, NORM2, AMAX 0, MUL and MUL_NO_ZEROS 1, MAX -inf,
    MIN +inf, AVG NaN.
    """
    x = to_float64(values)
    dims = sorted(axis % max(x.dim(), 1) for axis in axes)
    count = 1
    for axis in dims:
        count *= x.shape[axis]
    if mode == "ADD":
        return _sum(x, dims)
    if mode == "AVG":
        return _sum(x, dims) / count
    if mode == "NORM1":
        return _sum(x.abs(), dims)
    if mode == "NORM2":
        return _norm2(x, dims)
    if mode == "MUL":
        return _fold(x, dims, torch.prod, 1.0)
    if mode == "MUL_NO_ZEROS":
        return _fold(torch.where(x == 0, 1.0, x), dims, torch.prod, 1.0)
    if mode == "MAX":
        return _fold(x, dims, torch.amax, float("-inf"))
    if mode == "MIN":
        return _fold(x, dims, torch.amin, float("inf"))
    if mode == "AMAX":
        return _fold(x.abs(), dims, torch.amax, 0.0)
    raise ValueError(f"mode: {mode!r} is no reduction mode")


def _sum(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return torch.sum(x, dim=list(dims), keepdim=True) if dims else x


def _norm2(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return torch.sqrt(_sum(x * x, dims)) if dims else x.abs()


def _fold(x: torch.Tensor, dims: Sequence[int], fold: Any, empty: float) -> torch.Tensor:
    """Apply a one-axis fold axis by axis, with the value of an empty fold given."""
    for axis in dims:
        if x.shape[axis] == 0:
            shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
            x = torch.full(shape, empty, dtype=x.dtype, device=x.device)
        else:
            x = fold(x, dim=axis, keepdim=True)
    return x


def generate_statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and sum of squares over all axes but 1 of (N, C, ...); each (1, C, 1, ...)."""
    x = to_float64(values)
    dims = [axis for axis in range(x.dim()) if axis != 1]
    return _sum(x, dims), _sum(x * x, dims)


@reference("reduction")
def _reduction(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    source = inputs["input"]
    out = tuple(operation.outputs["out"].dim)
    axes = [axis for axis, extent in enumerate(out) if extent != source.shape[axis]]
    return {"out": reduce(source, operation.mode.name, axes)}


@reference("genstats")
def _genstats(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    total, squares = generate_statistics(inputs["input"])
    return {"SUM": total, "SQ_SUM": squares}
