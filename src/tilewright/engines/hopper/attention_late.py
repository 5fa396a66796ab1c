"""A block's exponentials, without its maxima.

    p = 2^(c s - m),  c = scale * log2(e),  where m is of the blocks before.

It need not be the maximum: bfloat16 reaches as far as float32, float16 up to 2^16, and a row of
larger p is as exact. That p is too large shows in sums, which are made anyway: a thread looks at
those of its columns, and if one is above 2^15, its warp takes the rows' maxima and makes p again,
from the exponents, which stay in registers until then. So a sixth of a step's instructions, and the
wait for them before the first exponential, is left to blocks whose scores grow by far.

A row that has seen no key yet has m = 0 and the sum 0, and its scores may lie anywhere; where there
are such rows (``FRESH``), the sum 0 is looked for, too.

What a row has is kept a thread: its four threads hold the same m, and sums of their own columns.
Numbers of a row and a thread are (rows, 4), and a block of scores (rows, columns / 8, 4, 2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_records import ROWS
from tilewright.engines.hopper.attention_softmax import (
    MINUS_INFINITY,
    products_in_place,
    skipping_products,
)

# The largest sum of a thread's columns, 2^15: no p of float16 overflows.
_LIMIT = "0f47000000"
# Nothing beside the sum of a row, whose largest p is 1 or more.
TINY = gl.constexpr(2.0**-100)
_ZERO, _ONE, _MINUS_INFINITY = "0f00000000", "0f3F800000", "0fFF800000"


@gluon.constexpr_function
def maximum_of_row(numbers, into):
    """PTX: the maximum of a thread's ``numbers`` and of the three threads beside it."""
    text = f"mov.f32 {into}, {numbers[0]};"
    for number in numbers[1:]:
        text += f"max.f32 {into}, {into}, {number};"
    for lane in (1, 2):
        text += f"shfl.sync.bfly.b32 t, {into}, {lane}, 0x1f, 0xffffffff;"
        text += f"max.f32 {into}, {into}, t;"
    return text


@gluon.constexpr_function
def mending(count, is_fresh):
    """PTX: p, sum, m and factor of ``count`` columns of a thread, made again if a sum asks for it.

    Operands, ``count`` each: p; sum and m in turn; the factor of what came before. Inputs: p, in
    the same place; exponents; sum and m in turn; what the sum was before, if ``is_fresh``. Columns
    lie in pairs of a row and of the row 8 below in turn, as a product leaves them; of what a row
    has, the first is given and taken.
    """
    made, factor = count, 2 * count
    exponent, given, before = 4 * count, 5 * count, 6 * count
    text = "{.reg .pred asks, any, new, none; .reg .f32 t, seen, rise0, rise1, sum0, sum1;"
    text += f"setp.gtu.f32 asks, ${given}, {_LIMIT};"
    text += f"setp.gtu.or.f32 asks, ${given + 2}, {_LIMIT}, asks;"
    if is_fresh:
        for row in (0, 2):
            text += f"setp.eq.or.f32 asks, ${before + row}, {_ZERO}, asks;"
    text += "vote.sync.any.pred any, asks, 0xffffffff;"
    for at in range(4):
        text += f"mov.f32 ${made + at}, ${given + at};"
    text += f"mov.f32 ${factor}, {_ONE}; mov.f32 ${factor + 2}, {_ONE}; @!any bra DONE;"
    for row in (0, 1):
        mine = [f"${exponent + at}" for at in range(count) if (at >> 1) & 1 == row]
        rise, first = f"rise{row}", 2 * row
        text += maximum_of_row(mine, rise)
        if is_fresh:
            # A row without a maximum takes this one, be it lower, unless it sees nothing here.
            text += maximum_of_row([f"${before + first}"], "seen")
            text += f"setp.eq.f32 new, seen, {_ZERO}; setp.eq.f32 none, {rise}, {_MINUS_INFINITY};"
            text += f"max.f32 t, {rise}, {_ZERO}; selp.f32 {rise}, {rise}, t, new;"
            text += f"selp.f32 {rise}, {_ZERO}, {rise}, none;"
        else:
            text += f"max.f32 {rise}, {rise}, {_ZERO};"
        text += f"add.f32 ${made + first + 1}, ${given + first + 1}, {rise};"
        text += f"neg.f32 t, {rise}; ex2.approx.ftz.f32 t, t;"
        if is_fresh:
            # There is nothing to scale, and the factor may be infinite.
            text += f"selp.f32 t, {_ONE}, t, new;"
        text += f"mov.f32 ${factor + first}, t; mov.f32 sum{row}, {_ZERO};"
    for at in range(count):
        row = (at >> 1) & 1
        text += f"sub.f32 ${at}, ${exponent + at}, rise{row}; ex2.approx.ftz.f32 ${at}, ${at};"
        text += f"add.f32 sum{row}, sum{row}, ${at};"
    return text + f"mov.f32 ${made}, sum0; mov.f32 ${made + 2}, sum1; DONE: }}"


@gluon.constexpr_function
def mending_operands(count, is_fresh):
    """The constraints that go with ``mending``."""
    tied = [str(at) for at in range(count)]
    return ",".join(["=&f"] * (3 * count) + tied + ["f"] * ((3 if is_fresh else 2) * count))


@gluon.jit
def _first(one, other):
    return one


@gluon.jit
def parted(block):
    """A block of (rows, columns) as (rows, columns / 8, 4 threads, 2)."""
    return block.reshape([ROWS, block.shape[1] // 8, 4, 2])


@gluon.jit
def joined(parts, block):
    """What ``parted`` made of a block like ``block`` as such a block again."""
    layout: gl.constexpr = block.type.layout
    return gl.convert_layout(parts.reshape(block.shape), layout, assert_trivial=True)


@gluon.jit
def beside(number, parts):
    """A number of a row and a thread, beside each of its columns in ``parts``."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    number = gl.convert_layout(number, layout, assert_trivial=True)
    return number.expand_dims(1).expand_dims(3)


@gluon.jit
def in_turn(one, other, parts):
    """Two numbers of a row and a thread, in turn beside its columns in ``parts``."""
    layout: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    both = gl.join(one, gl.convert_layout(other, one.type.layout, assert_trivial=True))
    return gl.convert_layout(both, layout, assert_trivial=True).expand_dims(1)


@gluon.jit
def first_of(columns, LAYOUT: gl.constexpr):
    """The number of a row and a thread that stands first of (rows, columns / 8, 4 threads)."""
    return gl.convert_layout(gl.reduce(columns, 1, _first), LAYOUT, assert_trivial=True)


@gluon.jit
def begun_late(top, total, scale):
    """(m, sums) of a row and a thread after a tile's first block; ``top``: the rows' maxima."""
    layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    row = gl.convert_layout(top, layout, assert_trivial=True)[:, None]
    top = gl.full(total.shape, 0.0, gl.float32, total.type.layout) + row * scale
    is_empty = top == MINUS_INFINITY
    # A thread that sees nothing of a row that does is not to ask for the row's maximum.
    total = gl.where(is_empty, total, gl.maximum(total, TINY))
    return gl.where(is_empty, 0.0, top), total


@gluon.jit
def softmax_late(scores, top, total, scale, FRESH: gl.constexpr):
    """(p, factor of what came before, m, the new sums) of one block of scores; ``top`` is m."""
    layout: gl.constexpr = total.type.layout
    COUNT: gl.constexpr = scores.shape[1] // 2
    parts = parted(scores)
    exponents = parts * scale - beside(top, parts)
    p = gl.exp2(exponents)
    sums = gl.sum(gl.sum(p, 3), 1)
    inputs = (p, exponents, in_turn(sums, top, parts))
    if FRESH:
        inputs = (p, exponents, in_turn(sums, top, parts), beside(total, parts))
    p, made, factor = gl.inline_asm_elementwise(
        mending(COUNT, FRESH), mending_operands(COUNT, FRESH), inputs,
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=COUNT,
    )  # fmt: skip
    sums, top = gl.split(made)
    factor, _ = gl.split(factor)
    factor = first_of(factor, layout)
    total = total * factor + first_of(sums, layout)
    return joined(p, scores), factor, first_of(top, layout), total


@gluon.jit
def rescaled_late(acc, factor):
    """The accumulator times a factor of a row and a thread; a warp of ones leaves it out."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    parts = parted(acc)
    out = gl.inline_asm_elementwise(
        skipping_products(COUNT), products_in_place(COUNT), [parts, beside(factor, parts)],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip
    return joined(out, acc)
