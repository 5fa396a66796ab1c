"""The loop of dK and dV's kernel: tiles of rows, one after another, into a block of keys.

A tile makes S and dP anew, from them P and dS, and adds P^T dO to dV and dS^T Q to dK.
"""

import triton
import triton.language as tl

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_backward_tiles import (
    tile_gradient,
    tile_keep,
    tile_probabilities,
)
from tilewright.engines.triton.attention_masks import tile_is_open


@triton.jit
def rows_pass(
    acc_k,
    acc_v,
    k_tile,
    v_tile,
    first,
    end,
    first_seen,
    end_seen,
    first_key,
    query,
    gradient,
    statistics,
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
    IS_EVEN: tl.constexpr,
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
    """Add the rows of [first, end), in whole tiles, to the accumulators.

    ``query`` and ``gradient`` are where the head's rows begin and their steps; ``statistics`` where
    its log-sum-exps and deltas begin.
    """
    q_at, q_row, q_col = query
    d_o_at, d_o_row, d_o_col = gradient
    lse_at, delta_at = statistics
    bias_at, bias_row, bias_col = bias
    block_mask_at, block_mask_row, block_mask_col = block_mask
    drop_mask_at, drop_mask_row, drop_mask_col = drop_mask
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    key = first_key + tl.arange(0, KEYS)[:, None]
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        is_shown = True
        if HAS_BLOCK_MASK:
            is_shown = tile_is_open(
                block_mask_at, first_key * 0 + start, first_key, block_mask_row, block_mask_col
            )
        if is_shown:
            token = row.to(tl.int64)[:, None]
            q_tile_at = q_at + token * (q_row * UNIT) + depth * q_col
            d_o_tile_at = d_o_at + token * (d_o_row * UNIT) + depth_v * d_o_col
            lse = tl.load(lse_at + row)
            delta = tl.load(delta_at + row)
            if IS_EVEN and IS_OPEN and DEPTH == BLOCK_DEPTH:
                q_tile = tl.load(q_tile_at)
            else:
                live = ((row >= first_seen) & (row < end_seen))[:, None] & (depth < DEPTH)
                if HAS_BIAS or HAS_BLOCK_MASK:
                    # A row that sees nothing gives nothing, whatever it holds.
                    live = live & (lse < float("inf"))[:, None]
                q_tile = tl.load(q_tile_at, mask=live, other=0.0)
            if IS_EVEN and IS_OPEN and DEPTH_V == BLOCK_DEPTH_V:
                d_o_tile = tl.load(d_o_tile_at)
            else:
                live = ((row >= first_seen) & (row < end_seen))[:, None] & (depth_v < DEPTH_V)
                if HAS_BIAS or HAS_BLOCK_MASK:
                    live = live & (lse < float("inf"))[:, None]
                d_o_tile = tl.load(d_o_tile_at, mask=live, other=0.0)
            nothing = tl.zeros((KEYS, ROWS), dtype=tl.float32)
            products = dot(k_tile, tl.trans(q_tile), nothing)
            d_p = dot(v_tile, tl.trans(d_o_tile), nothing)
            p, cap_slope, seen = tile_probabilities(
                products,
                row[None, :],
                key,
                lse[None, :],
                scoring,
                band,
                bias_at + row.to(tl.int64)[None, :] * bias_row + key.to(tl.int64) * bias_col
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
            p_kept = p
            if HAS_PHILOX or HAS_DROP_MASK:
                keep = tile_keep(
                    row[None, :],
                    key,
                    seen,
                    dropout,
                    drop_mask_at
                    + row.to(tl.int64)[None, :] * drop_mask_row
                    + key.to(tl.int64) * drop_mask_col
                    if HAS_DROP_MASK
                    else None,
                    HAS_PHILOX,
                    THRESHOLD,
                )
                p_kept = p * keep
                d_p = d_p * keep
            acc_v = dot(p_kept.to(d_o_tile.dtype), d_o_tile, acc_v)
            d_x = tile_gradient(p, d_p, delta[None, :], cap_slope, seen, IS_OPEN, HAS_SOFT_CAP)
            d_x = d_x.to(q_tile.dtype)
            acc_k = dot(d_x, q_tile, acc_k)
    return acc_k, acc_v
