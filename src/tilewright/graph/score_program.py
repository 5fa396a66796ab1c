"""A score program: pointwise operations that attention applies to each score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.graph.tensor import Tensor
from tilewright.records import record

if TYPE_CHECKING:
    from tilewright.graph.operation import Operation


@record(frozen=True, eq=False)
class ScoreProgram:
    """Pointwise operations from ``input`` (the float32 scores) to ``output``, same dim.

    ``gradient`` is set for a backward program only: the tensor of incoming gradients, beside the
    scores. Tensors that are neither made here nor one of these are ports of the attention
    operation, ``prefix + "_0"`` and so on in order of first use.
    """

    input: Tensor
    output: Tensor
    operations: tuple[Operation, ...]
    gradient: Tensor | None = None

    def own_inputs(self) -> tuple[Tensor, ...]:
        """The tensors that attention itself feeds in."""
        return (self.input,) if self.gradient is None else (self.gradient, self.input)

    def made(self) -> tuple[Tensor, ...]:
        """The tensors that the program's operations make, in order."""
        return tuple(tensor for step in self.operations for tensor in step.outputs.values())

    def external_inputs(self) -> tuple[Tensor, ...]:
        """The graph's tensors that the program reads, in order of first use."""
        known = {id(tensor) for tensor in self.own_inputs()}
        external = []
        for operation in self.operations:
            for tensor in operation.inputs.values():
                if id(tensor) not in known:
                    external.append(tensor)
                    known.add(id(tensor))
            known.update(id(tensor) for tensor in operation.outputs.values())
        return tuple(external)
