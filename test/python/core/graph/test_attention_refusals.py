"""Wrong attention graphs are refused with a message that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.enums import diagonal_alignment, tensor_reordering
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0

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

# Name -> (what declares the graph, fragments of the message).
EXTENTS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "q of rank 3": (
        lambda s: s.sdpa(q=s.tensor(HQ, SQ, D, name="q")),
        ("'q' (q) has rank 3", "expected 4"),
    ),
    "heads no multiple": (
        lambda s: s.sdpa(q=s.tensor(B, 3, SQ, D, name="q")),
        ("'q' (q) has 3 heads", "'k' (k) has 2", "h // (Hq // Hkv)"),
    ),
    "no heads of k": (
        lambda s: s.sdpa(k=s.tensor(B, 0, SKV, D, name="k"), v=s.tensor(B, 0, SKV, DV)),
        ("'k' (k) has 0", "expected a multiple"),
    ),
    "heads of k and v": (
        lambda s: s.sdpa(v=s.tensor(B, 4, SKV, DV, name="v")),
        ("'v' (v) has dim (2, 4, 7, 32)", "expected 2 on axis 1", "same heads"),
    ),
    "head size": (
        lambda s: s.sdpa(k=s.tensor(B, HKV, SKV, 48, name="k")),
        ("'k' (k) has dim (2, 2, 7, 48)", "expected 64 on axis 3", "same head size"),
    ),
    "no head size of v": (
        lambda s: s.sdpa(v=s.tensor(B, HKV, SKV, 0, name="v")),
        ("'v' (v) has dim (2, 2, 7, 0)", "at least 1"),
    ),
    "keys and values": (
        lambda s: s.sdpa(v=s.tensor(B, HKV, 8, DV, name="v")),
        ("'v' (v) has dim (2, 2, 8, 32)", "expected 7 on axis 2", "one value for each key"),
    ),
    "batch of k": (
        lambda s: s.sdpa(k=s.tensor(1, HKV, SKV, D, name="k")),
        ("'k' (k) has dim (1, 2, 7, 64)", "expected 2 on axis 0"),
    ),
    "q of integers": (
        lambda s: s.sdpa(q=s.tensor(B, HQ, SQ, D, type=INT32, name="q")),
        ("'q' (q) has data type INT32", "HALF, BFLOAT16, FLOAT, DOUBLE"),
    ),
    "k missing": (lambda s: s.sdpa(k=None), ("sdpa: the required input 'k' is missing",)),
    "O of another dim": (
        lambda s: _output_dim(s, (B, HQ, SQ, D)),
        ("(O) has dim (2, 4, 5, 64)", "expected (2, 4, 5, 32)"),
    ),
    "O of integers": (
        lambda s: s.typed(s.graph.sdpa(**s.operands()), INT32),
        ("(O) has data type INT32", "expected one of HALF"),
    ),
}

MASKS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "causal twice": (
        lambda s: s.sdpa(use_causal_mask=True, use_causal_mask_bottom_right=True),
        ("use_causal_mask and use_causal_mask_bottom_right are both True",),
    ),
    "causal and a right bound": (
        lambda s: s.sdpa(use_causal_mask=True, diagonal_band_right_bound=0),
        ("use_causal_mask is True and the right bound is 0", "causal is the right bound 0"),
    ),
    "bottom right and a right bound": (
        lambda s: s.sdpa(use_causal_mask_bottom_right=True, diagonal_band_right_bound=3),
        ("use_causal_mask_bottom_right is True and the right bound is 3",),
    ),
    "causal top left at bottom right": (
        lambda s: s.sdpa(use_causal_mask=True, diagonal_alignment=diagonal_alignment.BOTTOM_RIGHT),
        ("diagonal_alignment is BOTTOM_RIGHT", "expected use_causal_mask_bottom_right"),
    ),
    "window and a left bound": (
        lambda s: s.sdpa(sliding_window_length=3, diagonal_band_left_bound=3),
        ("sliding_window_length is 3 and the left bound is 3", "expected one of them"),
    ),
    "empty window": (
        lambda s: s.sdpa(sliding_window_length=0),
        ("sliding_window_length is 0", "at least 1", "col <= row - L"),
    ),
    "negative left bound": (
        lambda s: s.sdpa(diagonal_band_left_bound=-1),
        ("left bound is -1", "at least 1"),
    ),
    "negative right bound": (
        lambda s: s.sdpa(diagonal_band_right_bound=-1),
        ("right bound is -1", "at least 0", "col > row + R"),
    ),
    "fractional bound": (
        lambda s: s.sdpa(diagonal_band_left_bound=1.5),
        ("'diagonal_band_left_bound' is 1.5", "expected an integer"),
    ),
    "unknown alignment": (
        lambda s: s.sdpa(diagonal_alignment="CENTER"),
        ("'CENTER'", "accepted are TOP_LEFT, BOTTOM_RIGHT"),
    ),
    "causal of 1": (
        lambda s: s.sdpa(use_causal_mask=1),
        ("'use_causal_mask' is 1", "expected True or False"),
    ),
    "block mask dim": (
        lambda s: s.sdpa(block_mask=s.tensor(B, HQ, 1, 2, type=UINT8, name="m")),
        ("'m' (block_mask) has dim (2, 4, 1, 2)", "expected (2, 4, 1, 1)", "128 x 128 tile"),
    ),
    "block mask type": (
        lambda s: s.sdpa(block_mask=s.tensor(B, HQ, 1, 1, type=INT32, name="m")),
        ("'m' (block_mask) has data type INT32", "UINT8"),
    ),
}

LENGTHS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "padding without lengths": (
        lambda s: s.sdpa(use_padding_mask=True),
        ("seq_len_q is missing", "use_padding_mask is True"),
    ),
    "padding without key lengths": (
        lambda s: s.sdpa(use_padding_mask=True, seq_len_q=s.lengths()),
        ("seq_len_kv is missing", "cu_seq_len_kv"),
    ),
    "lengths without padding": (
        lambda s: s.sdpa(seq_len_kv=s.lengths(side="kv")),
        ("'lengths_kv' (seq_len_kv) is given", "use_padding_mask is False"),
    ),
    "lengths in two forms": (
        lambda s: s.sdpa(**s.padding(), cu_seq_len_q=s.lengths(extra=1)),
        ("seq_len_q and cu_seq_len_q are both given",),
    ),
    "lengths dim": (
        lambda s: s.sdpa(**{**s.padding(), "seq_len_q": s.lengths(extra=1)}),
        ("'lengths_q' (seq_len_q) has dim (3, 1, 1, 1)", "expected (2, 1, 1, 1)"),
    ),
    "running sums dim": (
        lambda s: s.sdpa(
            use_padding_mask=True, seq_len_q=s.lengths(), cu_seq_len_kv=s.lengths(side="kv")
        ),
        ("'lengths_kv' (cu_seq_len_kv) has dim (2, 1, 1, 1)", "expected (3, 1, 1, 1)"),
    ),
    "lengths type": (
        lambda s: s.sdpa(**{**s.padding(), "seq_len_kv": s.lengths(side="kv", type=FLOAT)}),
        ("'lengths_kv' (seq_len_kv) has data type FLOAT", "INT32, INT64"),
    ),
    "ragged without padding": (
        lambda s: s.sdpa(q=s.ragged(B, HQ, SQ, D, name="q")),
        ("'q' (q) has a ragged offset and use_padding_mask is False",),
    ),
    "ragged bias": (
        lambda s: s.sdpa(**s.padding(), bias=s.ragged(B, HQ, SQ, SKV, name="b")),
        ("'b' (bias) has a ragged offset", "expected none"),
    ),
    "negative token total": (
        lambda s: s.sdpa(max_total_seq_len_kv=-1),
        ("max_total_seq_len_kv is -1", "a count of tokens"),
    ),
}

OPTIONS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "bias dim": (
        lambda s: s.sdpa(bias=s.tensor(1, HQ, SQ, SKV + 1, name="b")),
        ("'b' (bias) has dim (1, 4, 5, 8)", "(2, 4, 5, 7)"),
    ),
    "bias rank": (
        lambda s: s.sdpa(bias=s.tensor(SQ, SKV, name="b")),
        ("'b' (bias) has dim (5, 7)", "(2, 4, 5, 7)"),
    ),
    "bias of booleans": (
        lambda s: s.sdpa(bias=s.tensor(1, 1, SQ, SKV, type=DataType.BOOLEAN, name="b")),
        ("'b' (bias) has data type BOOLEAN", "True and False are no bias"),
    ),
    "sink dim": (
        lambda s: s.sdpa(sink_token=s.tensor(1, HKV, 1, 1, type=FLOAT, name="sink")),
        ("'sink' (sink_token) has dim (1, 2, 1, 1)", "expected (1, 4, 1, 1)"),
    ),
    "sink type": (
        lambda s: s.sdpa(sink_token=s.tensor(1, HQ, 1, 1, type=INT32, name="sink")),
        ("'sink' (sink_token) has data type INT32",),
    ),
    "scale of several": (
        lambda s: s.sdpa(attn_scale=s.tensor(1, HQ, 1, 1, type=FLOAT, name="scale")),
        ("'scale' (attn_scale) has dim (1, 4, 1, 1)", "expected (1, 1, 1, 1)"),
    ),
    "infinite scale": (
        lambda s: s.sdpa(attn_scale=float("inf")),
        ("attn_scale is inf", "finite"),
    ),
    "scale of a string": (
        lambda s: s.sdpa(attn_scale="0.125"),
        ("'attn_scale' is '0.125'", "expected a number"),
    ),
    "Stats contradicted": (
        lambda s: s.sdpa(is_inference=True, generate_stats=True),
        ("is_inference is True and generate_stats is True",),
    ),
    "Stats of a number": (
        lambda s: s.sdpa(generate_stats=1),
        ("generate_stats is 1", "True, False or None"),
    ),
    "unknown implementation": (
        lambda s: s.sdpa(implementation="FASTEST"),
        ("'FASTEST'", "AUTO, COMPOSITE, UNIFIED"),
    ),
    "dropout of 1": (
        lambda s: s.sdpa(dropout=(1.0, s.scalar(INT32), s.scalar(INT32))),
        ("dropout_probability is 1.0", "0 <= p < 1"),
    ),
    "dropout of NaN": (
        lambda s: s.sdpa(dropout=(float("nan"), s.scalar(INT32), s.scalar(INT32))),
        ("dropout_probability is nan", "0 <= p < 1"),
    ),
    "dropout of a number alone": (
        lambda s: s.sdpa(dropout=0.1),
        ("dropout is 0.1", "(probability, seed tensor, offset tensor)"),
    ),
    "dropout without offset": (
        lambda s: s.sdpa(dropout=(0.1, s.scalar(INT32))),
        ("(mask tensor, scale tensor)",),
    ),
    "dropout seed of floats": (
        lambda s: s.sdpa(dropout=(0.1, s.scalar(FLOAT, "seed"), s.scalar(INT32))),
        ("'seed' (dropout_seed) has data type FLOAT", "INT32, INT64"),
    ),
    "dropout mask dim": (
        lambda s: s.sdpa(dropout=(s.tensor(B, HQ, SQ, 3, name="keep"), s.scalar())),
        ("'keep' (dropout_mask) has dim (2, 4, 5, 3)", "(2, 4, 5, 7)"),
    ),
    "inverse dropout scale in a forward": (
        lambda s: s.sdpa(dropout=(s.tensor(B, HQ, SQ, SKV), s.scalar(), s.scalar())),
        ("(mask tensor, scale tensor)",),
    ),
    "draws without dropout": (
        lambda s: s.sdpa(rng_dump=s.tensor(B, HQ, SQ, SKV, type=FLOAT, name="draws")),
        ("'draws' (rng_dump) is given", "without it nothing is drawn"),
    ),
    "row maxima dim": (
        lambda s: s.sdpa(score_max=s.tensor(B, HQ, SKV, 1, type=FLOAT, name="max")),
        ("'max' (score_max) has dim (2, 4, 7, 1)", "expected (2, 4, 5, 1)"),
    ),
    "row sums rounded": (
        lambda s: s.sdpa(score_sum_exp=s.tensor(B, HQ, SQ, 1, type=HALF, name="sum")),
        ("'sum' (score_sum_exp) has data type HALF", "FLOAT, DOUBLE"),
    ),
}

PAGES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "one table": (
        lambda s: s.paged(paged_attention_v_table=None),
        ("paged_attention_v_table is missing", "both k and v"),
    ),
    "no key count": (
        lambda s: s.paged(paged_attention_max_seq_len_kv=None),
        ("paged_attention_max_seq_len_kv is None", "at least 1"),
    ),
    "key count without tables": (
        lambda s: s.sdpa(paged_attention_max_seq_len_kv=SKV),
        ("paged_attention_max_seq_len_kv is 7", "no page tables"),
    ),
    "table batch": (
        lambda s: s.paged(paged_attention_k_table=s.tensor(3, 1, 2, 1, type=INT32, name="t")),
        ("'t' (paged_attention_k_table) has dim (3, 1, 2, 1)", "expected (2, 1, 2, 1)"),
    ),
    "table rank": (
        lambda s: s.paged(paged_attention_k_table=s.tensor(B, 2, type=INT32, name="t")),
        ("'t' (paged_attention_k_table) has rank 2", "expected 4"),
    ),
    "table type": (
        lambda s: s.paged(paged_attention_v_table=s.tensor(B, 1, 2, 1, type=FLOAT, name="t")),
        ("'t' (paged_attention_v_table) has data type FLOAT", "page numbers are integers"),
    ),
    "too few pages": (
        lambda s: s.paged(paged_attention_max_seq_len_kv=9),
        ("'k_table' (paged_attention_k_table) has 2 pages of 4 tokens", "= 9"),
    ),
    "ragged and paged": (
        lambda s: s.paged(**s.padding(), k=s.ragged(9, HKV, 4, D, name="k")),
        ("'k' (k) has a ragged offset and a page table",),
    ),
}

BACKWARD: dict[str, tuple[Case, tuple[str, ...]]] = {
    "stats missing": (
        lambda s: s.backward(stats=None),
        ("sdpa_backward: the required input 'stats' is missing",),
    ),
    "stats dim": (
        lambda s: s.backward(stats=s.tensor(B, HQ, SQ, type=FLOAT, name="lse")),
        ("'lse' (stats) has dim (2, 4, 5)", "expected (2, 4, 5, 1)"),
    ),
    "stats type": (
        lambda s: s.backward(stats=s.tensor(B, HQ, SQ, 1, type=HALF, name="lse")),
        ("'lse' (stats) has data type HALF", "FLOAT"),
    ),
    "dO dim": (
        lambda s: s.backward(dO=s.tensor(B, HQ, SQ, D, name="dO")),
        ("'dO' (dO) has dim (2, 4, 5, 64)", "expected (2, 4, 5, 32)"),
    ),
    "dBias without bias": (
        lambda s: s.backward(dBias=s.tensor(1, 1, SQ, SKV, name="dB")),
        ("'dB' (dBias) is given without bias", "expected both"),
    ),
    "dBias dim": (
        lambda s: s.backward(
            bias=s.tensor(1, 1, SQ, SKV), dBias=s.tensor(B, HQ, SQ, SKV, name="dB")
        ),
        ("'dB' (dBias) has dim (2, 4, 5, 7)", "expected (1, 1, 5, 7)"),
    ),
    "dSink without sink": (
        lambda s: s.backward(dSink_token=s.tensor(1, HQ, 1, 1, type=FLOAT, name="dS")),
        ("'dS' (dSink_token) is given without sink_token",),
    ),
    "score gradient alone": (
        lambda s: s.backward(score_mod_bprop=lambda graph, gradient, score: gradient),
        ("score_mod_bprop is given without score_mod",),
    ),
    "masks as in the forward": (
        lambda s: s.backward(use_causal_mask=True, use_causal_mask_bottom_right=True),
        ("sdpa_backward: use_causal_mask and use_causal_mask_bottom_right",),
    ),
}

EIGHT_BIT: dict[str, tuple[Case, tuple[str, ...]]] = {
    "fp8 operands in sdpa": (
        lambda s: s.sdpa(q=s.tensor(B, HQ, SQ, D, type=E4M3, name="q")),
        ("'q' (q) has data type FP8_E4M3", "sdpa_fp8 or sdpa_mxfp8"),
    ),
    "half operands in sdpa_fp8": (
        lambda s: s.fp8(k=s.tensor(B, HKV, SKV, D, name="k")),
        ("'k' (k) has data type HALF", "FP8_E4M3, FP8_E5M2"),
    ),
    "descale dim": (
        lambda s: s.fp8(descale_k=s.tensor(1, HKV, 1, 1, type=FLOAT, name="dk")),
        ("'dk' (descale_k) has dim (1, 2, 1, 1)", "one scale a tensor"),
    ),
    "descale type": (
        lambda s: s.fp8(descale_v=s.scalar(HALF, "dv")),
        ("'dv' (descale_v) has data type HALF", "expected one of FLOAT"),
    ),
    "scale missing": (
        lambda s: s.fp8(scale_o=None),
        ("sdpa_fp8: the required input 'scale_o' is missing",),
    ),
    "window in two spellings": (
        lambda s: s.fp8(sliding_window=3, sliding_window_length=3),
        ("sliding_window_length and sliding_window are one argument",),
    ),
    "fp8 bounds": (lambda s: s.fp8(left_bound=0), ("left bound is 0", "at least 1")),
    "fp8 backward scale": (
        lambda s: s.fp8_backward(scale_dP=s.tensor(2, 1, 1, 1, type=FLOAT, name="sdp")),
        ("'sdp' (scale_dP) has dim (2, 1, 1, 1)",),
    ),
    "fp8 backward stats": (
        lambda s: s.fp8_backward(stats=s.tensor(B, HQ, SQ, 2, type=FLOAT, name="lse")),
        ("'lse' (stats) has dim (2, 4, 5, 2)",),
    ),
    "block scale type": (
        lambda s: s.mxfp8(descale_q=s.tensor(B, HQ, SQ, 2, type=FLOAT, name="dq")),
        ("'dq' (descale_q) has data type FLOAT", "FP8_E8M0"),
    ),
    "block scale dim": (
        lambda s: s.mxfp8(descale_q=s.tensor(B, HQ, SQ, 3, type=E8M0, name="dq")),
        ("'dq' (descale_q) has dim (2, 4, 5, 3)", "(2, 4, 5, 2)", "(2, 4, 128, 4)"),
    ),
    "block scale axis of v": (
        lambda s: s.mxfp8(descale_v=s.tensor(B, HKV, SKV, 1, type=E8M0, name="dv")),
        ("'dv' (descale_v) has dim (2, 2, 7, 1)", "(2, 2, 1, 32)", "along axis 2"),
    ),
    "block scale order": (
        lambda s: s.mxfp8(
            descale_q=s.tensor(
                *(B, HQ, SQ, 2),
                type=E8M0,
                reordering_type=tensor_reordering.INT8x32,
                name="dq",
            )
        ),
        ("'dq' (descale_q) has reordering INT8x32", "NONE or F8_128x4"),
    ),
    "O of mxfp8 in 8 bits": (
        lambda s: s.mxfp8(output_type=E4M3),
        ("(O) has data type FP8_E4M3", "it has no scale"),
    ),
    "transposed operand": (
        lambda s: s.mxfp8_backward(q_T=s.tensor(B, HQ, D, SQ, type=E4M3, name="qt")),
        ("'qt' (q_T) has dim (2, 4, 64, 5)", "expected (2, 4, 5, 64)"),
    ),
    "block scales of a transposed operand": (
        lambda s: s.mxfp8_backward(descale_k_T=s.tensor(B, HKV, SKV, 2, type=E8M0, name="dkt")),
        ("'dkt' (descale_k_T) has dim (2, 2, 7, 2)", "(2, 2, 1, 64)"),
    ),
    "8-bit o_f16": (
        lambda s: s.mxfp8_backward(o_f16=s.tensor(B, HQ, SQ, DV, type=E4M3, name="of")),
        ("'of' (o_f16) has data type FP8_E4M3",),
    ),
}

WRONG = {**EXTENTS, **MASKS, **LENGTHS, **OPTIONS, **PAGES, **BACKWARD, **EIGHT_BIT}


def _output_dim(sketch: Sketch, dim: tuple[int, ...]) -> None:
    outputs = sketch.graph.sdpa(**sketch.operands())
    assert outputs[0] is not None
    outputs[0].set_output(True).set_dim(dim)
    sketch.graph.validate()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_attention_is_refused(name: str) -> None:
    declare, fragments = WRONG[name]
    with pytest.raises(GraphError) as caught:
        declare(Sketch())
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, message


@pytest.mark.parametrize(
    "declare",
    [
        Sketch.sdpa,
        Sketch.paged,
        Sketch.backward,
        Sketch.fp8,
        Sketch.fp8_backward,
        Sketch.mxfp8,
        Sketch.mxfp8_backward,
    ],
    ids=lambda method: method.__name__,
)
def test_the_unchanged_sketches_are_right(declare: Callable[[Sketch], Tensor | None]) -> None:
    """So that each refusal above is due to what its case changes."""
    first = declare(Sketch())
    assert first is not None
    assert first.dim[:3] == (B, HQ, SQ)


def test_two_tensors_of_another_graph_are_refused() -> None:
    sketch, other = Sketch(), Sketch()
    with pytest.raises(GraphError, match="belongs to another graph"):
        sketch.sdpa(k=other.tensor(B, HKV, SKV, D, name="k"))
