"""Wrong attention: pages, the backward, and eight bits."""

from __future__ import annotations

from graph_cases.attention_sketch import (
    DV,
    E4M3,
    E8M0,
    FLOAT,
    HALF,
    HKV,
    HQ,
    INT32,
    SKV,
    SQ,
    B,
    D,
    Wrong,
)
from tilewright.graph.enums import tensor_reordering

PAGES: Wrong = {
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

BACKWARD: Wrong = {
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

EIGHT_BIT: Wrong = {
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
