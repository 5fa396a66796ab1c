"""A level at which all weights of a row are made: its greatest score of the first keys it sees.

Softmax is the same at any level; what bounds it is that weights and sums are finite. In bfloat16
and float32 they are up to scores that are 2**6.9 above the level in base 2. So there is no greatest
score to be looked for in each block, and no sums to be rescaled: a third less instructions. A row
whose sums are not finite is noted, and ``attention_repair`` makes it again. The first scores are
looked through behind a branch in assembly, which other blocks pass by.
"""

import os

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Chains of maxima that do not wait for one another.
_CHAINS = 4


def _first_maxima(count: int) -> str:
    """Operands, ``count`` of each: levels, of which a row's first is given, scores, levels as they
    were, and factors. Four lanes have a row."""
    rows = [[count + n for n in range(count) if n // 2 % 2 == row] for row in (0, 1)]
    levels, factor = [2 * count, 2 * count + 2], 3 * count
    lines = ["{", ".reg .pred unset, high; .reg .f32 most<8>, level<2>, other;"]
    lines += [f"mov.f32 level{row}, ${levels[row]};" for row in (0, 1)]
    lines += ["setp.eq.f32 unset, level0, 0fFF800000;", "setp.eq.f32 high, level1, 0fFF800000;"]
    lines += ["or.pred unset, unset, high;", "vote.sync.any.pred unset, unset, 0xffffffff;"]
    lines += ["@!unset bra.uni KEEP;"]
    for start in range(0, count // 2, _CHAINS):
        for row in (0, 1):
            for chain in range(_CHAINS):
                most, score = f"most{row * _CHAINS + chain}", f"${rows[row][start + chain]}"
                lines.append(
                    f"max.f32 {most}, {most}, {score};" if start else f"mov.f32 {most}, {score};"
                )
    for row in (0, 1):
        a, b, c, d = (f"most{row * _CHAINS + chain}" for chain in range(_CHAINS))
        lines += [f"max.f32 {a}, {a}, {c};", f"max.f32 {b}, {b}, {d};", f"max.f32 {a}, {a}, {b};"]
        for lanes in (2, 1):
            lines.append(f"shfl.sync.bfly.b32 other, {a}, {lanes}, 0x1f, 0xffffffff;")
            lines.append(f"max.f32 {a}, {a}, other;")
        lines.append(f"mul.f32 {a}, {a}, ${factor};")
        lines.append(f"setp.eq.f32 unset, level{row}, 0fFF800000;")
        lines.append(f"selp.f32 level{row}, {a}, level{row}, unset;")
    lines += ["KEEP:", "mov.f32 $0, level0;", "mov.f32 $2, level1;"]
    return "\n".join([*lines, "}"])


# Scores that a lane has of 64 rows in blocks of 128 and of 64 keys.
_LEVEL_64, _LEVEL_32 = tl.constexpr(_first_maxima(64)), tl.constexpr(_first_maxima(32))
_GIVEN_64 = tl.constexpr(",".join(["=f"] * 64 + ["f"] * 192))
_GIVEN_32 = tl.constexpr(",".join(["=f"] * 32 + ["f"] * 96))


@triton.jit
def _first(a, b):
    return a


@triton.jit
def first_level(score, level, factor):
    """``level`` (M,), or where it is -inf the greatest of a row's scores times ``factor``.

    ``score`` is a product of four warps of SM90, (M, 64 or 128). -inf stays where no score is seen.
    """
    if _IS_INTERPRETED:
        return tl.where(level == -float("inf"), tl.max(score, 1) * factor, level)
    else:
        given = (
            score,
            tl.broadcast_to(level[:, None], score.shape),
            tl.broadcast_to(factor, score.shape),
        )
        if score.shape[1] == 128:
            most = tl.inline_asm_elementwise(_LEVEL_64, _GIVEN_64, given, tl.float32, True, 64)
        else:
            most = tl.inline_asm_elementwise(_LEVEL_32, _GIVEN_32, given, tl.float32, True, 32)
        # Of a row's elements only the first is there.
        return tl.reduce(most, 1, _first)
