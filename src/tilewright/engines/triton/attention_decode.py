"""Attention forward for a few queries over many keys: splits of the keys, then a combination.

The queries of all heads that share a key head form one tile, so keys are read once. The keys of a
sequence are cut into runs of blocks, of a length that the declaration fixes, so that no result
depends on the sequences beside it. Runs are dealt out to programs by a sum over all lengths, which
the device alone knows: a long sequence gets many programs, an empty one none. Each program works
out the deal for itself and writes its sums, the first one the deal too; ``attention_combine`` joins
the sums of a sequence.

    (acc, total, top) of a union:  top = max top_i,  total = sum total_i exp2(top_i - top)

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton.attention_addresses import row_offsets, sequence_length
from tilewright.engines.triton.attention_arguments import KernelArguments, add_forward_operands
from tilewright.engines.triton.attention_config import ForwardConfig, pieces, power_of_two
from tilewright.engines.triton.attention_loop import (
    attend,
    is_spoilt,
    load_piece,
    scalar_value,
)
from tilewright.engines.triton.attention_masks import LOG2_E, alibi_slope, key_bounds
from tilewright.engines.triton.attention_output import join_sink, store_rows
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.launch.workspace import plan_workspace

# Elements of sums, rows by width aside, that a combining program holds at a time.
_RUNS_AT_ONCE = 16
_COMBINE_WARPS = 4
# The kernels' names of what is in the workspace.
_PARTS = ("part_acc", "part_total", "part_top", "part_deal")


@triton.jit
def _deal(
    len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, heads_kv, left, right,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    run,
    BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr,
):  # fmt: skip
    """(batch indices, runs of each, first slot of each); a run is one slot a key head."""
    index = tl.arange(0, BATCH_BLOCK)
    known = tl.minimum(index, batches - 1)
    count_q = sequence_length(len_q, known, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    count_kv = sequence_length(len_kv, known, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM)
    shift = 0
    if BOTTOM_RIGHT:
        shift = count_kv - count_q
    first, end, _, _ = key_bounds(
        index * 0, count_q - 1, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
    )
    blocks = tl.cdiv(tl.maximum(end - first // BLOCK_N * BLOCK_N, 0), BLOCK_N)
    blocks = tl.where((index < batches) & (count_q > 0), blocks, 0)
    runs = tl.cdiv(blocks, run)
    slots = runs * heads_kv
    return index, runs, tl.cumsum(slots, 0) - slots


@triton.jit
def attention_decode(
    q, k, v, o, stats, smax, ssum, bias, sink, part_acc, part_total, part_top, part_deal,
    len_q, len_kv, k_table, v_table,
    q_offsets, k_offsets, v_offsets, o_offsets, stats_offsets, smax_offsets, ssum_offsets,
    scale, cap_inner, cap_outer, given_0, given_1, given_2, given_3,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    bias_batch, bias_head, bias_row, bias_col,
    sink_head,
    len_q_step, len_kv_step,
    k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, k_offset_step, v_offset_step, o_offset_step,
    stats_offset_step, smax_offset_step, ssum_offset_step,
    q_multiplier, k_multiplier, v_multiplier, o_multiplier,
    stats_multiplier, smax_multiplier, ssum_multiplier,
    batches, rows, keys, heads_kv, group, left, right, run,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    D_BLOCK: tl.constexpr, D_BLOCK_2: tl.constexpr,
    DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr,
    UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    ALIBI_SPLIT: tl.constexpr, CAP_DIVIDES: tl.constexpr, SCORE_PROGRAM: tl.constexpr,
    FOLDS_SCALE: tl.constexpr, STATS_LOG2: tl.constexpr,
):  # fmt: skip
    is_paged: tl.constexpr = k_table is not None
    has_bias: tl.constexpr = bias is not None
    has_alibi: tl.constexpr = ALIBI_SPLIT > 0
    has_soft_cap: tl.constexpr = CAP_DIVIDES is not None
    is_split: tl.constexpr = part_acc is not None

    slot = tl.program_id(0)
    if is_split:
        index, runs, starts = _deal(
            len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, heads_kv, left, right,
            LEN_Q_IS_SUM, LEN_KV_IS_SUM, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT,
            run, BLOCK_N, BATCH_BLOCK,
        )  # fmt: skip
        if slot == 0:
            tl.store(part_deal + index, runs, mask=index < batches)
            tl.store(part_deal + batches + index, starts, mask=index < batches)
        # The last sequence with any run that starts at or before this slot.
        batch = tl.max(tl.where((starts <= slot) & (runs > 0), index, -1), 0)
        if batch < 0:
            return
        own = index == batch
        place = slot - tl.sum(tl.where(own, starts, 0), 0)
        key_head = place % heads_kv
        number = place // heads_kv
        if number >= tl.sum(tl.where(own, runs, 0), 0):
            return
    else:
        key_head = slot % heads_kv
        batch = slot // heads_kv
        number = 0
    count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    count_kv = sequence_length(len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM)
    place_in_tile = tl.arange(0, BLOCK_M)
    row = place_in_tile % rows
    member = place_in_tile // rows
    head = key_head * group + member
    in_declared = member < group
    in_rows = in_declared & (row < count_q)
    shift = 0
    if BOTTOM_RIGHT:
        shift = count_kv - count_q

    q_at = row_offsets(
        row, q_offsets, batch, head, q_offset_step, q_multiplier, q_batch, q_head, q_row, UNIT
    )
    query = load_piece(q, q_at, in_rows, q_col, 0, D_BLOCK, D, False, True)
    query_2 = query
    if D_BLOCK_2 > 0:
        query_2 = load_piece(q, q_at, in_rows, q_col, D_BLOCK, D_BLOCK_2, D, False, True)
    if is_paged:
        k_at = k + key_head.to(tl.int64) * k_head * UNIT
        v_at = v + key_head.to(tl.int64) * v_head * UNIT
        k_pages = k_table + batch.to(tl.int64) * k_table_batch
        v_pages = v_table + batch.to(tl.int64) * v_table_batch
    else:
        k_at = k + row_offsets(
            slot * 0, k_offsets, batch, key_head, k_offset_step, k_multiplier, k_batch,
            k_head, 0, UNIT,
        )  # fmt: skip
        v_at = v + row_offsets(
            slot * 0, v_offsets, batch, key_head, v_offset_step, v_multiplier, v_batch,
            v_head, 0, UNIT,
        )  # fmt: skip
        k_pages, v_pages = None, None
    bias_at, slope, inner, outer = None, None, None, None
    if has_bias:
        bias_at = bias + batch.to(tl.int64) * bias_batch + head.to(tl.int64)[:, None] * bias_head
        bias_at = bias_at + row.to(tl.int64)[:, None] * bias_row
    if has_alibi:
        slope = alibi_slope(head, ALIBI_SPLIT)[:, None]
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

    first, end, first_full, end_full = key_bounds(
        slot * 0, count_q - 1, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
    )
    if count_q <= 0:
        end = first
    first = first // BLOCK_N * BLOCK_N
    if is_split:
        first = first + number * run * BLOCK_N
        end = tl.minimum(end, first + run * BLOCK_N)
    full_start = tl.cdiv(first_full, BLOCK_N) * BLOCK_N
    full_start = tl.maximum(tl.minimum(full_start, end), first)
    full_end = tl.minimum(end_full // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N)
    full_end = tl.maximum(full_end, full_start)

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
        if part != 0 or HAS_LEFT:
            acc, acc_2, total, top = attend(
                acc, acc_2, total, top, query, query_2, k_at, v_at, k_row, v_row, k_col, v_col,
                k_pages, v_pages, k_table_row, v_table_row, k_batch, v_batch,
                start, stop, 0, row[:, None], count_kv, shift, left, right, factor,
                inner, outer, number_0, number_1, number_2, number_3, batch, head[:, None],
                bias_at, bias_col, slope, None, keys, None, None,
                None, 0, None, 0, 0, in_rows[:, None],
                D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT, K_PAGE, V_PAGE,
                is_paged, HAS_LEFT, HAS_RIGHT, has_bias, has_alibi, has_soft_cap,
                CAP_DIVIDES, SCORE_PROGRAM, False, False, 0, False, FOLDS_SCALE, part != 1, False,
            )  # fmt: skip

    # Values that a row does not see do not exist, NaN and infinity included; they are rare.
    if HAS_LEFT or HAS_RIGHT or has_bias:
        if is_spoilt(acc, acc_2, DV_BLOCK_2 > 0):
            acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
            if DV_BLOCK_2 > 0:
                acc_2 = tl.zeros((BLOCK_M, DV_BLOCK_2), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            acc, acc_2, total, top = attend(
                acc, acc_2, total, top, query, query_2, k_at, v_at, k_row, v_row, k_col, v_col,
                k_pages, v_pages, k_table_row, v_table_row, k_batch, v_batch,
                first, end, 0, row[:, None], count_kv, shift, left, right, factor,
                inner, outer, number_0, number_1, number_2, number_3, batch, head[:, None],
                bias_at, bias_col, slope, None, keys, None, None,
                None, 0, None, 0, 0, in_rows[:, None],
                D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT, K_PAGE, V_PAGE,
                is_paged, HAS_LEFT, HAS_RIGHT, has_bias, has_alibi, has_soft_cap,
                CAP_DIVIDES, SCORE_PROGRAM, False, False, 0, False, FOLDS_SCALE, True, True,
            )  # fmt: skip

    if is_split:
        at = slot.to(tl.int64) * BLOCK_M + place_in_tile
        tl.store(part_total + at, total, mask=in_declared)
        tl.store(part_top + at, top, mask=in_declared)
        width: tl.constexpr = DV_BLOCK + DV_BLOCK_2
        to = part_acc + (at * width)[:, None]
        tl.store(to + tl.arange(0, DV_BLOCK)[None, :], acc, mask=in_declared[:, None])
        if DV_BLOCK_2 > 0:
            along = DV_BLOCK + tl.arange(0, DV_BLOCK_2)
            tl.store(to + along[None, :], acc_2, mask=in_declared[:, None])
    else:
        if sink is not None:
            level = tl.load(sink + head.to(tl.int64) * sink_head, mask=in_declared, other=0.0)
            acc, acc_2, total, top = join_sink(acc, acc_2, total, top, level, DV_BLOCK_2 > 0)
        store_rows(
            acc, acc_2, total, top, 1.0, batch, head, row, in_rows, in_declared,
            o, stats, smax, ssum, o_offsets, stats_offsets, smax_offsets, ssum_offsets,
            o_batch, o_head, o_row, o_col, stats_batch, stats_head, stats_row,
            smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row,
            o_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
            o_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
            DV, DV_BLOCK, DV_BLOCK_2, O_UNIT, STATS_LOG2,
        )  # fmt: skip


@triton.jit
def attention_combine(
    o, stats, smax, ssum, sink, part_acc, part_total, part_top, part_deal,
    len_q,
    o_offsets, stats_offsets, smax_offsets, ssum_offsets,
    o_batch, o_head, o_row, o_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    len_q_step,
    o_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    o_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    batches, rows, heads_kv, group,
    LEN_Q_IS_SUM: tl.constexpr,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROW_BLOCK: tl.constexpr, RUN_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    O_UNIT: tl.constexpr, STATS_LOG2: tl.constexpr,
):  # fmt: skip
    """One program a (batch, query head): its rows' sums over all runs, RUN_BLOCK at a time."""
    heads = heads_kv * group
    program = tl.program_id(0)
    head, batch = program % heads, program // heads
    count = tl.load(part_deal + batch)
    first_slot = tl.load(part_deal + batches + batch) + head // group
    count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    row = tl.arange(0, ROW_BLOCK)
    in_declared = row < rows
    in_rows = row < count_q
    in_tile = (head % group) * rows + row

    width: tl.constexpr = DV_BLOCK + DV_BLOCK_2
    # Whole rows of sums, as wide as a power of two; what is beyond DV is not stored.
    along = tl.arange(0, WIDTH_BLOCK)
    acc = tl.zeros((ROW_BLOCK, WIDTH_BLOCK), tl.float32)
    total = tl.zeros((ROW_BLOCK,), tl.float32)
    top = tl.full((ROW_BLOCK,), -float("inf"), tl.float32)
    for start in range(0, count, RUN_BLOCK):
        number = start + tl.arange(0, RUN_BLOCK)
        slot = (first_slot + number * heads_kv).to(tl.int64)
        at = slot[:, None] * BLOCK_M + in_tile[None, :]
        mask = (number < count)[:, None] & in_declared[None, :]
        tops = tl.load(part_top + at, mask=mask, other=-float("inf"))
        totals = tl.load(part_total + at, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        level = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(tops - level[None, :])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(totals * weights, 0)
        inside = mask[:, :, None] & (along < width)[None, None, :]
        parts = tl.load(
            part_acc + (at * width)[:, :, None] + along[None, None, :], mask=inside, other=0.0
        )
        acc = acc * fade[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    if sink is not None:
        level = tl.load(sink + head.to(tl.int64) * sink_head)
        acc, _, total, top = join_sink(acc, 0.0, total, top, level, False)
    store_rows(
        acc, 0.0, total, top, 1.0, batch, head, row, in_rows, in_declared,
        o, stats, smax, ssum, o_offsets, stats_offsets, smax_offsets, ssum_offsets,
        o_batch, o_head, o_row, o_col, stats_batch, stats_head, stats_row,
        smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row,
        o_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
        o_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
        DV, WIDTH_BLOCK, 0, O_UNIT, STATS_LOG2,
    )  # fmt: skip


def decode_plan(
    spec: AttentionSpec, slots: Mapping[int, int], config: ForwardConfig, *, is_aligned: bool
) -> KernelPlan:
    """One kernel where each key head is read by one program, else the split and the combination."""
    units = spec.batch * spec.heads_kv
    is_split = config.splits > 1
    blocks = triton.cdiv(spec.keys, config.block_n)
    run = triton.cdiv(blocks, config.splits)
    programs = units * triton.cdiv(blocks, run) if is_split else units
    cells = programs * config.block_m
    width = sum(pieces(spec.depth_v))
    scratch = [
        ("sums of values", cells * width * 4),
        ("sums of weights", cells * 4),
        ("maxima", cells * 4),
        ("runs and first slots", spec.batch * 2 * 4),
    ]
    pieces_at = [piece.offset_bytes for piece in plan_workspace(scratch).pieces]

    def arguments() -> KernelArguments:
        given = KernelArguments(slots)
        add_forward_operands(given, spec, is_aligned=is_aligned)
        for name, offset in zip(_PARTS, pieces_at, strict=True):
            kind = "*i32" if name == "part_deal" else "*fp32"
            given.scratch(name, kind, offset if is_split else None)
        given.extent("run", run)
        rows = power_of_two(spec.rows)
        given.constant(
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BATCH_BLOCK=power_of_two(spec.batch) if is_split else 1,
            ROW_BLOCK=rows,
            RUN_BLOCK=max(1, _RUNS_AT_ONCE // rows),
            WIDTH_BLOCK=power_of_two(width),
        )
        return given

    first = arguments().planned(attention_decode, (programs, 1, 1), config.warps, config.stages)
    if not is_split:
        return KernelPlan((first,))
    grid = (spec.batch * spec.heads_q, 1, 1)
    second = arguments().planned(attention_combine, grid, _COMBINE_WARPS, 1)
    return KernelPlan((first, second), tuple(scratch))
