"""Matrix multiplication: C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n]."""

from __future__ import annotations

from typing import ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.shapes import broadcast_dims
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@operation_kind("matmul")
@record(frozen=True, kw_only=True, eq=False)
class Matmul(Operation):
    """A (..., M, K) times B (..., K, N); batch axes broadcast where an extent is 1."""

    required: ClassVar = ("A", "B")
    produces: ClassVar = ("C",)

    padding: float = 0.0

    def infer(self) -> None:
        """C's dim from A's rows, B's columns and the broadcast batch."""
        self.require_rank("A", 2, 8, "a matrix, with leading batch axes")
        self.require_rank("B", 2, 8, "a matrix, with leading batch axes")
        self.fill("C", self._product_dim())

    def check(self) -> None:
        """The inner extents agree and C has the product's dim."""
        self.require_dim("C", self._product_dim(), "(..., M, N) of A (..., M, K), B (..., K, N)")

    def _product_dim(self) -> tuple[int, ...]:
        a, b = self.inputs["A"], self.inputs["B"]
        if a.rank != b.rank:
            self.fail(
                f"tensor {b.label()} (B) has rank {b.rank}; expected {a.rank}: "
                "A and B have the same rank"
            )
        if a.dim[-1] != b.dim[-2]:
            self.fail(
                f"tensor {b.label()} (B) has dim {b.dim}; expected {a.dim[-1]} rows: "
                f"the inner extents of A {a.dim} and B agree"
            )
        batch = broadcast_dims(a.dim[:-2], b.dim[:-2])
        if batch is None:
            self.fail(
                f"tensor {b.label()} (B) has dim {b.dim}; its batch axes do not broadcast "
                f"with A's {a.dim}"
            )
        return (*batch, a.dim[-2], b.dim[-1])


class MatmulMethods(Builder):
    """Declares matrix multiplications."""

    def matmul(
        self,
        A: Tensor,
        B: Tensor,
        compute_data_type: object = None,
        padding: float = 0.0,
        name: str = "",
    ) -> Tensor:
        """C = A B over the last two axes. A (..., M, K), B (..., K, N), C (..., M, N).

        Raises:
            GraphError: at ``validate`` if the inner extents differ or the batch axes do not
                broadcast.
        """
        operation = self.append(
            Matmul,
            {"A": A, "B": B},
            name=name,
            compute_data_type=compute_data_type,
            padding=padding,
        )
        return operation.outputs["C"]
