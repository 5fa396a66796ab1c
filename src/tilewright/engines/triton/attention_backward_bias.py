"""dBias: a program owns a tile of it and sums dS over whatever the bias is broadcast to.

The products are made anew, so that the sum is in registers, in a fixed order, for any broadcast.
"""

import triton
import triton.language as tl

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_addresses import row_offsets, sequence_length
from tilewright.engines.triton.attention_backward_tiles import (
    soft_cap_factors,
    tile_gradient,
    tile_keep,
    tile_probabilities,
)
from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import alibi_slope, key_bounds, tile_is_open


@triton.jit
def attention_backward_bias(
    q, k, v, d_o, lse, delta, d_bias, bias, block_mask, drop_mask, len_q, len_kv,
    q_offsets, k_offsets, v_offsets, d_o_offsets,
    scale, cap_inner, cap_outer, keep_scale, seed, offset,
    rows, keys, padded_rows, left, right,
    bias_rows, bias_keys, bias_heads, summed_batches, summed_heads,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    d_o_batch, d_o_head, d_o_row, d_o_col,
    d_bias_batch, d_bias_head, d_bias_row, d_bias_col,
    bias_batch, bias_head, bias_row, bias_col,
    block_mask_batch, block_mask_head, block_mask_row, block_mask_col,
    drop_mask_batch, drop_mask_head, drop_mask_row, drop_mask_col,
    len_q_step, len_kv_step,
    q_offset_step, q_multiplier, k_offset_step, k_multiplier,
    v_offset_step, v_multiplier, d_o_offset_step, d_o_multiplier,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr,
    DEPTH: tl.constexpr, DEPTH_V: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr,
    SUMS_ROWS: tl.constexpr, SUMS_KEYS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, CAP_DIVIDES: tl.constexpr, ALIBI_SPLIT: tl.constexpr,
    HAS_PHILOX: tl.constexpr, THRESHOLD: tl.constexpr,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
):  # fmt: skip
    """Where SUMS_ROWS or SUMS_KEYS, the program walks all rows or keys."""
    HAS_BLOCK_MASK: tl.constexpr = block_mask is not None
    HAS_DROP_MASK: tl.constexpr = drop_mask is not None
    HAS_ALIBI: tl.constexpr = ALIBI_SPLIT > 0
    row_tiles = tl.cdiv(bias_rows, ROWS)
    key_tiles = tl.cdiv(bias_keys, KEYS)
    program = tl.program_id(0)
    own_key = (program % key_tiles) * KEYS
    own_row = (program // key_tiles % row_tiles) * ROWS
    own_head = program // (key_tiles * row_tiles) % bias_heads
    own_batch = program // (key_tiles * row_tiles) // bias_heads
    first_row, end_row = own_row, own_row + ROWS
    if SUMS_ROWS:
        end_row = rows
    first_key, end_key = own_key, own_key + KEYS
    if SUMS_KEYS:
        end_key = keys
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    factor = scalar_value(scale).to(tl.float32)
    inner, outer = None, None
    if HAS_SOFT_CAP:
        inner, outer = soft_cap_factors(cap_inner, cap_outer)
    seed_value, offset_value, kept_scale = None, None, None
    if HAS_PHILOX:
        seed_value = scalar_value(seed).to(tl.int64)
        offset_value = scalar_value(offset).to(tl.int64)
    if HAS_PHILOX or HAS_DROP_MASK:
        kept_scale = scalar_value(keep_scale).to(tl.float32)
    total = tl.zeros((ROWS, KEYS), dtype=tl.float32)
    for part in range(summed_batches * summed_heads):
        batch = own_batch + part // summed_heads
        head_q = own_head + part % summed_heads
        head_kv = head_q // GROUP
        wide_batch, wide_head = batch.to(tl.int64), head_q.to(tl.int64)
        line = wide_batch * (HEADS_KV * GROUP) + wide_head
        count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
        count_kv = sequence_length(
            len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM
        )
        shift = count_kv - count_q if BOTTOM_RIGHT else 0
        bias_at = bias + wide_batch * bias_batch + wide_head * bias_head
        slope = 0.0
        if HAS_ALIBI:
            slope = alibi_slope(head_q, ALIBI_SPLIT)
        for row_start in range(first_row, tl.minimum(end_row, count_q), ROWS):
            row = row_start + tl.arange(0, ROWS)
            last_row = tl.minimum(row_start + ROWS, count_q) - 1
            first_seen, end_seen, _, _ = key_bounds(
                row_start, last_row, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
            )
            first_seen = tl.maximum(first_seen, first_key) // KEYS * KEYS
            q_at = q + row_offsets(
                row[:, None], q_offsets, batch, head_q, q_offset_step, q_multiplier, q_batch,
                q_head, q_row, UNIT,
            )  # fmt: skip
            d_o_at = d_o + row_offsets(
                row[:, None], d_o_offsets, batch, head_q, d_o_offset_step, d_o_multiplier,
                d_o_batch, d_o_head, d_o_row, UNIT,
            )  # fmt: skip
            inside = (row < count_q)[:, None]
            q_tile = tl.load(q_at + depth * q_col, mask=inside & (depth < DEPTH), other=0.0)
            d_o_tile = tl.load(
                d_o_at + depth_v * d_o_col, mask=inside & (depth_v < DEPTH_V), other=0.0
            )
            lse_of_rows = tl.load(lse + line * padded_rows + row)
            delta_of_rows = tl.load(delta + line * padded_rows + row)
            for key_start in range(first_seen, tl.minimum(end_key, end_seen), KEYS):
                is_shown = True
                if HAS_BLOCK_MASK:
                    is_shown = tile_is_open(
                        block_mask + wide_batch * block_mask_batch + wide_head * block_mask_head,
                        own_row * 0 + row_start, own_key * 0 + key_start,
                        block_mask_row, block_mask_col,
                    )  # fmt: skip
                if is_shown:
                    key = key_start + tl.arange(0, KEYS)
                    in_keys = (key < count_kv)[:, None]
                    k_at = k + row_offsets(
                        key[:, None], k_offsets, batch, head_kv, k_offset_step, k_multiplier,
                        k_batch, k_head, k_row, UNIT,
                    )  # fmt: skip
                    v_at = v + row_offsets(
                        key[:, None], v_offsets, batch, head_kv, v_offset_step, v_multiplier,
                        v_batch, v_head, v_row, UNIT,
                    )  # fmt: skip
                    k_tile = tl.load(
                        k_at + depth * k_col, mask=in_keys & (depth < DEPTH), other=0.0
                    )
                    v_tile = tl.load(
                        v_at + depth_v * v_col, mask=in_keys & (depth_v < DEPTH_V), other=0.0
                    )
                    nothing = tl.zeros((ROWS, KEYS), dtype=tl.float32)
                    products = dot(q_tile, tl.trans(k_tile), nothing)
                    d_p = dot(d_o_tile, tl.trans(v_tile), nothing)
                    wide_row = row.to(tl.int64)[:, None]
                    wide_key = key.to(tl.int64)[None, :]
                    p, cap_slope, seen = tile_probabilities(
                        products, row[:, None], key[None, :], lse_of_rows[:, None],
                        (factor, inner, outer, slope), (count_q, count_kv, shift, left, right),
                        bias_at + wide_row * bias_row + wide_key * bias_col,
                        False, HAS_LEFT, HAS_RIGHT, HAS_SOFT_CAP, CAP_DIVIDES, True, HAS_ALIBI,
                    )  # fmt: skip
                    if HAS_PHILOX or HAS_DROP_MASK:
                        drop_at = None
                        if HAS_DROP_MASK:
                            drop_at = drop_mask + wide_batch * drop_mask_batch
                            drop_at += wide_head * drop_mask_head + wide_row * drop_mask_row
                            drop_at += wide_key * drop_mask_col
                        d_p = d_p * tile_keep(
                            row[:, None], key[None, :], seen,
                            (line * rows, keys, seed_value, offset_value, kept_scale),
                            drop_at, HAS_PHILOX, THRESHOLD,
                        )  # fmt: skip
                    d_s = tile_gradient(
                        p, d_p, delta_of_rows[:, None], cap_slope, seen, False, False
                    )
                    total += d_s
    row = own_row + tl.arange(0, ROWS)
    key = own_key + tl.arange(0, KEYS)
    if SUMS_ROWS:
        total = tl.broadcast_to(tl.sum(total, axis=0)[None, :], (ROWS, KEYS))
    if SUMS_KEYS:
        total = tl.broadcast_to(tl.sum(total, axis=1)[:, None], (ROWS, KEYS))
    at = d_bias + own_batch.to(tl.int64) * d_bias_batch + own_head.to(tl.int64) * d_bias_head
    at += row.to(tl.int64)[:, None] * d_bias_row + key.to(tl.int64)[None, :] * d_bias_col
    own = (row < bias_rows)[:, None] & (key < bias_keys)[None, :]
    tl.store(at, total.to(d_bias.dtype.element_ty), mask=own)
