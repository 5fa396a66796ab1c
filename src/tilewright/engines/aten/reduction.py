"""Reductions and generated statistics.

A reduction runs over the axes on which the output has extent 1 and the input another. AMAX is
max |x|, NORM1 sum |x|, NORM2 the root of sum x^2, MUL_NO_ZEROS the product of the elements that
are not 0. MAX, MIN and AMAX propagate NaN. Over nothing, ADD, AMAX, NORM1 and NORM2 give 0,
AVG NaN, MUL and MUL_NO_ZEROS 1, MAX -inf and MIN inf.

genstats gives SUM and SQ_SUM, the sums of x and of x^2 over every axis but the channel (axis
1): what a batch normalization needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor as TensorRecord

Tensor = torch.Tensor
Axes = tuple[int, ...]
Reduce = Callable[[Tensor, Axes], Tensor]

_OVER_NOTHING = {
    "MUL": 1.0,
    "MUL_NO_ZEROS": 1.0,
    "AVG": math.nan,
    "MAX": -math.inf,
    "MIN": math.inf,
}
# Sums of integers are exact in int64; the others leave the integers.
_INTEGER_MODES = frozenset({"ADD", "MAX", "MIN", "AMAX", "NORM1"})


@implements_dense("reduction")
def prepare_reduction(operation: Any, device: torch.device) -> Kernel:
    """One reduction of ``input`` into ``out``; see the module for the modes."""
    source, out = operation.inputs["input"], operation.outputs["out"]
    mode = getattr(operation.mode, "name", operation.mode)
    if mode not in _REDUCTIONS:
        raise NotSupportedError(f"reduction mode {mode}; accepted are {sorted(_REDUCTIONS)}")
    axes = reduced_axes(source, out)
    store = casts.storer(out)
    if 0 in source.dim:
        nothing = torch.tensor(_OVER_NOTHING.get(mode, 0.0), device=device)
        return lambda inputs, outputs: store(outputs["out"], nothing)
    dtype = casts.compute_dtype((source, out))
    if source.data_type.is_integer and mode in _INTEGER_MODES:
        dtype = torch.int64
    if casts.is_plain(source, dtype) and casts.is_plain(out, dtype) and axes:
        direct = _DIRECT.get(mode)
        if direct is not None:
            function = direct

            def run_directly(inputs: Operands, outputs: Operands) -> None:
                function(inputs["input"], axes, outputs["out"])

            return run_directly
    load = casts.loader(source, dtype, device)
    reduce = _REDUCTIONS[mode] if axes else _ELEMENTWISE.get(mode, lambda x, axes: x)

    def run(inputs: Operands, outputs: Operands) -> None:
        store(outputs["out"], reduce(load(inputs["input"]), axes))

    return run


@implements_dense("genstats")
def prepare_genstats(operation: Any, device: torch.device) -> Kernel:
    """SUM and SQ_SUM (1, C, 1, ...) of input (N, C, ...)."""
    source = operation.inputs["input"]
    total, squares = operation.outputs["SUM"], operation.outputs["SQ_SUM"]
    if len(source.dim) < 2:
        raise NotSupportedError(
            f"tensor {source.label()} has dim {source.dim}; genstats takes N, C and more axes"
        )
    for record in (total, squares):
        if record.dim != (1, source.dim[1]) + (1,) * (len(source.dim) - 2):
            raise NotSupportedError(
                f"tensor {record.label()} has dim {record.dim}; a statistic of {source.dim} has "
                "the channel's extent on axis 1 and 1 elsewhere"
            )
    axes = tuple(axis for axis in range(len(source.dim)) if axis != 1)
    dtype = casts.compute_dtype((source, total, squares))
    load = casts.loader(source, dtype, device)
    store_total, store_squares = casts.storer(total), casts.storer(squares)

    def run(inputs: Operands, outputs: Operands) -> None:
        x = load(inputs["input"])
        store_total(outputs["SUM"], torch.sum(x, axes, keepdim=True))
        store_squares(outputs["SQ_SUM"], torch.sum(x * x, axes, keepdim=True))

    return run


def reduced_axes(source: TensorRecord, out: TensorRecord) -> tuple[int, ...]:
    """The axes on which ``out`` has extent 1 and ``source`` another.

    Raises:
        NotSupportedError: if an output axis is neither kept nor reduced to 1.
    """
    fits = len(source.dim) == len(out.dim) and all(
        have in (1, want) for have, want in zip(out.dim, source.dim, strict=True)
    )
    if not fits:
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; a reduction of {source.dim} keeps an axis "
            "or reduces it to 1"
        )
    pairs = zip(source.dim, out.dim, strict=True)
    return tuple(axis for axis, (before, after) in enumerate(pairs) if before != after)


def _product(x: Tensor, axes: Axes) -> Tensor:
    for axis in axes:
        x = torch.prod(x, axis, keepdim=True)
    return x


def _product_of_nonzeros(x: Tensor, axes: Axes) -> Tensor:
    return _product(torch.where(x == 0, 1.0, x), axes)


def _add_out(x: Tensor, axes: Axes, out: Tensor) -> None:
    torch.sum(x, axes, keepdim=True, out=out)


def _avg_out(x: Tensor, axes: Axes, out: Tensor) -> None:
    torch.mean(x, axes, keepdim=True, out=out)


def _max_out(x: Tensor, axes: Axes, out: Tensor) -> None:
    torch.amax(x, axes, keepdim=True, out=out)


def _min_out(x: Tensor, axes: Axes, out: Tensor) -> None:
    torch.amin(x, axes, keepdim=True, out=out)


_REDUCTIONS: dict[str, Reduce] = {
    "ADD": lambda x, axes: torch.sum(x, axes, keepdim=True),
    "MUL": _product,
    "MIN": lambda x, axes: torch.amin(x, axes, keepdim=True),
    "MAX": lambda x, axes: torch.amax(x, axes, keepdim=True),
    "AMAX": lambda x, axes: torch.amax(x.abs(), axes, keepdim=True),
    "AVG": lambda x, axes: torch.mean(x, axes, keepdim=True),
    "NORM1": lambda x, axes: torch.sum(x.abs(), axes, keepdim=True),
    "NORM2": lambda x, axes: torch.linalg.vector_norm(x, 2, axes, keepdim=True),
    "MUL_NO_ZEROS": _product_of_nonzeros,
}
# ATen takes an empty list of axes for all of them, so "no axis" has its own table.
_ELEMENTWISE: dict[str, Reduce] = {
    "AMAX": lambda x, axes: x.abs(),
    "NORM1": lambda x, axes: x.abs(),
    "NORM2": lambda x, axes: x.abs(),
    "MUL_NO_ZEROS": lambda x, axes: torch.where(x == 0, 1.0, x),
}
_DIRECT: dict[str, Callable[[Tensor, Axes, Tensor], None]] = {
    "ADD": _add_out,
    "AVG": _avg_out,
    "MAX": _max_out,
    "MIN": _min_out,
}
