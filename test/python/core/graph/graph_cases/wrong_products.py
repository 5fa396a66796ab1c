"""Wrong graphs: products, convolutions, reductions and statistics."""

from __future__ import annotations

from graph_cases.case import IMAGE, Wrong
from tilewright.graph.enums import (
    reduction_mode,
)

HUGE = 2**62

PRODUCTS: Wrong = {
    # Products
    "matmul: rank 1": (
        lambda c: c.g.matmul(c.t("A", 4), c.t("B", 4, 4)),
        "matmul: tensor 'A' (A) has rank 1; expected 2 to 8: a matrix, with leading batch axes",
    ),
    "matmul: different ranks": (
        lambda c: c.g.matmul(c.t("A", 2, 4, 4), c.t("B", 4, 4), name="p"),
        "matmul 'p': tensor 'B' (B) has rank 2; expected 3: A and B have the same rank",
    ),
    "matmul: inner extents": (
        lambda c: c.g.matmul(c.t("A", 4, 5), c.t("B", 4, 5)),
        "tensor 'B' (B) has dim (4, 5); expected 5 rows: the inner extents of A (4, 5) and B agree",
    ),
    "matmul: batch": (
        lambda c: c.g.matmul(c.t("A", 4, 2, 2), c.t("B", 3, 2, 2)),
        "its batch axes do not broadcast with A's (4, 2, 2)",
    ),
    "matmul: output dim": (
        lambda c: c.g.matmul(c.t("A", 4, 5), c.t("B", 5, 6), name="p").set_dim((4, 7)),
        "tensor 'p::C' (C) has dim (4, 7); expected (4, 6)",
    ),
    "moe: token batch": (
        lambda c: c.moe(token=c.t("token", 2, 5, 8)),
        "tensor 'token' (token) has dim (2, 5, 8); expected 1 on axis 0",
    ),
    "moe: inner extents": (
        lambda c: c.moe(weight=c.t("w", 3, 9, 16)),
        "tensor 'w' (weight) has dim (3, 9, 16); expected 8 on axis 1",
    ),
    "moe: offsets": (
        lambda c: c.moe(first_token_offset=c.t("o", 5, 1, 1, data_type="INT32")),
        "tensor 'o' (first_token_offset) has dim (5, 1, 1); expected (3 or 4, 1, 1)",
    ),
    "moe: fractional offsets": (
        lambda c: c.moe(first_token_offset=c.t("o", 3, 1, 1)),
        "tensor 'o' (first_token_offset) has data type FLOAT; expected one of INT32, INT64",
    ),
    "moe: gather without index": (
        lambda c: c.moe("GATHER"),
        "moe_grouped_matmul 'moe': input 'token_index' is missing; mode GATHER takes it",
    ),
    "moe: index without gather": (
        lambda c: c.moe(token_index=c.t("i", 1, 4, 1, data_type="INT32")),
        "tensor 'i' (token_index) is given in mode NONE",
    ),
    "moe: scatter of too few": (
        lambda c: c.moe("SCATTER", token_index=c.t("i", 1, 4, 1, data_type="INT32")),
        "tensor 'i' (token_index) has dim (1, 4, 1); expected (1, 10, 1)",
    ),
    "moe: negative top_k": (lambda c: c.moe(top_k=-1), "top_k is -1; expected at least 0"),
    "moe: output rows": (
        lambda c: c.moe().set_dim((1, 11, 16)),
        "tensor 'moe::out' (out) has dim (1, 11, 16); expected (1, 10, 16)",
    ),
    "moe_bwd: rows": (
        lambda c: c.g.moe_grouped_matmul_bwd(
            c.t("dy", 1, 9, 16), c.t("token", 1, 10, 8), c.t("o", 3, 1, 1, data_type="INT32")
        ),
        "tensor 'dy' (doutput) has dim (1, 9, 16); expected 10 on axis 1",
    ),
    # Convolutions
    "conv: no spatial axis": (
        lambda c: c.g.conv_fprop(c.t("x", 2, 8), c.t("w", 4, 8)),
        "conv_fprop: tensor 'x' (image) has rank 2; expected 3 to 5",
    ),
    "conv: different ranks": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3)),
        "tensor 'w' (weight) has rank 3; expected 4",
    ),
    "conv: channels": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 3, 3, 3)),
        "tensor 'w' (weight) has dim (4, 3, 3, 3); expected a divisor of 8 on axis 1",
    ),
    "conv: groups": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 6, 2, 3, 3)),
        "tensor 'w' (weight) has dim (6, 2, 3, 3); expected a multiple of 4 on axis 0",
    ),
    "conv: empty filter": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 0, 3)),
        "tensor 'w' (weight) has dim (4, 8, 0, 3); expected at least 1 on each spatial axis",
    ),
    "conv: filter larger than the image": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), dilation=[1, 3]),
        "with dilation (1, 3) it is larger than the padded image (2, 8, 6, 6) on axis 3",
    ),
    "conv: entries of stride": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), stride=[1, 1, 1]),
        "stride is (1, 1, 1); expected 2 entries, one a spatial axis of rank 4",
    ),
    "conv: stride 0": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), stride=[1, 0]),
        "stride is (1, 0); expected at least 1 on each axis",
    ),
    "conv: negative padding": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), padding=-1),
        "pre_padding is (-1, -1); expected at least 0 on each axis",
    ),
    "conv: fractional dilation": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), dilation=[1.5, 1]),
        "conv_fprop: attribute 'dilation' is 1.5; expected an integer",
    ),
    "conv: both paddings": (
        lambda c: c.g.conv_fprop(
            c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), padding=1, post_padding=[1, 1]
        ),
        "conv_fprop: padding is given beside pre_padding or post_padding",
    ),
    "conv: output dim": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), name="c").set_dim(IMAGE),
        "tensor 'c::out' (out) has dim (2, 8, 6, 6); expected (2, 4, 4, 4)",
    ),
    "dgrad: no dim": (
        lambda c: c.g.conv_dgrad(c.t("dy", 2, 4, 4, 4), c.t("w", 4, 8, 3, 3), name="c"),
        "conv_dgrad 'c': tensor 'c::out' (out) has no dim; call set_dim",
    ),
    "dgrad: image that gives another loss": (
        lambda c: c.g.conv_dgrad(c.t("dy", 2, 4, 4, 4), c.t("w", 4, 8, 3, 3)).set_dim((2, 8, 9, 6)),
        "tensor 'dy' (loss) has dim (2, 4, 4, 4); expected (2, 4, 7, 4)",
    ),
    "dgrad: image of another rank": (
        lambda c: c.g.conv_dgrad(c.t("dy", 2, 4, 4, 4), c.t("w", 4, 8, 3, 3)).set_dim((2, 8, 6)),
        "tensor 'w' (filter) has rank 4; expected 3",
    ),
    "wgrad: no dim": (
        lambda c: c.g.conv_wgrad(c.t("x", *IMAGE), c.t("dy", 2, 4, 4, 4)),
        "(out) has no dim; call set_dim: several filter extents give one loss",
    ),
    "wgrad: filter that gives another loss": (
        lambda c: c.g.conv_wgrad(c.t("x", *IMAGE), c.t("dy", 2, 4, 4, 4)).set_dim((4, 8, 5, 3)),
        "tensor 'dy' (loss) has dim (2, 4, 4, 4); expected (2, 4, 2, 4)",
    ),
    # Reductions and statistics
    "reduction: no dim": (
        lambda c: c.g.reduction(c.t("x", 4, 4), reduction_mode.ADD),
        "(out) has no dim; call set_dim: extent 1 marks the reduced axes",
    ),
    "reduction: no mode": (
        lambda c: c.g.reduction(c.t("x", 4, 4)).set_dim((4, 1)),
        "reduction: mode is NOT_SET; accepted are ADD, MUL, MIN",
    ),
    "reduction: unknown mode": (
        lambda c: c.g.reduction(c.t("x", 4, 4), "SUM"),
        "reduction: attribute 'mode' is 'SUM'; accepted are ADD, MUL",
    ),
    "reduction: part of an axis": (
        lambda c: c.g.reduction(c.t("x", 4, 4), reduction_mode.ADD).set_dim((4, 2)),
        "(out) has dim (4, 2); expected 1 or the extent of (4, 4) on each axis",
    ),
    "reduction: another rank": (
        lambda c: c.g.reduction(c.t("x", 4, 4), reduction_mode.ADD).set_dim((4,)),
        "(out) has dim (4,); expected 1 or the extent of (4, 4) on each axis",
    ),
    "genstats: rank 1": (
        lambda c: c.g.genstats(c.t("x", 4))[0],
        "genstats: tensor 'x' (input) has rank 1; expected 2 to 8: N, C and more axes",
    ),
    "genstats: integers": (
        lambda c: c.g.genstats(c.t("x", 4, 4, data_type="INT32"))[0],
        "tensor 'x' (input) has data type INT32; expected one of FLOAT, DOUBLE",
    ),
    "genstats: sum of another dim": (
        lambda c: c.g.genstats(c.t("x", *IMAGE), name="s")[0].set_dim((1, 1, 6, 6)),
        "tensor 's::SUM' (SUM) has dim (1, 1, 6, 6); expected (1, 8, 1, 1)",
    ),
}
