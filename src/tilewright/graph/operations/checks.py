"""Checks and conversions that several operation families share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilewright.dtypes import DataType
from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

# Floating types that hold numbers; FP8_E8M0 holds scales only.
FLOATING_TYPES = (
    DataType.FLOAT,
    DataType.DOUBLE,
    DataType.HALF,
    DataType.BFLOAT16,
    DataType.FP8_E4M3,
    DataType.FP8_E5M2,
    DataType.FP4_E2M1,
)
INDEX_TYPES = (DataType.INT32, DataType.INT64)


def scalar_input(graph: Builder, value: Any, like: Tensor) -> Any:
    """A number as a pass-by-value scalar tensor; None, a tensor or an array as it is.

    The scalar is DOUBLE beside a DOUBLE tensor and FLOAT otherwise, so no digit of it is lost.
    ``append`` makes a tensor of an array. A NumPy number that is a float (``np.float64``) is a
    number, although it has a shape.

    Raises:
        GraphError: if ``value`` is none of these.
    """
    is_number = isinstance(value, int | float)
    if not is_number and (value is None or isinstance(value, Tensor) or hasattr(value, "shape")):
        return value
    wide = isinstance(like, Tensor) and like.data_type is DataType.DOUBLE
    return graph.tensor_scalar(value, DataType.DOUBLE if wide else DataType.FLOAT)


def require_floating(operation: Operation, ports: Sequence[str], rule: str) -> None:
    """Require floating operands on ``ports``; absent ports are passed over.

    Raises:
        GraphError: naming the tensor and its type.
    """
    for port in ports:
        operation.require_type(port, FLOATING_TYPES, rule)


def require_scalar(operation: Operation, port: str, low: float, high: float) -> None:
    """Require one floating element on ``port``, within [low, high] where its value is known.

    Raises:
        GraphError: naming the tensor, and the dim, type or value at fault.
    """
    tensor = operation.inputs.get(port)
    if tensor is None:
        return
    if any(extent != 1 for extent in tensor.dim):
        operation.fail(
            f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; expected one element: "
            f"{port} is a scalar"
        )
    require_floating(operation, (port,), f"{port} is a floating scalar")
    value = tensor.value
    if value is not None and not low <= value <= high:
        bounds = f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
        operation.fail(f"tensor {tensor.label()} ({port}) has value {value}; expected {bounds}")


def channel_dim(dim: Sequence[int]) -> tuple[int, ...]:
    """(1, C, 1, ...): the dim of one value a channel, the channel being axis 1."""
    return tuple(extent if axis == 1 else 1 for axis, extent in enumerate(dim))
