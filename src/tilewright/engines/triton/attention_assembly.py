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


def _operands(others: int) -> str:
    results, inputs = ["=f"] * _ELEMENTS, [str(n) for n in range(_ELEMENTS)]
    return ",".join([*results, *inputs, *["r"] * (others * _ELEMENTS)])


_BEFORE = tl.constexpr(_assembly("lt"))
_AFTER = tl.constexpr(_assembly("gt"))
_HIDING = tl.constexpr(_operands(4))
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
