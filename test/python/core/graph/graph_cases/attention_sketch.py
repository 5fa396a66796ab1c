"""An attention graph that is right, but for what a case replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.dtypes import DataType
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor

B, HQ, HKV, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 64, 32
HALF, FLOAT, INT32 = DataType.HALF, DataType.FLOAT, DataType.INT32
E4M3, E8M0, UINT8 = DataType.FP8_E4M3, DataType.FP8_E8M0, DataType.UINT8


class Sketch:
    """A graph whose attention is right, but for what a case replaces."""

    def __init__(self) -> None:
        self.graph = DeclaredGraph(io_data_type=HALF, intermediate_data_type=FLOAT)

    def tensor(self, *dim: int, type: DataType | None = None, **rest: Any) -> Tensor:
        return self.graph.tensor(dim, data_type=type, **rest)

    def scalar(self, type: DataType = FLOAT, name: str = "") -> Tensor:
        return self.tensor(1, 1, 1, 1, type=type, name=name)

    def lengths(self, *, side: str = "q", extra: int = 0, type: DataType = INT32) -> Tensor:
        return self.tensor(B + extra, 1, 1, 1, type=type, name=f"lengths_{side}")

    def padding(self) -> dict[str, Any]:
        return {
            "use_padding_mask": True,
            "seq_len_q": self.lengths(side="q"),
            "seq_len_kv": self.lengths(side="kv"),
        }

    def operands(self, type: DataType | None = None, **changes: Any) -> dict[str, Any]:
        given = {
            "q": self.tensor(B, HQ, SQ, D, type=type, name="q"),
            "k": self.tensor(B, HKV, SKV, D, type=type, name="k"),
            "v": self.tensor(B, HKV, SKV, DV, type=type, name="v"),
        }
        return {**given, **changes}

    def sdpa(self, **changes: Any) -> Tensor | None:
        return self._finish(self.graph.sdpa(**self.operands(**changes)))

    def results(self, type: DataType | None = None, **changes: Any) -> dict[str, Any]:
        given = {
            "o": self.tensor(B, HQ, SQ, DV, type=type, name="o"),
            "dO": self.tensor(B, HQ, SQ, DV, type=type, name="dO"),
            "stats": self.tensor(B, HQ, SQ, 1, type=FLOAT, name="stats"),
        }
        return {**given, **changes}

    def backward(self, **changes: Any) -> Tensor | None:
        arguments = {**self.operands(), **self.results(), **changes}
        return self._finish(self.graph.sdpa_backward(**arguments))

    def fp8(self, **changes: Any) -> Tensor | None:
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = {name: self.scalar(name=name) for name in names}
        arguments = {**self.operands(E4M3), **scales, **changes}
        return self._finish(self.graph.sdpa_fp8(**arguments))

    def fp8_backward(self, **changes: Any) -> Tensor | None:
        read = ("q", "k", "v", "o", "dO", "s", "dP")
        names = [f"descale_{x}" for x in read] + [
            f"scale_{x}" for x in ("s", "dQ", "dK", "dV", "dP")
        ]
        scales = {name: self.scalar(name=name) for name in names}
        arguments = {**self.operands(E4M3), **self.results(E4M3), **scales, **changes}
        return self._finish(self.graph.sdpa_fp8_backward(**arguments))

    def mxfp8(self, output_type: DataType = HALF, **changes: Any) -> Tensor | None:
        scales = {
            "descale_q": self.tensor(B, HQ, SQ, D // 32, type=E8M0, name="descale_q"),
            "descale_k": self.tensor(B, HKV, SKV, D // 32, type=E8M0, name="descale_k"),
            "descale_v": self.tensor(B, HKV, 1, DV, type=E8M0, name="descale_v"),
        }
        arguments = {**self.operands(E4M3), **scales, **changes}
        outputs = self.graph.sdpa_mxfp8(**arguments)
        assert outputs[0] is not None
        outputs[0].set_data_type(output_type)
        return self._finish(outputs)

    def mxfp8_backward(self, **changes: Any) -> Tensor | None:
        arguments = {
            **self.operands(E4M3),
            "q_T": self.tensor(B, HQ, SQ, D, type=E4M3, name="q_T"),
            "k_T": self.tensor(B, HKV, SKV, D, type=E4M3, name="k_T"),
            "o_f16": self.tensor(B, HQ, SQ, DV, name="o_f16"),
            "dO_f16": self.tensor(B, HQ, SQ, DV, name="dO_f16"),
            "dO": self.tensor(B, HQ, SQ, DV, type=E4M3, name="dO"),
            "dO_T": self.tensor(B, HQ, SQ, DV, type=E4M3, name="dO_T"),
            "stats": self.tensor(B, HQ, SQ, 1, type=FLOAT, name="stats"),
            "descale_q": self.tensor(B, HQ, SQ, D // 32, type=E8M0, name="descale_q"),
            "descale_q_T": self.tensor(B, HQ, 1, D, type=E8M0, name="descale_q_T"),
            "descale_k": self.tensor(B, HKV, SKV, D // 32, type=E8M0, name="descale_k"),
            "descale_k_T": self.tensor(B, HKV, 1, D, type=E8M0, name="descale_k_T"),
            "descale_v": self.tensor(B, HKV, SKV, DV // 32, type=E8M0, name="descale_v"),
            "descale_dO": self.tensor(B, HQ, SQ, DV // 32, type=E8M0, name="descale_dO"),
            "descale_dO_T": self.tensor(B, HQ, 1, DV, type=E8M0, name="descale_dO_T"),
            **changes,
        }
        return self._finish(self.graph.sdpa_mxfp8_backward(**arguments))

    def paged(self, **changes: Any) -> Tensor | None:
        arguments = {
            "k": self.tensor(9, HKV, 4, D, name="k"),
            "v": self.tensor(9, HKV, 4, DV, name="v"),
            "paged_attention_k_table": self.tensor(B, 1, 2, 1, type=INT32, name="k_table"),
            "paged_attention_v_table": self.tensor(B, 1, 2, 1, type=INT32, name="v_table"),
            "paged_attention_max_seq_len_kv": SKV,
            **changes,
        }
        return self.sdpa(**arguments)

    def ragged(self, *dim: int, name: str) -> Tensor:
        offset = self.tensor(dim[0] + 1, 1, 1, 1, type=INT32, name=f"{name}_offset")
        return self.tensor(*dim, ragged_offset=offset, name=name)

    def typed(self, outputs: list[Tensor | None], data_type: DataType) -> None:
        assert outputs[0] is not None
        outputs[0].set_data_type(data_type)
        self._finish(outputs)

    def _finish(self, outputs: list[Tensor | None] | list[Tensor]) -> Tensor | None:
        for output in outputs:
            if output is not None:
                output.set_output(True)
        self.graph.validate()
        return outputs[0]


Case = Callable[[Sketch], object]
# A case's name -> what declares the graph, and fragments of what it is told.
Wrong = dict[str, tuple[Case, tuple[str, ...]]]
