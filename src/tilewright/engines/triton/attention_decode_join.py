"""Sums of a key head's runs, which the programs of a cluster send one another and join.

    (acc, total, top) of a union:  top = max top_i,  total = sum total_i exp2(top_i - top)

Each program joins its share of the dimensions of one key head, of which all warps send it theirs
(``cluster_exchange``). Sums are joined in the order of their runs, whoever made them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.triton.attention_addresses import row_offsets
from tilewright.engines.triton.attention_decode_side import (
    MINUS_INFINITY,
    all_the_same,
    first_rows,
    sum_layout,
)
from tilewright.engines.triton.attention_masks import LN_2, LOG2_E, in_range
from tilewright.engines.triton.attention_output import gate_factor, rounded
from tilewright.engines.triton.cluster_exchange import (
    FLAG_BYTES,
    await_bytes,
    expect_bytes,
    in_program,
    received,
    received_both,
    reserved,
    send_both,
    send_pairs,
)


@gluon.constexpr_function
def share_layout(runs, width, warps):
    """Runs by dimensions by rows: a thread has all runs of what it joins."""
    lanes = min(width, 32)
    return gl.BlockedLayout([runs, 1, 1], [1, lanes, 32 // lanes], [1, 1, warps], [1, 2, 0])


@gluon.constexpr_function
def spread_layout(programs, rows, warps):
    """Programs by rows, for what each warp sends: no two of its threads have the same."""
    bits = [[0, 1 << bit] for bit in range(rows.bit_length() - 1)]
    bits += [[1 << bit, 0] for bit in range(programs.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=bits[5:], lane_bases=bits[:5],
        warp_bases=all_the_same(warps), block_bases=[], shape=[programs, rows],
    )  # fmt: skip


@gluon.constexpr_function
def tops_place(runs, width, kept):
    """Where a program's (top, total) of each run and row begin: behind its share of ``acc``."""
    return runs * width * kept * 4


@gluon.constexpr_function
def flag_place(runs, width, kept):
    """Where the barrier is, behind the tops: so many bytes are sent to a program."""
    return tops_place(runs, width, kept) + runs * kept * 8


@gluon.jit
def expect_sums(RUNS: gl.constexpr, WIDTH: gl.constexpr, KEPT: gl.constexpr):
    """Where the sums of RUNS runs will be: WIDTH dimensions by KEPT rows, and tops and totals."""
    flag_at: gl.constexpr = flag_place(RUNS, WIDTH, KEPT)
    buffer = reserved(flag_at + FLAG_BYTES)
    expect_bytes(buffer + flag_at, flag_at)
    return buffer


@gluon.jit
def send_sums(
    acc, total, top, number, to, buffer,
    DV: gl.constexpr, ROWS: gl.constexpr, RUNS: gl.constexpr, KEPT: gl.constexpr,
    PROGRAMS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Send PROGRAMS of the cluster, from ``to`` on, a share of ``acc`` each, and all the rest."""
    width: gl.constexpr = DV // PROGRAMS
    tops_at: gl.constexpr = tops_place(RUNS, width, KEPT)
    flag_at: gl.constexpr = flag_place(RUNS, width, KEPT)
    layout: gl.constexpr = sum_layout(WARPS)
    # Dimension 8 a + b of 64 is at place 8 b + a.
    place = gl.arange(0, DV, layout=gl.SliceLayout(1, layout))
    along = place // 64 * 64 + place % 8 * 8 + place // 8 % 8
    at = buffer + (number * width + along % width) * (KEPT * 4)
    at = gl.expand_dims(in_program(at, to + along // width), 1)
    flag = gl.expand_dims(in_program(buffer + flag_at, to + along // width), 1)
    across = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout)), 0)
    send_pairs(at + across * 4, acc, flag, (across < KEPT).to(gl.int32))

    spread: gl.constexpr = spread_layout(PROGRAMS, ROWS, WARPS)
    in_rows: gl.constexpr = gl.SliceLayout(0, spread)
    target = to + gl.expand_dims(gl.arange(0, PROGRAMS, layout=gl.SliceLayout(1, spread)), 1)
    across = gl.expand_dims(gl.arange(0, ROWS, layout=in_rows), 0)
    tops = gl.expand_dims(gl.convert_layout(first_rows(top, ROWS), in_rows), 0)
    totals = gl.expand_dims(gl.convert_layout(first_rows(total, ROWS), in_rows), 0)
    at = in_program(buffer, target) + tops_at + (number * KEPT + across) * 8
    flag = in_program(buffer + flag_at, target)
    send_both(at, tops, totals, flag, (across < KEPT).to(gl.int32))


@gluon.jit
def join_sums(
    buffer, RUNS: gl.constexpr, WIDTH: gl.constexpr, KEPT: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """(acc, total, top) of all runs, once they are there: WIDTH dimensions by KEPT rows."""
    tops_at: gl.constexpr = tops_place(RUNS, WIDTH, KEPT)
    await_bytes(buffer + flag_place(RUNS, WIDTH, KEPT))
    whole: gl.constexpr = share_layout(RUNS, WIDTH, WARPS)
    of_rows: gl.constexpr = gl.SliceLayout(1, whole)
    of_dims: gl.constexpr = gl.SliceLayout(2, whole)
    number = gl.expand_dims(gl.arange(0, RUNS, layout=gl.SliceLayout(1, of_rows)), 1)
    row = gl.expand_dims(gl.arange(0, KEPT, layout=gl.SliceLayout(0, of_rows)), 0)
    tops, totals = received_both(buffer + tops_at + (number * KEPT + row) * 8)
    number = gl.expand_dims(gl.arange(0, RUNS, layout=gl.SliceLayout(1, of_dims)), 1)
    along = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, of_dims)), 0)
    row = gl.arange(0, KEPT, layout=gl.SliceLayout(0, gl.SliceLayout(0, whole)))
    at = gl.expand_dims((number * WIDTH + along) * KEPT, 2)
    parts = received(buffer + (at + gl.expand_dims(gl.expand_dims(row, 0), 0)) * 4)
    top = gl.max(tops, 0)
    # exp2(-inf + inf) would be NaN; against 0 it is 0.
    level = gl.where(top == MINUS_INFINITY, 0.0, top)
    weights = gl.exp2(tops - gl.expand_dims(level, 0))
    total = gl.sum(totals * weights, 0)
    acc = gl.sum(parts * gl.expand_dims(weights, 1), 0)
    in_tile: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, whole))
    return acc, gl.convert_layout(total, in_tile), gl.convert_layout(top, in_tile)


@gluon.jit
def store_one_a_row(
    to, value, row, batch, head, in_rows, in_declared, is_first,
    offsets, offset_step, multiplier, batch_step, head_step, row_step,
):  # fmt: skip
    """Store a number a row where ``is_first``: one program of a cluster does."""
    at = row_offsets(
        row, offsets, batch, head, offset_step, multiplier, batch_step, head_step, row_step, 1
    )
    inside = in_rows if offsets is not None else in_declared
    gl.store(to + at, value.to(to.dtype.element_ty), mask=inside & is_first)


@gluon.jit
def store_joined(
    buffer, program, batch, key_head, count_q, o, gate, stats, smax, ssum, sink,
    o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    rows, group,
    RUNS: gl.constexpr, WIDTH: gl.constexpr, KEPT: gl.constexpr,
    O_UNIT: gl.constexpr, GATE_UNIT: gl.constexpr, GATE_O: gl.constexpr,
    GATE_TYPE: gl.constexpr, STATS_LOG2: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Join what this program was sent of a sequence's key head, and store its dimensions.

    The first ``program`` of those that have the key head stores what there is one of a row.
    """
    acc, total, top = join_sums(buffer, RUNS, WIDTH, KEPT, WARPS)

    tile: gl.constexpr = gl.SliceLayout(0, share_layout(RUNS, WIDTH, WARPS))
    place = gl.arange(0, KEPT, layout=gl.SliceLayout(0, tile))
    member, row = place // rows, place % rows
    in_declared = member < group
    in_rows = in_declared & (row < count_q)
    head = key_head * group + member
    if sink is not None:
        level = gl.load(sink + head.to(gl.int64) * sink_head, mask=in_declared, other=0.0)
        level = in_range(level.to(gl.float32)) * LOG2_E
        new_top = gl.maximum(top, level)
        safe = gl.where(new_top == MINUS_INFINITY, 0.0, new_top)
        fade = gl.exp2(top - safe)
        # As ``join_sink`` has it.
        total = total * fade + gl.where(level == safe, 1.0, gl.exp2(level - safe))
        acc = acc * gl.expand_dims(fade, 0)
        top = new_top
    total = gl.where(in_rows, total, 0.0)
    is_empty = total == 0.0
    weight = 1.0 / gl.where(is_empty, 1.0, total)
    acc = gl.where(gl.expand_dims(in_rows, 0), acc * gl.expand_dims(weight, 0), 0.0)
    along = (program * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, tile))).to(gl.int64)
    if gate is not None:
        at = row_offsets(
            row, gate_offsets, batch, head, gate_offset_step, gate_multiplier,
            gate_batch, gate_head, gate_row, GATE_UNIT,
        )  # fmt: skip
        inside = in_rows if gate_offsets is not None else in_declared
        logits = gl.load(
            gate + gl.expand_dims(at, 0) + gl.expand_dims(along * gate_col, 1),
            mask=gl.expand_dims(inside, 0), other=0.0,
        )  # fmt: skip
        acc = rounded(acc, GATE_O) * gate_factor(logits, GATE_TYPE)
    at = row_offsets(
        row, o_offsets, batch, head, o_offset_step, o_multiplier, o_batch, o_head, o_row, O_UNIT
    )
    inside = in_rows if o_offsets is not None else in_declared
    gl.store(
        o + gl.expand_dims(at, 0) + gl.expand_dims(along * o_col, 1),
        acc.to(o.dtype.element_ty), mask=gl.expand_dims(inside, 0),
    )  # fmt: skip

    top = gl.where(is_empty, MINUS_INFINITY, top)
    is_first = program == 0
    if stats is not None:
        value = top + gl.log2(gl.where(is_empty, 1.0, total))
        if not STATS_LOG2:
            value = value * LN_2
        store_one_a_row(
            stats, value, row, batch, head, in_rows, in_declared, is_first,
            stats_offsets, stats_offset_step, stats_multiplier,
            stats_batch, stats_head, stats_row,
        )  # fmt: skip
    if smax is not None:
        store_one_a_row(
            smax, top * LN_2, row, batch, head, in_rows, in_declared, is_first,
            smax_offsets, smax_offset_step, smax_multiplier, smax_batch, smax_head, smax_row,
        )  # fmt: skip
    if ssum is not None:
        store_one_a_row(
            ssum, total, row, batch, head, in_rows, in_declared, is_first,
            ssum_offsets, ssum_offset_step, ssum_multiplier, ssum_batch, ssum_head, ssum_row,
        )  # fmt: skip
