"""The kernel for few queries with plain scores whose programs join their sums themselves.

    (acc, total, top) of a union:  top = max top_i,  total = sum total_i exp2(top_i - top)

A warp has a run of keys, as in ``attention_decode_direct``, and waits for no other while it sums.
The runs of a sequence's key head are a cluster, whose programs run at the same time: each joins its
share of the dimensions, which all warps send it (``cluster_exchange``). There is no second kernel,
and nothing goes through the workspace. A run is as long as the declaration says, so that no result
depends on the sequences beside it. With few programs of several warps a call begins sooner than
with as many as there are runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.triton.attention_addresses import row_offsets
from tilewright.engines.triton.attention_decode_side import (
    MINUS_INFINITY,
    N,
    all_the_same,
    first_rows,
    length_of,
    load,
    page_of,
    queries_of,
    sides_of,
    sum_keys_early,
    sum_layout,
    warp_number,
)
from tilewright.engines.triton.attention_masks import LN_2, LOG2_E
from tilewright.engines.triton.attention_output import gate_factor, rounded
from tilewright.engines.triton.cluster_exchange import (
    FLAG_BYTES,
    all_have_begun,
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


@gluon.jit
def send_sums(
    acc, total, top, number, buffer, tops_at, flag_at,
    DV: gl.constexpr, ROWS: gl.constexpr, KEPT: gl.constexpr, RUNS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Send each program of the cluster its dimensions of ``acc``, and all of them the rest."""
    programs: gl.constexpr = RUNS // WARPS
    width: gl.constexpr = DV // programs
    layout: gl.constexpr = sum_layout(WARPS)
    # Dimension 8 a + b of 64 is at place 8 b + a.
    place = gl.arange(0, DV, layout=gl.SliceLayout(1, layout))
    along = place // 64 * 64 + place % 8 * 8 + place // 8 % 8
    at = buffer + (number * width + along % width) * (KEPT * 4)
    at = gl.expand_dims(in_program(at, along // width), 1)
    flag = gl.expand_dims(in_program(buffer + flag_at, along // width), 1)
    across = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout)), 0)
    send_pairs(at + across * 4, acc, flag, (across < KEPT).to(gl.int32))

    spread: gl.constexpr = spread_layout(programs, ROWS, WARPS)
    in_rows: gl.constexpr = gl.SliceLayout(0, spread)
    target = gl.expand_dims(gl.arange(0, programs, layout=gl.SliceLayout(1, spread)), 1)
    across = gl.expand_dims(gl.arange(0, ROWS, layout=in_rows), 0)
    tops = gl.expand_dims(gl.convert_layout(first_rows(top, ROWS), in_rows), 0)
    totals = gl.expand_dims(gl.convert_layout(first_rows(total, ROWS), in_rows), 0)
    at = in_program(buffer, target) + tops_at + (number * KEPT + across) * 8
    flag = in_program(buffer + flag_at, target)
    send_both(at, tops, totals, flag, (across < KEPT).to(gl.int32))


@gluon.jit
def join_sums(
    buffer, tops_at,
    WIDTH: gl.constexpr, KEPT: gl.constexpr, RUNS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(acc, total, top) of all runs: WIDTH dimensions by KEPT rows, and one a row."""
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
def attention_decode_joined(
    q, k, v, o, gate, stats, smax, ssum, sink,
    len_q, len_kv, k_table, v_table,
    q_offsets, o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    len_q_step, len_kv_step, k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, o_offset_step, gate_offset_step,
    stats_offset_step, smax_offset_step, ssum_offset_step,
    q_multiplier, o_multiplier, gate_multiplier,
    stats_multiplier, smax_multiplier, ssum_multiplier,
    rows, keys, group, run,
    LEN_Q_IS_SUM: gl.constexpr, LEN_KV_IS_SUM: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    KEPT: gl.constexpr, RUNS: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, O_UNIT: gl.constexpr,
    GATE_UNIT: gl.constexpr, GATE_O: gl.constexpr, GATE_TYPE: gl.constexpr,
    STATS_LOG2: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (RUNS / WARPS, key heads, sequences): a cluster is the programs of a key head.

    KEPT: the rows of all heads of a key head, or the power of two above, at least 2.
    """
    program, key_head, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    number = program * WARPS + warp_number()
    first = number * run * N
    count_kv = length_of(len_kv, batch, len_kv_step, keys, LEN_KV_IS_SUM)
    count_q = length_of(len_q, batch, len_q_step, rows, LEN_Q_IS_SUM)
    k_side, v_side = sides_of(
        k, v, k_table, v_table, batch, key_head, k_batch, k_head, k_row, v_batch, v_head, v_row,
        k_table_batch, k_table_row, v_table_batch, v_table_row, D, DV, K_PAGE, V_PAGE,
        WARPS,
    )  # fmt: skip
    # Entries of the table are read before the queries; those behind the length name no page.
    k_page, v_page = page_of(k_side, first, keys), page_of(v_side, first, keys)
    query = queries_of(
        q, q_offsets, batch, key_head, count_q, q_batch, q_head, q_row, q_offset_step,
        q_multiplier, rows, group, D, BLOCK_M, ROWS, WARPS,
    )  # fmt: skip
    # No branch: behind one the second length would be read after the first.
    end = gl.where(count_q > 0, gl.minimum(count_kv, first + run * N), first)
    next_k = load(k_side, first, end, k_page)
    next_v = load(v_side, first, end, v_page)
    k_page = page_of(k_side, first + N, end)
    v_page = page_of(v_side, first + N, end)

    width: gl.constexpr = DV * WARPS // RUNS
    tops_at: gl.constexpr = RUNS * width * KEPT * 4
    flag_at: gl.constexpr = tops_at + RUNS * KEPT * 8
    buffer = reserved(flag_at + FLAG_BYTES)
    expect_bytes(buffer + flag_at, flag_at)
    acc, total, top = sum_keys_early(
        query, k_side, v_side, next_k, next_v, k_page, v_page, first, end, scale,
        D, DV, BLOCK_M, ROWS, WARPS,
    )  # fmt: skip
    all_have_begun()
    send_sums(acc, total, top, number, buffer, tops_at, flag_at, DV, ROWS, KEPT, RUNS, WARPS)
    await_bytes(buffer + flag_at)
    acc, total, top = join_sums(buffer, tops_at, width, KEPT, RUNS, WARPS)

    tile: gl.constexpr = gl.SliceLayout(0, share_layout(RUNS, width, WARPS))
    place = gl.arange(0, KEPT, layout=gl.SliceLayout(0, tile))
    member, row = place // rows, place % rows
    in_declared = member < group
    in_rows = in_declared & (row < count_q)
    head = key_head * group + member
    if sink is not None:
        level = gl.load(sink + head.to(gl.int64) * sink_head, mask=in_declared, other=0.0)
        level = level.to(gl.float32) * LOG2_E
        new_top = gl.maximum(top, level)
        safe = gl.where(new_top == MINUS_INFINITY, 0.0, new_top)
        fade = gl.exp2(top - safe)
        total = total * fade + gl.exp2(level - safe)
        acc = acc * gl.expand_dims(fade, 0)
        top = new_top
    total = gl.where(in_rows, total, 0.0)
    is_empty = total == 0.0
    weight = 1.0 / gl.where(is_empty, 1.0, total)
    acc = gl.where(gl.expand_dims(in_rows, 0), acc * gl.expand_dims(weight, 0), 0.0)
    along = (program * width + gl.arange(0, width, layout=gl.SliceLayout(1, tile))).to(gl.int64)
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
