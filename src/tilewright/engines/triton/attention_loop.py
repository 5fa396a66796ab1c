"""The loop of attention forward: one tile of queries over a range of keys, softmax on the way.

    S = scale q k^T, changed and masked;  m' = max(m, max S);  P = exp2(S - m')
    l = l exp2(m - m') + sum P;  acc = acc exp2(m - m') + P v

Scores, m and l are in float32 and m in base 2; P meets v in v's type, sums are in float32.
Source: FlashAttention-2 (Dao 2023). Head sizes are cut in at most two pieces, each a power of two,
so that 96 and 192 do not pay for 128 and 256.
"""

import triton
import triton.language as tl
from triton.language import core

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_masks import (
    LOG2_E,
    LOWEST,
    changed_scores,
    philox_keep,
    tile_is_open,
    visible,
)


@triton.jit
def scalar_value(value):
    """A scalar argument, given as itself or as an address."""
    # Interpreted, a number is one of Python's.
    value = core.to_tensor(value)
    if value.dtype.is_ptr():
        return tl.load(value)
    else:
        return value


@triton.jit
def load_piece(
    at,
    token,
    in_keys,
    step,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Elements FIRST .. FIRST + BLOCK of tokens ``token`` elements from ``at``, (tokens, BLOCK).

    0 beyond SIZE and, if IS_MASKED, for tokens that are not ``in_keys``.
    """
    along = FIRST + tl.arange(0, BLOCK)
    if IS_TRANSPOSED:
        pointers = at + token[None, :] + (along * step)[:, None]
        in_size = (along < SIZE)[:, None]
        is_token = in_keys[None, :]
    else:
        pointers = at + token[:, None] + (along * step)[None, :]
        in_size = (along < SIZE)[None, :]
        is_token = in_keys[:, None]
    if FIRST + BLOCK > SIZE:
        if IS_MASKED:
            return tl.load(pointers, mask=in_size & is_token, other=0.0)
        else:
            return tl.load(pointers, mask=in_size, other=0.0)
    elif IS_MASKED:
        return tl.load(pointers, mask=is_token, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def pages_of(
    first, len_kv, table, table_step,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """The page of each token of a block, int64, or the one page that holds them all.

    Entries of tokens beyond the length are not read.
    """
    if IS_PAGED and PAGE % BLOCK_N != 0:
        token = first + tl.arange(0, BLOCK_N)
        entry = table + (token // PAGE).to(tl.int64) * table_step
        return tl.load(entry, mask=token < len_kv, other=0).to(tl.int64)
    elif IS_PAGED:
        entry = table + (first // PAGE).to(tl.int64) * table_step
        return tl.load(entry, mask=first < len_kv, other=0).to(tl.int64)
    else:
        return 0


@triton.jit
def block_start(
    at, first, within, row_step, page, page_step,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """(pointer to a block of tokens, elements from there to each of its tokens)."""
    if IS_PAGED and PAGE % BLOCK_N != 0:
        in_page = ((first + within) % PAGE).to(tl.int64)
        return at, (page * page_step + in_page * row_step) * UNIT
    elif IS_PAGED:
        start = page * page_step + (first % PAGE).to(tl.int64) * row_step
        return at + start * UNIT, within.to(tl.int64) * row_step * UNIT
    else:
        start = first.to(tl.int64) * row_step
        return at + start * UNIT, within.to(tl.int64) * row_step * UNIT


@triton.jit
def weigh(score, top, total, scale, HIDES: tl.constexpr):
    """(weights, fade of what was summed so far, total, top) with a block's scores.

    ``scale`` is positive and in base 2. HIDES: scores may be -inf in a whole row.
    """
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    level = new_top
    if HIDES:
        # exp2(-inf + inf) would be NaN.
        level = tl.maximum(new_top, LOWEST)
    weights = tl.exp2(score * scale - level[:, None])
    fade = tl.exp2(top - level)
    return weights, fade, total * fade + tl.sum(weights, 1), new_top


@triton.jit
def add_product(weights, values, seen, dropped, acc, CHECKS: tl.constexpr):
    """acc + weights @ values, in which values that a row does not see do not exist.

    A weight of 0 times NaN or infinity would be NaN. Such values are rare: with CHECKS they are
    looked for, and then marked by a product of their own: n(+inf) + 256 n(-inf) + 65280 n(NaN) over
    the keys that a row sees. What dropout made 0 (``dropped``, or None) is seen, so that such a
    weight times infinity is NaN.
    """
    kind: tl.constexpr = values.dtype
    if CHECKS:
        wide = values.to(tl.float32)
        is_finite = tl.abs(wide) < float("inf")
        count = tl.sum(tl.sum((~is_finite).to(tl.int32), 1), 0)
        if count > 0:
            acc = dot(weights.to(kind), tl.where(is_finite, wide, 0.0).to(kind), acc)
            code = tl.where(wide == float("inf"), 1.0, 0.0)
            code += tl.where(wide == -float("inf"), 256.0, 0.0)
            code += tl.where(wide != wide, 65280.0, 0.0)
            marks = dot(seen.to(tl.float32).to(kind), code.to(kind), tl.zeros_like(acc))
            is_nan = marks >= 65280.0
            if dropped is not None:
                lost = (seen & dropped).to(tl.float32).to(kind)
                endless = tl.where(is_finite, 0.0, 1.0).to(kind)
                is_nan = is_nan | (dot(lost, endless, tl.zeros_like(acc)) > 0.0)
            negative = tl.floor(marks * (1.0 / 256.0))
            sees_positive = marks - negative * 256.0 > 0.0
            acc = tl.where(sees_positive, acc + float("inf"), acc)
            acc = tl.where(negative > 0.0, acc - float("inf"), acc)
            acc = tl.where(is_nan, float("nan"), acc)
        else:
            acc = dot(weights.to(kind), values, acc)
        return acc
    else:
        return dot(weights.to(kind), values, acc)


@triton.jit
def is_spoilt(acc, acc_2, HAS_SECOND: tl.constexpr):
    """True if a sum is not finite: then a value was not, which not every row need see."""
    count = tl.sum(tl.sum((~(tl.abs(acc) < float("inf"))).to(tl.int32), 1), 0)
    if HAS_SECOND:
        count += tl.sum(tl.sum((~(tl.abs(acc_2) < float("inf"))).to(tl.int32), 1), 0)
    return count > 0


@triton.jit
def rows_to_note(acc, in_rows):
    """1 for each row whose sums are not finite, else 0, for ``attention_repair``."""
    # 0 times infinity is NaN, which no number is equal to.
    is_noted = tl.sum(acc * 0.0, 1) != 0.0
    return (is_noted & in_rows).to(tl.int32)


@triton.jit
def note_rows(notes, acc, place, in_rows):
    """Store that at ``place``, (M,)."""
    tl.store(notes + place, rows_to_note(acc, in_rows))


@triton.jit
def attend(
    acc,
    acc_2,
    total,
    top,
    q,
    q_2,
    k_at,
    v_at,
    k_row,
    v_row,
    k_col,
    v_col,
    k_table,
    v_table,
    k_table_step,
    v_table_step,
    k_page,
    v_page,
    start,
    stop,
    first_row,
    row,
    len_kv,
    shift,
    left,
    right,
    scale,
    cap_inner,
    cap_outer,
    given_0,
    given_1,
    given_2,
    given_3,
    batch,
    head,
    bias_at,
    bias_col,
    slope,
    line,
    keys,
    seed,
    offset,
    drop_at,
    drop_col,
    mask_at,
    mask_row,
    mask_byte,
    in_rows,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    D_BLOCK_2: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    DV_BLOCK_2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    K_PAGE: tl.constexpr,
    V_PAGE: tl.constexpr,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CAP_DIVIDES: tl.constexpr,
    SCORE_PROGRAM: tl.constexpr,
    HAS_BLOCK_MASK: tl.constexpr,
    HAS_PHILOX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    HAS_DROP_MASK: tl.constexpr,
    FOLDS_SCALE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    CHECKS: tl.constexpr,
):
    """Keys [start, stop) for one tile of queries; returns (acc, acc_2, total, top).

    ``row`` is (M, 1); what depends on the head is a scalar or (M, 1) as well. Without IS_MASKED
    every key of the range is seen by every row, as far as lengths and the band go. Without CHECKS
    a value that is not finite makes the sums of rows that do not see it NaN: ``is_spoilt`` tells.
    ``scale`` is in base 2 if FOLDS_SCALE. ``start`` is a multiple of BLOCK_N.
    """
    has_program: tl.constexpr = SCORE_PROGRAM is not None
    changes: tl.constexpr = HAS_BIAS or HAS_ALIBI or HAS_SOFT_CAP or has_program
    within = tl.arange(0, BLOCK_N)
    k_number = pages_of(start, len_kv, k_table, k_table_step, K_PAGE, BLOCK_N, IS_PAGED)
    v_number = pages_of(start, len_kv, v_table, v_table_step, V_PAGE, BLOCK_N, IS_PAGED)
    for first in range(start, stop, BLOCK_N):
        first = core.to_tensor(first)
        col = first + within
        in_keys = col < len_kv
        # Page numbers are loaded a block ahead, so that loads of keys need not wait for them.
        next_k = pages_of(first + BLOCK_N, len_kv, k_table, k_table_step, K_PAGE, BLOCK_N, IS_PAGED)
        next_v = pages_of(first + BLOCK_N, len_kv, v_table, v_table_step, V_PAGE, BLOCK_N, IS_PAGED)
        runs = True
        if HAS_BLOCK_MASK:
            runs = tile_is_open(mask_at, first_row, first, mask_row, mask_byte)
        if runs:
            # What changes of an address is a scalar, unless a block lies in several pages.
            k_first, k_token = block_start(
                k_at, first, within, k_row, k_number, k_page, K_PAGE, BLOCK_N, UNIT, IS_PAGED
            )
            v_first, v_token = block_start(
                v_at, first, within, v_row, v_number, v_page, V_PAGE, BLOCK_N, UNIT, IS_PAGED
            )
            k = load_piece(k_first, k_token, in_keys, k_col, 0, D_BLOCK, D, True, IS_MASKED)
            score = dot(q, k, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
            if D_BLOCK_2 > 0:
                k_2 = load_piece(
                    k_first, k_token, in_keys, k_col, D_BLOCK, D_BLOCK_2, D, True, IS_MASKED
                )
                score = dot(q_2, k_2, score)
            column = col[None, :]
            if not FOLDS_SCALE:
                score = score * scale
            if has_program:
                score = SCORE_PROGRAM(
                    score, row, column, batch, head, given_0, given_1, given_2, given_3
                )
            if changes:
                inside = in_rows & in_keys[None, :]
                score = changed_scores(
                    score, row, column, shift, cap_inner, cap_outer,
                    bias_at + column.to(tl.int64) * bias_col if HAS_BIAS else 0, inside, slope,
                    HAS_SOFT_CAP, CAP_DIVIDES, HAS_BIAS, HAS_ALIBI,
                )  # fmt: skip
            if not FOLDS_SCALE:
                score = score * LOG2_E
            if IS_MASKED:
                seen = visible(
                    row, column, 2147483647, len_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
                )
                score = tl.where(seen, score, -float("inf"))
            highest = tl.max(score, 1)
            if FOLDS_SCALE:
                highest = highest * scale
            new_top = tl.maximum(top, highest)
            level = new_top
            if IS_MASKED or changes:
                # exp2(-inf + inf) would be NaN; against 0 it is 0.
                level = tl.where(new_top == -float("inf"), 0.0, new_top)
            if FOLDS_SCALE:
                weights = tl.exp2(score * scale - level[:, None])
            else:
                weights = tl.exp2(score - level[:, None])
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(weights, 1)
            top = new_top
            dropped = None
            if HAS_PHILOX:
                kept = philox_keep(line, column, keys, seed, offset, THRESHOLD)
                weights = tl.where(kept, weights, 0.0)
                dropped = ~kept
            if HAS_DROP_MASK:
                drop_inside = in_rows & in_keys[None, :]
                factor = tl.load(
                    drop_at + column.to(tl.int64) * drop_col, mask=drop_inside, other=0.0
                )
                weights = weights * factor.to(tl.float32)
                dropped = factor == 0.0
            acc = acc * fade[:, None]
            v = load_piece(v_first, v_token, in_keys, v_col, 0, DV_BLOCK, DV, False, IS_MASKED)
            is_seen = score != -float("inf")
            acc = add_product(weights, v, is_seen, dropped, acc, CHECKS)
            if DV_BLOCK_2 > 0:
                acc_2 = acc_2 * fade[:, None]
                v_2 = load_piece(
                    v_first, v_token, in_keys, v_col, DV_BLOCK, DV_BLOCK_2, DV, False, IS_MASKED
                )
                acc_2 = add_product(weights, v_2, is_seen, dropped, acc_2, CHECKS)
        k_number, v_number = next_k, next_v
    return acc, acc_2, total, top
