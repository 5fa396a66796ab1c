"""Blocks of keys and values for programs of one warp, and their sums, for plain scores.

    S = Q K^T,  8 or 16 queries by 16 keys;  O^T = V^T P^T,  dimensions by queries

Each warp has keys of its own: the layouts say that all warps of a program have the same, and what
is the same in all of a warp may differ from one to another. So a sum or a conversion leaves the
warp as little as a product does, and no warp waits for another.

A thread loads 16 bytes of a row at a time and multiplies what it loaded: no shared memory lies
between. A product takes the dimensions of keys in any order if queries have the same, and those of
values in any order, which is then that of the sums: of 64, dimension 8 a + b is at place 8 b + a.
The next block is on its way while a block is multiplied; keys beyond the length are not loaded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.core import _aggregate as aggregate

# Keys of a block.
BLOCK = 16
N = gl.constexpr(BLOCK)
MINUS_INFINITY = gl.constexpr(-float("inf"))


@gluon.constexpr_function
def score_layout(warps):
    """Of queries by keys: 16 queries are less than what two warps would share."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def sum_layout(warps):
    """Of dimensions by queries: so are 8 queries, and one warp has 16."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps], instr_shape=[16, 8])


@gluon.constexpr_function
def all_the_same(warps):
    """Bases of a layout of two axes for warps that all have the same."""
    return [[0, 0] for _ in range(warps.bit_length() - 1)]


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
        at = (page.to(gl.uint32) // side.PAGE).to(gl.int64) * side.entry_step
        page = gl.load(side.pages + at, mask=page < end, other=0)
    return page


@gluon.jit
def readable_keys(count, declared, k_table_offsets, v_table_offsets):
    """Keys whose page numbers may be read; what is not of a sequence names no page.

    A row of a table has those of all declared keys; where rows lie one after another, behind those
    of the last sequence may be no memory.
    """
    if k_table_offsets is None and v_table_offsets is None:
        return declared
    else:
        return count


@gluon.jit
def addresses(side, key, page):
    """Where the words of the 16 keys from ``key`` are."""
    number = gl.arange(0, N, layout=gl.SliceLayout(1 - side.KEY_AXIS, side.LAYOUT))
    word = gl.arange(0, side.WORDS, layout=gl.SliceLayout(side.KEY_AXIS, side.LAYOUT))
    if side.PAGE == 0:
        row = (key + number).to(gl.int64) * side.row_step
    elif side.PAGE % N == 0:
        start = gl.to_tensor(key).to(gl.uint32) % side.PAGE
        row = (start.to(gl.int32) + number).to(gl.int64) * side.row_step
        row += page.to(gl.int64) * side.page_step
    else:
        row = ((key + number) % side.PAGE).to(gl.int64) * side.row_step
        row += page.to(gl.int64) * side.page_step
    at = side.first + gl.expand_dims(row, 1 - side.KEY_AXIS)
    return at + gl.expand_dims(word, side.KEY_AXIS)


@gluon.jit
def are_before(side, key, end):
    """Which of the 16 keys from ``key`` are before ``end``, to be broadcast to a block."""
    number = gl.arange(0, N, layout=gl.SliceLayout(1 - side.KEY_AXIS, side.LAYOUT))
    return gl.expand_dims(key + number < end, 1 - side.KEY_AXIS)


@gluon.jit
def load(side, key, end, page):
    """Words of the 16 keys from ``key``; those from ``end`` on are 0."""
    # What was read once is of no more use.
    return gl.load(
        addresses(side, key, page), mask=are_before(side, key, end), other=0,
        eviction_policy="evict_first",
    )  # fmt: skip


@gluon.jit
def pages_of(k_side, v_side, key, end):
    """``page_of`` for keys and for values."""
    return page_of(k_side, key, end), page_of(v_side, key, end)


@gluon.jit
def load_both(k_side, v_side, key, end, k_page, v_page):
    """``load`` for keys and for values."""
    return load(k_side, key, end, k_page), load(v_side, key, end, v_page)


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
def run_size(count, runs):
    """Keys of each of ``runs`` runs of ``count`` keys: whole blocks, at least one.

    ``attention_combine`` works out the same.
    """
    return gl.maximum((count + (N * runs - 1)) // (N * runs), 1) * N


@gluon.constexpr_function
def words_of_keys(depth, warps):
    """Dimensions, two a word, by keys: 8 dimensions are side by side in a thread."""
    wide = [[32, 0]] if depth == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [16, 0], *wide, [0, 8]],
        lane_bases=[[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=all_the_same(warps), block_bases=[], shape=[depth // 2, BLOCK],
    )  # fmt: skip


@gluon.constexpr_function
def words_of_values(depth, warps):
    """Keys by dimensions, two a word."""
    wide = [[0, 32]] if depth == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [8, 0], *wide],
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=all_the_same(warps), block_bases=[], shape=[BLOCK, depth // 2],
    )  # fmt: skip


@gluon.jit
def warp_number():
    """The warp's number in its program, known to be the same in all of the warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5;"
        " shfl.sync.idx.b32 $0, t, 0, 31, 0xffffffff; }",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def table_start(table, offsets, batch, offset_step, multiplier, batch_step):
    """Where the page numbers of a sequence start."""
    if offsets is None:
        return table + batch.to(gl.int64) * batch_step
    else:
        start = gl.load(offsets + batch.to(gl.int64) * offset_step)
        return table + start.to(gl.int64) * multiplier


@gluon.jit
def sides_of(
    k, v, k_table, v_table, k_table_offsets, v_table_offsets, batch, key_head,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    k_table_batch, k_table_row, v_table_batch, v_table_row,
    k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
    D: gl.constexpr, DV: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Keys and values of a head of one sequence; steps are in 16 bytes."""
    is_paged: gl.constexpr = k_table is not None
    k_words: gl.constexpr = words_of_keys(D, WARPS)
    v_words: gl.constexpr = words_of_values(DV, WARPS)
    word: gl.constexpr = gl.pointer_type(gl.int32)
    k_first = k.cast(word, bitcast=True) + key_head.to(gl.int64) * k_head * 4
    v_first = v.cast(word, bitcast=True) + key_head.to(gl.int64) * v_head * 4
    k_pages, v_pages = k_first, v_first
    if is_paged:
        k_pages = table_start(
            k_table, k_table_offsets, batch, k_table_offset_step, k_table_multiplier, k_table_batch
        )
        v_pages = table_start(
            v_table, v_table_offsets, batch, v_table_offset_step, v_table_multiplier, v_table_batch
        )
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
    return k_side, v_side


@gluon.jit
def queries_of(
    q, q_offsets, batch, key_head, count_q, q_batch, q_head, q_row, q_offset_step, q_multiplier,
    rows, group, D: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The queries of all heads of a key head; 8 dimensions are side by side in a thread."""
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout(WARPS), 8)
    place = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, q_layout))
    member, row = place // rows, place % rows
    fits = (member < group) & (place < ROWS)
    if q_offsets is None:
        start = batch.to(gl.int64) * q_batch
    else:
        start = gl.load(q_offsets + batch.to(gl.int64) * q_offset_step).to(gl.int64) * q_multiplier
        # Behind the last row may be no memory.
        fits = fits & (row < count_q)
    head = key_head * group + member
    at = start + head.to(gl.int64) * q_head + row.to(gl.int64) * q_row
    along = gl.arange(0, D, layout=gl.SliceLayout(0, q_layout))
    query = gl.load(
        q + gl.expand_dims(at * 8, 1) + gl.expand_dims(along, 0),
        mask=gl.expand_dims(fits, 1), other=0.0,
    )  # fmt: skip
    # So that the compiler knows that the other rows are 0, and keeps them nowhere.
    return gl.where(gl.expand_dims(place < ROWS, 1), query, 0.0)


@gluon.jit
def keys_of(words, DTYPE: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """Dimensions by keys of a block, of which these are the words."""
    block = gl.reshape(gl.permute(pairs(words, DTYPE), (0, 2, 1)), (D, N))
    return gl.convert_layout(block, gl.DotOperandLayout(1, score_layout(WARPS), 8))


@gluon.jit
def values_of(words, DTYPE: gl.constexpr, DV: gl.constexpr, WARPS: gl.constexpr):
    """Dimensions, in the order of sums, by keys of a block, of which these are the words."""
    block = gl.reshape(pairs(words, DTYPE), (N, DV // 64, 8, 8))
    block = gl.reshape(gl.permute(block, (1, 3, 2, 0)), (DV, N))
    return gl.convert_layout(block, gl.DotOperandLayout(0, sum_layout(WARPS), 2))


@gluon.jit
def scores_of(query, block, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """Queries by the keys of a block."""
    layout: gl.constexpr = score_layout(WARPS)
    return mma_v2(query, block, gl.zeros((BLOCK_M, N), gl.float32, layout))


@gluon.jit
def weigh(score, key, end, total, top, scale, WARPS: gl.constexpr):
    """(weights, what sums so far fade by, total, top) with the scores of the keys from ``key``."""
    if key + N > end:
        seen = key + gl.arange(0, N, layout=gl.SliceLayout(0, score_layout(WARPS))) < end
        score = gl.where(gl.expand_dims(seen, 0), score, MINUS_INFINITY)
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    # exp2(-inf + inf) would be NaN; against 0 it is 0.
    level = gl.where(new_top == MINUS_INFINITY, 0.0, new_top)
    weights = gl.exp2(score * scale - gl.expand_dims(level, 1))
    fade = gl.exp2(top - level)
    return weights, fade, total * fade + gl.sum(weights, 1), new_top


@gluon.jit
def add_values(acc, block, weights, fade, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """``acc`` with the weighted values of a block."""
    weights = gl.permute(first_rows(weights.to(block.dtype), ROWS), (1, 0))
    layout: gl.constexpr = sum_layout(WARPS)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(1, layout, 2))
    fade = gl.convert_layout(first_rows(fade, ROWS), gl.SliceLayout(0, layout))
    return mma_v2(block, weights, acc * gl.expand_dims(fade, 0))


@gluon.jit
def no_sums(
    DV: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """(acc, total, top) of no key."""
    in_row: gl.constexpr = gl.SliceLayout(1, score_layout(WARPS))
    acc = gl.zeros((DV, ROWS), gl.float32, sum_layout(WARPS))
    total = gl.zeros((BLOCK_M,), gl.float32, in_row)
    return acc, total, gl.full((BLOCK_M,), MINUS_INFINITY, gl.float32, in_row)


@gluon.jit
def there(block):
    """``block``, which is there before anything that follows is asked for."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [block], dtype=block.dtype, is_pure=False, pack=2
    )


@gluon.jit
def meet():
    """The threads of a warp wait for one another: what stands before is asked for before."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r,~{memory}", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrived(
    next_k, next_v, DTYPE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Keys and values that were asked for, there before anything that follows is asked for."""
    keys = there(keys_of(next_k, DTYPE, D, WARPS))
    return keys, there(values_of(next_v, DTYPE, DV, WARPS))


@gluon.jit
def add_block(acc, total, top, query, keys, values, key, end, scale, WARPS: gl.constexpr):
    """(acc, total, top) with the block from ``key``, once all that stands before is asked for."""
    meet()
    score = scores_of(query, keys, query.shape[0], WARPS)
    weights, fade, total, top = weigh(score, key, end, total, top, scale, WARPS)
    return add_values(acc, values, weights, fade, acc.shape[1], WARPS), total, top
