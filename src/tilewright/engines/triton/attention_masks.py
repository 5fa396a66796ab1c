"""What acts on attention scores, as Triton functions that forward and backward share.

The order is: scale, soft cap, bias, ALiBi, then what is hidden (docs/operations/attention.md).
``row`` and ``col`` count within a sequence and are int32 that broadcast against the scores, so
that scores may be (queries, keys) or (keys, queries); ``head`` is a scalar or broadcasts too.
``shift`` moves a row to its diagonal: 0, or len_kv - len_q from the bottom right.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MASK_TILE = tl.constexpr(128)
# The least finite number of float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# 2**127 ln 2. Times log2(e) it is 2**127 again, so what Stats keeps of it is the same number.
_FARTHEST = tl.constexpr(1.1793288193681678e38)


@triton.jit
def in_range(x):
    """x, a bias or a sink, where it is a number no farther from 0 than is one in base 2.

    Masks are made of the least number of a type, which would be infinite times log2(e).
    """
    nearest = tl.minimum(tl.maximum(x, -_FARTHEST), _FARTHEST)
    return tl.where(tl.abs(x) < float("inf"), nearest, x)


@triton.jit
def tanh_of(x, far):
    """tanh x, which ``far`` is to a rounding of 1, with all digits of a small one."""
    square = x * x
    # The first terms of its series leave 6e-8 of x at the bound.
    near = x + x * square * (square * (square * (-17.0 / 315.0) + 2.0 / 15.0) - 1.0 / 3.0)
    return tl.where(tl.abs(x) < 0.2, near, far)


@triton.jit
def soft_cap_unit(score, inner, DIVIDES: tl.constexpr):
    """tanh of the scaled score, in [-1, 1]; its slope by the score is (1 - t * t) * inner."""
    scaled = score / inner if DIVIDES else score * inner
    # 1 - 2 / (exp(2 x) + 1): large scores give 1 and -1.
    return tanh_of(scaled, 1.0 - 2.0 / (tl.exp2(scaled * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def alibi_slope(head, SPLIT: tl.constexpr):
    """ALiBi's slope of a head; see ``attention_spec.alibi_split``."""
    number = head.to(tl.float32)
    below = (number + 1.0) * (-8.0 / SPLIT)
    above = (2.0 * (number - SPLIT) + 1.0) * (-4.0 / SPLIT)
    return tl.exp2(tl.where(head < SPLIT, below, above))


@triton.jit
def changed_scores(
    score,
    row,
    col,
    shift,
    cap_inner,
    cap_outer,
    bias_at,
    bias_inside,
    slope,
    HAS_SOFT_CAP: tl.constexpr,
    CAP_DIVIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Soft cap, bias and ALiBi on scaled scores.

    ``bias_at`` are pointers to each score's bias, read where ``bias_inside``. A bias of -inf hides
    whatever the key holds, so it overwrites.
    """
    if HAS_SOFT_CAP:
        score = soft_cap_unit(score, cap_inner, CAP_DIVIDES) * cap_outer
    if HAS_BIAS:
        bias = in_range(tl.load(bias_at, mask=bias_inside, other=0.0).to(tl.float32))
        score = tl.where(bias == -float("inf"), -float("inf"), score + bias)
    if HAS_ALIBI:
        score += slope * (col - (row + shift)).to(tl.float32)
    return score


@triton.jit
def visible(
    row,
    col,
    len_q,
    len_kv,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Which keys lie within both lengths and the diagonal band."""
    seen = (row < len_q) & (col < len_kv)
    if HAS_RIGHT:
        seen = seen & (col <= row + (shift + right))
    if HAS_LEFT:
        seen = seen & (col > row + (shift - left))
    return seen


@triton.jit
def tile_is_open(mask_at, row, col, row_step, byte_step):
    """Whether the block mask shows the 128 x 128 tile that holds (row, col); scalars or tensors.

    ``mask_at`` points to the bytes of the batch index and head; steps are in bytes, 64-bit.
    """
    tile = col // MASK_TILE
    at = mask_at + (row // MASK_TILE).to(tl.int64) * row_step + (tile // 8).to(tl.int64) * byte_step
    return ((tl.load(at).to(tl.int32) >> (tile % 8)) & 1) != 0


@triton.jit
def key_bounds(
    first_row,
    last_row,
    len_kv,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(first, end, first_full, end_full) of keys for rows first_row .. last_row, both included.

    [first, end) are keys that some of the rows sees, [first_full, end_full) those that all of
    them see, by lengths of keys and the band. Either may be empty: end <= first.
    """
    first = first_row * 0
    first_full = first
    end = first + len_kv
    end_full = end
    if HAS_RIGHT:
        end = tl.minimum(end, last_row + shift + right + 1)
        end_full = tl.minimum(end_full, first_row + shift + right + 1)
    if HAS_LEFT:
        first = tl.maximum(first, first_row + shift - left + 1)
        first_full = tl.maximum(first_full, last_row + shift - left + 1)
    return first, end, first_full, end_full


@triton.jit
def row_bounds(
    first_key,
    last_key,
    len_q,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(first, end, first_full, end_full) of rows for keys first_key .. last_key, both included.

    The counterpart of ``key_bounds``: rows that see some of the keys, and rows that see all.
    """
    first = first_key * 0
    first_full = first
    end = first + len_q
    end_full = end
    if HAS_RIGHT:
        first = tl.maximum(first, first_key - shift - right)
        first_full = tl.maximum(first_full, last_key - shift - right)
    if HAS_LEFT:
        end = tl.minimum(end, last_key - shift + left)
        end_full = tl.minimum(end_full, first_key - shift + left)
    return first, end, first_full, end_full


@triton.jit
def philox_keep(line, col, keys, seed, offset, THRESHOLD: tl.constexpr):
    """Whether dropout keeps each score: Philox4x32-10, word ``flat % 4`` of counter ``flat // 4``.

    ``line`` is ((b * Hq + h) * Sq + row), int64, and ``col`` int32, broadcasting to the scores;
    flat = line * keys + col with the declared number of keys. ``seed`` and ``offset`` are int64.
    Kept where the word is at least THRESHOLD = floor(p * 2**32). Source: Salmon et al., SC 2011.
    """
    flat = line * keys + col.to(tl.int64)
    counter = flat >> 2
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    offset_low = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, low, high, offset_low, offset_high)
    lane = flat & 3
    word = tl.where(
        lane < 2,
        tl.where(lane == 0, word_0, word_1),
        tl.where(lane == 2, word_2, word_3),
    )
    return word >= tl.full((1, 1), THRESHOLD, tl.uint32)
