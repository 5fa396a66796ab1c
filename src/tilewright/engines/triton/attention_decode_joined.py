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

from tilewright.engines.triton.attention_decode_join import send_sums, store_joined
from tilewright.engines.triton.attention_decode_side import (
    N,
    length_of,
    load,
    page_of,
    queries_of,
    sides_of,
    sum_keys_early,
    warp_number,
)
from tilewright.engines.triton.cluster_exchange import (
    FLAG_BYTES,
    all_have_begun,
    await_bytes,
    expect_bytes,
    reserved,
)


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
    send_sums(
        acc, total, top, number, 0, buffer, tops_at, flag_at, DV, ROWS, KEPT, RUNS // WARPS, WARPS
    )
    await_bytes(buffer + flag_at)
    store_joined(
        buffer, program, batch, key_head, count_q, o, gate, stats, smax, ssum, sink,
        o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
        o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
        stats_batch, stats_head, stats_row,
        smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row, sink_head,
        o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
        o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
        rows, group, KEPT, RUNS, width,
        O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2, WARPS,
    )  # fmt: skip
