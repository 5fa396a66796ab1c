"""Float64 references, written independently of every engine, one file an operation family.

`evaluate` runs a graph; the modules hold the plain functions beneath it. References use primitive
tensor operations only, follow the device of their operands, and share no code with the engines.
"""

from __future__ import annotations

from tilewright.oracle import (
    attention,
    attention_fp8,
    attention_mxfp8,
    attention_operations,
    block_scale,
    causal_convolution,
    convolution,
    formats,
    layout,
    linear_attention,
    matmul,
    moe,
    movement,
    normalization,
    philox,
    pointwise,
    reduction,
    registry,
    rope,
    visibility,
)
from tilewright.oracle.compare import assert_close
from tilewright.oracle.evaluation import evaluate
from tilewright.oracle.registry import reference
from tilewright.oracle.tolerances import default_tolerance
from tilewright.oracle.visibility import visible_keys

__all__ = [
    "assert_close",
    "attention",
    "attention_fp8",
    "attention_mxfp8",
    "attention_operations",
    "block_scale",
    "causal_convolution",
    "convolution",
    "default_tolerance",
    "evaluate",
    "formats",
    "layout",
    "linear_attention",
    "matmul",
    "moe",
    "movement",
    "normalization",
    "philox",
    "pointwise",
    "reduction",
    "reference",
    "registry",
    "rope",
    "visibility",
    "visible_keys",
]
