"""The kernel for few queries with plain scores: keys and values go straight into registers.

    S = Q K^T,  8 or 16 queries by 16 keys;  O^T = V^T P^T,  dimensions by queries

A program is one warp, so that many of them share a multiprocessor and none waits for another. A
thread loads 16 bytes of a row at a time and multiplies what it loaded: no shared memory lies
between. A product takes the dimensions of keys in any order if queries have the same, and those of
values in any order, which is then that of the sums: of 64, dimension 8 a + b is at place 8 b + a.
The next block is on its way while a block is multiplied; keys beyond the length are not loaded.

A run of keys is as long as the declaration says, so that no result depends on the sequences beside
it. Where all runs have room at once, each is a program's, which knows it by its number. Where they
have not, a program takes some that follow one another, as many as all have to, so that none is
left: that follows from the lengths, and each program works it out for itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.core import _aggregate as aggregate

# Keys of a block.
BLOCK = 16
N = gl.constexpr(BLOCK)
MINUS_INFINITY = gl.constexpr(-float("inf"))


@aggregate
class Side:
    """Keys or values of one head, in words of 4 bytes; PAGE is 0 where there are no pages.

    ``first`` is the head's first word, or that in the first page; ``pages`` the sequence's table.
    In a block in registers, axis KEY_AXIS is that of keys, the other one that of WORDS.
    """

    first: gl.tensor
    pages: gl.tensor
    row_step: gl.tensor
    page_step: gl.tensor
    entry_step: gl.tensor
    PAGE: gl.constexpr
    KEY_AXIS: gl.constexpr
    WORDS: gl.constexpr
    LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, first, pages, row_step, page_step, entry_step, PAGE, KEY_AXIS, WORDS, LAYOUT
    ):  # fmt: skip
        self.first = first
        self.pages = pages
        self.row_step = row_step
        self.page_step = page_step
        self.entry_step = entry_step
        self.PAGE = gl.constexpr(PAGE)
        self.KEY_AXIS = gl.constexpr(KEY_AXIS)
        self.WORDS = gl.constexpr(WORDS)
        self.LAYOUT = gl.constexpr(LAYOUT)


@gluon.jit
def page_of(side, key, end):
    """The page of the 16 keys from ``key``, or the page of each of them."""
    page = gl.to_tensor(key)
    if side.PAGE > 0:
        if side.PAGE % N > 0:
            page += gl.arange(0, N, layout=gl.SliceLayout(1 - side.KEY_AXIS, side.LAYOUT))
        at = (page // side.PAGE).to(gl.int64) * side.entry_step
        page = gl.load(side.pages + at, mask=page < end, other=0)
    return page


@gluon.jit
def load(side, key, end, page):
    """Words of the 16 keys from ``key``; those from ``end`` on are 0."""
    number = gl.arange(0, N, layout=gl.SliceLayout(1 - side.KEY_AXIS, side.LAYOUT))
    word = gl.arange(0, side.WORDS, layout=gl.SliceLayout(side.KEY_AXIS, side.LAYOUT))
    if side.PAGE == 0:
        row = (key + number).to(gl.int64) * side.row_step
    elif side.PAGE % N == 0:
        row = (key % side.PAGE + number).to(gl.int64) * side.row_step
        row += page.to(gl.int64) * side.page_step
    else:
        row = ((key + number) % side.PAGE).to(gl.int64) * side.row_step
        row += page.to(gl.int64) * side.page_step
    at = side.first + gl.expand_dims(row, 1 - side.KEY_AXIS)
    at += gl.expand_dims(word, side.KEY_AXIS)
    mask = gl.expand_dims(key + number < end, 1 - side.KEY_AXIS)
    # What was read once is of no more use.
    return gl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit
def pairs(words, DTYPE: gl.constexpr):
    """The two elements of each word, on a new last axis.

    In one word a value stays in one register from a step of a loop to the next; in two elements
    it may lie in two.
    """
    if DTYPE == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.float16, gl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return gl.join(low, high)


@gluon.jit
def first_rows(x, ROWS: gl.constexpr):
    """The first ROWS of 16, of a matrix with N columns or of a vector."""
    if ROWS == 16:
        return x
    elif len(x.shape) == 1:
        some, _ = gl.split(gl.permute(gl.reshape(x, (2, 8)), (1, 0)))
        return some
    else:
        some, _ = gl.split(gl.permute(gl.reshape(x, (2, 8, N)), (1, 2, 0)))
        return some


@gluon.jit
def length_of(lengths, sequence, step, limit, IS_SUM: gl.constexpr):
    """The length of a sequence, int32 in [0, limit]; ``limit`` itself if no length is given."""
    if lengths is None:
        return limit
    else:
        at = lengths + sequence.to(gl.int64) * step
        count = gl.load(at).to(gl.int64)
        if IS_SUM:
            count = gl.load(at + step).to(gl.int64) - count
        return gl.minimum(gl.maximum(count, 0), limit).to(gl.int32)


@gluon.jit
def sum_run(
    query, k_side, v_side, next_k, next_v, k_page, v_page, start, stop, end, scale,
    batch, key_head, heads_kv, runs, number, group, rows, part_acc, part_total, part_top,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    PRODUCT: gl.constexpr,
):  # fmt: skip
    """Store the sums of keys [start, stop); the blocks and pages that come next, up to ``end``."""
    dtype: gl.constexpr = query.dtype
    k_layout: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    in_row: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    in_column: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    acc = gl.zeros((DV, ROWS), gl.float32, PRODUCT)
    total = gl.zeros((BLOCK_M,), gl.float32, in_row)
    top = gl.full((BLOCK_M,), MINUS_INFINITY, gl.float32, in_row)
    for key in range(start, stop, N):
        key = gl.to_tensor(key)
        block = gl.reshape(gl.permute(pairs(next_k, dtype), (0, 2, 1)), (D, N))
        block = gl.convert_layout(block, k_layout)
        score = mma_v2(query, block, gl.zeros((BLOCK_M, N), gl.float32, PRODUCT))
        next_k = load(k_side, key + N, end, k_page)
        k_page = page_of(k_side, key + 2 * N, end)
        if key + N > end:
            seen = key + gl.arange(0, N, layout=in_column) < end
            score = gl.where(gl.expand_dims(seen, 0), score, MINUS_INFINITY)
        new_top = gl.maximum(top, gl.max(score, 1) * scale)
        # exp2(-inf + inf) would be NaN; against 0 it is 0.
        level = gl.where(new_top == MINUS_INFINITY, 0.0, new_top)
        weights = gl.exp2(score * scale - gl.expand_dims(level, 1))
        fade = gl.exp2(top - level)
        total = total * fade + gl.sum(weights, 1)
        top = new_top
        block = gl.reshape(pairs(next_v, dtype), (N, DV // 64, 8, 8))
        block = gl.reshape(gl.permute(block, (1, 3, 2, 0)), (DV, N))
        weights = gl.permute(first_rows(weights.to(dtype), ROWS), (1, 0))
        fade = gl.convert_layout(first_rows(fade, ROWS), in_column)
        acc = mma_v2(
            gl.convert_layout(block, v_layout),
            gl.convert_layout(weights, p_layout),
            acc * gl.expand_dims(fade, 0),
        )
        next_v = load(v_side, key + N, end, v_page)
        v_page = page_of(v_side, key + 2 * N, end)

    slot = (batch.to(gl.int64) * heads_kv + key_head) * runs + number
    tile = slot * (group * rows)
    in_tile = gl.arange(0, BLOCK_M, layout=in_row)
    gl.store(part_total + tile + in_tile, total, mask=in_tile < group * rows)
    gl.store(part_top + tile + in_tile, top, mask=in_tile < group * rows)
    across = gl.arange(0, ROWS, layout=in_column)
    to = part_acc + gl.expand_dims((tile + across) * DV, 0)
    to += gl.expand_dims(gl.arange(0, DV, layout=in_row), 1)
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
    len_q, len_kv, k_table, v_table, q_offsets, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    len_q_step, len_kv_step, k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, q_multiplier,
    batches, rows, keys, heads_kv, group, run, all_runs, programs,
    LEN_Q_IS_SUM: gl.constexpr, LEN_KV_IS_SUM: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, IS_EARLY: gl.constexpr,
    BATCH_BLOCK: gl.constexpr, IS_SHARED: gl.constexpr,
):  # fmt: skip
    """Grid (runs, key heads, sequences), a run each; or, IS_SHARED, as many as the device holds."""
    is_paged: gl.constexpr = k_table is not None
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]
    )
    # 8 dimensions of a query or key are side by side in a thread: 16 bytes.
    q_layout: gl.constexpr = gl.DotOperandLayout(0, product, 8)
    k_words: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [16, 0]] + ([[32, 0]] if D == 128 else []) + [[0, 8]],
        lane_bases=[[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[], block_bases=[], shape=[D // 2, N],
    )  # fmt: skip
    v_words: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [8, 0]] + ([[0, 32]] if DV == 128 else []),
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[], block_bases=[], shape=[N, DV // 2],
    )  # fmt: skip
    word: gl.constexpr = gl.pointer_type(gl.int32)

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
        first = run_number * run * N
        count_kv = length_of(len_kv, batch, len_kv_step, keys, LEN_KV_IS_SUM)
        count_q = length_of(len_q, batch, len_q_step, rows, LEN_Q_IS_SUM)
    k_first = k.cast(word, bitcast=True) + key_head.to(gl.int64) * k_head * 4
    v_first = v.cast(word, bitcast=True) + key_head.to(gl.int64) * v_head * 4
    k_pages, v_pages = k_first, v_first
    if is_paged:
        k_pages = k_table + batch.to(gl.int64) * k_table_batch
        v_pages = v_table + batch.to(gl.int64) * v_table_batch
    else:
        k_first += batch.to(gl.int64) * k_batch * 4
        v_first += batch.to(gl.int64) * v_batch * 4
    k_side = Side(
        k_first, k_pages, k_row * 4, k_batch * 4, gl.to_tensor(k_table_row),
        K_PAGE if is_paged else 0, 1, D // 2, k_words,
    )  # fmt: skip
    v_side = Side(
        v_first, v_pages, v_row * 4, v_batch * 4, gl.to_tensor(v_table_row),
        V_PAGE if is_paged else 0, 0, DV // 2, v_words,
    )  # fmt: skip
    # Entries of the table are read before the queries; those behind the length name no page.
    k_page, v_page = page_of(k_side, first, keys), page_of(v_side, first, keys)

    place_in_tile = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, q_layout))
    member, row = place_in_tile // rows, place_in_tile % rows
    fits = (member < group) & (place_in_tile < ROWS)
    if q_offsets is None:
        start = batch.to(gl.int64) * q_batch
    else:
        start = gl.load(q_offsets + batch.to(gl.int64) * q_offset_step).to(gl.int64) * q_multiplier
        # Behind the last row may be no memory.
        fits = fits & (row < count_q)
    head = key_head * group + member
    q_at = start + head.to(gl.int64) * q_head + row.to(gl.int64) * q_row
    along = gl.arange(0, D, layout=gl.SliceLayout(0, q_layout))
    query = gl.load(
        q + gl.expand_dims(q_at * 8, 1) + gl.expand_dims(along, 0),
        mask=gl.expand_dims(fits, 1), other=0.0,
    )  # fmt: skip
    # So that the compiler knows that the other rows are 0, and keeps them nowhere.
    query = gl.where(gl.expand_dims(place_in_tile < ROWS, 1), query, 0.0)

    if IS_SHARED:
        end = gl.minimum(count_kv, first + each * size)
    else:
        end = gl.minimum(count_kv, first + run * N)
    if count_q <= 0:
        end = first
    if IS_EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r,~{memory}",
            [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if first < end:
        next_k = load(k_side, first, end, k_page)
        next_v = load(v_side, first, end, v_page)
        k_page = page_of(k_side, first + N, end)
        v_page = page_of(v_side, first + N, end)
        if IS_SHARED:
            for number in range(run_number, (end + size - 1) // size):
                number = gl.to_tensor(number)
                next_k, next_v, k_page, v_page = sum_run(
                    query, k_side, v_side, next_k, next_v, k_page, v_page,
                    number * size, gl.minimum(number * size + size, end), end, scale,
                    batch, key_head, heads_kv, all_runs, number, group, rows,
                    part_acc, part_total, part_top,
                    D, DV, BLOCK_M, ROWS, product,
                )  # fmt: skip
        else:
            sum_run(
                query, k_side, v_side, next_k, next_v, k_page, v_page, first, end, end, scale,
                batch, key_head, heads_kv, gl.num_programs(0), run_number, group, rows,
                part_acc, part_total, part_top,
                D, DV, BLOCK_M, ROWS, product,
            )  # fmt: skip
