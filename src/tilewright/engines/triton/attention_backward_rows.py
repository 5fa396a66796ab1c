"""dQ: a program owns a block of rows of one query head and walks the keys that they see.

What a tile of keys adds is in ``attention_backward_rows_loop``.
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import row_offsets, sequence_length
from tilewright.engines.triton.attention_backward_rows_loop import keys_pass
from tilewright.engines.triton.attention_backward_tiles import at_head, soft_cap_factors
from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import alibi_slope, key_bounds


@triton.jit
def attention_backward_rows(
    q,
    k,
    v,
    d_o,
    lse,
    delta,
    d_q,
    bias,
    block_mask,
    drop_mask,
    len_q,
    len_kv,
    q_offsets,
    k_offsets,
    v_offsets,
    d_o_offsets,
    d_q_offsets,
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
    d_q_batch,
    d_q_head,
    d_q_row,
    d_q_col,
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
    d_q_offset_step,
    d_q_multiplier,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_V: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    D_Q_UNIT: tl.constexpr,
    MAY_MASK: tl.constexpr,
    MASKS_ALL: tl.constexpr,
    CLEANS_KEYS: tl.constexpr,
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
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    block = program % blocks
    if HAS_RIGHT:
        # The last rows see most keys: they start first.
        block = blocks - 1 - block
    first_row = block * ROWS
    head_q = (program // blocks) % (HEADS_KV * GROUP)
    batch = program // (blocks * (HEADS_KV * GROUP))
    count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    count_kv = sequence_length(len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM)
    row = first_row + tl.arange(0, ROWS)
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    inside = (row < count_q)[:, None]
    head = head_q.to(tl.int64)
    head_kv = head_q // GROUP
    line = batch.to(tl.int64) * (HEADS_KV * GROUP) + head
    q_at = q + row_offsets(
        row[:, None], q_offsets, batch, head_q, q_offset_step, q_multiplier, q_batch,
        q_head, q_row, UNIT,
    )  # fmt: skip
    d_o_at = d_o + row_offsets(
        row[:, None], d_o_offsets, batch, head_q, d_o_offset_step, d_o_multiplier, d_o_batch,
        d_o_head, d_o_row, UNIT,
    )  # fmt: skip
    k_at = k + row_offsets(
        first_row * 0, k_offsets, batch, head_kv, k_offset_step, k_multiplier, k_batch,
        k_head, 0, UNIT,
    )  # fmt: skip
    v_at = v + row_offsets(
        first_row * 0, v_offsets, batch, head_kv, v_offset_step, v_multiplier, v_batch,
        v_head, 0, UNIT,
    )  # fmt: skip
    q_at += depth * q_col
    d_o_at += depth_v * d_o_col
    q_tile = tl.load(q_at, mask=inside & (depth < DEPTH), other=0.0)
    d_o_tile = tl.load(d_o_at, mask=inside & (depth_v < DEPTH_V), other=0.0)
    lse_of_rows = tl.load(lse + line * padded_rows + row)
    delta_of_rows = tl.load(delta + line * padded_rows + row)
    scale = scalar_value(scale).to(tl.float32)
    inner, outer = None, None
    if HAS_SOFT_CAP:
        inner, outer = soft_cap_factors(cap_inner, cap_outer)
    if HAS_PHILOX:
        seed = scalar_value(seed).to(tl.int64)
        offset = scalar_value(offset).to(tl.int64)
    if HAS_PHILOX or HAS_DROP_MASK:
        keep_scale = scalar_value(keep_scale).to(tl.float32)
    bias_at, block_mask_at, drop_mask_at = None, None, None
    if HAS_BIAS:
        bias_at = at_head(bias, batch, head, bias_batch, bias_head)
    if HAS_BLOCK_MASK:
        block_mask_at = at_head(block_mask, batch, head, block_mask_batch, block_mask_head)
    if HAS_DROP_MASK:
        drop_mask_at = at_head(drop_mask, batch, head, drop_mask_batch, drop_mask_head)
    slope = 0.0
    if HAS_ALIBI:
        slope = alibi_slope(head_q, ALIBI_SPLIT)
    shift = count_kv - count_q if BOTTOM_RIGHT else 0
    last_row = tl.minimum(first_row + ROWS, count_q) - 1
    first_seen, end_seen, first_full, end_full = key_bounds(
        first_row, last_row, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
    )
    if first_row >= count_q:
        end_seen = first_seen * 0
    # Tiles of keys: [first, first_open) and [end_open, end) need masks, those between do not.
    first = tl.maximum(first_seen, 0) // KEYS * KEYS
    end = tl.maximum(tl.cdiv(end_seen, KEYS) * KEYS, first)
    first_open = tl.cdiv(tl.maximum(first_full, 0), KEYS) * KEYS
    end_open = tl.maximum(end_full, 0) // KEYS * KEYS
    if MASKS_ALL:
        first_open = end
    first_open = tl.minimum(tl.maximum(first_open, first), end)
    end_open = tl.minimum(tl.maximum(end_open, first_open), end)
    acc_q = tl.zeros((ROWS, BLOCK_DEPTH), dtype=tl.float32)
    for part in tl.static_range(3):
        if (
            (part == 1 and not MASKS_ALL)
            or (part == 0 and (HAS_LEFT or MASKS_ALL))
            or (part == 2 and MAY_MASK and not MASKS_ALL)
        ):
            acc_q = keys_pass(
                acc_q, q_tile, d_o_tile, lse_of_rows, delta_of_rows,
                first if part == 0 else (first_open if part == 1 else end_open),
                first_open if part == 0 else (end_open if part == 1 else end),
                first_row, (k_at, k_row, k_col), (v_at, v_row, v_col),
                (bias_at, bias_row, bias_col),
                (block_mask_at, block_mask_row, block_mask_col),
                (drop_mask_at, drop_mask_row, drop_mask_col),
                (scale, inner, outer, slope),
                (count_q, count_kv, shift, left, right),
                (line * rows, keys, seed, offset, keep_scale),
                DEPTH, DEPTH_V, BLOCK_DEPTH, BLOCK_DEPTH_V, ROWS, KEYS, UNIT, part == 1,
                CLEANS_KEYS, HAS_LEFT, HAS_RIGHT, HAS_SOFT_CAP, CAP_DIVIDES, HAS_BIAS, HAS_ALIBI,
                HAS_BLOCK_MASK, HAS_PHILOX, HAS_DROP_MASK, THRESHOLD, STAGES,
            )  # fmt: skip
    d_q_at = d_q + row_offsets(
        row[:, None], d_q_offsets, batch, head_q, d_q_offset_step, d_q_multiplier, d_q_batch,
        d_q_head, d_q_row, D_Q_UNIT,
    )  # fmt: skip
    d_q_at += depth * d_q_col
    # Rows beyond a sequence get zeros where they have a place of their own.
    own = (row < (rows if d_q_offsets is None else count_q))[:, None]
    acc_q *= scale
    if len_q is not None and d_q_offsets is None:
        # Beyond the sequence a row's 0 times a key that is not finite is NaN.
        acc_q = tl.where(inside, acc_q, 0.0)
    tl.store(d_q_at, acc_q.to(d_q.dtype.element_ty), mask=own & (depth < DEPTH))
