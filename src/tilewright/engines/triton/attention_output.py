"""The end of attention forward: from sums to O and the statistics, shared by its kernels."""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import row_offsets
from tilewright.engines.triton.attention_masks import LN_2, LOG2_E, in_range
from tilewright.engines.triton.device_math import quick_gate


@triton.jit
def store_piece(
    at, token, inside, step, values, FIRST: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """Store (tokens, BLOCK) values as elements FIRST .. FIRST + BLOCK, up to SIZE."""
    along = FIRST + tl.arange(0, BLOCK)
    pointers = at + token[:, None] + (along * step)[None, :]
    mask = inside[:, None]
    if FIRST + BLOCK > SIZE:
        mask = mask & (along < SIZE)[None, :]
    tl.store(pointers, values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def gate_factor(logits, TYPE: tl.constexpr):
    """sigmoid(logits), float32, rounded to TYPE if there is one; 0 and 1 at infinity."""
    return rounded(quick_gate(logits.to(tl.float32)), TYPE)


@triton.jit
def rounded(values, TYPE: tl.constexpr):
    """float32 values as TYPE holds them; None holds all."""
    if TYPE is None:
        return values
    else:
        return values.to(TYPE).to(tl.float32)


@triton.jit
def gate_piece(
    values, at, token, inside, step, FIRST: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    O_TYPE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Elements FIRST .. FIRST + BLOCK of O times those of the gate, which lies as ``store_piece``
    would store it."""
    along = FIRST + tl.arange(0, BLOCK)
    pointers = at + token[:, None] + (along * step)[None, :]
    mask = inside[:, None]
    if FIRST + BLOCK > SIZE:
        mask = mask & (along < SIZE)[None, :]
    return rounded(values, O_TYPE) * gate_factor(tl.load(pointers, mask=mask, other=0.0), TYPE)


@triton.jit
def join_sink(acc, acc_2, total, top, sink, HAS_SECOND: tl.constexpr):
    """The sums with a sink among the scores: it has a weight and no value."""
    level = in_range(sink.to(tl.float32)) * LOG2_E
    new_top = tl.maximum(top, level)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    fade = tl.exp2(top - safe)
    # As one operation the product and the difference would leave what rounding took from a large
    # level, which is more than float32 has a power of 2 for.
    total = total * fade + tl.where(level == safe, 1.0, tl.exp2(level - safe))
    acc = acc * fade[:, None]
    if HAS_SECOND:
        acc_2 = acc_2 * fade[:, None]
    return acc, acc_2, total, new_top


@triton.jit
def store_rows(
    acc, acc_2, total, top, factor, batch, head, row, in_rows, in_declared,
    o, gate, stats, smax, ssum,
    o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    STATS_LOG2: tl.constexpr, IS_WHOLE: tl.constexpr = False,
):  # fmt: skip
    """O = acc / total * factor and the statistics of rows (``head`` a scalar or one a row).

    With a gate what is stored is O * sigmoid(gate), factors rounded to GATE_O and GATE_TYPE.

    Rows that are not ``in_rows`` are beyond the length: they are 0 and -inf where the output is
    dense, and have no place where it is ragged. A row whose total is 0 sees nothing. IS_WHOLE:
    all declared rows are ``in_rows``.
    """
    total = tl.where(in_rows, total, 0.0)
    is_empty = total == 0.0
    weight = factor / tl.where(is_empty, 1.0, total)
    in_o = in_rows if o_offsets is not None else in_declared
    o_at = row_offsets(
        row, o_offsets, batch, head, o_offset_step, o_multiplier, o_batch, o_head, o_row, O_UNIT
    )
    acc = acc * weight[:, None]
    if not IS_WHOLE:
        acc = tl.where(in_rows[:, None], acc, 0.0)
    if gate is not None:
        gate_at = row_offsets(
            row, gate_offsets, batch, head, gate_offset_step, gate_multiplier,
            gate_batch, gate_head, gate_row, GATE_UNIT,
        )  # fmt: skip
        acc = gate_piece(acc, gate, gate_at, in_o, gate_col, 0, DV_BLOCK, DV, GATE_O, GATE_TYPE)
    store_piece(o, o_at, in_o, o_col, acc, 0, DV_BLOCK, DV)
    if DV_BLOCK_2 > 0:
        acc_2 = acc_2 * weight[:, None]
        if not IS_WHOLE:
            acc_2 = tl.where(in_rows[:, None], acc_2, 0.0)
        if gate is not None:
            acc_2 = gate_piece(
                acc_2, gate, gate_at, in_o, gate_col, DV_BLOCK, DV_BLOCK_2, DV, GATE_O, GATE_TYPE
            )
        store_piece(o, o_at, in_o, o_col, acc_2, DV_BLOCK, DV_BLOCK_2, DV)
    top = tl.where(is_empty, -float("inf"), top)
    if stats is not None:
        value = top + tl.log2(tl.where(is_empty, 1.0, total))
        if not STATS_LOG2:
            value = value * LN_2
        at = row_offsets(
            row, stats_offsets, batch, head, stats_offset_step, stats_multiplier,
            stats_batch, stats_head, stats_row, 1,
        )  # fmt: skip
        in_stats = in_rows if stats_offsets is not None else in_declared
        tl.store(stats + at, value.to(stats.dtype.element_ty), mask=in_stats)
    if smax is not None:
        at = row_offsets(
            row, smax_offsets, batch, head, smax_offset_step, smax_multiplier,
            smax_batch, smax_head, smax_row, 1,
        )  # fmt: skip
        in_smax = in_rows if smax_offsets is not None else in_declared
        tl.store(smax + at, (top * LN_2).to(smax.dtype.element_ty), mask=in_smax)
    if ssum is not None:
        at = row_offsets(
            row, ssum_offsets, batch, head, ssum_offset_step, ssum_multiplier,
            ssum_batch, ssum_head, ssum_row, 1,
        )  # fmt: skip
        in_ssum = in_rows if ssum_offsets is not None else in_declared
        tl.store(ssum + at, total.to(ssum.dtype.element_ty), mask=in_ssum)
