"""Wrong graphs: block-scaled formats, rotary embedding, pointwise operations."""

from __future__ import annotations

import math

from graph_cases.case import Wrong

HUGE = 2**62

ELEMENTS: Wrong = {
    # Block-scaled formats
    "quantize: no block size": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 64), 0)[0],
        "block_scale_quantize: block_size is 0; expected at least 1",
    ),
    "quantize: axis": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 64), 32, axis=2)[0],
        "axis is 2; expected -2 to 1: tensor 'x' has rank 2",
    ),
    "quantize: types not set": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 64), 32, name="q")[0],
        "tensor 'q::Y' (Y) has data type FLOAT; expected one of FP8_E4M3, FP8_E5M2, FP4_E2M1",
    ),
    "quantize: scale of halves": (
        lambda c: c.quantized("FP8_E4M3", "HALF"),
        "tensor 'q::scale' (scale) has data type HALF; expected one of FP8_E8M0, FP8_E4M3, FLOAT",
    ),
    "quantize: scale dim": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 65), 32, name="q")[1].set_dim((4, 2)),
        "tensor 'q::scale' (scale) has dim (4, 2); expected (4, 3): one entry a block of 32",
    ),
    "quantize: tiles along a batch axis": (
        lambda c: c.g.block_scale_quantize(c.t("x", 64, 4, 4), 32, axis=0, name="q")[
            1
        ].set_reordering_type("F8_128x4"),
        "tensor 'q::scale' (scale) has reordering F8_128x4 and blocks run along axis 0",
    ),
    "quantize: transposed vector": (
        lambda c: c.g.block_scale_quantize(c.t("x", 64), 32, transpose=True)[0],
        "tensor 'x' (input) has dim (64,); expected two axes or more",
    ),
    "dequantize: descale dim": (
        lambda c: c.g.block_scale_dequantize(
            c.t("x", 4, 64, data_type="FP8_E4M3"), c.t("d", 4, 3), 32
        ),
        "tensor 'd' (descale) has dim (4, 3); expected (4, 2): one entry a block of (32,)",
    ),
    "dequantize: too many block sizes": (
        lambda c: c.g.block_scale_dequantize(
            c.t("x", 64, data_type="FP8_E4M3"), c.t("d", 2), [32, 32]
        ),
        "block_size is (32, 32); expected positive numbers, one or up to one an axis of tensor 'x'",
    ),
    "dequantize: wide elements": (
        lambda c: c.g.block_scale_dequantize(c.t("x", 4, 64), c.t("d", 4, 2), 32),
        "tensor 'x' (input) has data type FLOAT; expected one of FP8_E4M3",
    ),
    # Rotary embedding
    "rope: rank 3": (
        lambda c: c.g.rope(c.t("x", 4, 8, 16), c.t("f", 1, 8, 16)),
        "rope: tensor 'x' (input) has rank 3; expected 4: (B, H, S, D)",
    ),
    "rope: odd rope_dim": (
        lambda c: c.g.rope(c.t("x", 2, 4, 8, 16), c.t("f", 1, 1, 8, 16), rope_dim=7),
        "rope_dim is 7; expected an even number of at most 16, or 0 for all",
    ),
    "rope: rope_dim beyond D": (
        lambda c: c.g.rope(c.t("x", 2, 4, 8, 16), c.t("f", 1, 1, 8, 16), rope_dim=18),
        "rope_dim is 18; expected an even number of at most 16, or 0 for all",
    ),
    "rope: angles of another length": (
        lambda c: c.g.rope(c.t("x", 2, 4, 8, 16), c.t("f", 1, 1, 9, 16)),
        "tensor 'f' (freqs) has dim (1, 1, 9, 16); expected (2 or 1, 1, 8 or 1, 16 or 8)",
    ),
    "rope_backward: integer angles": (
        lambda c: c.g.rope_backward(
            c.t("dy", 2, 4, 8, 16), c.t("f", 1, 1, 8, 16, data_type="INT32")
        ),
        "tensor 'f' (freqs) has data type INT32; expected one of FLOAT, DOUBLE",
    ),
    # Pointwise
    "pointwise: operands that do not broadcast": (
        lambda c: c.g.add(c.t("a", 4, 3), c.t("b", 4, 2)),
        "pointwise add: tensor 'b' has dim (4, 2); expected 1 or the extent of (4, 3)",
    ),
    "pointwise: output smaller than the operands": (
        lambda c: c.g.add(c.t("a", 4, 3), c.t("b", 1, 3), name="s").set_dim((1, 3)),
        "pointwise add 's': tensor 's::out' (out) has dim (1, 3); tensor 'a' (in0, a) of dim "
        "(4, 3) does not broadcast to it",
    ),
    "pointwise: exponential of integers": (
        lambda c: c.g.exp(c.t("x", 4, data_type="INT32")),
        "tensor 'x' (input) has data type INT32; expected a floating type: exp gives fractions",
    ),
    "pointwise: gradient of another dim": (
        lambda c: c.g.relu_backward(c.t("loss", 1, 4), c.t("x", 4, 4)),
        "tensor 'loss' (in0) has dim (1, 4); expected (4, 4): the gradient has the dim of the",
    ),
    "pointwise: mask that does not broadcast": (
        lambda c: c.g.binary_select(c.t("a", 4), c.t("b", 4), c.t("mask", 3)),
        "tensor 'mask' has dim (3,); expected 1 or the extent of (4,) on each axis",
    ),
    "pointwise: a missing mask": (
        lambda c: c.g.binary_select(c.t("a", 4), c.t("b", 4), None),
        "operand 'mask' (in2) is missing; binary_select takes input0, input1, mask",
    ),
    "pointwise: clips that cross": (
        lambda c: c.g.relu(c.t("x", 4), lower_clip=2.0, upper_clip=1.0),
        "lower_clip is 2.0 and upper_clip 1.0; expected lower_clip <= upper_clip",
    ),
    "pointwise: NaN slope": (
        lambda c: c.g.leaky_relu(c.t("x", 4), math.nan),
        "pointwise leaky_relu: negative_slope is nan; expected a number",
    ),
    "pointwise: softplus_beta 0": (
        lambda c: c.g.softplus(c.t("x", 4), softplus_beta=0.0),
        "softplus_beta is 0.0; expected a positive number: softplus divides by it",
    ),
    "pointwise: index of an axis that is not there": (
        lambda c: c.g.gen_index(c.t("x", 4, 4), axis=2),
        "pointwise gen_index: axis is 2; expected -2 to 1: tensor 'x' has rank 2",
    ),
}
