"""The kernel for few queries with plain scores: keys and values go straight into registers.

A program is one warp, so that many of them share a multiprocessor and none waits for another.
``attention_decode_side`` has what it loads and multiplies.

Where all runs of the declared keys have room at once, each is a program's, which knows it by its
number, and a shorter sequence has as many, which are shorter. Where they have not, a run is as long
as the declaration says, and a program takes some that follow one another, as many as all have to,
so that none is left: that follows from the lengths, and each program works it out for itself.
No result depends on the sequences beside it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.triton.attention_decode_ahead import ahead_from, ask, follow
from tilewright.engines.triton.attention_decode_side import (
    N,
    add_values,
    keys_of,
    length_of,
    load,
    load_both,
    no_sums,
    page_of,
    pages_of,
    queries_of,
    readable_keys,
    run_size,
    score_layout,
    scores_of,
    sides_of,
    sum_layout,
    values_of,
    weigh,
)


@gluon.jit
def sum_keys(
    query, k_side, v_side, next_k, next_v, k_page, v_page, start, stop, end, ahead, scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Sums of keys [start, stop), and the blocks and pages that come next, up to ``end``.

    From the key ``ahead`` on, if that is known, the block behind the next one is asked for as well.
    """
    dtype: gl.constexpr = query.dtype
    acc, total, top = no_sums(DV, BLOCK_M, ROWS, 1)
    if ahead is not None:
        if start >= ahead:
            ask(k_side, start + N, end, k_page, 1)
            ask(v_side, start + N, end, v_page, 1)
    for key in range(start, stop, N):
        key = gl.to_tensor(key)
        if ahead is not None:
            if key >= ahead:
                ask(k_side, key + 2 * N, end, k_page, 1)
                ask(v_side, key + 2 * N, end, v_page, 1)
        score = scores_of(query, keys_of(next_k, dtype, D, 1), BLOCK_M, 1)
        next_k = load(k_side, key + N, end, k_page)
        k_page = page_of(k_side, key + 2 * N, end)
        weights, fade, total, top = weigh(score, key, end, total, top, scale, 1)
        values = values_of(next_v, dtype, DV, 1)
        acc = add_values(acc, values, weights, fade, ROWS, 1)
        next_v = load(v_side, key + N, end, v_page)
        v_page = page_of(v_side, key + 2 * N, end)
    return acc, total, top, next_k, next_v, k_page, v_page


@gluon.jit
def sum_run(
    query, k_side, v_side, next_k, next_v, k_page, v_page, start, stop, end, ahead, scale,
    batch, key_head, heads_kv, runs, number, group, rows, part_acc, part_total, part_top,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store the sums of keys [start, stop); the blocks and pages that come next, up to ``end``."""
    acc, total, top, next_k, next_v, k_page, v_page = sum_keys(
        query, k_side, v_side, next_k, next_v, k_page, v_page, start, stop, end, ahead, scale,
        D, DV, BLOCK_M, ROWS,
    )  # fmt: skip
    in_row: gl.constexpr = gl.SliceLayout(1, score_layout(1))
    layout: gl.constexpr = sum_layout(1)
    slot = (batch.to(gl.int64) * heads_kv + key_head) * runs + number
    tile = slot * (group * rows)
    in_tile = gl.arange(0, BLOCK_M, layout=in_row)
    gl.store(part_total + tile + in_tile, total, mask=in_tile < group * rows)
    gl.store(part_top + tile + in_tile, top, mask=in_tile < group * rows)
    across = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    to = part_acc + gl.expand_dims((tile + across) * DV, 0)
    to += gl.expand_dims(gl.arange(0, DV, layout=gl.SliceLayout(1, layout)), 1)
    gl.store(to, acc, mask=gl.expand_dims(across < group * rows, 0))
    return next_k, next_v, k_page, v_page


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def dealt(runs, most):
    """(runs that a program takes, programs of a key head of each sequence): at most ``most``."""
    each = gl.maximum((gl.sum(runs, 0) + most - 1) // most, 1)
    while gl.sum((runs + each - 1) // each, 0) > most:
        each += 1
    return each, (runs + each - 1) // each


@gluon.jit
def attention_decode_direct(
    q, k, v, part_acc, part_total, part_top,
    len_q, len_kv, k_table, v_table, q_offsets, k_table_offsets, v_table_offsets, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    len_q_step, len_kv_step, k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, k_table_offset_step, v_table_offset_step,
    q_multiplier, k_table_multiplier, v_table_multiplier,
    batches, rows, keys, heads_kv, group, run, all_runs, programs,
    LEN_Q_IS_SUM: gl.constexpr, LEN_KV_IS_SUM: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, IS_EARLY: gl.constexpr,
    BATCH_BLOCK: gl.constexpr, IS_SHARED: gl.constexpr,
):  # fmt: skip
    """Grid (runs, key heads, sequences), a run each; or, IS_SHARED, as many as the device holds."""
    if IS_SHARED:
        index = gl.arange(0, BATCH_BLOCK, layout=gl.BlockedLayout([1], [32], [1], [0]))
        known = gl.minimum(index, batches - 1)
        counts = length_of(len_kv, known, len_kv_step, keys, LEN_KV_IS_SUM) + index * 0
        size = run * N
        runs = gl.where(index < batches, (counts + size - 1) // size, 0)
        each, shares = dealt(runs, programs // heads_kv)
        ends = gl.associative_scan(shares, 0, add)
        key_head, place = gl.program_id(0) % heads_kv, gl.program_id(0) // heads_kv
        batch = gl.sum(gl.where(ends <= place, 1, 0), 0)
        if batch >= batches:
            return
        own = index == batch
        run_number = (place - gl.sum(gl.where(own, ends - shares, 0), 0)) * each
        count_kv = gl.sum(gl.where(own, counts, 0), 0)
        count_q = length_of(len_q, batch, len_q_step, rows, LEN_Q_IS_SUM)
        first = run_number * size
    else:
        run_number, key_head, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
        count_kv = length_of(len_kv, batch, len_kv_step, keys, LEN_KV_IS_SUM)
        size = run_size(count_kv, gl.num_programs(0))
        first = run_number * size
        count_q = length_of(len_q, batch, len_q_step, rows, LEN_Q_IS_SUM)
    k_side, v_side = sides_of(
        k, v, k_table, v_table, k_table_offsets, v_table_offsets, batch, key_head,
        k_batch, k_head, k_row, v_batch, v_head, v_row,
        k_table_batch, k_table_row, v_table_batch, v_table_row,
        k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
        D, DV, K_PAGE, V_PAGE, 1,
    )  # fmt: skip
    # Entries of the table are read before the queries.
    readable = readable_keys(count_kv, keys, k_table_offsets, v_table_offsets)
    k_page, v_page = pages_of(k_side, v_side, first, readable)
    query = queries_of(
        q, q_offsets, batch, key_head, count_q, q_batch, q_head, q_row, q_offset_step,
        q_multiplier, rows, group, D, BLOCK_M, ROWS, 1,
    )  # fmt: skip

    if IS_SHARED:
        end = gl.minimum(count_kv, first + each * size)
    else:
        end = gl.minimum(count_kv, first + size)
    if count_q <= 0:
        end = first
    ahead = None
    if not IS_SHARED and len_kv is not None and k_table is None:
        late = ahead_from(count_kv, len_kv, gl.num_programs(2), len_kv_step, keys, LEN_KV_IS_SUM, 1)
        late = late // gl.num_programs(0)
        ahead = gl.where(follow(k_side) & follow(v_side), first + late, end)
    if IS_EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r,~{memory}",
            [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if first < end:
        next_k, next_v = load_both(k_side, v_side, first, end, k_page, v_page)
        k_page, v_page = pages_of(k_side, v_side, first + N, end)
        if IS_SHARED:
            for number in range(run_number, (end + size - 1) // size):
                number = gl.to_tensor(number)
                next_k, next_v, k_page, v_page = sum_run(
                    query, k_side, v_side, next_k, next_v, k_page, v_page,
                    number * size, gl.minimum(number * size + size, end), end, None, scale,
                    batch, key_head, heads_kv, all_runs, number, group, rows,
                    part_acc, part_total, part_top,
                    D, DV, BLOCK_M, ROWS,
                )  # fmt: skip
        else:
            sum_run(
                query, k_side, v_side, next_k, next_v, k_page, v_page, first, end, end, ahead,
                scale,
                batch, key_head, heads_kv, gl.num_programs(0), run_number, group, rows,
                part_acc, part_total, part_top,
                D, DV, BLOCK_M, ROWS,
            )  # fmt: skip
