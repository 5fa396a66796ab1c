"""Rows of attention forward that a hidden value spoilt, made again.

A hidden key has weight 0, and 0 times NaN or infinity is NaN; and at a level that is kept sums may
pass what float32 holds. Both are rare: a forward kernel that does not look for such values notes of
each row whether its sums are finite (``spoilt``, 32 bits a row, rows of a head padded to whole
tiles), and this kernel makes the noted rows again by the loop that marks which rows really see such
a value. A program looks through the notes of several tiles. Where a level is kept the sums are the
likelier cause, and marks are left to a second loop.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.attention_addresses import head_start, row_offsets
from tilewright.engines.triton.attention_arguments import KernelArguments, add_forward_operands
from tilewright.engines.triton.attention_config import ForwardConfig, blocks, keeps_level
from tilewright.engines.triton.attention_loop import (
    attend,
    is_spoilt,
    load_piece,
    scalar_value,
)
from tilewright.engines.triton.attention_masks import LOG2_E, key_bounds
from tilewright.engines.triton.attention_output import join_sink, store_rows
from tilewright.engines.triton.attention_spec import AttentionSpec

# Notes that a program looks through, and fewer where rows may pass their level, as then all may;
# and rows that it makes at a time.
_NOTES, _NOTES_AT_A_LEVEL = 2048, 512
_ROWS = 64


@triton.jit
def made_again(
    query, k_at, v_at, k_row, v_row, k_col, v_col, first, end, first_row, row,
    in_rows, keys, shift, left, right, factor, batch, head,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CHECKS: tl.constexpr,
):  # fmt: skip
    """(sums, total, greatest score) of BLOCK_M rows.

    CHECKS: values that are not finite are looked for, and marked where a row sees them.
    """
    acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    acc, _, total, top = attend(
        acc, 0.0, total, top, query, query, k_at, v_at, k_row, v_row, k_col, v_col,
        None, None, 0, 0, 0, 0, first // BLOCK_N * BLOCK_N, end, first_row,
        row[:, None], keys, shift, left, right, factor,
        None, None, None, None, None, None, batch, head,
        None, 0, None, None, keys, None, None, None, 0, None, 0, 0, in_rows[:, None],
        D, DV, D_BLOCK, 0, DV_BLOCK, 0, BLOCK_N, UNIT, 1, 1,
        False, HAS_LEFT, HAS_RIGHT, False, False, False, None, None, False, False, 0,
        False, True, True, CHECKS,
    )  # fmt: skip
    return acc, total, top


@triton.jit
def attention_repair(
    q, k, v, o, gate, stats, sink, spoilt,
    scale,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    sink_head,
    rows, keys, heads, group, left, right, noted_rows, all_heads,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STATS_LOG2: tl.constexpr, NOTES: tl.constexpr, TRIES_PLAIN: tl.constexpr,
):  # fmt: skip
    """``noted_rows`` notes a head, a multiple of BLOCK_M, for each of ``all_heads`` heads."""
    begin = tl.program_id(0).to(tl.int64) * NOTES
    count = noted_rows.to(tl.int64) * all_heads
    along = begin + tl.arange(0, NOTES)
    notes = tl.load(spoilt + along, mask=along < count, other=0)
    if tl.max(notes.to(tl.int32), 0) > 0:
        factor = scalar_value(scale).to(tl.float32) * LOG2_E
        shift = 0
        if BOTTOM_RIGHT:
            shift = keys - rows
        for start in range(0, NOTES, BLOCK_M):
            place = begin + start + tl.arange(0, BLOCK_M)
            noted = tl.load(spoilt + place, mask=place < count, other=0) != 0
            if tl.max(noted.to(tl.int32), 0) > 0:
                both = ((begin + start) // noted_rows).to(tl.int32)
                first_row = ((begin + start) % noted_rows).to(tl.int32)
                head, batch = both % heads, both // heads
                key_head = head // group
                row = first_row + tl.arange(0, BLOCK_M)
                in_rows = row < rows
                q_at = row_offsets(row, None, batch, head, 0, 1, q_batch, q_head, q_row, UNIT)
                query = load_piece(q, q_at, in_rows, q_col, 0, D_BLOCK, D, False, True)
                k_at = head_start(k, None, batch, key_head, 0, 1, k_batch, k_head, UNIT, False)
                v_at = head_start(v, None, batch, key_head, 0, 1, v_batch, v_head, UNIT, False)
                last_row = tl.minimum(first_row + BLOCK_M, rows) - 1
                first, end, _, _ = key_bounds(
                    first_row, last_row, keys, shift, left, right, HAS_LEFT, HAS_RIGHT
                )
                acc, total, top = made_again(
                    query, k_at, v_at, k_row, v_row, k_col, v_col, first, end, first_row, row,
                    in_rows, keys, shift, left, right, factor, batch, head,
                    D, DV, D_BLOCK, DV_BLOCK, BLOCK_M, BLOCK_N, UNIT, HAS_LEFT, HAS_RIGHT,
                    not TRIES_PLAIN,
                )  # fmt: skip
                if TRIES_PLAIN:
                    # Not the sums alone, then: a value is not finite.
                    if is_spoilt(acc, 0.0, False):
                        acc, total, top = made_again(
                            query, k_at, v_at, k_row, v_row, k_col, v_col, first, end, first_row,
                            row, in_rows, keys, shift, left, right, factor, batch, head,
                            D, DV, D_BLOCK, DV_BLOCK, BLOCK_M, BLOCK_N, UNIT, HAS_LEFT, HAS_RIGHT,
                            True,
                        )  # fmt: skip
                if sink is not None:
                    level = tl.load(sink + head.to(tl.int64) * sink_head)
                    acc, _, total, top = join_sink(acc, 0.0, total, top, level, False)
                store_rows(
                    acc, 0.0, total, top, 1.0, batch, head, row, in_rows, in_rows & noted,
                    o, gate, stats, None, None, None, None, None, None, None,
                    o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
                    stats_batch, stats_head, stats_row,
                    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1,
                    DV, DV_BLOCK, 0, O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2, True,
                )  # fmt: skip


def notes_of(
    spec: AttentionSpec, noted_rows: int, *, keeps_level: bool = False
) -> tuple[tuple[str, int], ...]:
    """What the notes take of the workspace; nothing where masks hide no key.

    ``keeps_level``: weights are made at a level that may be too low for a row.
    """
    if not (spec.is_banded or keeps_level):
        return ()
    return (("rows that are not finite", spec.batch * spec.heads_q * noted_rows * 4),)


def repair_kernel(
    spec: AttentionSpec,
    slots: Mapping[int, int],
    forward: ForwardConfig,
    noted_rows: int,
    *,
    is_aligned: bool,
) -> PlannedKernel:
    """The launch behind a forward kernel that noted ``noted_rows`` rows a head in the workspace."""
    arguments = KernelArguments(slots)
    add_forward_operands(arguments, spec, is_aligned=is_aligned)
    arguments.scratch("spoilt", "*i32", 0)
    all_heads = spec.batch * spec.heads_q
    arguments.extent("noted_rows", noted_rows)
    arguments.extent("all_heads", all_heads)
    block, block_v = blocks(spec)
    has_level = keeps_level(spec, forward)
    notes = _NOTES_AT_A_LEVEL if has_level else _NOTES
    arguments.constant(
        D_BLOCK=block,
        DV_BLOCK=block_v,
        BLOCK_M=min(_ROWS, forward.block_m),
        BLOCK_N=min(32 if block_v > 128 else 64, forward.block_n),
        NOTES=notes,
        TRIES_PLAIN=has_level,
    )
    grid = (triton.cdiv(noted_rows * all_heads, notes), 1, 1)
    stages = 3 if has_level else 1
    return arguments.planned(attention_repair, grid, 8 if block_v > 128 else 4, stages)
