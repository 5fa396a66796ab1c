"""Powers of two, part of them on the multiply-add units.

A multiprocessor makes 16 exponentials a clock and 128 multiply-adds. With small heads attention
waits for the former, so some of every eight values take a polynomial instead:
    2^x = 2^n 2^f,  n = round(x),  f = x - n in [-1/2, 1/2],  2^f by a cubic to 1e-4 of its value.
That is well within the rounding of a probability to 16 bits. Source: Cody and Waite 1980; the mix
of units as in FlashAttention 4.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PACK = gl.constexpr(8)


@gluon.constexpr_function
def _float(value):
    """A float32 constant of PTX."""
    import struct

    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


@gluon.constexpr_function
def _code(emulated):
    """PTX for eight values, ``emulated`` of them by polynomial."""
    # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    round_up, round_down = _float(12582912.0), _float(-12582912.0)
    c3, c2, c1, c0 = (_float(c) for c in (0.05583828, 0.24263948, 0.69313673, 0.99992456))
    every = 8 // emulated if emulated else 0
    lines = ["{ .reg .f32 x, t, n, f; .reg .b32 e, r;"]
    for i in range(8):
        if not emulated or i % every != every - 1:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${8 + i};")
            continue
        lines += [
            f"max.f32 x, ${8 + i}, {_float(-126.0)};",
            f"add.f32 t, x, {round_up};",
            f"add.f32 n, t, {round_down};",
            "sub.f32 f, x, n;",
            f"fma.rn.f32 n, f, {c3}, {c2};",
            f"fma.rn.f32 n, n, f, {c1};",
            f"fma.rn.f32 n, n, f, {c0};",
            "mov.b32 e, t; shl.b32 e, e, 23;",
            f"mov.b32 r, n; add.s32 r, r, e; mov.b32 ${i}, r;",
        ]
    return " ".join([*lines, "}"])


@gluon.jit
def exp2(x, EMULATED: gl.constexpr):
    """2**x, EMULATED (0, 1, 2 or 4) of every eight values of a thread by polynomial.

    The polynomial takes -126 for anything below, so that what is masked must not come here.
    """
    if EMULATED == 0:
        y = gl.exp2(x)
    else:
        y = gl.inline_asm_elementwise(
            _code(EMULATED),
            "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=_PACK,
        )
    return y
