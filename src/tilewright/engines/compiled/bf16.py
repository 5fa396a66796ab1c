"""Matrix products that mean the same under Triton's interpreter as on a GPU.

The interpreter holds bfloat16 as raw 16-bit integers and multiplies those in ``tl.dot``. Widening
both operands to float32 there is exact: products of two bfloat16 are, and sums are in float32.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 operands are multiplied as such, without TF32."""
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
