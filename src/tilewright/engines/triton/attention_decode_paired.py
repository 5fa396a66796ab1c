"""The kernel for few queries with plain scores where sequences have lengths of their own.

As ``attention_decode_joined``, with a cluster for a key head of two sequences, the first and the
last one, the second and the last but one, and so on. Each has as many runs as the cluster has
warps: a warp takes a run of the first, and then the run of the second whose number, counted from
the last one, is the same. So a long sequence beside a short one is read by twice the warps that it
would have for itself.

The first block of the second run is on its way while the last one of the first is multiplied.
Half of the programs join the first sequence's sums, and half the second one's. How long runs are
follows from their own sequence's length, and they are joined in their order, so no result depends
on the sequence beside it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.triton.attention_decode_join import expect_sums, send_sums, store_joined
from tilewright.engines.triton.attention_decode_side import (
    N,
    Side,
    add_block,
    arrived,
    length_of,
    load,
    no_sums,
    page_of,
    pages_of,
    queries_of,
    readable_keys,
    run_size,
    sides_of,
    warp_number,
)
from tilewright.engines.triton.cluster_exchange import all_have_begun


@gluon.jit
def one_of(condition, one, other):
    """The side ``one`` if ``condition``, else ``other``: of two sequences of one cache."""
    return Side(
        gl.where(condition, one.first, other.first), gl.where(condition, one.pages, other.pages),
        other.row_step, other.page_step, other.entry_step,
        other.PAGE, other.KEY_AXIS, other.WORDS, other.LAYOUT,
    )  # fmt: skip


@gluon.jit
def load_next(k_side, v_side, key, end, k_behind, v_behind, behind, behind_end, k_page, v_page):
    """Words of keys and values of the block from ``key``, and the pages of the block after it.

    From ``end`` on they are those of other sides, from ``behind`` to ``behind_end``.
    """
    is_over = key >= end
    at, stop = gl.where(is_over, behind, key), gl.where(is_over, behind_end, end)
    next_k = load(one_of(is_over, k_behind, k_side), at, stop, k_page)
    next_v = load(one_of(is_over, v_behind, v_side), at, stop, v_page)
    is_last = key + N >= end
    at = gl.where(is_last, gl.where(is_over, behind + N, behind), key + N)
    stop = gl.where(is_last, behind_end, end)
    k_page = page_of(one_of(is_last, k_behind, k_side), at, stop)
    v_page = page_of(one_of(is_last, v_behind, v_side), at, stop)
    return next_k, next_v, k_page, v_page


@gluon.jit
def sum_run(
    query, k_side, v_side, next_k, next_v, k_page, v_page, start, end,
    k_behind, v_behind, behind, behind_end, scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Sums of keys [start, end), as those of ``attention_decode_joined``, and what comes next:

    blocks and pages of keys [behind, behind_end) of other sides.
    """
    acc, total, top = no_sums(DV, BLOCK_M, ROWS, WARPS)
    for key in range(start, end, N):
        key = gl.to_tensor(key)
        keys, values = arrived(next_k, next_v, query.dtype, D, DV, WARPS)
        next_k, next_v, k_page, v_page = load_next(
            k_side, v_side, key + N, end, k_behind, v_behind, behind, behind_end, k_page, v_page
        )
        acc, total, top = add_block(acc, total, top, query, keys, values, key, end, scale, WARPS)
    return acc, total, top, next_k, next_v, k_page, v_page


@gluon.jit
def attention_decode_paired(
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
    batches, rows, keys, group,
    LEN_Q_IS_SUM: gl.constexpr, LEN_KV_IS_SUM: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    KEPT: gl.constexpr, RUNS: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, O_UNIT: gl.constexpr,
    GATE_UNIT: gl.constexpr, GATE_O: gl.constexpr, GATE_TYPE: gl.constexpr,
    STATS_LOG2: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (RUNS / WARPS, key heads, half the sequences): a cluster is the programs of a key head.

    KEPT: the rows of all heads of a key head, or the power of two above, at least 2.
    """
    program, key_head, pair = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    # Of an odd number the middle one is alone.
    second = batches - 1 - pair
    has_two = second > pair
    number = program * WARPS + warp_number()
    keys_1 = length_of(len_kv, pair, len_kv_step, keys, LEN_KV_IS_SUM)
    keys_2 = length_of(len_kv, second, len_kv_step, keys, LEN_KV_IS_SUM)
    size_1, size_2 = run_size(keys_1, RUNS), run_size(keys_2, RUNS)
    first_1, first_2 = number * size_1, (RUNS - 1 - number) * size_2
    rows_1 = length_of(len_q, pair, len_q_step, rows, LEN_Q_IS_SUM)
    rows_2 = length_of(len_q, second, len_q_step, rows, LEN_Q_IS_SUM)
    k_1, v_1 = sides_of(
        k, v, k_table, v_table, k_table_offsets, v_table_offsets, pair, key_head,
        k_batch, k_head, k_row, v_batch, v_head, v_row,
        k_table_batch, k_table_row, v_table_batch, v_table_row,
        k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
        D, DV, K_PAGE, V_PAGE, WARPS,
    )  # fmt: skip
    k_2, v_2 = sides_of(
        k, v, k_table, v_table, k_table_offsets, v_table_offsets, second, key_head,
        k_batch, k_head, k_row, v_batch, v_head, v_row,
        k_table_batch, k_table_row, v_table_batch, v_table_row,
        k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
        D, DV, K_PAGE, V_PAGE, WARPS,
    )  # fmt: skip
    # Entries of the table are read before the queries.
    readable_1 = readable_keys(keys_1, keys, k_table_offsets, v_table_offsets)
    readable_2 = readable_keys(keys_2, keys, k_table_offsets, v_table_offsets)
    k_page_1, v_page_1 = pages_of(k_1, v_1, first_1, readable_1)
    k_page_2, v_page_2 = pages_of(k_2, v_2, first_2, readable_2)
    query = queries_of(
        q, q_offsets, pair, key_head, rows_1, q_batch, q_head, q_row, q_offset_step,
        q_multiplier, rows, group, D, BLOCK_M, ROWS, WARPS,
    )  # fmt: skip
    next_query = queries_of(
        q, q_offsets, second, key_head, rows_2, q_batch, q_head, q_row, q_offset_step,
        q_multiplier, rows, group, D, BLOCK_M, ROWS, WARPS,
    )  # fmt: skip
    # No branch: behind one the second length would be read after the first.
    end_1 = gl.where(rows_1 > 0, gl.minimum(keys_1, first_1 + size_1), first_1)
    end_2 = gl.where((rows_2 > 0) & has_two, gl.minimum(keys_2, first_2 + size_2), first_2)
    is_none = first_1 >= end_1
    k_page = gl.where(is_none, k_page_2, k_page_1)
    v_page = gl.where(is_none, v_page_2, v_page_1)
    next_k, next_v, k_page, v_page = load_next(
        k_1, v_1, first_1, end_1, k_2, v_2, first_2, end_2, k_page, v_page
    )

    half: gl.constexpr = RUNS // WARPS // 2
    width: gl.constexpr = DV // half
    buffer = expect_sums(RUNS, width, KEPT)
    for turn in range(gl.where(has_two, 2, 1)):
        turn = gl.to_tensor(turn)
        is_second = turn == 1
        start, end = gl.where(is_second, first_2, first_1), gl.where(is_second, end_2, end_1)
        acc, total, top, next_k, next_v, k_page, v_page = sum_run(
            query, one_of(is_second, k_2, k_1), one_of(is_second, v_2, v_1),
            next_k, next_v, k_page, v_page, start, end,
            k_2, v_2, first_2, gl.where(is_second, first_2, end_2), scale,
            D, DV, BLOCK_M, ROWS, WARPS,
        )  # fmt: skip
        if turn == 0:
            all_have_begun()
        send_sums(
            acc, total, top, gl.where(is_second, RUNS - 1 - number, number), turn * half,
            buffer, DV, ROWS, RUNS, KEPT, half, WARPS,
        )  # fmt: skip
        query = next_query

    joins_second = program >= half
    if joins_second & (second <= pair):
        return
    batch = gl.where(joins_second, second, pair)
    count_q = gl.where(joins_second, rows_2, rows_1)
    store_joined(
        buffer, program % half, batch, key_head, count_q, o, gate, stats, smax, ssum, sink,
        o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
        o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
        stats_batch, stats_head, stats_row,
        smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row, sink_head,
        o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
        o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
        rows, group, RUNS, width, KEPT,
        O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2, WARPS,
    )  # fmt: skip
