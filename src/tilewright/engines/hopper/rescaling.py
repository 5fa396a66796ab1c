"""Rescaling an accumulator only where a row needs it: a branch a warp, by inline assembly."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _code(count):
    """PTX: multiply ``count`` values, unless the factors of all 32 lanes are 1.

    A thread's values belong to two rows, two values in turn: the factors of the first and of the
    third value are all there are.
    """
    first, third = f"${2 * count}", f"${2 * count + 2}"
    lines = ["{ .reg .pred some, any;"]
    lines += [f"setp.neu.f32 some, {first}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 some, {third}, 0f3F800000, some;"]
    lines += ["vote.sync.any.pred any, some, 0xffffffff;"]
    lines += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    lines += ["@!any bra.uni DONE;"]
    lines += [f"mul.f32 ${i}, ${i}, {third if i % 4 >= 2 else first};" for i in range(count)]
    lines += ["DONE: }"]
    return " ".join(lines)


@gluon.constexpr_function
def _constraints(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def rescale_if_needed(acc, factor, COUNT: gl.constexpr):
    """``acc * factor``, the work left out in warps whose factors are all 1.

    ``acc`` is an accumulator of one warpgroup's product, COUNT values a thread; ``factor`` has
    one column.
    """
    _, factor = gl.broadcast(acc, factor)
    return gl.inline_asm_elementwise(
        _code(COUNT), _constraints(COUNT), [acc, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )
