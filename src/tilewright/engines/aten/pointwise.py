"""Elementwise operations as kernels; the modes and formulas are in ``pointwise_modes``.

Inputs broadcast to the output. Where every operand has one type that ATen computes with a
single rounding, the kernel is the ATen function writing straight into the output; otherwise
operands are loaded into float32 (or float64) and the result is rounded once when stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.pointwise_modes import (
    Mode,
    PointwiseParameters,
    apply_pointwise,
    index_along,
    mode_entry,
)
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.shapes import broadcast_dims
from tilewright.graph.tensor import Tensor as TensorRecord

__all__ = ["PointwiseParameters", "apply_pointwise", "prepare_pointwise"]

_DIRECT_TYPES = frozenset({DataType.FLOAT, DataType.DOUBLE, DataType.HALF, DataType.BFLOAT16})
_PREDICATE_TYPES = _DIRECT_TYPES | {
    DataType.BOOLEAN,
    DataType.UINT8,
    DataType.INT8,
    DataType.INT32,
    DataType.INT64,
}
_INTEGER_MODES = frozenset(
    {"identity", "abs", "neg", "add", "sub", "mul", "max", "min", "add_square", "bias", "scale"}
    | {"cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "binary_select"}
    | {"logical_and", "logical_or", "logical_not"}
)


@implements_dense("pointwise")
def prepare_pointwise(operation: Any, device: torch.device) -> Kernel:
    """One elementwise operation; see the module's formulas."""
    entry = mode_entry(operation.mode)
    parameters = PointwiseParameters.of(operation)
    ports = [f"in{index}" for index in range(entry.arity)]
    missing = [port for port in ports if port not in operation.inputs]
    if missing:
        raise NotSupportedError(
            f"pointwise {operation.mode}: input {missing[0]!r} is absent; it takes {entry.arity}"
        )
    records = [operation.inputs[port] for port in ports]
    output = operation.outputs["out"]
    if operation.mode == "gen_index":
        return _prepare_index(records[0], output, parameters, device)
    same_type = output.data_type is records[0].data_type
    if operation.mode == "identity" and same_type and not output.data_type.is_sub_byte:
        return _copy
    if entry.direct is not None and _can_write_directly(entry, records, output, device):
        return _prepare_direct(entry.arity, entry.direct, parameters)
    dtype = _arithmetic_dtype(operation.mode, records, output)
    loaders = [_operand_loader(record, dtype, device) for record in records]
    store = casts.storer(output)
    apply = entry.apply

    def run(inputs: Operands, outputs: Operands) -> None:
        args = [load(inputs[port]) for load, port in zip(loaders, ports, strict=True)]
        store(outputs["out"], apply(parameters, args))

    return run


def _operand_loader(record: TensorRecord, dtype: torch.dtype, device: torch.device) -> casts.Loader:
    if record.is_pass_by_value:
        # A scalar broadcasts whatever rank it was declared with, and stays on the host: ATen
        # takes a host scalar beside operands of any device.
        return lambda operand: operand.to(dtype).reshape(())
    return casts.loader(record, dtype, device)


def _can_write_directly(
    entry: Mode, records: Sequence[TensorRecord], output: TensorRecord, device: torch.device
) -> bool:
    types = {record.data_type for record in records}
    if not entry.is_predicate:
        types.add(output.data_type)
    elif output.data_type not in _PREDICATE_TYPES:
        return False
    if len(types) != 1 or not types <= _DIRECT_TYPES:
        return False
    if not entry.is_exact and not types <= {DataType.FLOAT, DataType.DOUBLE}:
        return False
    # A scalar passed by value lives on the host, which only the loaders take care of.
    if device.type != "cpu" and any(record.is_pass_by_value for record in records):
        return False
    shape: tuple[int, ...] | None = ()
    for record in records:
        shape = broadcast_dims(shape, record.dim) if shape is not None else None
    return shape == output.dim


def _prepare_direct(
    arity: int, direct: Callable[..., Any], parameters: PointwiseParameters
) -> Kernel:
    function = direct(parameters)

    def run_unary(inputs: Operands, outputs: Operands) -> None:
        function(inputs["in0"], out=outputs["out"])

    def run_binary(inputs: Operands, outputs: Operands) -> None:
        function(inputs["in0"], inputs["in1"], out=outputs["out"])

    return run_unary if arity == 1 else run_binary


def _copy(inputs: Operands, outputs: Operands) -> None:
    outputs["out"].copy_(inputs["in0"])


def _prepare_index(
    source: TensorRecord,
    output: TensorRecord,
    parameters: PointwiseParameters,
    device: torch.device,
) -> Kernel:
    index = index_along(source.dim, parameters.axis, torch.int64, device)
    store = casts.storer(output)
    return lambda inputs, outputs: store(outputs["out"], index)


def _arithmetic_dtype(
    mode: str, records: Sequence[TensorRecord], output: TensorRecord
) -> torch.dtype:
    """int64 for integer operands of a mode that stays within the integers, else floating."""
    whole = all(
        record.data_type.is_integer or record.data_type is DataType.BOOLEAN for record in records
    )
    if whole and mode in _INTEGER_MODES:
        return torch.int64
    return casts.compute_dtype((*records, output))
