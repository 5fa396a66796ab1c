"""Tiles of attention's backward, as Triton functions that its kernels share.

With S the changed scores, P = exp(S - Stats), M the dropout factor and Delta = rowsum(dO * O):

    dP = M (dO V^T),   dS = P (dP - Delta),   dV = (M P)^T dO,
    dX = dS * slope of the soft cap,   dK = scale dX^T Q,   dQ = scale dX K.

``row`` and ``col`` are int32 that broadcast against the tile, so a tile may be (queries, keys) or
(keys, queries). Row statistics come in base 2 and are +inf where a row sees nothing, which makes
P zero there.

What goes together is handed on together:

    scoring     scale, the two factors of the soft cap, ALiBi's slope of the head
    band        queries and keys of the sequence, shift of the diagonal, left and right bound
    dropout     (b * Hq + h) * Sq as int64, keys of a line, seed, offset, scale of what is kept
    bias, ...   where the head's elements begin, steps of rows and of keys; None if not given
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import (
    LOG2_E,
    in_range,
    philox_keep,
    tanh_of,
    visible,
)


@triton.jit
def soft_cap_factors(cap_inner, cap_outer):
    """The factors of a soft cap, 1 for one that is not given."""
    inner, outer = 1.0, 1.0
    if cap_inner is not None:
        inner = scalar_value(cap_inner).to(tl.float32)
    if cap_outer is not None:
        outer = scalar_value(cap_outer).to(tl.float32)
    return inner, outer


@triton.jit
def at_head(pointer, batch, head, batch_step, head_step):
    """Where a head's elements of an operand begin."""
    return pointer + batch.to(tl.int64) * batch_step + head.to(tl.int64) * head_step


@triton.jit
def tile_probabilities(
    products,
    row,
    col,
    lse,
    scoring,
    band,
    bias_at,
    IS_OPEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CAP_DIVIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """(P, slope of the soft cap by the scaled score, which scores are visible).

    ``products`` is Q K^T without the scale, or its transpose. An open tile hides nothing: its
    third result is meaningless, as the second is without a soft cap.
    """
    scale, cap_inner, cap_outer, slope = scoring
    len_q, len_kv, shift, left, right = band
    seen = row < len_q
    if not IS_OPEN:
        seen = visible(row, col, len_q, len_kv, shift, left, right, HAS_LEFT, HAS_RIGHT)
    cap_slope = 1.0
    if HAS_SOFT_CAP:
        scaled = products * scale
        inner = scaled / cap_inner if CAP_DIVIDES else scaled * cap_inner
        # With e = exp(-2 |x|): tanh|x| = (1 - e) / (1 + e), and its slope 4 e / (1 + e)^2 keeps
        # its digits where 1 - tanh^2 has none left.
        fade = tl.exp2(tl.abs(inner) * (-2.0 * LOG2_E))
        share = 1.0 / (1.0 + fade)
        unit = (1.0 - fade) * share
        score = tanh_of(inner, tl.where(inner < 0.0, -unit, unit)) * (cap_outer * LOG2_E)
        cap_slope = 4.0 * fade * share * share
        cap_slope *= cap_outer / cap_inner if CAP_DIVIDES else cap_outer * cap_inner
    else:
        score = products * (scale * LOG2_E)
    if HAS_BIAS:
        bias = in_range(tl.load(bias_at, mask=seen, other=0.0).to(tl.float32))
        seen = seen & (bias != -float("inf"))
        score += bias * LOG2_E
    if HAS_ALIBI:
        score += (slope * LOG2_E) * (col - (row + shift)).to(tl.float32)
    p = tl.exp2(score - lse)
    if not IS_OPEN:
        # What is hidden is overwritten: a key that a row cannot see may hold anything.
        p = tl.where(seen, p, 0.0)
    return p, cap_slope, seen


@triton.jit
def tile_gradient(p, d_p, delta, cap_slope, seen, IS_OPEN: tl.constexpr, BEFORE_CAP: tl.constexpr):
    """dS, the gradient by the changed scores, or dX, by those before the soft cap."""
    gradient = p * (d_p - delta)
    if BEFORE_CAP:
        gradient = gradient * cap_slope
    if not IS_OPEN:
        gradient = tl.where(seen, gradient, 0.0)
    return gradient


@triton.jit
def tile_keep(
    row,
    col,
    inside,
    dropout,
    mask_at,
    HAS_PHILOX: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """The dropout factor of each score."""
    line, keys, seed, offset, keep_scale = dropout
    if HAS_PHILOX:
        keep = philox_keep(line + row.to(tl.int64), col, keys, seed, offset, THRESHOLD)
        return tl.where(keep, keep_scale, 0.0)
    else:
        return tl.load(mask_at, mask=inside, other=0.0).to(tl.float32) * keep_scale


@triton.jit
def finite_or_zero(tile):
    """The tile with NaN and infinity replaced: a hidden key must not matter times a 0."""
    return tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), tile, 0.0).to(tile.dtype)
