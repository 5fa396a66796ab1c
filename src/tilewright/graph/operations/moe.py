"""Grouped products of a mixture of experts, forward and weight gradient.

token (1, T, K), weight (E, K, N); first_token_offset (E or E + 1, 1, 1) says at which row each
expert's group starts, the last group ending at T or at the last entry. On row i of group e:

    NONE:    out[i] = token[i] weight[e]
    GATHER:  out[i] = token[token_index[i]] weight[e]
    SCATTER: out[token_index[i]] = token[i] weight[e]

Rows in no group are 0. Backward: dweight[e] = sum over the group's rows of token[i]^T doutput[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tilewright.graph import enums
from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.operations.checks import INDEX_TYPES
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@record(frozen=True, kw_only=True, eq=False)
class _Grouped(Operation):
    def _require_offsets(self, experts: int) -> None:
        offsets = self.inputs["first_token_offset"]
        if offsets.dim not in ((experts, 1, 1), (experts + 1, 1, 1)):
            self.fail(
                f"tensor {offsets.label()} (first_token_offset) has dim {offsets.dim}; expected "
                f"({experts} or {experts + 1}, 1, 1): the first row of each expert, and perhaps "
                "the end"
            )
        self.require_type("first_token_offset", INDEX_TYPES, "row numbers are integers")

    def _require_rows(self, port: str) -> None:
        """Require (1, T, features)."""
        self.require_rank(port, 3, 3, "(1, T, features)")
        tensor = self.inputs[port]
        if tensor.dim[0] != 1:
            self.fail(
                f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; expected 1 on axis 0: "
                "the tokens of all groups are rows of one matrix"
            )


@operation_kind("moe_grouped_matmul")
@record(frozen=True, kw_only=True, eq=False)
class MoeGroupedMatmul(_Grouped):
    """One product an expert, over the rows that are routed to it."""

    required: ClassVar = ("token", "weight", "first_token_offset")
    optional: ClassVar = ("token_index", "token_ks")
    produces: ClassVar = ("out",)

    mode: enums.moe_grouped_matmul_mode = enums.moe_grouped_matmul_mode.NONE
    top_k: int = 0

    def infer(self) -> None:
        """(1, rows, N), packed: a row an index for GATHER, else a row a token."""
        self._require_rows("token")
        self.require_rank("weight", 3, 3, "(E, K, N)")
        self._require_index()
        token, weight = self.inputs["token"], self.inputs["weight"]
        self.fill("out", (1, self._rows(), weight.dim[2]), order_of=token)

    def check(self) -> None:
        """Inner extents, offsets, indices and the output's rows fit."""
        token, weight = self.inputs["token"], self.inputs["weight"]
        if token.dim[2] != weight.dim[1]:
            self.fail(
                f"tensor {weight.label()} (weight) has dim {weight.dim}; expected {token.dim[2]} "
                f"on axis 1: the features of tensor {token.label()} (token) {token.dim}"
            )
        self._require_offsets(weight.dim[0])
        if self.top_k < 0:
            self.fail(f"top_k is {self.top_k}; expected at least 0")
        out = self.outputs["out"]
        # A scatter's rows may go to a longer output, the rest of which is 0.
        rows = out.dim[1] if self._is_free() and out.rank == 3 else self._rows()
        self.require_dim("out", (1, rows, weight.dim[2]), f"(1, rows, N) of mode {self.mode.name}")

    def _is_free(self) -> bool:
        return self.mode.name in ("SCATTER", "COMBINE")

    def _rows(self) -> int:
        if self.mode.name == "GATHER":
            return self.inputs["token_index"].dim[1]
        return self.inputs["token"].dim[1]

    def _require_index(self) -> None:
        index = self.inputs.get("token_index")
        if self.mode.name == "NONE":
            if index is not None:
                self.fail(
                    f"tensor {index.label()} (token_index) is given in mode NONE; GATHER, SCATTER "
                    "and COMBINE take it"
                )
            return
        if index is None:
            self.fail(f"input 'token_index' is missing; mode {self.mode.name} takes it")
        rows = self.inputs["token"].dim[1]
        self.require_rank("token_index", 3, 3, "(1, rows, 1)")
        expected = (1, index.dim[1] if self.mode.name == "GATHER" else rows, 1)
        self.require_dim("token_index", expected, "one index a row of the product")
        self.require_dim("token_ks", index.dim, "one entry an index")
        for port in ("token_index", "token_ks"):
            self.require_type(port, INDEX_TYPES, "row numbers are integers")


@operation_kind("moe_grouped_matmul_bwd")
@record(frozen=True, kw_only=True, eq=False)
class MoeGroupedMatmulBwd(_Grouped):
    """dweight (E, K, N) of doutput (1, T, N) and token (1, T, K)."""

    required: ClassVar = ("doutput", "token", "first_token_offset")
    produces: ClassVar = ("dweight",)

    def infer(self) -> None:
        """An expert an offset unless set; column-major matrices, as in cuDNN's vocabulary."""
        self._require_rows("doutput")
        self._require_rows("token")
        self.require_rank("first_token_offset", 3, 3, "(E or E + 1, 1, 1)")
        experts = self.inputs["first_token_offset"].dim[0]
        dim = self._dim(self.outputs["dweight"].dim or (experts,))
        stride = (max(dim[1] * dim[2], 1), 1, max(dim[1], 1))
        self.fill("dweight", dim, stride=stride)

    def check(self) -> None:
        """Both operands have the same rows; dweight's dim and the offsets fit."""
        token, gradient = self.inputs["token"], self.inputs["doutput"]
        if token.dim[1] != gradient.dim[1]:
            self.fail(
                f"tensor {gradient.label()} (doutput) has dim {gradient.dim}; expected "
                f"{token.dim[1]} on axis 1: a row a token of tensor {token.label()}"
            )
        out = self.outputs["dweight"]
        self.require_dim("dweight", self._dim(out.dim), "(E, K, N)")
        self._require_offsets(out.dim[0])

    def _dim(self, leading: Sequence[int]) -> tuple[int, int, int]:
        return (leading[0], self.inputs["token"].dim[2], self.inputs["doutput"].dim[2])


class MoeMethods(Builder):
    """Declares grouped products."""

    def moe_grouped_matmul(
        self,
        token: Tensor,
        weight: Tensor,
        first_token_offset: Tensor,
        token_index: Tensor | None = None,
        token_ks: Tensor | None = None,
        mode: enums.moe_grouped_matmul_mode = enums.moe_grouped_matmul_mode.NONE,
        compute_data_type: object = None,
        top_k: int = 0,
        name: str = "",
    ) -> Tensor:
        """The grouped product (1, rows, N) of token (1, T, K) and weight (E, K, N).

        ``first_token_offset``, INT32 or INT64 of (E, 1, 1) or (E + 1, 1, 1), says at which row each
        expert's group starts. ``token_index`` (1, rows, 1), INT32 or INT64, is for the modes GATHER
        (row i is made of token[token_index[i]]) and SCATTER (row i goes to token_index[i]); NONE
        takes rows in place. Rows in no group are 0. An engine may decline COMBINE, ``token_ks`` and
        ``top_k``.

        Raises:
            GraphError: at ``validate`` if the dims do not fit, or ``token_index`` is not what the
                mode takes.
        """
        operation = self.append(
            MoeGroupedMatmul,
            {
                "token": token,
                "weight": weight,
                "first_token_offset": first_token_offset,
                "token_index": token_index,
                "token_ks": token_ks,
            },
            name=name,
            compute_data_type=compute_data_type,
            mode=mode,
            top_k=top_k,
        )
        return operation.outputs["out"]

    def moe_grouped_matmul_bwd(
        self,
        doutput: Tensor,
        token: Tensor,
        first_token_offset: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """dweight (E, K, N), the weight's gradient; call ``set_dim`` if there are E + 1 offsets.

        ``doutput`` (1, T, N) is the gradient of the product in mode NONE, whose ``token`` (1, T, K)
        and ``first_token_offset`` are given again: the sum of token[i]^T doutput[i] over a group.

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        operation = self.append(
            MoeGroupedMatmulBwd,
            {"doutput": doutput, "token": token, "first_token_offset": first_token_offset},
            name=name,
            compute_data_type=compute_data_type,
        )
        return operation.outputs["dweight"]
