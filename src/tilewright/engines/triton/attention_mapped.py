"""The loop of attention for a few queries with plain scores, keys and values by the copy engine.

Little but products and exponentials is left to the threads, so that a program's code is short and
its loads are in flight after a few instructions. As ``attention_loop.attend`` otherwise.
"""

import triton
import triton.language as tl
from triton.language import core

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_loop import block_start, load_piece, pages_of


@triton.jit
def _add_keys(acc, total, top, score, values, scale):
    """The sums with more keys; ``scale`` is positive and in base 2."""
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    # exp2(-inf + inf) would be NaN; against 0 it is 0.
    level = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(score * scale - level[:, None])
    fade = tl.exp2(top - level)
    acc = dot(weights.to(values.dtype), values, acc * fade[:, None])
    return acc, total * fade + tl.sum(weights, 1), new_top


@triton.jit
def _keys(
    at_map, number, batch, key_head, first,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """One block, (BLOCK_N, WIDTH); what is beyond the operand is 0."""
    if IS_PAGED:
        block = at_map.load([number.to(tl.int32), key_head, first % PAGE, 0])
    else:
        block = at_map.load([batch, key_head, first, 0])
    return tl.reshape(block, (BLOCK_N, WIDTH))


@triton.jit
def attend_mapped(
    acc, total, top, q, k_map, v_map, v_at, v_row, v_col,
    k_pages, v_pages, k_table_row, v_table_row, v_page, batch, key_head, start, end, scale,
    BLOCK_N: tl.constexpr, D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
    UNIT: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """Keys [start, end), all within the length; ``start`` is a multiple of BLOCK_N."""
    stop = start + (end - start) // BLOCK_N * BLOCK_N
    k_number = pages_of(start, end, k_pages, k_table_row, K_PAGE, BLOCK_N, IS_PAGED)
    v_number = pages_of(start, end, v_pages, v_table_row, V_PAGE, BLOCK_N, IS_PAGED)
    for first in range(start, stop, BLOCK_N):
        first = core.to_tensor(first)
        next_k = pages_of(first + BLOCK_N, end, k_pages, k_table_row, K_PAGE, BLOCK_N, IS_PAGED)
        next_v = pages_of(first + BLOCK_N, end, v_pages, v_table_row, V_PAGE, BLOCK_N, IS_PAGED)
        k = _keys(k_map, k_number, batch, key_head, first, K_PAGE, BLOCK_N, D_BLOCK, IS_PAGED)
        v = _keys(v_map, v_number, batch, key_head, first, V_PAGE, BLOCK_N, DV_BLOCK, IS_PAGED)
        score = dot(q, k.T, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        acc, total, top = _add_keys(acc, total, top, score, v, scale)
        k_number, v_number = next_k, next_v
    if stop < end:
        # Values beyond the length may be anything, and a weight of 0 times NaN would be NaN.
        within = tl.arange(0, BLOCK_N)
        in_keys = stop + within < end
        k = _keys(k_map, k_number, batch, key_head, stop, K_PAGE, BLOCK_N, D_BLOCK, IS_PAGED)
        v_first, v_token = block_start(
            v_at, stop, within, v_row, v_number, v_page, V_PAGE, BLOCK_N, UNIT, IS_PAGED
        )
        v = load_piece(v_first, v_token, in_keys, v_col, 0, DV_BLOCK, DV, False, True)
        score = dot(q, k.T, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        score = tl.where(in_keys[None, :], score, -float("inf"))
        acc, total, top = _add_keys(acc, total, top, score, v, scale)
    return acc, total, top
