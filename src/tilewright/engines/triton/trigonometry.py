"""Cosine and sine of float32 angles in float64, over the full range, for tables.

The float64 result is off by less than a unit or two in its last place, so the float32 number it
rounds to is the nearest to the true value but for one angle in some 2^28. Reduction is by Cody
and Waite (1980) with three parts of pi / 2 below 2^30, and by 128 bits of 2 / pi (Payne and Hanek
1983) from there on; the polynomials are fdlibm's (Sun Microsystems 1993). Triton's interpreter
has no fused multiply-add, so there torch's functions in float64 stand in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.engines.triton import device_math

_TWO_OVER_PI = tl.constexpr(0.6366197723675814)
_HALF_PI = tl.constexpr(1.5707963267948966)
_HALF_PI_MIDDLE = tl.constexpr(6.123233995736766e-17)
_HALF_PI_LOW = tl.constexpr(-1.4973849048591698e-33)
# Added and subtracted, it rounds to an integer, which its last bits then hold.
_ROUNDER = tl.constexpr(6755399441055744.0)
_LARGE = tl.constexpr(1073741824.0)
# The first 256 bits of 2 / pi after the point.
_BITS_0 = tl.constexpr(0xA2F9836E4E441529)
_BITS_1 = tl.constexpr(0xFC2757D1F534DDC0)
_BITS_2 = tl.constexpr(0xDB6295993C439041)
_BITS_3 = tl.constexpr(0xFE5163ABDEBBC561)
_UNIT_HIGH = tl.constexpr(2.0**-62)
_UNIT_LOW = tl.constexpr(2.0**-126)


@triton.jit
def _reduce_large(angle):
    """(quarter turns, rest in float64) of finite angles from 2^30 on; of others, anything."""
    bits = angle.to(tl.int32, bitcast=True)
    # |angle| = mantissa 2^(place + 2): the product by 2 / pi is wanted modulo 4, so the bits
    # of 2 / pi that count start at place.
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.uint64)
    place = ((bits >> 23) & 0xFF) - 152
    shift = (place & 63).to(tl.uint64)
    is_first = place < 64
    first = tl.where(is_first, _BITS_0, _BITS_1).to(tl.uint64)
    second = tl.where(is_first, _BITS_1, _BITS_2).to(tl.uint64)
    third = tl.where(is_first, _BITS_2, _BITS_3).to(tl.uint64)
    high = (first << shift) | ((second >> 1) >> (63 - shift))
    low = (second << shift) | ((third >> 1) >> (63 - shift))
    # A number of 128 bits in units of 2^-126 quarter turns.
    high = mantissa * high + tl.umulhi(mantissa, low)
    low = mantissa * low
    quarters = (high + 0x2000000000000000) >> 62
    rest = (high - (quarters << 62)).to(tl.int64, bitcast=True).to(tl.float64)
    rest = (rest * _UNIT_HIGH + low.to(tl.float64) * _UNIT_LOW) * _HALF_PI
    quarters = quarters.to(tl.int32)
    return tl.where(bits < 0, -quarters, quarters), tl.where(bits < 0, -rest, rest)


@triton.jit
def is_large(angle):
    """1 where an angle needs the long reduction, else 0; float32."""
    magnitude = tl.abs(angle)
    return ((magnitude >= _LARGE) & (magnitude < float("inf"))).to(tl.int32)


@triton.jit
def _tables(angle, has_large):
    wide = angle.to(tl.float64)
    shifted = wide * _TWO_OVER_PI + _ROUNDER
    turns = shifted - _ROUNDER
    quarters = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    # A bare number would reach fma as a float32.
    zero = tl.zeros_like(wide)
    rest = tl.fma(-turns, zero + _HALF_PI, wide)
    rest = tl.fma(-turns, zero + _HALF_PI_MIDDLE, rest)
    rest = tl.fma(-turns, zero + _HALF_PI_LOW, rest)
    if has_large:
        is_far = is_large(angle) != 0
        large_quarters, large_rest = _reduce_large(angle)
        quarters = tl.where(is_far, large_quarters, quarters)
        rest = tl.where(is_far, large_rest, rest)

    square = rest * rest
    sine = square * 1.58969099521155010221e-10 - 2.50507602534068634195e-08
    sine = square * sine + 2.75573137070700676789e-06
    sine = square * sine - 1.98412698298579493134e-04
    sine = square * sine + 8.33333333332248946124e-03
    sine = square * sine - 1.66666666666666324348e-01
    sine = rest * square * sine + rest
    cosine = 2.08757232129817482790e-09 - square * 1.13596475577881948265e-11
    cosine = square * cosine - 2.75573143513906633035e-07
    cosine = square * cosine + 2.48015872894767294178e-05
    cosine = square * cosine - 1.38888888888741095749e-03
    cosine = square * cosine + 4.16666666666666019037e-02
    half_square = 0.5 * square
    near = 1.0 - half_square
    cosine = near + (((1.0 - near) - half_square) + square * square * cosine)

    is_odd = (quarters & 1) != 0
    cos_result = tl.where(is_odd, sine, cosine)
    sin_result = tl.where(is_odd, cosine, sine)
    cos_result = tl.where(((quarters + 1) & 2) != 0, -cos_result, cos_result)
    sin_result = tl.where((quarters & 2) != 0, -sin_result, sin_result)
    # Zero keeps its sign.
    return cos_result, tl.where(angle == 0.0, wide, sin_result)


if device_math.IS_INTERPRETED:

    def cosine_and_sine(angle, has_large):
        wide = device_math.cast(angle, tl.float64)
        return device_math.cos(wide), device_math.sin(wide)
else:
    # Of an angle in float32; ``has_large`` is true if it may be large anywhere in the block.
    cosine_and_sine = _tables
