"""Scores to rounded probabilities in FP8 attention with two consumers where it is long.

With the scale folded in, p = 2^(c s - b), c = scale log2(e), where b = c m - E for some row maximum
m of before. So there is no maximum to wait for: p is found, and only where one is above 448, which
E4M3 cannot hold, a warp finds its rows' maxima, and p anew:
    b' = max(b, c max s - E),  p = 2^(c s - b'),  l' = 2^(b - b') l + sum p.
With E = 6 that is when a score has grown by 2^2.8 over m; what is rounded lies in E4M3's range all
the same, for m only grows. The largest p of a row is kept, as Amax_S is of it.

The two consumers take turns at it: together they would both wait for the unit that makes
exponentials, and then both for the tensor cores. A turn is passed on at three quarters, so that the
next one's first exponentials hide what passing takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_fp8_words import (
    added_text,
    maximum_text,
    places_given,
    registers_text,
    results_text,
)
from tilewright.engines.hopper.attention_softmax import thread_sums

# E: probabilities are multiplied by 2 to this before they are rounded.
EXPONENT = gl.constexpr(6.0)
UNIT = gl.constexpr(2.0**-6)


@gluon.constexpr_function
def softmax_text(count, own, other):
    """PTX for ``count`` words of four probabilities a thread, of two rows in turn.

    ``own`` and ``other`` are the numbers of the turns' barriers. The assembler moves nothing across
    a ``pmevent``, which does no more than tell a profiler, if one asks.
    """
    # How many exponentials lie between a score's scaling and its own, and before its first use.
    ahead, behind = 6, 3
    minus_exponent, largest, one = "0fC0C00000", "0x43E00000", "0f3F800000"
    scores, _, total, peak, scale = places_given(count)
    own, other = int(own), int(other)
    text = "{" + registers_text(count) + ".reg .b32 zero, limit; .reg .pred first;"
    # The scale's sign, 0: to the assembler the limit is no constant, and it keeps to one loop.
    text += f"mov.b32 zero, ${scale}; shr.u32 zero, zero, 31; add.u32 limit, zero, {largest};"
    text += f"bar.sync {own}, 256; pmevent 1;"
    text += "AGAIN: setp.ne.u32 first, limit, 0x7FFFFFFF;"
    # One exponential, and between it and the next a score to come and a probability that is there.
    for step in range(-ahead, 4 * count + behind + 1):
        e = step
        if 0 <= e < 4 * count:
            text += f"ex2.approx.ftz.f32 x{e}, x{e};"
        e = step + ahead
        if 0 <= e < 4 * count:
            i, k = e // 4, e % 4
            text += f"fma.rn.f32 x{e}, ${scores + count * k + i}, ${scale}, minus{i & 1};"
        e = step - behind
        if 0 <= e < 4 * count:
            text += f"mov.b32 n{e}, x{e};" + added_text(e)
        e = step - behind - 1
        if 0 <= e < 4 * count and e % 2 == 1:
            # Floats that are not negative are ordered as integers, and NaN is above them.
            r = e // 4 & 1
            text += f"max.s32 n, n{e - 1}, n{e}; max.s32 top{r}, top{r}, n;"
        if step == 3 * count:
            text += f"pmevent 1; @first bar.arrive {other}, 256;"
    text += "max.s32 n, top0, top1; setp.gt.s32 any, n, limit;"
    text += "vote.sync.any.pred any, any, 0xffffffff; @!any bra DONE;"
    for r in range(2):
        text += maximum_text(
            [f"${scores + count * k + i}" for i in range(r, count, 2) for k in range(4)]
        )
        text += f"fma.rn.f32 y, y, ${scale}, {minus_exponent}; max.f32 y, y, b{r};"
        # A row that has seen nothing: its scores are -inf, its probabilities 0.
        text += "setp.eq.f32 none, y, 0fFF800000;"
        text += f"sub.f32 z, b{r}, y; ex2.approx.ftz.f32 z, z; selp.f32 f{r}, {one}, z, none;"
        text += f"mov.f32 b{r}, y; neg.f32 y, y; selp.f32 minus{r}, 0f00000000, y, none;"
        text += f"mul.f32 sum{r}, ${total + r}, f{r};"
        text += f"mov.b32 z, ${peak + r}; mul.f32 z, z, f{r}; mov.b32 top{r}, z;"
    # Once is enough, and NaN would go on for ever.
    text += "add.u32 limit, zero, 0x7FFFFFFF; bra AGAIN; DONE: "
    return text + results_text(count) + "}"


@gluon.jit
def started(scores, scale):
    """(b, l, the largest p) where a tile begins, b for the maxima of ``scores``."""
    layout: gl.constexpr = scores.type.layout
    zero = thread_sums(gl.zeros(scores.shape, gl.float32, layout))
    bias = gl.max(scores, 1) * scale - EXPONENT
    bias = gl.convert_layout(bias, gl.SliceLayout(1, zero.type.layout), assert_trivial=True)
    return zero + bias[:, None], zero, zero.to(gl.int32, bitcast=True)
