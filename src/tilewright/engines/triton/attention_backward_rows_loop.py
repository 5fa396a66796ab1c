"""The loop of dQ's kernel: tiles of keys, one after another, into a block of rows.

A tile makes S and dP anew, from them dS, and adds dS K to dQ.
"""

import triton
import triton.language as tl

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_backward_tiles import (
    finite_or_zero,
    tile_gradient,
    tile_keep,
    tile_probabilities,
)
from tilewright.engines.triton.attention_masks import tile_is_open


@triton.jit
def keys_pass(
    acc_q,
    q_tile,
    d_o_tile,
    lse,
    delta,
    first,
    end,
    first_row,
    keys_of,
    values_of,
    bias,
    block_mask,
    drop_mask,
    scoring,
    band,
    dropout,
    DEPTH: tl.constexpr,
    DEPTH_V: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_OPEN: tl.constexpr,
    CLEANS_KEYS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CAP_DIVIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BLOCK_MASK: tl.constexpr,
    HAS_PHILOX: tl.constexpr,
    HAS_DROP_MASK: tl.constexpr,
    THRESHOLD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the keys of [first, end), in whole tiles, to dQ.

    ``keys_of`` and ``values_of`` are where the head's keys and values begin and their steps.
    """
    k_at, k_row, k_col = keys_of
    v_at, v_row, v_col = values_of
    bias_at, bias_row, bias_col = bias
    block_mask_at, block_mask_row, block_mask_col = block_mask
    drop_mask_at, drop_mask_row, drop_mask_col = drop_mask
    len_kv = band[1]
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    row = first_row + tl.arange(0, ROWS)[:, None]
    for start in tl.range(first, end, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        is_shown = True
        if HAS_BLOCK_MASK:
            is_shown = tile_is_open(
                block_mask_at, first_row, first_row * 0 + start, block_mask_row, block_mask_col
            )
        if is_shown:
            token = key.to(tl.int64)[:, None]
            k_tile_at = k_at + token * (k_row * UNIT) + depth * k_col
            v_tile_at = v_at + token * (v_row * UNIT) + depth_v * v_col
            if IS_OPEN and DEPTH == BLOCK_DEPTH:
                k_tile = tl.load(k_tile_at)
            else:
                live = (key < len_kv)[:, None] & (depth < DEPTH)
                k_tile = tl.load(k_tile_at, mask=live, other=0.0)
            if IS_OPEN and DEPTH_V == BLOCK_DEPTH_V:
                v_tile = tl.load(v_tile_at)
            else:
                live = (key < len_kv)[:, None] & (depth_v < DEPTH_V)
                v_tile = tl.load(v_tile_at, mask=live, other=0.0)
            nothing = tl.zeros((ROWS, KEYS), dtype=tl.float32)
            products = dot(q_tile, tl.trans(k_tile), nothing)
            d_p = dot(d_o_tile, tl.trans(v_tile), nothing)
            p, cap_slope, seen = tile_probabilities(
                products,
                row,
                key[None, :],
                lse[:, None],
                scoring,
                band,
                bias_at + row.to(tl.int64) * bias_row + key.to(tl.int64)[None, :] * bias_col
                if HAS_BIAS
                else None,
                IS_OPEN,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SOFT_CAP,
                CAP_DIVIDES,
                HAS_BIAS,
                HAS_ALIBI,
            )
            if HAS_PHILOX or HAS_DROP_MASK:
                d_p = d_p * tile_keep(
                    row,
                    key[None, :],
                    seen,
                    dropout,
                    drop_mask_at
                    + row.to(tl.int64) * drop_mask_row
                    + key.to(tl.int64)[None, :] * drop_mask_col
                    if HAS_DROP_MASK
                    else None,
                    HAS_PHILOX,
                    THRESHOLD,
                )
            d_x = tile_gradient(p, d_p, delta[:, None], cap_slope, seen, IS_OPEN, HAS_SOFT_CAP)
            if CLEANS_KEYS and not IS_OPEN:
                k_tile = finite_or_zero(k_tile)
            acc_q = dot(d_x.to(k_tile.dtype), k_tile, acc_q)
    return acc_q
