"""Scores to rounded probabilities in FP8 attention with three consumers where it is long.

As in ``attention_fp8_softmax``, p = 2^x with x = c s - b. But x takes the register of the score s,
and p that of x: three consumers have none to keep scores in until all p are known. So what E4M3
cannot hold is looked for before exponentials: where some x is above 8.8, a warp finds rows' maxima,
    d = max(0, max x - E),  b' = b + d,  x' = x - d,  l' = 2^-d l + sum p.
The largest x of a row is kept, less d where b grows; it is at least E, so that the bits of floats
order it.

Only one consumer has its turn at a time: two at once take each other's exponentials from the time
when a third multiplies, and beside products exponentials are slower.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_fp8_softmax import EXPONENT
from tilewright.engines.hopper.attention_fp8_words import (
    added_text,
    maximum_text,
    places_given,
    registers_text,
    results_text,
)


@gluon.constexpr_function
def early_text(count, own, other):
    """PTX as ``attention_fp8_softmax.softmax_text``, with the same operands."""
    # E, and what x may be: 2^8.8 is 446.
    exponent, most = "0f40C00000", "0x410CCCCD"
    # How many exponentials lie before the first use of one, and before the turn is passed on.
    behind, turn = 3, 48
    scores, _, _, _, scale = places_given(count)
    own, other = int(own), int(other)
    # Of rows in turn: the scores of one.
    of_row = [[e for e in range(4 * count) if (e // 4) & 1 == r] for r in range(2)]
    text = "{" + registers_text(count)
    for r in range(2):
        # A row that has seen nothing: its scores are -inf, its probabilities 0.
        text += f"setp.eq.f32 none, b{r}, 0fFF800000;"
        text += f"selp.f32 minus{r}, 0f00000000, minus{r}, none;"
    for e in range(4 * count):
        i, k = e // 4, e % 4
        text += f"fma.rn.f32 x{e}, ${scores + count * k + i}, ${scale}, minus{i & 1};"
        text += f"mov.b32 n{e}, x{e};"
        if e % 2 == 1:
            text += f"max.s32 n, n{e - 1}, n{e}; max.s32 top{i & 1}, top{i & 1}, n;"
    text += f"max.s32 n, top0, top1; setp.gt.s32 any, n, {most};"
    text += "vote.sync.any.pred any, any, 0xffffffff; @!any bra GO;"
    for r in range(2):
        text += maximum_text([f"x{e}" for e in of_row[r]])
        text += f"sub.f32 y, y, {exponent}; max.f32 y, y, 0f00000000; neg.f32 z, y;"
        text += f"ex2.approx.ftz.f32 f{r}, z; add.f32 b{r}, b{r}, y; mul.f32 sum{r}, sum{r}, f{r};"
        text += f"mov.b32 z, top{r}; sub.f32 z, z, y; mov.b32 top{r}, z;"
        text += "".join(f"sub.f32 x{e}, x{e}, y;" for e in of_row[r])
    text += f"GO: bar.sync {own}, 256; pmevent 1;"
    for step in range(4 * count + behind + 1):
        if step < 4 * count:
            text += f"ex2.approx.ftz.f32 x{step}, x{step};"
        if 0 <= step - behind < 4 * count:
            text += added_text(step - behind)
        if step == turn:
            text += f"pmevent 1; bar.arrive {other}, 256;"
    return text + results_text(count) + "}"


@gluon.jit
def with_maxima(scores, bias, total, peak, scale):
    """(b', l', the largest x, the sums' factor), b' for the maxima of ``scores`` as well.

    For scores of which some are hidden: a row may see its first key among them.
    """
    found = gl.max(scores, 1) * scale - EXPONENT
    found = gl.convert_layout(found, gl.SliceLayout(1, bias.type.layout), assert_trivial=True)
    new = gl.maximum(bias, found[:, None])
    change = gl.where(bias == new, 0.0, bias - new)
    factor = gl.exp2(change)
    # Of a row that had seen nothing: less than any, and no -inf.
    peak = peak.to(gl.float32, bitcast=True) + gl.maximum(change, -1e30)
    return new, total * factor, peak.to(gl.int32, bitcast=True), factor
