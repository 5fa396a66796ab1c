"""The functions that generated kernels call: activations, their slopes, and conversions.

On float32 or float64 blocks unless said otherwise. The formulas are those of
docs/operations/pointwise.md. Near infinity a gate of 0 must not meet an infinite operand: operands
are held to +-1e4 there, from where on gates are 0 or 1 to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.engines.triton import device_math
from tilewright.engines.triton.device_math import (
    cast,
    erf,
    exp,
    expm1,
    log1p,
    narrow,
    quick_gate,
    quick_tail,
    quotient,
    root,
)

_GATE_IS_CONSTANT_FROM = tl.constexpr(1e4)
_HALF_ROOT = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_GELU_LINEAR = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def larger(a, b):
    """The maximum; NaN if either is."""
    if a.dtype.is_fp32():
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.where((a >= b) | (a != a), a, b)
    return result


@triton.jit
def smaller(a, b):
    """The minimum; NaN if either is."""
    if a.dtype.is_fp32():
        result = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.where((a <= b) | (a != a), a, b)
    return result


@triton.jit
def at_least(x, LOW: tl.constexpr):
    if x.dtype.is_fp32():
        result = tl.maximum(x, LOW, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.where(x < LOW, LOW, x)
    return result


@triton.jit
def at_most(x, HIGH: tl.constexpr):
    if x.dtype.is_fp32():
        result = tl.minimum(x, HIGH, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = tl.where(x > HIGH, HIGH, x)
    return result


@triton.jit
def negative(x):
    # 0 - x, which a minus sign means, gives the wrong zero.
    return x * -1.0


@triton.jit
def reciprocal(x):
    return quotient(tl.full(x.shape, 1.0, x.dtype), x)


@triton.jit
def inverse_root(x):
    return reciprocal(root(x))


@triton.jit
def sigmoid(x):
    if x.dtype.is_fp64():
        result = 1.0 / (1.0 + exp(x * -1.0))
    else:
        result = quick_gate(x)
    return result


@triton.jit
def normal_share(x):
    """The normal distribution function."""
    if x.dtype.is_fp64():
        result = 0.5 + 0.5 * erf(x * _HALF_ROOT)
    else:
        tail = quick_tail(tl.abs(x))
        result = tl.where(x < 0.0, tail, 1.0 - tail)
    return result


@triton.jit
def softplus(x, BETA: tl.constexpr):
    scaled = x * BETA
    return (at_least(scaled, 0.0) + log1p(exp(tl.abs(scaled) * -1.0))) * (1.0 / BETA)


@triton.jit
def softplus_slope(x, BETA: tl.constexpr):
    return sigmoid(x * BETA)


@triton.jit
def swish(x, BETA: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    # Beyond LOW and HIGH, of which one is infinite, the gate is 0.
    if LOW > float("-inf"):
        x = at_least(x, LOW)
    if HIGH < float("inf"):
        x = at_most(x, HIGH)
    return x * sigmoid(x * BETA)


@triton.jit
def swish_slope(x, BETA: tl.constexpr):
    scaled = at_most(at_least(x * BETA, -_GATE_IS_CONSTANT_FROM), _GATE_IS_CONSTANT_FROM)
    return sigmoid(scaled) * (1.0 + scaled * sigmoid(scaled * -1.0))


@triton.jit
def elu(x, ALPHA: tl.constexpr):
    return tl.where(x > 0.0, x, expm1(at_most(x, 0.0)) * ALPHA)


@triton.jit
def elu_slope(x, ALPHA: tl.constexpr):
    return tl.where(x > 0.0, 1.0, exp(at_most(x, 0.0)) * ALPHA)


@triton.jit
def gelu(x):
    held = at_least(x, -_GATE_IS_CONSTANT_FROM)
    return held * normal_share(held)


@triton.jit
def gelu_slope(x):
    held = at_most(at_least(x, -_GATE_IS_CONSTANT_FROM), _GATE_IS_CONSTANT_FROM)
    density = exp(held * held * -0.5) * _DENSITY
    return normal_share(held) + held * density


@triton.jit
def gelu_approx_tanh(x):
    # (1 + tanh u) / 2 is sigmoid(2 u).
    held = at_least(x, -_GATE_IS_CONSTANT_FROM)
    bend = (held + held * held * held * _GELU_CUBIC) * (2.0 * _GELU_LINEAR)
    return held * sigmoid(bend)


@triton.jit
def gelu_approx_tanh_slope(x):
    held = at_most(at_least(x, -_GATE_IS_CONSTANT_FROM), _GATE_IS_CONSTANT_FROM)
    square = held * held
    bend = (held + square * held * _GELU_CUBIC) * (2.0 * _GELU_LINEAR)
    inner = (1.0 + square * (3.0 * _GELU_CUBIC)) * (2.0 * _GELU_LINEAR)
    gate = sigmoid(bend)
    return gate + held * gate * sigmoid(bend * -1.0) * inner


@triton.jit
def sigmoid_slope(x):
    return sigmoid(x) * sigmoid(x * -1.0)


@triton.jit
def tanh_slope(x):
    # 1 - tanh(x)^2 cancels near 1; this product is equal and does not.
    return 4.0 * sigmoid(x * 2.0) * sigmoid(x * -2.0)


@triton.jit
def relu(x, SLOPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    if SLOPE == 0.0:
        below = tl.where(x != x, x, LOW)
    else:
        below = LOW + SLOPE * (x - LOW)
    return tl.where(x > LOW, at_most(x, HIGH), below)


@triton.jit
def relu_slope(x, SLOPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    if HIGH == float("inf"):
        inside = tl.full(x.shape, 1.0, x.dtype)
    else:
        inside = tl.where(x < HIGH, 1.0, 0.0).to(x.dtype)
    return tl.where(x > LOW, inside, SLOPE)


@triton.jit
def saturated(value, TYPE: tl.constexpr, LIMIT: tl.constexpr):
    """To an 8-bit floating type, held to +-LIMIT; NaN stays NaN."""
    return narrow(at_most(at_least(value, -LIMIT), LIMIT), TYPE)


@triton.jit
def to_integer(value, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Floating to int64, toward zero, held to [LOW, HIGH]; NaN gives 0."""
    held = at_most(at_least(tl.where(value != value, 0.0, value), LOW), HIGH)
    return cast(held, tl.int64)


@triton.jit
def to_int64(value):
    """float64 to int64, toward zero and saturating; NaN gives 0."""
    # 2^63 - 1 is no float64: the largest one below it, and the limit itself put in afterwards.
    whole = to_integer(value, -9223372036854775808.0, 9223372036854774784.0)
    return tl.where(value >= 9223372036854775808.0, 9223372036854775807, whole)


@triton.jit
def within(value, LOW: tl.constexpr, HIGH: tl.constexpr):
    """int64 held to [LOW, HIGH]."""
    return tl.minimum(tl.maximum(value, LOW), HIGH)


@triton.jit
def average(total, COUNT: tl.constexpr):
    return quotient(total, tl.full(total.shape, COUNT, total.dtype))


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _larger_of(a, b):
    return larger(a, b)


@triton.jit
def _smaller_of(a, b):
    return smaller(a, b)


@triton.jit
def _row_sum(block):
    return tl.sum(block, axis=1, keep_dims=True)


@triton.jit
def _row_product(block):
    return tl.reduce(block, 1, _multiply, keep_dims=True)


@triton.jit
def _row_max(block):
    return tl.reduce(block, 1, _larger_of, keep_dims=True)


@triton.jit
def _row_min(block):
    return tl.reduce(block, 1, _smaller_of, keep_dims=True)


# Reductions of a block along its second axis, which is kept with extent 1.
if device_math.IS_INTERPRETED:
    row_sum, row_product, row_max, row_min = device_math.row_reductions()
else:
    row_sum, row_product, row_max, row_min = _row_sum, _row_product, _row_max, _row_min
