"""Units of packed attention with a value that is not finite, made again; see ``attention_repair``.

A program looks through the flags of some units, as many as there really are.
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import quotient, row_offsets
from tilewright.engines.triton.attention_loop import load_piece, scalar_value
from tilewright.engines.triton.attention_masks import LOG2_E, key_bounds
from tilewright.engines.triton.attention_output import join_sink, store_rows
from tilewright.engines.triton.attention_packed_order import unit_at
from tilewright.engines.triton.attention_repair import made_again


@triton.jit
def attention_packed_repair(
    q, k, v, o, gate, stats, sink, order, flags, o_offsets, gate_offsets, stats_offsets,
    scale,
    q_head, q_row, q_col,
    k_head, k_row, k_col,
    v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    sink_head,
    o_offset_step, gate_offset_step, stats_offset_step,
    o_multiplier, gate_multiplier, stats_multiplier,
    heads, left, right, by_heads, heads_shift, by_group, group_shift,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STATS_LOG2: tl.constexpr, IN_PAIRS: tl.constexpr, TILE: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    factor = scalar_value(scale).to(tl.float32) * LOG2_E
    count = tl.load(order) * heads
    for begin in range(tl.program_id(0) * NOTES, count, tl.num_programs(0) * NOTES):
        along = begin + tl.arange(0, NOTES)
        noted = tl.load(flags + along, mask=along < count, other=0)
        if tl.max(noted, 0) > 0:
            for number in range(begin, tl.minimum(begin + NOTES, count)):
                if tl.load(flags + number) != 0:
                    sequence, head, place, rows, keys, q_first, k_first, v_first = unit_at(
                        order, number, heads, by_heads, heads_shift, IN_PAIRS, TILE
                    )
                    key_head = quotient(head, by_group, group_shift)
                    shift = 0
                    if BOTTOM_RIGHT:
                        shift = keys - rows
                    k_at = k + row_offsets(
                        k_first, None, sequence, key_head, 0, 1, 0, k_head, k_row, UNIT
                    )
                    v_at = v + row_offsets(
                        v_first, None, sequence, key_head, 0, 1, 0, v_head, v_row, UNIT
                    )
                    last_tile = tl.cdiv(rows, TILE) - 1 - place
                    for part in range(0, (2 if IN_PAIRS else 1) * (TILE // BLOCK_M)):
                        tile = tl.where(part < TILE // BLOCK_M, last_tile, place)
                        first_row = tile * TILE + part % (TILE // BLOCK_M) * BLOCK_M
                        row = first_row + tl.arange(0, BLOCK_M)
                        in_rows = row < rows
                        q_at = row_offsets(
                            row + q_first, None, sequence, head, 0, 1, 0, q_head, q_row, UNIT
                        )
                        query = load_piece(q, q_at, in_rows, q_col, 0, D_BLOCK, D, False, True)
                        last_row = tl.minimum(first_row + BLOCK_M, rows) - 1
                        first, end, _, _ = key_bounds(
                            first_row, last_row, keys, shift, left, right, HAS_LEFT, HAS_RIGHT
                        )
                        if first_row >= rows:
                            end = first
                        acc, total, top = made_again(
                            query, k_at, v_at, k_row, v_row, k_col, v_col, first, end, first_row,
                            row, in_rows, keys, shift, left, right, factor, sequence, head,
                            D, DV, D_BLOCK, DV_BLOCK, BLOCK_M, BLOCK_N, UNIT, HAS_LEFT, HAS_RIGHT,
                            True,
                        )  # fmt: skip
                        if sink is not None:
                            level = tl.load(sink + head.to(tl.int64) * sink_head)
                            acc, _, total, top = join_sink(acc, 0.0, total, top, level, False)
                        store_rows(
                            acc, 0.0, total, top, 1.0, sequence, head, row, in_rows, in_rows,
                            o, gate, stats, None, None,
                            o_offsets, gate_offsets, stats_offsets, None, None,
                            o_batch, o_head, o_row, o_col,
                            gate_batch, gate_head, gate_row, gate_col,
                            stats_batch, stats_head, stats_row, 0, 0, 0, 0, 0, 0,
                            o_offset_step, gate_offset_step, stats_offset_step, 0, 0,
                            o_multiplier, gate_multiplier, stats_multiplier, 1, 1,
                            DV, DV_BLOCK, 0, O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE,
                            STATS_LOG2, True,
                        )  # fmt: skip
