"""Wrong graphs: normalizations."""

from __future__ import annotations

import math

from graph_cases.case import IMAGE, INFERENCE, Wrong
from tilewright.graph.enums import (
    norm_forward_phase,
)

HUGE = 2**62

NORMS: Wrong = {
    # Normalizations
    "norm: no phase": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8), phase=norm_forward_phase.NOT_SET)[0],
        "layernorm 'n': norm_forward_phase is NOT_SET; accepted are TRAINING, INFERENCE",
    ),
    "norm: a word as phase": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8), phase="TRAIN")[0],
        "layernorm: attribute 'norm_forward_phase' is 'TRAIN'; accepted are TRAINING, INFERENCE",
    ),
    "layernorm: scale of another rank": (
        lambda c: c.norm("layernorm", (4, 8), (8,))[0],
        "tensor 'scale' (scale) has dim (8,); expected 1 or the extent of (4, 8) on each axis",
    ),
    "layernorm: scale that does not fit": (
        lambda c: c.norm("layernorm", (4, 8), (1, 4))[0],
        "tensor 'scale' (scale) has dim (1, 4); expected 1 or the extent of (4, 8)",
    ),
    "layernorm: scale that varies nowhere": (
        lambda c: c.norm("layernorm", (4, 8), (1, 1))[0],
        "tensor 'scale' (scale) has dim (1, 1); expected the extent of the input (4, 8) on an axis",
    ),
    "layernorm: bias of another dim": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8), (1, 1))[0],
        "tensor 'bias' (bias) has dim (1, 1); expected (1, 8): bias has the scale's dim",
    ),
    "layernorm: mean of another dim": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8))[1].set_dim((1, 8)),
        "tensor 'n::mean' (mean) has dim (1, 8); expected (4, 1)",
    ),
    "layernorm: integers": (
        lambda c: c.g.layernorm(
            INFERENCE, c.t("x", 4, 8, data_type="INT8"), c.t("s", 1, 8), None, 0.1
        )[0],
        "tensor 'x' (input) has data type INT8; expected one of FLOAT, DOUBLE",
    ),
    "rmsnorm: no epsilon": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=None)[0],
        "rmsnorm 'n': the required input 'epsilon' is missing",
    ),
    "rmsnorm: negative epsilon": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=-1.0)[0],
        "(epsilon) has value -1.0; expected at least 0",
    ),
    "rmsnorm: NaN epsilon": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=math.nan)[0],
        "(epsilon) has value nan; expected at least 0",
    ),
    "rmsnorm: epsilon of eight elements": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=c.t("eps", 1, 8))[0],
        "tensor 'eps' (epsilon) has dim (1, 8); expected one element: epsilon is a scalar",
    ),
    "rmsnorm: output dim": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8))[0].set_dim((8, 4)),
        "tensor 'n::Y' (Y) has dim (8, 4); expected (4, 8): Y has the input's dim",
    ),
    "instancenorm: no spatial axis": (
        lambda c: c.norm("instancenorm", (4, 8), (1, 8))[0],
        "tensor 'x' (input) has rank 2; expected 3 to 8: N, C and spatial axes",
    ),
    "instancenorm: scale of the spatial axes": (
        lambda c: c.norm("instancenorm", IMAGE, (1, 1, 6, 6))[0],
        "tensor 'scale' (scale) has dim (1, 1, 6, 6); expected (1, 8, 1, 1): one value a channel",
    ),
    "adalayernorm: scale of another batch": (
        lambda c: c.norm("adalayernorm", (4, 10, 8), (3, 1, 8))[0],
        "tensor 'scale' (scale) has dim (3, 1, 8); expected 1 or the extent of (4, 10, 8)",
    ),
    "layernorm_backward: gradient": (
        lambda c: c.norm_backward("layernorm", (4, 9), (4, 8), (1, 8), (4, 1), (4, 1))[0],
        "tensor 'grad' (grad) has dim (4, 9); expected (4, 8): the gradient of Y",
    ),
    "instancenorm_backward: statistics": (
        lambda c: c.norm_backward(
            "instancenorm", IMAGE, IMAGE, (1, 8, 1, 1), (1, 8, 1, 1), (1, 8, 1, 1)
        )[0],
        "tensor 'mean' (mean) has dim (1, 8, 1, 1); expected (2, 8, 1, 1)",
    ),
    "adalayernorm_backward: DScale": (
        lambda c: c.norm_backward(
            "adalayernorm", (4, 5, 8), (4, 5, 8), (4, 1, 8), (4, 5, 1), (4, 5, 1)
        )[1].set_dim((1, 1, 8)),
        "tensor 'n::DScale' (DScale) has dim (1, 1, 8); expected (4, 1, 8)",
    ),
    "rmsnorm_backward: inv_variance": (
        lambda c: c.g.rmsnorm_backward(
            c.t("g", 4, 8), c.t("x", 4, 8), c.t("s", 1, 8), c.t("inv", 4, 8), has_dbias=False
        )[0],
        "tensor 'inv' (inv_variance) has dim (4, 8); expected (4, 1)",
    ),
    "batchnorm: running statistics in part": (
        lambda c: c.batchnorm(in_running_var=None)[0],
        "batchnorm 'bn': input 'in_running_var' is missing beside in_running_mean, momentum",
    ),
    "batchnorm: momentum alone": (
        lambda c: c.batchnorm(in_running_mean=None, in_running_var=None)[0],
        "input 'in_running_mean' is missing beside momentum",
    ),
    "batchnorm: momentum above 1": (
        lambda c: c.batchnorm(momentum=1.5)[0],
        "(momentum) has value 1.5; expected 0 to 1",
    ),
    "batchnorm: scale of the wrong axis": (
        lambda c: c.batchnorm(scale=c.t("s", 8, 1, 1, 1))[0],
        "tensor 's' (scale) has dim (8, 1, 1, 1); expected (1, 8, 1, 1): scale is one value",
    ),
    "batchnorm: peer of integers": (
        lambda c: c.batchnorm(peer_stats=[c.t("peer", 1, 8, 1, 1, data_type="INT32")])[0],
        "tensor 'peer' (peer_stats_0) has data type INT32; expected one of FLOAT",
    ),
    "batchnorm_inference: rank 1": (
        lambda c: c.g.batchnorm_inference(c.t("x", 8), *(c.t(n, 8) for n in "mvsb")),
        "tensor 'x' (input) has rank 1; expected 2 to 8: N, C and more axes",
    ),
    "batchnorm_backward: gradient": (
        lambda c: c.g.batchnorm_backward(
            c.t("g", 2, 8, 6), c.t("x", *IMAGE), *c.channels("s", "m", "v")
        )[0],
        "tensor 'g' (grad) has dim (2, 8, 6); expected (2, 8, 6, 6)",
    ),
}
