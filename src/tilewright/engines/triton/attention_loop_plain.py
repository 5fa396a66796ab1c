"""Loops of attention forward for plain scores, scaled and masked by lengths and a band alone.

The sums are those of ``attention_loop.py``. ``attend_ahead`` asks for a product early;
``attend_in_order`` is for several programs a multiprocessor, of which one multiplies beside the
others' exponentials.
"""

import triton
import triton.language as tl
from triton.language import core

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_assembly import hide_after, hide_before, settled
from tilewright.engines.triton.attention_level import first_level
from tilewright.engines.triton.attention_loop import load_piece, weigh
from tilewright.engines.triton.attention_masks import LOWEST, visible


@triton.jit
def raw_scores(
    q, q_2, k_at, k_map, k_row, k_col, batch, key_head, first, len_kv,
    D: tl.constexpr, D_BLOCK: tl.constexpr, D_BLOCK_2: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """q k^T for the keys of one block, through a tensor map if there is one.

    Keys beyond the length may be anything in bounds of the operand; their scores are not used.
    """
    if k_map is not None:
        block = k_map.load([batch, key_head, first, 0])
        k = tl.reshape(block, (BLOCK_N, D_BLOCK)).T
    else:
        within = tl.arange(0, BLOCK_N)
        token = within.to(tl.int64) * k_row * UNIT
        at = k_at + first.to(tl.int64) * k_row * UNIT
        k = load_piece(at, token, first + within < len_kv, k_col, 0, D_BLOCK, D, True, True)
    score = dot(q, k, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
    if D_BLOCK_2 > 0:
        k_2 = load_piece(
            at, token, first + within < len_kv, k_col, D_BLOCK, D_BLOCK_2, D, True, True
        )
        score = dot(q_2, k_2, score)
    return score


@triton.jit
def attend_ahead(
    acc, acc_2, total, top, q, q_2, k_at, v_at, k_map, v_map, k_row, v_row, k_col, v_col,
    batch, key_head, start, stop, end, row, len_kv, shift, left, right, scale,
    D: tl.constexpr, DV: tl.constexpr,
    D_BLOCK: tl.constexpr, D_BLOCK_2: tl.constexpr,
    DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_WHOLE: tl.constexpr,
    MASKS_ALL: tl.constexpr,
):  # fmt: skip
    """Keys [start, end) of plain scores, those of [start, stop) seen by every row; as ``attend``.

    The product for a block is asked for before the softmax of the one before it. For SM90 Triton
    3.6 and 3.7 wait for it at once, and for the product with V that is under way as well: one wait
    for both is what is gained there. ``scale`` is positive and in base 2. IS_WHOLE: no length
    is given, so that what is beyond the last key is beyond the operand, where a map gives 0.
    MASKS_ALL: the band is so narrow that masks everywhere cost less than loops of their own at the
    edges; ``stop`` is ``end`` then.
    """
    within = tl.arange(0, BLOCK_N)
    v_token = within.to(tl.int64) * v_row * UNIT
    score = raw_scores(
        q, q_2, k_at, k_map, k_row, k_col, batch, key_head, start, len_kv,
        D, D_BLOCK, D_BLOCK_2, BLOCK_N, UNIT,
    )  # fmt: skip
    for first in range(start, stop, BLOCK_N):
        first = core.to_tensor(first)
        next_score = raw_scores(
            q, q_2, k_at, k_map, k_row, k_col, batch, key_head, first + BLOCK_N, len_kv,
            D, D_BLOCK, D_BLOCK_2, BLOCK_N, UNIT,
        )  # fmt: skip
        if MASKS_ALL:
            seen = visible(
                row, (first + within)[None, :], 2147483647, len_kv, shift, left, right,
                HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        level = new_top
        if MASKS_ALL:
            level = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(score * scale - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        top = new_top
        acc = acc * fade[:, None]
        if v_map is not None:
            v = tl.reshape(v_map.load([batch, key_head, first, 0]), (BLOCK_N, DV_BLOCK))
        else:
            at = v_at + first.to(tl.int64) * v_row * UNIT
            in_keys = first + within < len_kv
            v = load_piece(at, v_token, in_keys, v_col, 0, DV_BLOCK, DV, False, MASKS_ALL)
        acc = dot(weights.to(v.dtype), v, acc)
        if DV_BLOCK_2 > 0:
            v_2 = load_piece(
                at, v_token, in_keys, v_col, DV_BLOCK, DV_BLOCK_2, DV, False, MASKS_ALL
            )
            acc_2 = dot(weights.to(v.dtype), v_2, acc_2 * fade[:, None])
        score = next_score
    for first in range(stop, end, BLOCK_N):
        first = core.to_tensor(first)
        col = first + within
        seen = visible(
            row, col[None, :], 2147483647, len_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
        )
        score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        level = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(score * scale - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        top = new_top
        if v_map is not None and IS_WHOLE:
            v = tl.reshape(v_map.load([batch, key_head, first, 0]), (BLOCK_N, DV_BLOCK))
        else:
            at = v_at + first.to(tl.int64) * v_row * UNIT
            in_keys = col < len_kv
            v = load_piece(at, v_token, in_keys, v_col, 0, DV_BLOCK, DV, False, True)
        acc = dot(weights.to(v.dtype), v, acc * fade[:, None])
        if DV_BLOCK_2 > 0:
            v_2 = load_piece(at, v_token, in_keys, v_col, DV_BLOCK, DV_BLOCK_2, DV, False, True)
            acc_2 = dot(weights.to(v.dtype), v_2, acc_2 * fade[:, None])
        if first + BLOCK_N < end:
            score = raw_scores(
                q, q_2, k_at, k_map, k_row, k_col, batch, key_head, first + BLOCK_N, len_kv,
                D, D_BLOCK, D_BLOCK_2, BLOCK_N, UNIT,
            )  # fmt: skip
    return acc, acc_2, total, top


@triton.jit
def attend_in_order(
    acc, total, top, q, k_at, v_at, k_map, v_map, k_row, v_row, k_col, v_col,
    batch, key_head, start, end, open_start, open_end, row, len_kv, shift, left, right, scale,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_WHOLE: tl.constexpr,
    MASKS_END: tl.constexpr, SETTLES: tl.constexpr, KEEPS_LEVEL: tl.constexpr,
):  # fmt: skip
    """Keys [start, end) of plain scores, one product after the other; as ``attend``.

    For tiles of few warps, of which several share a multiprocessor: one multiplies while another
    takes exponentials. All blocks are in one loop, so that its loads never drain; keys within
    [open_start, open_end) are seen by every row. MASKS_END: the last block may pass the last key.
    SETTLES: no product is under way beside the next block's scores. KEEPS_LEVEL: ``top`` is a level
    for all weights of a row (``attention_level``), and not its greatest score. ``scale`` and
    IS_WHOLE are those of ``attend_ahead``.
    """
    within = tl.arange(0, BLOCK_N)
    v_token = within.to(tl.int64) * v_row * UNIT
    # A row sees the keys low .. high.
    low, high = row + (shift - left + 1), row * 0 + (len_kv - 1)
    if HAS_RIGHT:
        high = tl.minimum(row + (shift + right), len_kv - 1)
    for first in range(start, end, BLOCK_N):
        first = core.to_tensor(first)
        score = raw_scores(
            q, q, k_at, k_map, k_row, k_col, batch, key_head, first, len_kv,
            D, D_BLOCK, 0, BLOCK_N, UNIT,
        )  # fmt: skip
        if HAS_RIGHT or MASKS_END:
            score = hide_after(score, first, within[None, :], high, first + BLOCK_N <= open_end)
        if HAS_LEFT:
            score = hide_before(score, first, within[None, :], low, first >= open_start)
        if KEEPS_LEVEL:
            top = first_level(score, top, scale)
            level = tl.maximum(top, LOWEST)
            weights = tl.exp2(score * scale - level[:, None])
            total = total + tl.sum(weights, 1)
        else:
            hides: tl.constexpr = HAS_LEFT or HAS_RIGHT or MASKS_END
            weights, fade, total, top = weigh(score, top, total, scale, hides)
            acc = acc * fade[:, None]
        weights = weights.to(q.dtype)
        if v_map is not None and IS_WHOLE:
            v = tl.reshape(v_map.load([batch, key_head, first, 0]), (BLOCK_N, DV_BLOCK))
        else:
            at = v_at + first.to(tl.int64) * v_row * UNIT
            in_keys = first + within < len_kv
            v = load_piece(at, v_token, in_keys, v_col, 0, DV_BLOCK, DV, False, True)
        acc = dot(weights, v, acc)
        if SETTLES:
            acc = settled(acc)
    return acc, total, top
