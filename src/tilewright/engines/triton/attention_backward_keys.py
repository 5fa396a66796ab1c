"""dK and dV: a program owns a block of keys of one key head and walks the rows that see it.

The query heads of the group are summed in its float32 accumulators, in a fixed order. What a tile
of rows adds is in ``attention_backward_keys_loop``.
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import row_offsets, sequence_length
from tilewright.engines.triton.attention_backward_keys_loop import rows_pass
from tilewright.engines.triton.attention_backward_tiles import at_head, soft_cap_factors
from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import alibi_slope, row_bounds


@triton.jit
def attention_backward_keys(
    q,
    k,
    v,
    d_o,
    lse,
    delta,
    d_k,
    d_v,
    bias,
    block_mask,
    drop_mask,
    len_q,
    len_kv,
    q_offsets,
    k_offsets,
    v_offsets,
    d_o_offsets,
    d_k_offsets,
    d_v_offsets,
    scale,
    cap_inner,
    cap_outer,
    keep_scale,
    seed,
    offset,
    rows,
    keys,
    padded_rows,
    left,
    right,
    q_batch,
    q_head,
    q_row,
    q_col,
    k_batch,
    k_head,
    k_row,
    k_col,
    v_batch,
    v_head,
    v_row,
    v_col,
    d_o_batch,
    d_o_head,
    d_o_row,
    d_o_col,
    d_k_batch,
    d_k_head,
    d_k_row,
    d_k_col,
    d_v_batch,
    d_v_head,
    d_v_row,
    d_v_col,
    bias_batch,
    bias_head,
    bias_row,
    bias_col,
    block_mask_batch,
    block_mask_head,
    block_mask_row,
    block_mask_col,
    drop_mask_batch,
    drop_mask_head,
    drop_mask_row,
    drop_mask_col,
    len_q_step,
    len_kv_step,
    q_offset_step,
    q_multiplier,
    k_offset_step,
    k_multiplier,
    v_offset_step,
    v_multiplier,
    d_o_offset_step,
    d_o_multiplier,
    d_k_offset_step,
    d_k_multiplier,
    d_v_offset_step,
    d_v_multiplier,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_V: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    D_K_UNIT: tl.constexpr,
    D_V_UNIT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    MAY_MASK: tl.constexpr,
    MASKS_ALL: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CAP_DIVIDES: tl.constexpr,
    ALIBI_SPLIT: tl.constexpr,
    HAS_PHILOX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    LEN_Q_IS_SUM: tl.constexpr,
    LEN_KV_IS_SUM: tl.constexpr,
    STAGES: tl.constexpr,
):
    HAS_BIAS: tl.constexpr = bias is not None
    HAS_BLOCK_MASK: tl.constexpr = block_mask is not None
    HAS_DROP_MASK: tl.constexpr = drop_mask is not None
    HAS_ALIBI: tl.constexpr = ALIBI_SPLIT > 0
    # Early blocks see most rows under a causal mask: they start first.
    blocks = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    first_key = (program % blocks) * KEYS
    head_kv = (program // blocks) % HEADS_KV
    batch = program // (blocks * HEADS_KV)
    count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    count_kv = sequence_length(len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM)
    key = first_key + tl.arange(0, KEYS)
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    inside = (key < count_kv)[:, None]
    k_at = k + row_offsets(
        key[:, None], k_offsets, batch, head_kv, k_offset_step, k_multiplier, k_batch,
        k_head, k_row, UNIT,
    )  # fmt: skip
    v_at = v + row_offsets(
        key[:, None], v_offsets, batch, head_kv, v_offset_step, v_multiplier, v_batch,
        v_head, v_row, UNIT,
    )  # fmt: skip
    k_at += depth * k_col
    v_at += depth_v * v_col
    k_tile = tl.load(k_at, mask=inside & (depth < DEPTH), other=0.0)
    v_tile = tl.load(v_at, mask=inside & (depth_v < DEPTH_V), other=0.0)
    scale = scalar_value(scale).to(tl.float32)
    inner, outer = None, None
    if HAS_SOFT_CAP:
        inner, outer = soft_cap_factors(cap_inner, cap_outer)
    if HAS_PHILOX:
        seed = scalar_value(seed).to(tl.int64)
        offset = scalar_value(offset).to(tl.int64)
    if HAS_PHILOX or HAS_DROP_MASK:
        keep_scale = scalar_value(keep_scale).to(tl.float32)
    shift = count_kv - count_q if BOTTOM_RIGHT else 0
    last_key = tl.minimum(first_key + KEYS, count_kv) - 1
    first_seen, end_seen, first_full, end_full = row_bounds(
        first_key, last_key, count_q, shift, left, right, HAS_LEFT, HAS_RIGHT
    )
    if first_key >= count_kv:
        end_seen = first_seen * 0
    # Tiles of rows: [first, first_open) and [end_open, end) need masks, those between do not.
    first = first_seen // ROWS * ROWS
    end = tl.maximum(tl.cdiv(end_seen, ROWS) * ROWS, first)
    first_open = tl.cdiv(first_full, ROWS) * ROWS
    # Rows beyond the sequence have P = 0 by their statistics: its last tile may be open.
    end_open = tl.where(end_full >= count_q, tl.cdiv(end_full, ROWS), end_full // ROWS) * ROWS
    if first_key + KEYS > count_kv or MASKS_ALL:
        first_open = end
    first_open = tl.minimum(tl.maximum(first_open, first), end)
    end_open = tl.minimum(tl.maximum(end_open, first_open), end)
    acc_k = tl.zeros((KEYS, BLOCK_DEPTH), dtype=tl.float32)
    acc_v = tl.zeros((KEYS, BLOCK_DEPTH_V), dtype=tl.float32)
    for member in range(GROUP):
        head_q = head_kv * GROUP + member
        wide_head = head_q.to(tl.int64)
        line = batch.to(tl.int64) * (HEADS_KV * GROUP) + wide_head
        q_at = q + row_offsets(
            first_key * 0, q_offsets, batch, head_q, q_offset_step, q_multiplier, q_batch,
            q_head, 0, UNIT,
        )  # fmt: skip
        d_o_at = d_o + row_offsets(
            first_key * 0, d_o_offsets, batch, head_q, d_o_offset_step, d_o_multiplier, d_o_batch,
            d_o_head, 0, UNIT,
        )  # fmt: skip
        bias_at, block_mask_at, drop_mask_at = None, None, None
        if HAS_BIAS:
            bias_at = at_head(bias, batch, wide_head, bias_batch, bias_head)
        if HAS_BLOCK_MASK:
            block_mask_at = at_head(block_mask, batch, wide_head, block_mask_batch, block_mask_head)
        if HAS_DROP_MASK:
            drop_mask_at = at_head(drop_mask, batch, wide_head, drop_mask_batch, drop_mask_head)
        slope = 0.0
        if HAS_ALIBI:
            slope = alibi_slope(head_q, ALIBI_SPLIT)
        for part in tl.static_range(3):
            # Before the open tiles, these, and behind them; parts that cannot be are left out.
            if (
                (part == 1 and not MASKS_ALL)
                or (part == 0 and MAY_MASK)
                or (part == 2 and HAS_LEFT and not MASKS_ALL)
            ):
                acc_k, acc_v = rows_pass(
                    acc_k, acc_v, k_tile, v_tile,
                    first if part == 0 else (first_open if part == 1 else end_open),
                    first_open if part == 0 else (end_open if part == 1 else end),
                    first_seen, end_seen, first_key,
                    (q_at, q_row, q_col), (d_o_at, d_o_row, d_o_col),
                    (lse + line * padded_rows, delta + line * padded_rows),
                    (bias_at, bias_row, bias_col),
                    (block_mask_at, block_mask_row, block_mask_col),
                    (drop_mask_at, drop_mask_row, drop_mask_col),
                    (scale, inner, outer, slope),
                    (count_q, count_kv, shift, left, right),
                    (line * rows, keys, seed, offset, keep_scale),
                    DEPTH, DEPTH_V, BLOCK_DEPTH, BLOCK_DEPTH_V, ROWS, KEYS, UNIT, part == 1,
                    IS_EVEN, HAS_LEFT, HAS_RIGHT, HAS_SOFT_CAP, CAP_DIVIDES, HAS_BIAS, HAS_ALIBI,
                    HAS_BLOCK_MASK, HAS_PHILOX, HAS_DROP_MASK, THRESHOLD, STAGES,
                )  # fmt: skip
    d_k_at = d_k + row_offsets(
        key[:, None], d_k_offsets, batch, head_kv, d_k_offset_step, d_k_multiplier, d_k_batch,
        d_k_head, d_k_row, D_K_UNIT,
    )  # fmt: skip
    d_v_at = d_v + row_offsets(
        key[:, None], d_v_offsets, batch, head_kv, d_v_offset_step, d_v_multiplier, d_v_batch,
        d_v_head, d_v_row, D_V_UNIT,
    )  # fmt: skip
    d_k_at += depth * d_k_col
    d_v_at += depth_v * d_v_col
    # Keys beyond a sequence get zeros where they have a place of their own.
    own_k = (key < (keys if d_k_offsets is None else count_kv))[:, None]
    own_v = (key < (keys if d_v_offsets is None else count_kv))[:, None]
    acc_k = (acc_k * scale).to(d_k.dtype.element_ty)
    tl.store(d_k_at, acc_k, mask=own_k & (depth < DEPTH))
    tl.store(d_v_at, acc_v.to(d_v.dtype.element_ty), mask=own_v & (depth_v < DEPTH_V))
