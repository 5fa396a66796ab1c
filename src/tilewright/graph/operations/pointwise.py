"""The record of elementwise operations: out[i] = mode(in0[i], in1[i], in2[i]).

One record serves every mode; ``pointwise_modes`` says what each takes. Operands broadcast to the
output where their extent is 1. An operand passed by value broadcasts whatever its rank is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.operations.checks import FLOATING_TYPES
from tilewright.graph.operations.pointwise_modes import (
    POINTWISE_MODES,
    PointwiseKind,
    PointwiseMode,
)
from tilewright.graph.shapes import broadcast_dims
from tilewright.graph.tensor import Tensor
from tilewright.records import record

PORTS = ("in0", "in1", "in2")


@operation_kind("pointwise")
@record(frozen=True, kw_only=True, eq=False)
class Pointwise(Operation):
    """One elementwise operation. ``mode`` is a key of ``POINTWISE_MODES``.

    Of the parameters a mode reads only its own. relu is min(x, upper_clip) where x > lower_clip,
    else lower_clip + negative_slope (x - lower_clip).
    """

    required: ClassVar = ("in0",)
    optional: ClassVar = ("in1", "in2")
    produces: ClassVar = ("out",)
    shares: ClassVar = (("out", "in0"),)

    mode: str = ""
    negative_slope: float = 0.0
    lower_clip: float = 0.0
    upper_clip: float = math.inf
    swish_beta: float = 1.0
    elu_alpha: float = 1.0
    softplus_beta: float = 1.0
    axis: int = 0

    def title(self) -> str:
        """The mode belongs to how messages call the operation."""
        return f"pointwise {self.mode} {self.name!r}" if self.name else f"pointwise {self.mode}"

    def infer(self) -> None:
        """The output has the operands' broadcast dim, in the axis order of one that has it."""
        row = self._row()
        dim = self._broadcast(self._shaping_operands())
        model = next((t for t in self._operands() if t.dim == dim), None)
        result = None if row.kind is not PointwiseKind.INDEX else row.result
        self.fill("out", dim, order_of=model, data_type=result)

    def check(self) -> None:
        """Operands broadcast to the output, and types and parameters are the mode's."""
        row, out = self._row(), self.outputs["out"]
        for port, argument, tensor in zip(PORTS, row.arguments, self._operands(), strict=False):
            if row.is_floating and tensor.data_type not in FLOATING_TYPES:
                self.fail(
                    f"tensor {tensor.label()} ({argument}) has data type "
                    f"{tensor.data_type.name}; expected a floating type: {self.mode} gives "
                    "fractions; convert with identity first"
                )
            fits = broadcast_dims(tensor.dim, out.dim) == out.dim
            if not fits and not tensor.is_pass_by_value:
                self.fail(
                    f"tensor {out.label()} (out) has dim {out.dim}; tensor {tensor.label()} "
                    f"({port}, {argument}) of dim {tensor.dim} does not broadcast to it"
                )
        if row.kind is PointwiseKind.BACKWARD:
            self.require_dim(
                "in0", self.inputs["in1"].dim, "the gradient has the dim of the forward's input"
            )
        self._check_parameters(row)

    def _row(self) -> PointwiseMode:
        row = POINTWISE_MODES.get(self.mode)
        if row is None:
            self.fail(f"mode is {self.mode!r}; accepted are {', '.join(POINTWISE_MODES)}")
        for position, port in enumerate(PORTS):
            if position < row.arity and port not in self.inputs:
                self.fail(
                    f"operand {row.arguments[position]!r} ({port}) is missing; {self.mode} takes "
                    f"{', '.join(row.arguments)}"
                )
            if position >= row.arity and port in self.inputs:
                self.fail(
                    f"tensor {self.inputs[port].label()} ({port}) is one operand too many; "
                    f"{self.mode} takes {', '.join(row.arguments)}"
                )
        return row

    def _operands(self) -> list[Tensor]:
        return [self.inputs[port] for port in PORTS if port in self.inputs]

    def _shaping_operands(self) -> list[Tensor]:
        """The operands that decide the output's dim: scalars do only if there is nothing else."""
        operands = self._operands()
        return [t for t in operands if not t.is_pass_by_value] or operands

    def _broadcast(self, operands: Sequence[Tensor]) -> tuple[int, ...]:
        dim = operands[0].dim
        for tensor in operands[1:]:
            joined = broadcast_dims(dim, tensor.dim)
            if joined is None:
                self.fail(
                    f"tensor {tensor.label()} has dim {tensor.dim}; expected 1 or the extent of "
                    f"{dim} on each axis: operands broadcast"
                )
            dim = joined
        return dim

    def _check_parameters(self, row: PointwiseMode) -> None:
        for name in row.parameters:
            if name != "axis" and math.isnan(getattr(self, name)):
                self.fail(f"{name} is nan; expected a number")
        if "lower_clip" in row.parameters and self.lower_clip > self.upper_clip:
            self.fail(
                f"lower_clip is {self.lower_clip} and upper_clip {self.upper_clip}; expected "
                "lower_clip <= upper_clip"
            )
        if "softplus_beta" in row.parameters and not 0 < self.softplus_beta < math.inf:
            self.fail(
                f"softplus_beta is {self.softplus_beta}; expected a positive number: softplus "
                "divides by it"
            )
        source = self.inputs["in0"]
        if "axis" in row.parameters and not -source.rank <= self.axis < source.rank:
            self.fail(
                f"axis is {self.axis}; expected {-source.rank} to {source.rank - 1}: tensor "
                f"{source.label()} has rank {source.rank}"
            )


class PointwiseBuilder(Builder):
    """Appends pointwise operations; the methods of each mode build on it."""

    def _pointwise(
        self,
        mode: str,
        operands: Sequence[Tensor],
        compute_data_type: object,
        name: str,
        **parameters: float | None,
    ) -> Tensor:
        """Append ``mode`` of ``operands``; parameters that are None keep their defaults."""
        given: dict[str, Any] = {k: v for k, v in parameters.items() if v is not None}
        operation = self.append(
            Pointwise,
            dict(zip(PORTS, operands, strict=False)),
            name=name,
            compute_data_type=compute_data_type,
            mode=mode,
            **given,
        )
        return operation.outputs["out"]
