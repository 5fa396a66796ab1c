"""Sums of the runs of each head's keys, joined into O and the statistics.

    (acc, total, top) of a union:  top = max top_i,  total = sum total_i exp2(top_i - top)

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewright.engines.triton.attention_addresses import sequence_length
from tilewright.engines.triton.attention_output import join_sink, store_rows
from tilewright.engines.triton.attention_runs import deal, pick, sums_at


@triton.jit
def attention_combine(
    o, gate, stats, smax, ssum, sink, part_acc, part_total, part_top,
    len_q, len_kv,
    o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    len_q_step, len_kv_step,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    batches, rows, keys, heads_kv, group, left, right, run, all_runs,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr, TILES: tl.constexpr,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr,
    ROW_BLOCK: tl.constexpr, RUN_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    STATS_LOG2: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_DEALT: tl.constexpr, IS_SHARED: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One program a (batch, query head): its rows' sums over all runs, RUN_BLOCK at a time."""
    heads = heads_kv * group
    program = tl.program_id(0)
    head, batch = program % heads, program // heads
    row = tl.arange(0, ROW_BLOCK)
    in_group = (head % group) * rows + row
    # A row's tile, of those of its key head, and where in it the row is.
    tile, in_tile = in_group // BLOCK_M, in_group % BLOCK_M
    if IS_DEALT:
        index, runs, starts, counts_q, _ = deal(
            len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, heads_kv * TILES, left,
            right, run, LEN_Q_IS_SUM, LEN_KV_IS_SUM, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_N,
            BATCH_BLOCK,
        )  # fmt: skip
        own = index == batch
        count, count_q = pick(runs, own), pick(counts_q, own)
        first_slot, slot_step = pick(starts, own) + head // group * TILES, heads_kv * TILES
    else:
        # Every run of the declared keys has a place, in order.
        count_q = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
        count_kv = sequence_length(
            len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM
        )
        blocks = tl.cdiv(count_kv, BLOCK_N)
        if not IS_SHARED:
            # As ``attention_decode_side.run_size`` has it, in blocks.
            run = tl.maximum(tl.cdiv(blocks, all_runs), 1)
        count = tl.where(count_q > 0, tl.cdiv(blocks, run), 0)
        first_slot, slot_step = (batch * heads_kv + head // group) * all_runs, 1
    in_declared = row < rows
    in_rows = row < count_q

    width: tl.constexpr = DV_BLOCK + DV_BLOCK_2
    # Whole rows of sums, as wide as a power of two; what is beyond DV is not stored.
    along = tl.arange(0, WIDTH_BLOCK)
    # The first turn sums and stores nothing: it brings this code into the caches while the kernel
    # that makes the sums still runs. How many turns there are is not for the compiler to know.
    turns = 1
    if IS_EARLY:
        turns = 1 + tl.minimum(batches, 1)
    for turn in range(turns):
        is_last = turn == turns - 1
        if IS_EARLY:
            if is_last:
                gdc_wait()
        there = tl.where(is_last, count, 0)
        reach = tl.where(is_last, count, 1)
        acc = tl.zeros((ROW_BLOCK, WIDTH_BLOCK), tl.float32)
        total = tl.zeros((ROW_BLOCK,), tl.float32)
        top = tl.full((ROW_BLOCK,), -float("inf"), tl.float32)
        for start in range(0, reach, RUN_BLOCK):
            number = start + tl.arange(0, RUN_BLOCK)
            slot = (first_slot + number * slot_step)[:, None] + tile[None, :]
            at = sums_at(slot, group, rows, TILES, BLOCK_M) + in_tile[None, :]
            mask = (number < there)[:, None] & in_declared[None, :]
            # All loads before what they are for.
            tops = tl.load(part_top + at, mask=mask, other=-float("inf"))
            totals = tl.load(part_total + at, mask=mask, other=0.0)
            inside = mask[:, :, None] & (along < width)[None, None, :]
            parts = tl.load(
                part_acc + (at * width)[:, :, None] + along[None, None, :], mask=inside, other=0.0
            )
            new_top = tl.maximum(top, tl.max(tops, 0))
            level = tl.where(new_top == -float("inf"), 0.0, new_top)
            weights = tl.exp2(tops - level[None, :])
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(totals * weights, 0)
            acc = acc * fade[:, None] + tl.sum(parts * weights[:, :, None], 0)
            top = new_top
        if sink is not None:
            level = tl.load(sink + head.to(tl.int64) * sink_head)
            acc, _none, total, top = join_sink(acc, 0.0, total, top, level, False)
        if IS_TRANSPOSED:
            # Dimension 8 a + b of 64 is at place 8 b + a.
            acc = tl.reshape(acc, (ROW_BLOCK, WIDTH_BLOCK // 64, 8, 8))
            acc = tl.reshape(tl.permute(acc, (0, 1, 3, 2)), (ROW_BLOCK, WIDTH_BLOCK))
        store_rows(
            acc, 0.0, total, top, 1.0, batch, head, row, in_rows & is_last, in_declared & is_last,
            o, gate, stats, smax, ssum,
            o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
            o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
            stats_batch, stats_head, stats_row,
            smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row,
            o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
            o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
            DV, WIDTH_BLOCK, 0, O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2,
        )  # fmt: skip
