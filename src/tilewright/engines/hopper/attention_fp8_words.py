"""Scores to words of four rounded probabilities in FP8 attention: what two ways of it share.

A way is a PTX text for a block of scores of a warp, whose registers hold rows i and i + 8
(``attention_fp8_softmax`` for two consumers, ``attention_fp8_early`` for three). Operands of a text
are ``count`` of each, a row's the same: words, l', the largest exponential, b', the factor of what
came before; four of scores, b, l, the largest before, c. What there is one of for a row is a tensor
(rows, 4), the same in all four threads of a row or a part of each.

In a text, element e of 4 ``count`` has its exponential in x{e}; r is 0 or 1, for its row: b{r} is
its b and minus{r} what is added to a scaled score, f{r} the factor, sum{r} and top{r} the sum and
the largest so far. Registers y, z, n, low and high are free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def places_given(count):
    """The first operand's number of each kind that is given: scores, b, l, the largest, c."""
    return tuple(count * i for i in (5, 9, 10, 11, 12))


@gluon.constexpr_function
def constraints(count):
    """The constraints that go with a text."""
    made = ["=r"] * count + ["=f"] * count + ["=r"] * count + ["=f"] * (2 * count)
    return ",".join(made + ["f"] * (6 * count) + ["r"] * count + ["f"] * count)


@gluon.constexpr_function
def registers_text(count):
    """PTX: a text's registers, those of rows with what they are before the block."""
    _, bias, total, peak, _ = places_given(count)
    text = ".reg .f32 y, z; .reg .b32 n; .reg .b16 low, high; .reg .pred any, none;"
    text += "".join(f".reg .f32 x{e}; .reg .b32 n{e};" for e in range(4 * count))
    text += "".join(f".reg .b32 w{i};" for i in range(count))
    for r in range(2):
        text += f".reg .f32 sum{r}, minus{r}, b{r}, f{r}; .reg .b32 top{r};"
        text += f"mov.f32 b{r}, ${bias + r}; neg.f32 minus{r}, b{r}; mov.f32 f{r}, 0f3F800000;"
        text += f"mov.f32 sum{r}, ${total + r}; mov.b32 top{r}, ${peak + r};"
    return text


@gluon.constexpr_function
def added_text(e):
    """PTX: the exponential of element ``e`` is added to its row's, and the last of four rounded."""
    text = f"add.f32 sum{e // 4 & 1}, sum{e // 4 & 1}, x{e};"
    if e % 4 == 3:
        text += f"cvt.rn.satfinite.e4m3x2.f32 low, x{e - 2}, x{e - 3};"
        text += f"cvt.rn.satfinite.e4m3x2.f32 high, x{e}, x{e - 1};"
        text += f"mov.b32 w{e // 4}, {{low, high}};"
    return text


@gluon.constexpr_function
def maximum_text(numbers):
    """PTX: the maximum of a thread's ``numbers`` and of the three threads beside it into y."""
    text = f"mov.f32 y, {numbers[0]};"
    text += "".join(f"max.f32 y, y, {number};" for number in numbers[1:])
    for lane in (2, 1):
        text += f"shfl.sync.bfly.b32 z, y, {lane}, 0x1f, 0xffffffff; max.f32 y, y, z;"
    return text


@gluon.constexpr_function
def results_text(count):
    """PTX: what a text made, to its operands."""
    words, total, peak, bias, factor = (count * i for i in range(5))
    text = ""
    for i in range(count):
        r = i & 1
        text += f"mov.b32 ${words + i}, w{i}; mov.f32 ${total + i}, sum{r};"
        text += f"mov.b32 ${peak + i}, top{r}; mov.f32 ${bias + i}, b{r};"
        text += f"mov.f32 ${factor + i}, f{r};"
    return text


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
def score_words(scores):
    """Four tensors: the scores of a word's four keys, in the order of ``as_operand``."""
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1]
    parts = scores.reshape([rows, keys // 16, 2, 4, 2]).permute((0, 1, 3, 4, 2))
    low, high = gl.split(parts)
    s0, s1 = gl.split(low)
    s2, s3 = gl.split(high)
    return s0, s1, s2, s3


@gluon.jit
def words_in_turn(scores, bias, total, peak, scale, tiling, TEXT: gl.constexpr,
                  WARPGROUP: gl.constexpr):  # fmt: skip
    """(words, b', l', the largest, factor) of scores by ``TEXT``, in this warpgroup's turn."""
    OWN: gl.constexpr = tiling.T_BARRIER + WARPGROUP
    NEXT: gl.constexpr = tiling.T_BARRIER + (WARPGROUP + 1) % tiling.WARPGROUPS
    LAYOUT: gl.constexpr = bias.type.layout
    COUNT: gl.constexpr = scores.shape[1] // 8
    s0, s1, s2, s3 = score_words(scores)
    WORDS: gl.constexpr = s0.type.layout
    words, total, peak, bias, factor = gl.inline_asm_elementwise(
        TEXT(COUNT, OWN, NEXT), constraints(COUNT),
        [s0, s1, s2, s3, of_words(bias, WORDS), of_words(total, WORDS), of_words(peak, WORDS),
         scale],
        dtype=(gl.int32, gl.float32, gl.int32, gl.float32, gl.float32), is_pure=False, pack=COUNT,
    )  # fmt: skip
    words = words.reshape([scores.shape[0], scores.shape[1] // 4])
    bias, total = of_rows(bias, LAYOUT), of_rows(total, LAYOUT)
    return words, bias, total, of_rows(peak, LAYOUT), of_rows(factor, LAYOUT)


@gluon.jit
def of_words_operand(words, LAYOUT: gl.constexpr, kind: gl.constexpr):
    """Words as the left operand of a product. (A loop that carries single bytes parts words and
    joins them again.)"""
    low, high = gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)
    p = gl.join(low, high).to(gl.int8).reshape([words.shape[0], words.shape[1] * 4])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(kind, bitcast=True)
