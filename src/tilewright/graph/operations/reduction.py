"""Reductions: one value for each index of the axes that are kept."""

from __future__ import annotations

from typing import ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.enums import reduction_mode
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@operation_kind("reduction")
@record(frozen=True, kw_only=True, eq=False)
class Reduction(Operation):
    """Reduce the axes on which ``out`` has extent 1 and ``input`` more."""

    required: ClassVar = ("input",)
    produces: ClassVar = ("out",)

    mode: reduction_mode = reduction_mode.NOT_SET

    def infer(self) -> None:
        """The output's dim says which axes are reduced, so it must be set."""
        out = self.outputs["out"]
        if not out.dim:
            self.fail(
                f"tensor {out.label()} (out) has no dim; call set_dim: extent 1 marks the "
                "reduced axes"
            )
        self.fill("out", out.dim, order_of=self.inputs["input"])

    def check(self) -> None:
        """A mode is set and every output axis is kept or reduced to 1."""
        if self.mode is reduction_mode.NOT_SET:
            accepted = ", ".join(mode for mode in reduction_mode.__members__ if mode != "NOT_SET")
            self.fail(f"mode is NOT_SET; accepted are {accepted}")
        source, out = self.inputs["input"], self.outputs["out"]
        fits = out.rank == source.rank and all(
            have in (1, want) for have, want in zip(out.dim, source.dim, strict=True)
        )
        if not fits:
            self.fail(
                f"tensor {out.label()} (out) has dim {out.dim}; expected 1 or the extent of "
                f"{source.dim} on each axis: a reduction keeps an axis or reduces it to 1"
            )


class ReductionMethods(Builder):
    """Declares reductions."""

    def reduction(
        self,
        input: Tensor,
        mode: reduction_mode = reduction_mode.NOT_SET,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """Reduce ``input``; call ``set_dim`` on the result, with 1 on the reduced axes.

        ``mode`` is ADD, AVG, MUL, MUL_NO_ZEROS (zeros are left out), MIN, MAX, AMAX (the largest
        magnitude), NORM1 (the sum of magnitudes) or NORM2 (the root of the sum of squares).

        Raises:
            GraphError: at ``validate`` if the result has no dim, or keeps part of an axis.
        """
        operation = self.append(
            Reduction,
            {"input": input},
            name=name,
            compute_data_type=compute_data_type,
            mode=mode,
        )
        return operation.outputs["out"]
