"""Assembly in the loops of attention forward, where the compiler's own words would cost too much.

Hiding scores takes a quarter of a block's instructions and is needed at the edges of a band alone.
Triton's branch around it would end what runs beside it: the compiler deals no loop with branches to
warp groups, and a loop that is cut in two drains its loads in between. So the branch is within an
elementwise operation. Interpreted, the same is said in Triton.
"""

import os

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Elements that one piece of assembly takes: a lane's scores in a block of 128 by 64 in four warps,
# or of 64 by 128. Lanes with fewer fill up what they give.
_ELEMENTS = 64


def _assembly(hidden: str) -> str:
    """Operands, _ELEMENTS of each: scores, as results and as what they were; columns of the block;
    the block's first column; whether it is open; the bound."""
    col, first, is_open, bound = (_ELEMENTS * number for number in range(2, 6))
    lines = ["{", ".reg .pred hides;", ".reg .b32 limit;", f"setp.ne.b32 hides, ${is_open}, 0;"]
    lines += ["@hides bra.uni OPEN;"]
    for n in range(_ELEMENTS):
        lines += [
            f"sub.s32 limit, ${bound + n}, ${first};",
            f"setp.{hidden}.s32 hides, ${col + n}, limit;",
            f"selp.b32 ${n}, 0xFF800000, ${n}, hides;",
        ]
    return "\n".join([*lines, "OPEN:", "}"])


def _edge(is_after: bool) -> str:
    """Of a block of 128 columns whose edge is the diagonal of a tile of 128 rows.

    Operands, _ELEMENTS of each: scores, as results and as what they were; columns of the block;
    whether it is open; the row in the tile; and the half of the tile. A warp group has one half,
    so that the assembler leaves out the other's part. A lane's first scores are of the first half
    of the columns.
    """
    col, is_open, row, half = (_ELEMENTS * number for number in range(2, 6))
    hidden = "gt" if is_after else "le"
    lines = ["{", ".reg .pred hides;", f"setp.ne.b32 hides, ${is_open}, 0;", "@hides bra.uni OPEN;"]
    lines += [f"setp.ne.b32 hides, ${half}, 0;", "@hides bra.uni SECOND;"]
    first, second = range(_ELEMENTS // 2), range(_ELEMENTS // 2, _ELEMENTS)

    def compared(numbers: range) -> list[str]:
        made = []
        for n in numbers:
            made.append(f"setp.{hidden}.s32 hides, ${col + n}, ${row + n};")
            made.append(f"selp.b32 ${n}, 0xFF800000, ${n}, hides;")
        return made

    lines += compared(first)
    if is_after:
        lines += [f"mov.b32 ${n}, 0xFF800000;" for n in second]
    lines += ["bra.uni OPEN;", "SECOND:"]
    if not is_after:
        lines += [f"mov.b32 ${n}, 0xFF800000;" for n in first]
    lines += compared(second)
    return "\n".join([*lines, "OPEN:", "}"])


def _operands(others: int) -> str:
    results, inputs = ["=f"] * _ELEMENTS, [str(n) for n in range(_ELEMENTS)]
    return ",".join([*results, *inputs, *["r"] * (others * _ELEMENTS)])


_BEFORE = tl.constexpr(_assembly("lt"))
_AFTER = tl.constexpr(_assembly("gt"))
_HIDING = tl.constexpr(_operands(4))
_EDGE_BEFORE, _EDGE_AFTER = tl.constexpr(_edge(False)), tl.constexpr(_edge(True))
_NOTHING = tl.constexpr(_operands(0))
_PACK = tl.constexpr(_ELEMENTS)


@triton.jit
def hide_before(score, first, col, low, is_open):
    """Scores (M, N), -inf where ``first + col < low``, if not ``is_open``.

    ``col`` is (1, N) and ``low`` (M, 1), int32; ``first`` and ``is_open`` are scalars. The latter
    is true where nothing is hidden.
    """
    if _IS_INTERPRETED:
        return tl.where((first + col >= low) | is_open, score, -float("inf"))
    else:
        return tl.inline_asm_elementwise(
            _BEFORE, _HIDING, _broadcast(score, first, col, low, is_open), tl.float32, True, _PACK
        )


@triton.jit
def hide_after(score, first, col, high, is_open):
    """The same where ``first + col > high``."""
    if _IS_INTERPRETED:
        return tl.where((first + col <= high) | is_open, score, -float("inf"))
    else:
        return tl.inline_asm_elementwise(
            _AFTER, _HIDING, _broadcast(score, first, col, high, is_open), tl.float32, True, _PACK
        )


@triton.jit
def _broadcast(score, first, col, bound, is_open):
    return (
        score,
        tl.broadcast_to(col, score.shape),
        tl.broadcast_to(first, score.shape),
        tl.broadcast_to(is_open.to(tl.int32), score.shape),
        tl.broadcast_to(bound, score.shape),
    )


@triton.jit
def settled(acc):
    """``acc`` itself, of which the compiler does not know: it waits for the product that makes it.

    A product under way holds its weights in registers, beside the scores of the next block.
    """
    if _IS_INTERPRETED:
        return acc
    else:
        return tl.inline_asm_elementwise("", _NOTHING, [acc], tl.float32, True, _PACK)


@triton.jit
def with_stored(value, at, word):
    """float32 ``value`` itself, while each int32 ``word`` is stored by the lanes that hold it.

    A store of Triton's own would carry the words to other lanes first, by way of shared memory.
    """
    if _IS_INTERPRETED:
        tl.store(at, word)
        return value
    else:
        given = (value, at.to(tl.int64), word)
        return tl.inline_asm_elementwise(
            "st.global.b32 [$2], $3;", "=f,0,l,r", given, tl.float32, False, 1
        )


@triton.jit
def with_noted(value, at, is_noted):
    """float32 ``value`` itself, while 1 is stored where int32 ``is_noted`` is not 0."""
    if _IS_INTERPRETED:
        tl.store(at, is_noted, mask=is_noted != 0)
        return value
    else:
        given = (value, at.to(tl.int64), is_noted)
        return tl.inline_asm_elementwise(
            "{ .reg .pred notes; setp.ne.b32 notes, $3, 0; @notes st.global.b32 [$2], $3; }",
            "=f,0,l,r", given, tl.float32, False, 1,
        )  # fmt: skip


@triton.jit
def hide_edge(score, col, row, is_open, IS_AFTER: tl.constexpr):
    """Scores (128, 128), -inf where ``col > row``, or where ``col <= row``, if not ``is_open``.

    ``col`` is (1, 128) and ``row`` (128, 1), the places in the block and in the tile.
    """
    if _IS_INTERPRETED:
        hides = (col > (row & 127)) == IS_AFTER
        return tl.where(hides & (is_open == 0), -float("inf"), score)
    given = (
        score,
        tl.broadcast_to(col, score.shape),
        tl.broadcast_to(is_open.to(tl.int32), score.shape),
        tl.broadcast_to(row & 127, score.shape),
        tl.broadcast_to((row >> 6) & 1, score.shape),
    )
    if IS_AFTER:
        return tl.inline_asm_elementwise(_EDGE_AFTER, _HIDING, given, tl.float32, True, _PACK)
    else:
        return tl.inline_asm_elementwise(_EDGE_BEFORE, _HIDING, given, tl.float32, True, _PACK)
