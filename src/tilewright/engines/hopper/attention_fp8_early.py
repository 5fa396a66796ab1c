"""Scores to rounded probabilities in FP8 attention with three consumers, a block at a time.

As ``attention_fp8_softmax``, with x = c s - b in the place of a score and p = 2^x in that of x, for
three consumers have no registers to keep scores until all p are known. So what E4M3 cannot hold is
looked for before exponentials are made: where some x is above 8.8, a warp finds its rows' maxima,
    d = max(0, max x - E),  b' = b + d,  x' = x - d,  l' = 2^-d l + sum p.
The largest x of a row is kept, less d where b grows; it is at least E, so that the bits of floats
order it.

Only one consumer has its turn at a time: two at once take each other's exponentials from the time
when a third multiplies, and beside products exponentials are slower.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_fp8_softmax import (
    EXPONENT,
    of_rows,
    of_words,
    score_words,
    softmax_places,
)

# E, and what x may be: 2^8.8 is 446.
_EXPONENT, _MOST = gl.constexpr("0f40C00000"), gl.constexpr("0x410CCCCD")
# How many exponentials lie before the first use of one, and before the turn is passed on.
_BEHIND, _TURN = gl.constexpr(3), gl.constexpr(48)


@gluon.constexpr_function
def early_text(exponent, most, count, behind, turn, own, other):
    """PTX as ``attention_fp8_softmax.softmax_text``, with the same operands."""
    words, new_total, new_peak, new_bias, factor = (count * i for i in range(5))
    scores, bias, total, peak, scale = (count * i for i in (5, 9, 10, 11, 12))
    own, other = int(own), int(other)
    # Of rows in turn: the scores of one.
    of_row = [[e for e in range(4 * count) if (e // 4) & 1 == r] for r in range(2)]

    text = "{ .reg .f32 y, z; .reg .b32 n; .reg .b16 low, high; .reg .pred any, none;"
    text += "".join(f".reg .f32 x{e}; .reg .b32 n{e};" for e in range(4 * count))
    text += "".join(f".reg .b32 w{i};" for i in range(count))
    for r in range(2):
        text += f".reg .f32 sum{r}, minus{r}, b{r}, f{r}; .reg .b32 top{r};"
        text += f"mov.f32 b{r}, ${bias + r}; neg.f32 minus{r}, b{r}; mov.f32 f{r}, 0f3F800000;"
        # A row that has seen nothing: its scores are -inf, its probabilities 0.
        text += (
            f"setp.eq.f32 none, b{r}, 0fFF800000; selp.f32 minus{r}, 0f00000000, minus{r}, none;"
        )
        text += f"mov.f32 sum{r}, ${total + r}; mov.b32 top{r}, ${peak + r};"
    for e in range(4 * count):
        i, k = e // 4, e % 4
        text += f"fma.rn.f32 x{e}, ${scores + count * k + i}, ${scale}, minus{i & 1};"
        text += f"mov.b32 n{e}, x{e};"
        if e % 2 == 1:
            text += f"max.s32 n, n{e - 1}, n{e}; max.s32 top{i & 1}, top{i & 1}, n;"
    text += f"max.s32 n, top0, top1; setp.gt.s32 any, n, {most};"
    text += "vote.sync.any.pred any, any, 0xffffffff; @!any bra GO;"
    for r in range(2):
        text += f"mov.f32 y, x{of_row[r][0]};"
        text += "".join(f"max.f32 y, y, x{e};" for e in of_row[r][1:])
        for lane in (2, 1):
            text += f"shfl.sync.bfly.b32 z, y, {lane}, 0x1f, 0xffffffff; max.f32 y, y, z;"
        text += f"sub.f32 y, y, {exponent}; max.f32 y, y, 0f00000000; neg.f32 z, y;"
        text += f"ex2.approx.ftz.f32 f{r}, z; add.f32 b{r}, b{r}, y; mul.f32 sum{r}, sum{r}, f{r};"
        text += f"mov.b32 z, top{r}; sub.f32 z, z, y; mov.b32 top{r}, z;"
        text += "".join(f"sub.f32 x{e}, x{e}, y;" for e in of_row[r])
    text += f"GO: bar.sync {own}, 256; pmevent 1;"
    for step in range(4 * count + behind + 1):
        if step < 4 * count:
            text += f"ex2.approx.ftz.f32 x{step}, x{step};"
        e = step - behind
        if 0 <= e < 4 * count:
            i, r = e // 4, e // 4 & 1
            text += f"add.f32 sum{r}, sum{r}, x{e};"
            if e % 4 == 3:
                text += f"cvt.rn.satfinite.e4m3x2.f32 low, x{e - 2}, x{e - 3};"
                text += f"cvt.rn.satfinite.e4m3x2.f32 high, x{e}, x{e - 1};"
                text += f"mov.b32 w{i}, {{low, high}};"
        if step == turn:
            text += f"pmevent 1; bar.arrive {other}, 256;"
    for i in range(count):
        r = i & 1
        text += f"mov.b32 ${words + i}, w{i}; mov.f32 ${new_total + i}, sum{r};"
        text += f"mov.b32 ${new_peak + i}, top{r}; mov.f32 ${new_bias + i}, b{r};"
        text += f"mov.f32 ${factor + i}, f{r};"
    return text + "}"


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


@gluon.jit
def softmax_early(scores, bias, total, peak, scale, OWN: gl.constexpr, OTHER: gl.constexpr):
    """(words, b', l', the largest x, factor) of scores, in turn ``OWN``, then that of ``OTHER``."""
    LAYOUT: gl.constexpr = bias.type.layout
    COUNT: gl.constexpr = scores.shape[1] // 8
    s0, s1, s2, s3 = score_words(scores)
    WORDS: gl.constexpr = s0.type.layout
    words, total, peak, bias, factor = gl.inline_asm_elementwise(
        early_text(_EXPONENT, _MOST, COUNT, _BEHIND, _TURN, OWN, OTHER), softmax_places(COUNT),
        [s0, s1, s2, s3, of_words(bias, WORDS), of_words(total, WORDS), of_words(peak, WORDS),
         scale],
        dtype=(gl.int32, gl.float32, gl.int32, gl.float32, gl.float32), is_pure=False, pack=COUNT,
    )  # fmt: skip
    words = words.reshape([scores.shape[0], scores.shape[1] // 4])
    bias, total = of_rows(bias, LAYOUT), of_rows(total, LAYOUT)
    return words, bias, total, of_rows(peak, LAYOUT), of_rows(factor, LAYOUT)
