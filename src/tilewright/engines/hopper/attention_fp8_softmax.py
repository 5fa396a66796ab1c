"""Scores to rounded probabilities in FP8 attention, a block at a time, in one assembly text.

With the scale folded in, p = 2^(c s - b), c = scale log2(e), where b = c m - E for some row maximum
m of before. So there is no maximum to wait for: p is found, and only where one is above 448, which
E4M3 cannot hold, a warp finds its rows' maxima, and p anew:
    b' = max(b, c max s - E),  p = 2^(c s - b'),  l' = 2^(b - b') l + sum p.
With E = 6 that is when a score has grown by 2^2.8 over m; what is rounded lies in E4M3's range all
the same, for m only grows. The largest p of a row is kept, as Amax_S is of it.

A warp's registers hold rows i and i + 8. What there is one of for a row is a tensor (rows, 4), the
same in all four threads of a row or a part of each.

The two consumers take turns at it: together they would both wait for the unit that makes
exponentials, and then both for the tensor cores. A turn is passed on at three quarters, so that the
next one's first exponentials hide what passing takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_softmax import thread_sums

# E: probabilities are multiplied by 2 to this before they are rounded.
EXPONENT = gl.constexpr(6.0)
UNIT = gl.constexpr(2.0**-6)
# -E in PTX.
_MINUS_EXPONENT = gl.constexpr("0fC0C00000")
# How many exponentials lie between a score's scaling and its own, and before its first use.
_AHEAD, _BEHIND = gl.constexpr(6), gl.constexpr(3)


@gluon.constexpr_function
def softmax_text(minus_exponent, count, ahead, behind, own, other):
    """PTX for ``count`` words of four probabilities a thread, of two rows in turn.

    Operands are ``count`` of each, a row's the same: words, l', the largest p, b', the factor
    2^(b - b'); four of scores, b, l, the largest p before, c. ``own`` and ``other`` are the numbers
    of the turns' barriers. The assembler moves nothing across a ``pmevent``, which does no more
    than tell a profiler, if one asks.
    """
    words, new_total, new_peak, new_bias, factor = (count * i for i in range(5))
    scores, bias, total, peak, scale = (count * i for i in (5, 9, 10, 11, 12))
    own, other = int(own), int(other)
    largest = "0x43E00000"
    one = "0f3F800000"

    text = "{ .reg .f32 y, z; .reg .b32 n, zero, limit; .reg .b16 low, high;"
    text += ".reg .pred any, none, first;"
    text += "".join(f".reg .f32 x{e}; .reg .b32 n{e};" for e in range(4 * count))
    text += "".join(f".reg .b32 w{i};" for i in range(count))
    for r in range(2):
        text += f".reg .f32 sum{r}, minus{r}, b{r}, f{r}; .reg .b32 top{r};"
        text += f"mov.f32 b{r}, ${bias + r}; neg.f32 minus{r}, b{r}; mov.f32 f{r}, {one};"
        text += f"mov.f32 sum{r}, ${total + r}; mov.b32 top{r}, ${peak + r};"
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
            i, r = e // 4, e // 4 & 1
            text += f"add.f32 sum{r}, sum{r}, x{e}; mov.b32 n{e}, x{e};"
            if e % 4 == 3:
                text += f"cvt.rn.satfinite.e4m3x2.f32 low, x{e - 2}, x{e - 3};"
                text += f"cvt.rn.satfinite.e4m3x2.f32 high, x{e}, x{e - 1};"
                text += f"mov.b32 w{i}, {{low, high}};"
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
        text += f"mov.f32 y, ${scores + r};"
        for i in range(r, count, 2):
            for k in range(4):
                text += f"max.f32 y, y, ${scores + count * k + i};"
        for lane in (2, 1):
            text += f"shfl.sync.bfly.b32 z, y, {lane}, 0x1f, 0xffffffff; max.f32 y, y, z;"
        text += f"fma.rn.f32 y, y, ${scale}, {minus_exponent}; max.f32 y, y, b{r};"
        # A row that has seen nothing: its scores are -inf, its probabilities 0.
        text += "setp.eq.f32 none, y, 0fFF800000;"
        text += f"sub.f32 z, b{r}, y; ex2.approx.ftz.f32 z, z; selp.f32 f{r}, {one}, z, none;"
        text += f"mov.f32 b{r}, y; neg.f32 y, y; selp.f32 minus{r}, 0f00000000, y, none;"
        text += f"mul.f32 sum{r}, ${total + r}, f{r};"
        text += f"mov.b32 z, ${peak + r}; mul.f32 z, z, f{r}; mov.b32 top{r}, z;"
    # Once is enough, and NaN would go on for ever.
    text += "add.u32 limit, zero, 0x7FFFFFFF; bra AGAIN; DONE: "
    for i in range(count):
        r = i & 1
        text += f"mov.b32 ${words + i}, w{i}; mov.f32 ${new_total + i}, sum{r};"
        text += f"mov.b32 ${new_peak + i}, top{r}; mov.f32 ${new_bias + i}, b{r};"
        text += f"mov.f32 ${factor + i}, f{r};"
    return text + "}"


@gluon.constexpr_function
def softmax_places(count):
    """The constraints that go with ``softmax_text``."""
    made = ["=r"] * count + ["=f"] * count + ["=r"] * count + ["=f"] * (2 * count)
    return ",".join(made + ["f"] * (6 * count) + ["r"] * count + ["f"] * count)


@gluon.jit
def of_words(row, LAYOUT: gl.constexpr):
    """What a row has, for each of its words."""
    row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return row.expand_dims(1)


@gluon.jit
def of_rows(words, LAYOUT: gl.constexpr):
    """What all words of a thread's row have, for the row: (rows, 4)."""
    rows: gl.constexpr = words.shape[0]
    parts: gl.constexpr = words.shape[1]
    row = words.reshape([rows, parts * 4])
    for _ in gl.static_range(parts.bit_length() - 1):
        row, _ = gl.split(row.reshape([rows, row.shape[1] // 8, 2, 4]).permute((0, 1, 3, 2)))
        row = row.reshape([rows, row.shape[1] * 4])
    return gl.convert_layout(row, LAYOUT, assert_trivial=True)


@gluon.jit
def started(scores, scale):
    """(b, l, the largest p) where a tile begins, b for the maxima of ``scores``."""
    layout: gl.constexpr = scores.type.layout
    zero = thread_sums(gl.zeros(scores.shape, gl.float32, layout))
    bias = gl.max(scores, 1) * scale - EXPONENT
    bias = gl.convert_layout(bias, gl.SliceLayout(1, zero.type.layout), assert_trivial=True)
    return zero + bias[:, None], zero, zero.to(gl.int32, bitcast=True)


@gluon.jit
def score_words(scores):
    """Four tensors: the scores of a word's four keys, in the order of V^T.

    A thread of the first product has keys 8c + 2q + e of 16, where q is its number among four; as
    an operand of the second it has positions 4q + 2c + e. So key 8c + 2q + e takes position
    4q + 2c + e, and nothing moves between threads.
    """
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1]
    parts = scores.reshape([rows, keys // 16, 2, 4, 2]).permute((0, 1, 3, 4, 2))
    low, high = gl.split(parts)
    s0, s1 = gl.split(low)
    s2, s3 = gl.split(high)
    return s0, s1, s2, s3


@gluon.jit
def softmax_block(scores, bias, total, peak, scale, OWN: gl.constexpr, OTHER: gl.constexpr):
    """(words, b', l', the largest p, factor) of scores; see above."""
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1]
    COUNT: gl.constexpr = keys // 8
    LAYOUT: gl.constexpr = bias.type.layout
    s0, s1, s2, s3 = score_words(scores)
    WORDS: gl.constexpr = s0.type.layout
    words, total, peak, bias, factor = gl.inline_asm_elementwise(
        softmax_text(_MINUS_EXPONENT, COUNT, _AHEAD, _BEHIND, OWN, OTHER), softmax_places(COUNT),
        [s0, s1, s2, s3, of_words(bias, WORDS), of_words(total, WORDS), of_words(peak, WORDS),
         scale],
        dtype=(gl.int32, gl.float32, gl.int32, gl.float32, gl.float32), is_pure=False, pack=COUNT,
    )  # fmt: skip
    words = words.reshape([rows, keys // 4])
    bias, total = of_rows(bias, LAYOUT), of_rows(total, LAYOUT)
    return words, bias, total, of_rows(peak, LAYOUT), of_rows(factor, LAYOUT)


@gluon.jit
def of_words_operand(words, LAYOUT: gl.constexpr, kind: gl.constexpr):
    """Words as the left operand of a product. (A loop that carries single bytes parts words and
    joins them again.)"""
    low, high = gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)
    p = gl.join(low, high).to(gl.int8).reshape([words.shape[0], words.shape[1] * 4])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(kind, bitcast=True)
