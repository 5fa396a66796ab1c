"""The kernel of attention forward: one program a tile of queries of one head, keys in a loop.

    O = softmax(masked(changed(scale Q K^T))) V,  Stats = log-sum-exp of each row

Keys that no row of a tile sees are left out of the loop; those that all rows see go through it
without masks, so that a causal mask costs half and a window its width. docs/operations/attention.md
has the definitions. Source: FlashAttention-2 (Dao 2023).
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import (
    head_start,
    row_offsets,
    sequence_length,
    table_starts,
    tile_of,
)
from tilewright.engines.triton.attention_loop import (
    attend,
    is_spoilt,
    load_piece,
    rows_to_note,
    scalar_value,
)
from tilewright.engines.triton.attention_loop_plain import attend_ahead, attend_in_order
from tilewright.engines.triton.attention_masks import LOG2_E, alibi_slope, key_bounds
from tilewright.engines.triton.attention_output import join_sink, store_rows


@triton.jit
def attention_forward(
    q, k, v, q_map, k_map, v_map, o, gate, stats, smax, ssum, bias, drop_mask, block_mask, sink,
    len_q, len_kv, k_table, v_table, spoilt,
    q_offsets, k_offsets, v_offsets, k_table_offsets, v_table_offsets, o_offsets, gate_offsets,
    stats_offsets, smax_offsets, ssum_offsets,
    scale, cap_inner, cap_outer, given_0, given_1, given_2, given_3, drop_scale, seed, offset,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    bias_batch, bias_head, bias_row, bias_col,
    drop_batch, drop_head, drop_row, drop_col,
    mask_batch, mask_head, mask_row, mask_col,
    sink_head,
    len_q_step, len_kv_step,
    k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, k_offset_step, v_offset_step, k_table_offset_step, v_table_offset_step,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    q_multiplier, k_multiplier, v_multiplier, k_table_multiplier, v_table_multiplier,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    batches, rows, keys, heads, group, left, right, slots, group_heads,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    D_BLOCK: tl.constexpr, D_BLOCK_2: tl.constexpr,
    DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    ALIBI_SPLIT: tl.constexpr, CAP_DIVIDES: tl.constexpr, SCORE_PROGRAM: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    FOLDS_SCALE: tl.constexpr, STATS_LOG2: tl.constexpr, LAST_FIRST: tl.constexpr,
    IS_AHEAD: tl.constexpr, IN_ORDER: tl.constexpr, BATCH_BLOCK: tl.constexpr,
    MASKS_ALL: tl.constexpr, MASKS_END: tl.constexpr, SETTLES: tl.constexpr,
    KEEPS_LEVEL: tl.constexpr,
):  # fmt: skip
    is_paged: tl.constexpr = k_table is not None
    has_bias: tl.constexpr = bias is not None
    has_alibi: tl.constexpr = ALIBI_SPLIT > 0
    has_soft_cap: tl.constexpr = CAP_DIVIDES is not None
    has_block_mask: tl.constexpr = block_mask is not None
    has_philox: tl.constexpr = seed is not None
    has_drop_mask: tl.constexpr = drop_mask is not None

    program = tl.program_id(0)
    if BATCH_BLOCK > 0:
        # A slot for each tile that sequences really have; how many that are the device knows.
        slot = program % slots
        if LAST_FIRST:
            # Under a causal mask the last rows take longest.
            slot = slots - 1 - slot
        head = program // slots
        index = tl.arange(0, BATCH_BLOCK)
        counts = sequence_length(
            len_q, tl.minimum(index, batches - 1), len_q_step, rows, True, LEN_Q_IS_SUM
        )
        tiles = tl.where(index < batches, tl.cdiv(counts, BLOCK_M), 0)
        ends = tl.cumsum(tiles, 0)
        batch = tl.sum((ends <= slot).to(tl.int32), 0)
        if batch >= batches:
            return
        tile = slot - tl.sum(tl.where(index == batch, ends - tiles, 0), 0)
        both = batch * heads + head
    else:
        tile, both = tile_of(program, slots, group_heads, batches * heads, LAST_FIRST)
        head, batch = both % heads, both // heads
    key_head = head // group
    count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    count_kv = sequence_length(len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM)
    first_row = tile * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    in_rows = row < count_q
    shift = 0
    if BOTTOM_RIGHT:
        shift = count_kv - count_q

    q_at = row_offsets(
        row, q_offsets, batch, head, q_offset_step, q_multiplier, q_batch, q_head, q_row, UNIT
    )
    if q_map is not None:
        query = tl.reshape(q_map.load([batch, head, first_row, 0]), (BLOCK_M, D_BLOCK))
    else:
        query = load_piece(q, q_at, in_rows, q_col, 0, D_BLOCK, D, False, True)
    query_2 = query
    if D_BLOCK_2 > 0:
        query_2 = load_piece(q, q_at, in_rows, q_col, D_BLOCK, D_BLOCK_2, D, False, True)
    k_at = head_start(
        k, k_offsets, batch, key_head, k_offset_step, k_multiplier, k_batch, k_head,
        UNIT, is_paged,
    )  # fmt: skip
    v_at = head_start(
        v, v_offsets, batch, key_head, v_offset_step, v_multiplier, v_batch, v_head,
        UNIT, is_paged,
    )  # fmt: skip
    k_pages, v_pages = None, None
    if is_paged:
        k_pages, v_pages = table_starts(
            k_table, v_table, k_table_offsets, v_table_offsets, batch,
            k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
            k_table_batch, v_table_batch,
        )  # fmt: skip

    wide_row = row.to(tl.int64)[:, None]
    bias_at, drop_at, mask_at, slope, line = None, None, None, None, None
    seed_value, offset_value, inner, outer = None, None, None, None
    if has_bias:
        bias_at = bias + batch.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head
        bias_at = bias_at + wide_row * bias_row
    if has_drop_mask:
        drop_at = drop_mask + batch.to(tl.int64) * drop_batch + head.to(tl.int64) * drop_head
        drop_at = drop_at + wide_row * drop_row
    if has_block_mask:
        mask_at = block_mask + batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
    if has_alibi:
        slope = alibi_slope(head, ALIBI_SPLIT)
    if has_philox:
        line = (batch.to(tl.int64) * heads + head) * rows + wide_row
        seed_value = scalar_value(seed).to(tl.int64)
        offset_value = scalar_value(offset).to(tl.int64)
    if has_soft_cap:
        inner, outer = 1.0, 1.0
        if cap_inner is not None:
            inner = scalar_value(cap_inner).to(tl.float32)
        if cap_outer is not None:
            outer = scalar_value(cap_outer).to(tl.float32)
    number_0, number_1, number_2, number_3 = None, None, None, None
    if given_0 is not None:
        number_0 = scalar_value(given_0).to(tl.float32)
    if given_1 is not None:
        number_1 = scalar_value(given_1).to(tl.float32)
    if given_2 is not None:
        number_2 = scalar_value(given_2).to(tl.float32)
    if given_3 is not None:
        number_3 = scalar_value(given_3).to(tl.float32)
    factor = scalar_value(scale).to(tl.float32)
    if FOLDS_SCALE:
        factor = factor * LOG2_E

    last_row = tl.minimum(first_row + BLOCK_M, count_q) - 1
    first, end, first_full, end_full = key_bounds(
        first_row, last_row, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
    )
    if first_row >= count_q:
        end = first
    first = first // BLOCK_N * BLOCK_N
    # Whole blocks that every row sees in full; before and after them blocks are masked.
    full_start = tl.cdiv(first_full, BLOCK_N) * BLOCK_N
    full_end = end_full // BLOCK_N * BLOCK_N
    full_start = tl.maximum(tl.minimum(full_start, end), first)
    full_end = tl.maximum(tl.minimum(full_end, end // BLOCK_N * BLOCK_N), full_start)

    if MASKS_ALL:
        full_start, full_end = first, tl.maximum(first, end)

    acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
    acc_2 = 0.0
    if DV_BLOCK_2 > 0:
        acc_2 = tl.zeros((BLOCK_M, DV_BLOCK_2), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            start, stop = first, full_start
        elif part == 1:
            start, stop = full_start, full_end
        else:
            start, stop = full_end, end
        if (part == 0 and not HAS_LEFT) or (part != 1 and (MASKS_ALL or IN_ORDER)):
            pass
        elif IN_ORDER:
            acc, total, top = attend_in_order(
                acc, total, top, query, k_at, v_at, k_map, v_map, k_row, v_row, k_col, v_col,
                batch, key_head, first, end, first_full, end_full, row[:, None], count_kv,
                shift, left, right, factor,
                D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, UNIT, HAS_LEFT, HAS_RIGHT, len_kv is None,
                MASKS_END, SETTLES, KEEPS_LEVEL,
            )  # fmt: skip
        elif part == 1 and IS_AHEAD:
            if first < end:
                acc, acc_2, total, top = attend_ahead(
                    acc, acc_2, total, top, query, query_2, k_at, v_at, k_map, v_map,
                    k_row, v_row, k_col, v_col, batch, key_head, full_start, full_end, end,
                    row[:, None], count_kv, shift, left, right, factor,
                    D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT,
                    HAS_LEFT, HAS_RIGHT, len_kv is None, MASKS_ALL,
                )  # fmt: skip
        elif part != 2 or not IS_AHEAD:
            acc, acc_2, total, top = attend(
                acc, acc_2, total, top, query, query_2, k_at, v_at, k_row, v_row, k_col, v_col,
                k_pages, v_pages, k_table_row, v_table_row, k_batch, v_batch,
                start, stop, first_row, row[:, None], count_kv, shift, left, right, factor,
                inner, outer, number_0, number_1, number_2, number_3, batch, head,
                bias_at, bias_col, slope, line, keys, seed_value, offset_value,
                drop_at, drop_col, mask_at, mask_row, mask_col, in_rows[:, None],
                D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT, K_PAGE, V_PAGE,
                is_paged, HAS_LEFT, HAS_RIGHT, has_bias, has_alibi, has_soft_cap,
                CAP_DIVIDES, SCORE_PROGRAM, has_block_mask, has_philox, THRESHOLD, has_drop_mask,
                FOLDS_SCALE, part != 1, False,
            )  # fmt: skip

    # Values that a row does not see do not exist, NaN and infinity included; they are rare.
    if spoilt is not None:
        place = both.to(tl.int64) * (slots * BLOCK_M) + row
        note = rows_to_note(acc, in_rows)
        if KEEPS_LEVEL:
            # Small values have finite sums all the same.
            note = note | ((total * 0.0 != 0.0) & in_rows).to(tl.int32)
        tl.store(spoilt + place, note)
    elif HAS_LEFT or HAS_RIGHT or has_bias:
        if is_spoilt(acc, acc_2, DV_BLOCK_2 > 0):
            acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
            if DV_BLOCK_2 > 0:
                acc_2 = tl.zeros((BLOCK_M, DV_BLOCK_2), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            acc, acc_2, total, top = attend(
                acc, acc_2, total, top, query, query_2, k_at, v_at, k_row, v_row, k_col, v_col,
                k_pages, v_pages, k_table_row, v_table_row, k_batch, v_batch,
                first, end, first_row, row[:, None], count_kv, shift, left, right, factor,
                inner, outer, number_0, number_1, number_2, number_3, batch, head,
                bias_at, bias_col, slope, line, keys, seed_value, offset_value,
                drop_at, drop_col, mask_at, mask_row, mask_col, in_rows[:, None],
                D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT, K_PAGE, V_PAGE,
                is_paged, HAS_LEFT, HAS_RIGHT, has_bias, has_alibi, has_soft_cap,
                CAP_DIVIDES, SCORE_PROGRAM, has_block_mask, has_philox, THRESHOLD, has_drop_mask,
                FOLDS_SCALE, True, True,
            )  # fmt: skip

    if sink is not None:
        level = tl.load(sink + head.to(tl.int64) * sink_head)
        acc, acc_2, total, top = join_sink(acc, acc_2, total, top, level, DV_BLOCK_2 > 0)
    weight = 1.0
    if has_philox:
        weight = KEEP_SCALE
    if has_drop_mask:
        weight = scalar_value(drop_scale).to(tl.float32)
    store_rows(
        acc, acc_2, total, top, weight, batch, head, row, in_rows, row < rows,
        o, gate, stats, smax, ssum,
        o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
        o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
        stats_batch, stats_head, stats_row,
        smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row,
        o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
        o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
        DV, DV_BLOCK, DV_BLOCK_2, O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE,
        STATS_LOG2, len_q is None,
    )  # fmt: skip
