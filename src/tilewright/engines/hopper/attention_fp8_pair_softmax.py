"""Scores to rounded probabilities where FP8 attention has two consumers, a block at a time.

As in ``attention_fp8_consumer``. The assembler, left to itself, uses each exponential as soon as it
is asked for, and waits for it; here half a block of them is asked for first. And the consumers take
turns at it: while one makes exponentials, the other multiplies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_fp8_products import as_operand
from tilewright.engines.hopper.attention_fp8_records import P_EXPONENT
from tilewright.engines.hopper.attention_fp8_turns import pass_turn
from tilewright.engines.hopper.attention_records import ROWS
from tilewright.engines.hopper.attention_softmax import MINUS_INFINITY, thread_sums


@gluon.jit
def masked(scores, first, column, sequence, tiling, features):
    """Scores with -inf where row ``first + i`` does not see key ``column + j``.

    A thread's columns are 2q + 8c + e, where q is its number among four. What differs between
    threads goes to the side of the row, so that columns are compared as constants.
    """
    BN: gl.constexpr = tiling.BLOCK_N
    layout: gl.constexpr = scores.type.layout
    parts = scores.reshape([ROWS, BN // 8, 4, 2])
    whole: gl.constexpr = parts.type.layout
    by_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, whole))
    by_register: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, whole))
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, by_thread))
    before = column + 2 * gl.arange(0, 4, gl.SliceLayout(0, by_thread))
    eights = 8 * gl.arange(0, BN // 8, gl.SliceLayout(1, by_register))
    columns = eights[:, None] + gl.arange(0, 2, gl.SliceLayout(0, by_register))[None, :]
    columns = columns.expand_dims(1).expand_dims(0)
    end = rows * 0 + sequence.keys
    if features.HAS_RIGHT:
        end = gl.minimum(rows + sequence.right + 1, sequence.keys)
    end = end[:, None] - before[None, :]
    seen = columns < end.expand_dims(1).expand_dims(3)
    parts = gl.where(seen, parts, MINUS_INFINITY)
    return gl.convert_layout(parts.reshape([ROWS, BN]), layout, assert_trivial=True)


@gluon.jit
def row_maxima(scores):
    """The largest score of each row; a thread's columns in chains of four and not one of 32."""
    parts: gl.constexpr = scores.shape[1] // 32
    found = gl.max(gl.max(scores.reshape([ROWS, parts, 4, 4, 2]), 4), 2)
    found = gl.max(gl.max(found, 1), 1)
    return gl.convert_layout(found, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    half: gl.constexpr = x.shape[1] // 2
    return gl.split(x.reshape([x.shape[0], 2, half]).permute((0, 2, 1)))


@gluon.jit
def beside(low, high, LAYOUT: gl.constexpr):
    """Two halves of columns as one tensor."""
    both = gl.join(low, high).permute((0, 2, 1)).reshape([low.shape[0], 2 * low.shape[1]])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def fence_schedule():
    """The end of a basic block: the assembler moves little across it.

    It waits while the clock's upper half is all ones, which it never is.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; again: mov.u32 t, %clock_hi; setp.eq.u32 p, t, 0xffffffff; "
        "@p bra again; mov.b32 $0, 0; }",
        "=r,r,~{memory}",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def turn_text(number):
    """Assembly: wait for turn ``number``; two registers go through, which nothing before has."""
    return (
        "{ .reg .pred p; .reg .b32 t, n; mov.u32 t, %clock_hi; setp.eq.u32 p, t, 0xffffffff; "
        "xor.b32 n, $2, $3; selp.b32 n, n, " + str(number) + ", p; bar.sync n, 256; "
        "mov.u32 t, %clock_hi; setp.ne.u32 p, t, 0xffffffff; selp.b32 $0, $2, 0x7fffffff, p; "
        "selp.b32 $1, $3, 0x7fffffff, p; }"
    )


@gluon.jit
def take_turn(values, tiling, WARPGROUP: gl.constexpr):
    """``values``, two a thread, when it is this warpgroup's turn to make exponentials.

    The assembler moves arithmetic across barriers. The barrier's number seems to depend on the
    values, and they on what follows it: nobody told it that the clock's upper half is not all ones.
    """
    NUMBER: gl.constexpr = tiling.T_BARRIER + WARPGROUP
    return gl.inline_asm_elementwise(
        turn_text(NUMBER), "=r,=r,r,r,~{memory}", [values], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def softmax_block(
    scores,
    top,
    total,
    scale,
    tiling,
    LAYOUT: gl.constexpr,
    kind: gl.constexpr,
    MASKED: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """(p times 2^8, rounded, factor of what came before, new maximum, new sums) of one block.

    The exponentials of one half of the keys come before what is done with them, and that beside
    those of the other half: the assembler would else use each at once, and wait for it.
    """
    new_top = gl.maximum(top, row_maxima(scores))
    shift = new_top * scale - P_EXPONENT
    if MASKED:
        shift = gl.where(new_top == MINUS_INFINITY, 0.0, shift)
    shift = take_turn(shift, tiling, WARPGROUP)
    low, high = halves(scores)
    shifts = gl.convert_layout(shift, gl.SliceLayout(1, low.type.layout), assert_trivial=True)
    low = gl.exp2(low * scale - shifts[:, None])
    fence_schedule()
    high = gl.exp2(high * scale - shifts[:, None])
    sums = thread_sums(low)
    p_low = as_operand(low, LAYOUT, kind)
    fence_schedule()
    pass_turn(tiling, WARPGROUP)
    sums += thread_sums(high)
    p = beside(p_low, as_operand(high, LAYOUT, kind), LAYOUT)
    factor = gl.exp2((top * scale - P_EXPONENT) - shift)
    spread = gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    sums = gl.convert_layout(sums, total.type.layout, assert_trivial=True)
    return p, factor, new_top, total * spread[:, None] + sums
