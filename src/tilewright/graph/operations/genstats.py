"""Channel sums for a batch normalization that is split over operations: SUM and SQ_SUM."""

from __future__ import annotations

from typing import ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.operations.checks import channel_dim, require_floating
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@operation_kind("genstats")
@record(frozen=True, kw_only=True, eq=False)
class Genstats(Operation):
    """SUM and SQ_SUM (1, C, 1, ...): sums of input and input^2 over every axis but the channel."""

    required: ClassVar = ("input",)
    produces: ClassVar = ("SUM", "SQ_SUM")
    required_outputs: ClassVar = ("SQ_SUM",)

    def infer(self) -> None:
        """One value a channel."""
        self.require_rank("input", 2, 8, "N, C and more axes")
        for port in self.produces:
            self.fill(port, channel_dim(self.inputs["input"].dim))

    def check(self) -> None:
        """The sums have one value a channel."""
        for port in self.produces:
            self.require_dim(port, channel_dim(self.inputs["input"].dim), "one value a channel")
        require_floating(self, ("input",), "statistics are of real numbers")


class GenstatsMethods(Builder):
    """Declares channel sums."""

    def genstats(
        self, input: Tensor, compute_data_type: object = None, name: str = ""
    ) -> list[Tensor]:
        """[SUM, SQ_SUM], each (1, C, 1, ...), of input (N, C, ...).

        Raises:
            GraphError: at ``validate`` if the input has fewer than two axes.
        """
        operation = self.append(
            Genstats, {"input": input}, name=name, compute_data_type=compute_data_type
        )
        return [operation.outputs["SUM"], operation.outputs["SQ_SUM"]]
