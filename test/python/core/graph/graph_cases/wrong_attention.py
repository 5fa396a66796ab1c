"""Wrong attention: extents, masks, lengths and options of the forward."""

from __future__ import annotations

from graph_cases.attention_sketch import (
    DV,
    FLOAT,
    HALF,
    HKV,
    HQ,
    INT32,
    SKV,
    SQ,
    UINT8,
    B,
    D,
    Sketch,
    Wrong,
)
from tilewright.dtypes import DataType
from tilewright.graph.enums import diagonal_alignment

EXTENTS: Wrong = {
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

MASKS: Wrong = {
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

LENGTHS: Wrong = {
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

OPTIONS: Wrong = {
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


def _output_dim(sketch: Sketch, dim: tuple[int, ...]) -> None:
    outputs = sketch.graph.sdpa(**sketch.operands())
    assert outputs[0] is not None
    outputs[0].set_output(True).set_dim(dim)
    sketch.graph.validate()
