"""Scores to probabilities, a block at a time, and what a tile ends with.

Softmax in base 2 with the scale folded in; the running maximum m and the sum l of a row:
    m' = max(m, max s),  p = 2^(c s - c m'),  l' = 2^(c m - c m') l + sum p,  c = scale * log2(e).
If LAZY, m stays where it would grow by less than 8 / c: then p is up to 2^8, and as exact.

Source: Milakov and Gimelshein 2018.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewright.engines.hopper.attention_places import element
from tilewright.engines.hopper.attention_records import CAPPED, NO_LENGTHS, PLAIN, ROWS
from tilewright.engines.hopper.attention_sinks import with_sink
from tilewright.engines.hopper.barriers import partition_barrier

MINUS_INFINITY = gl.constexpr(float("-inf"))
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def reciprocal(x):
    """1 / x to a unit in the last place, for x >= 1; 0 for infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def shaped(scores, problem, features):
    """Scores in base 2 where Q K^T is scaled, or scaled and capped, before masks.

    tanh(x) = 1 - 2 / (e^(2x) + 1) to float32's rounding of 1, which keeps a score to a ten
    millionth of its cap. (``tanh.approx`` is off by 2^-11: 0.02 in a score near a cap of 50.)
    """
    if features.SCORES != PLAIN:
        scores = scores * problem.gain
        if features.SCORES == CAPPED:
            share = reciprocal(gl.exp2(scores) + 1.0)
            scores = problem.ceiling - (2.0 * problem.ceiling) * share
    return scores


@gluon.jit
def masked(scores, first, column, sequence, tiling, features, APART: gl.constexpr = False):
    """Scores with -inf where row ``first + i`` does not see key ``column + j``.

    If APART, what a thread's columns have in common is on the rows' side: constants are compared.
    """
    layout: gl.constexpr = scores.type.layout
    # Counted from the block's first column: what is compared is known to the compiler.
    columns = gl.arange(0, tiling.BLOCK_N, gl.SliceLayout(0, layout))
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if APART:
        common = columns & 6
        columns = columns & -7
    if features.HAS_RIGHT:
        end = (gl.minimum(rows + sequence.right + 1, sequence.keys) - column)[:, None]
        if APART:
            end = end - common[None, :]
        seen = columns[None, :] < end
    else:
        end = sequence.keys - column
        if APART:
            end = end - common
        seen = (columns < end)[None, :]
    if features.HAS_LEFT:
        start = (rows - sequence.left - column)[:, None]
        if APART:
            start = start - common[None, :]
        seen = seen & (columns[None, :] > start)
    return gl.where(seen, scores, MINUS_INFINITY)


@gluon.jit
def clear_tail(values, valid, tiling):
    """Zero the rows of a block of V from ``valid`` on: a weight of 0 times NaN would be NaN.

    Every consumer does so for itself; they write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, tiling.BLOCK_N, gl.SliceLayout(1, layout))
    block = values.load(layout)
    values.store(gl.where((rows < valid)[:, None], block, 0.0).to(values.dtype))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def packed(p, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, WORDS: gl.constexpr):
    """Probabilities in 16 bits, as the left operand of a product, or two columns a word (int32).

    Where registers are few, ptxas keeps single 16-bit values in swapped pairs from one step of a
    loop to the next, and swaps them back; it leaves words alone.
    """
    if WORDS:
        low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
        KIND: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
        made = gl.inline_asm_elementwise(
            "cvt.rn." + KIND + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        made = gl.convert_layout(p.to(DTYPE), LAYOUT)
    return made


@gluon.jit
def unpacked(made, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, WORDS: gl.constexpr):
    """What ``packed`` made, as the left operand of a product."""
    p = made
    if WORDS:
        if DTYPE == gl.bfloat16:
            low, high = gl.inline_asm_elementwise(
                "mov.b32 {$0, $1}, $2;", "=h,=h,r", [made], dtype=(gl.bfloat16, gl.bfloat16),
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low, high = gl.inline_asm_elementwise(
                "mov.b32 {$0, $1}, $2;", "=h,=h,r", [made], dtype=(gl.float16, gl.float16),
                is_pure=True, pack=1,
            )  # fmt: skip
        p = gl.reshape(gl.join(low, high), [made.shape[0], made.shape[1] * 2])
        p = gl.convert_layout(p, LAYOUT, assert_trivial=True)
    return p


@gluon.jit
def thread_sums(p):
    """Row sums of the columns that one thread holds: (rows, 4), added up when a tile ends."""
    parts: gl.constexpr = p.shape[1] // 8
    return gl.sum(gl.sum(p.reshape([p.shape[0], parts, 4, 2]), 3), 1)


@gluon.jit
def softmax_block(scores, top, total, scale, MASKED: gl.constexpr, LAZY: gl.constexpr):
    """(p, factor of what came before, the new maximum, the new sums) of one block of scores."""
    new_top = gl.maximum(top, gl.max(scores, 1))
    if LAZY:
        grows = (new_top - top) * scale > 8.0
        new_top = gl.where(grows, new_top, top)
    shift = new_top * scale
    if MASKED:
        shift = gl.where(new_top == MINUS_INFINITY, 0.0, shift)
    p = gl.exp2(scores * scale - shift[:, None])
    factor = gl.exp2(top * scale - shift)
    if LAZY:
        factor = gl.where(grows, factor, 1.0)
    sums = thread_sums(p)
    spread = gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, factor, new_top, total * spread[:, None] + sums


@gluon.jit
def rescaled(acc, factor):
    """The accumulator times a factor a row."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factor = gl.convert_layout(factor, layout, assert_trivial=True)
    return acc * factor[:, None]


@gluon.constexpr_function
def skipping_products(count):
    """PTX: ``count`` numbers of a thread times a factor each, unless those of all its warp are 1.

    The numbers lie in pairs of a row and of the row 8 below in turn, as a product leaves them.
    """
    text = "{.reg .pred one, two, any;"
    text += f"setp.neu.f32 one, ${2 * count}, 0f3F800000;"
    text += f"setp.neu.or.f32 two, ${2 * count + 2}, 0f3F800000, one;"
    text += "vote.sync.any.pred any, two, 0xffffffff; @!any bra SKIP;"
    for i in range(count):
        text += f"mul.f32 ${i}, ${i}, ${2 * count + i};"
    return text + "SKIP: }"


@gluon.constexpr_function
def products_in_place(count):
    """The constraints that go with ``skipping_products``."""
    places = ",".join(str(i) for i in range(count))
    return ",".join(["=f"] * count) + "," + places + "," + ",".join(["f"] * count)


@gluon.jit
def rescaled_lazily(acc, factor, LAZY: gl.constexpr):
    """``rescaled``; if LAZY, a warp whose factors are all 1 leaves it out."""
    if LAZY:
        layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        factor = gl.convert_layout(factor, layout, assert_trivial=True)
        COUNT: gl.constexpr = acc.shape[1] // 2
        out = gl.inline_asm_elementwise(
            skipping_products(COUNT), products_in_place(COUNT), [acc, factor[:, None]],
            dtype=gl.float32, is_pure=False, pack=COUNT,
        )  # fmt: skip
    else:
        out = rescaled(acc, factor)
    return out


@gluon.jit
def finish(acc, top, total, place, first, sequence, problem, features, LATE: gl.constexpr):
    """The normalized accumulator; Stats are stored."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = first + gl.arange(0, ROWS, layout)
    total = gl.convert_layout(gl.sum(total, 1), layout)
    if LATE:
        # All threads of a row have the same; a row that sees nothing has no maximum.
        shift = gl.convert_layout(gl.max(top, 1), layout)
        shift = gl.where(total == 0.0, MINUS_INFINITY, shift)
    else:
        shift = gl.convert_layout(top, layout) * problem.scale
    scaled = 1.0
    if features.HAS_SINK:
        total, shift, scaled = with_sink(total, shift, problem.sink, place.head)
    empty = total == 0.0
    if features.LENGTHS_Q != NO_LENGTHS:
        empty = empty | (rows >= sequence.rows)
    if features.HAS_STATS:
        stats = shift + gl.log2(total)
        if not features.STATS_LOG2:
            stats = stats * LN2
        end = problem.rows
        at = problem.stats.pointer + element(
            problem.stats, place.batch, place.head, place.head * 0, features.RAGGED_Q
        )
        if features.RAGGED_Q:
            end = sequence.rows
            start = gl.load(
                problem.stats.starts + place.batch.to(gl.int64) * problem.stats.starts_step
            )
            at += start.to(gl.int64) * problem.stats.unit
        gl.store(
            at + rows.to(gl.int64) * problem.stats.row,
            gl.where(empty, MINUS_INFINITY, stats),
            mask=rows < end,
        )
    inverse = gl.where(empty, 0.0, scaled / total)
    out = acc * inverse[:, None]
    if features.LENGTHS_Q != NO_LENGTHS:
        # What rows of padding hold, NaN included, does not matter.
        out = gl.where(empty[:, None], 0.0, out)
    return out
