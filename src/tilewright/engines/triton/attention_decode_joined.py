"""The kernel for few queries with plain scores whose programs join their sums themselves.

    (acc, total, top) of a union:  top = max top_i,  total = sum total_i exp2(top_i - top)

A warp has a run of keys, as in ``attention_decode_direct``, and waits for no other while it sums.
The runs of a sequence's key head are a cluster, whose programs run at the same time: each joins its
share of the dimensions, which all warps send it (``cluster_exchange``). There is no second kernel,
and nothing goes through the workspace. All of a cluster's warps share a sequence's keys, however
many there are; no result depends on the sequences beside it. With few programs of several warps a
call begins sooner than with as many as there are runs.

A sequence that outlasts the others asks for a block more in the second-level cache
(``attention_decode_ahead``), if the rows of a block follow one another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.triton.attention_decode_ahead import ahead_from, ask, follow
from tilewright.engines.triton.attention_decode_join import expect_sums, send_sums, store_joined
from tilewright.engines.triton.attention_decode_side import (
    N,
    add_block,
    arrived,
    length_of,
    load_both,
    no_sums,
    pages_of,
    queries_of,
    readable_keys,
    run_size,
    sides_of,
    warp_number,
)
from tilewright.engines.triton.cluster_exchange import all_have_begun


@gluon.jit
def sum_run(
    query, k_side, v_side, next_k, next_v, k_page, v_page, start, end, ahead, scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Sums of keys [start, end); the next block is asked for as soon as this one is there.

    From the key ``ahead`` on, so is the one behind it in the second-level cache.

    The assembler waits for all that was asked for where the loop begins again, so it is asked for
    early: values not after the product with those before them.
    """
    acc, total, top = no_sums(DV, BLOCK_M, ROWS, WARPS)
    if AHEAD:
        k_page_2, v_page_2 = pages_of(k_side, v_side, start + 2 * N, end)
        if start >= ahead:
            ask(k_side, start + N, end, k_page, WARPS)
            ask(v_side, start + N, end, v_page, WARPS)
    for key in range(start, end, N):
        key = gl.to_tensor(key)
        keys, values = arrived(next_k, next_v, query.dtype, D, DV, WARPS)
        next_k, next_v = load_both(k_side, v_side, key + N, end, k_page, v_page)
        if AHEAD:
            k_page, v_page = k_page_2, v_page_2
            k_page_2, v_page_2 = pages_of(k_side, v_side, key + 3 * N, end)
            if key >= ahead:
                ask(k_side, key + 2 * N, end, k_page, WARPS)
                ask(v_side, key + 2 * N, end, v_page, WARPS)
        else:
            k_page, v_page = pages_of(k_side, v_side, key + 2 * N, end)
        acc, total, top = add_block(acc, total, top, query, keys, values, key, end, scale, WARPS)
    return acc, total, top


@gluon.jit
def attention_decode_joined(
    q, k, v, o, gate, stats, smax, ssum, sink,
    len_q, len_kv, k_table, v_table,
    q_offsets, k_table_offsets, v_table_offsets,
    o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    len_q_step, len_kv_step, k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, k_table_offset_step, v_table_offset_step,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    q_multiplier, k_table_multiplier, v_table_multiplier,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    rows, keys, group,
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
    count_kv = length_of(len_kv, batch, len_kv_step, keys, LEN_KV_IS_SUM)
    count_q = length_of(len_q, batch, len_q_step, rows, LEN_Q_IS_SUM)
    size = run_size(count_kv, RUNS)
    first = number * size
    k_side, v_side = sides_of(
        k, v, k_table, v_table, k_table_offsets, v_table_offsets, batch, key_head,
        k_batch, k_head, k_row, v_batch, v_head, v_row,
        k_table_batch, k_table_row, v_table_batch, v_table_row,
        k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
        D, DV, K_PAGE, V_PAGE, WARPS,
    )  # fmt: skip
    # Entries of the table are read before the queries.
    readable = readable_keys(count_kv, keys, k_table_offsets, v_table_offsets)
    k_page, v_page = pages_of(k_side, v_side, first, readable)
    query = queries_of(
        q, q_offsets, batch, key_head, count_q, q_batch, q_head, q_row, q_offset_step,
        q_multiplier, rows, group, D, BLOCK_M, ROWS, WARPS,
    )  # fmt: skip
    # No branch: behind one the second length would be read after the first.
    end = gl.where(count_q > 0, gl.minimum(count_kv, first + size), first)
    next_k, next_v = load_both(k_side, v_side, first, end, k_page, v_page)
    k_page, v_page = pages_of(k_side, v_side, first + N, end)
    has_ahead: gl.constexpr = len_kv is not None and k_side.PAGE % N == 0 and v_side.PAGE % N == 0
    ahead = end
    if has_ahead:
        late = ahead_from(
            count_kv, len_kv, gl.num_programs(2), len_kv_step, keys, LEN_KV_IS_SUM, WARPS
        )  # fmt: skip
        ahead = gl.where(follow(k_side) & follow(v_side), first + late // RUNS, end)

    width: gl.constexpr = DV * WARPS // RUNS
    buffer = expect_sums(RUNS, width, KEPT)
    acc, total, top = sum_run(
        query, k_side, v_side, next_k, next_v, k_page, v_page, first, end, ahead, scale,
        D, DV, BLOCK_M, ROWS, WARPS, has_ahead,
    )  # fmt: skip
    all_have_begun()
    send_sums(acc, total, top, number, 0, buffer, DV, ROWS, RUNS, KEPT, RUNS // WARPS, WARPS)
    store_joined(
        buffer, program, batch, key_head, count_q, o, gate, stats, smax, ssum, sink,
        o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
        o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
        stats_batch, stats_head, stats_row,
        smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row, sink_head,
        o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
        o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
        rows, group, RUNS, width, KEPT,
        O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2, WARPS,
    )  # fmt: skip
