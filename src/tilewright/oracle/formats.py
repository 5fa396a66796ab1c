"""Floating-point formats, decoded, encoded and rounded by arithmetic on their fields.

Every function works on float64 values or integer codes and follows the device of its argument.
No dtype cast does the rounding: the quantum of each value is formed from its exponent, the value
is divided by it (exact: a power of two), and the quotient is rounded half to even by comparing the
remainder with one half.

Sources: IEEE 754-2019 (binary16, binary32), OCP 8-bit Floating Point Specification (OFP8) v1.0
(E4M3, E5M2), OCP Microscaling Formats (MX) Specification v1.0 (E2M1, E8M0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "FORMATS",
    "FloatFormat",
    "decode",
    "encode",
    "floor_log2",
    "format_of",
    "pack_nibbles",
    "power_of_two",
    "round_half_even",
    "round_to",
    "to_float64",
    "unpack_nibbles",
]


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    `specials` tells what the largest exponent code means: "ieee" (infinities and NaNs), "nan"
    (only the all-ones mantissa is NaN, the rest are numbers: E4M3), "none" (all are numbers:
    E2M1), or "scale" (E8M0: no sign, no mantissa, no zero, code 255 is NaN).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: float
    specials: str

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        sign_bits = 0 if self.specials == "scale" else 1
        return sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, which subnormals share."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number (`emax` of the OCP specifications)."""
        return int(floor_log2(torch.tensor(self.max_finite, dtype=torch.float64)).item())

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return float(2.0**-self.mantissa_bits)


FORMATS: dict[str, FloatFormat] = {
    entry.name: entry
    for entry in (
        FloatFormat("DOUBLE", 11, 52, 1023, 1.7976931348623157e308, "ieee"),
        FloatFormat("FLOAT", 8, 23, 127, 3.4028234663852886e38, "ieee"),
        FloatFormat("HALF", 5, 10, 15, 65504.0, "ieee"),
        FloatFormat("BFLOAT16", 8, 7, 127, 3.3895313892515355e38, "ieee"),
        FloatFormat("FP8_E4M3", 4, 3, 7, 448.0, "nan"),
        FloatFormat("FP8_E5M2", 5, 2, 15, 57344.0, "ieee"),
        FloatFormat("FP4_E2M1", 2, 1, 1, 6.0, "none"),
        FloatFormat("FP8_E8M0", 8, 0, 127, 2.0**127, "scale"),
    )
}

_TORCH_NAMES: dict[torch.dtype, str] = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FP8_E4M3",
    torch.float8_e5m2: "FP8_E5M2",
    torch.float8_e8m0fnu: "FP8_E8M0",
}


def format_of(data_type: Any) -> FloatFormat | None:
    """The format of a data type record (by its name), a name, or a torch dtype; None if integral.

    Integer, boolean and unset types have no format.
    """
    if isinstance(data_type, FloatFormat):
        return data_type
    if isinstance(data_type, torch.dtype):
        return FORMATS.get(_TORCH_NAMES.get(data_type, ""))
    return FORMATS.get(data_type if isinstance(data_type, str) else data_type.name)


def floor_log2(values: torch.Tensor) -> torch.Tensor:
    """`floor(log2 |x|)` as int64, exact; 0 for zero and for values that are not finite."""
    finite = torch.where(torch.isfinite(values), values.to(torch.float64), 0.0)
    # frexp gives |x| = m * 2**e with m in [0.5, 1).
    exponent = torch.frexp(finite.abs()).exponent.to(torch.int64) - 1
    return torch.where(finite == 0, 0, exponent)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """`2.0 ** e` in float64 for integer exponents in [-1074, 1023], built from its bits."""
    low = torch.div(exponents, 2, rounding_mode="floor")
    high = exponents - low
    return _normal_power(low) * _normal_power(high)


def _normal_power(exponents: torch.Tensor) -> torch.Tensor:
    return ((exponents + 1023) << 52).view(torch.float64)


def round_half_even(values: torch.Tensor) -> torch.Tensor:
    """Round float64 values to integers, halves to the even neighbour."""
    low = torch.floor(values)
    rest = values - low
    odd = torch.remainder(low, 2.0) == 1.0
    up = (rest > 0.5) | ((rest == 0.5) & odd)
    return torch.where(up, low + 1.0, low)


def round_to(values: torch.Tensor, data_type: Any, *, saturate: bool = True) -> torch.Tensor:
    """Round float64 values to the nearest number of a format, ties to even; the result is float64.

    Args:
        values: Any shape.
        data_type: What `format_of` accepts.
        saturate: What becomes of values beyond the largest number, infinities included. True: 8-
            and 4-bit formats give that number with the sign kept. False: infinity where the format
            has one, NaN in E4M3 (E2M1 always saturates: it has neither). 16- and 32-bit formats
            overflow to infinity in both cases, as IEEE 754 has it.

    NaN stays NaN where the format has one and becomes the largest number in E2M1 (OCP MX leaves
    that case to the implementation). Zero keeps its sign. E8M0 rounds to the nearest power of two,
    1.5 * 2**e upwards to the even code as any other tie, values below 2**-127 to 2**-127 and
    negative values to NaN.
    """
    target = format_of(data_type)
    if target is None:
        raise ValueError(f"data_type: {data_type!r} is not a floating-point format")
    values = values.to(torch.float64)
    if target.name == "DOUBLE":
        return values
    if target.specials == "scale":
        return decode(_encode_scale(values), target)
    magnitude = values.abs()
    quantum_exponent = floor_log2(magnitude).clamp(min=target.min_exponent) - target.mantissa_bits
    quantum = power_of_two(quantum_exponent)
    rounded = torch.where(
        torch.isfinite(magnitude), round_half_even(magnitude / quantum) * quantum, magnitude
    )
    if target.specials == "none" or (saturate and target.bits == 8):
        rounded = torch.where(rounded > target.max_finite, target.max_finite, rounded)
    else:
        overflow = float("inf") if target.specials == "ieee" else float("nan")
        rounded = torch.where(rounded > target.max_finite, overflow, rounded)
    if target.specials == "none":
        rounded = torch.where(torch.isnan(rounded), target.max_finite, rounded)
    return torch.copysign(rounded, values)


def _encode_scale(values: torch.Tensor) -> torch.Tensor:
    exponent = floor_log2(values)
    mantissa = values.abs() / power_of_two(exponent)
    odd = torch.remainder(exponent + 127, 2) == 1
    exponent = exponent + ((mantissa > 1.5) | ((mantissa == 1.5) & odd)).to(torch.int64)
    codes = (exponent + 127).clamp(0, 254)
    codes = torch.where(values == 0, 0, codes)
    codes = torch.where(values == float("inf"), 254, codes)
    return torch.where(torch.isnan(values) | (values < 0), 255, codes)


def encode(values: torch.Tensor, data_type: Any, *, saturate: bool = True) -> torch.Tensor:
    """Codes (int64) of float64 values rounded by `round_to`; formats up to 32 bits."""
    target = format_of(data_type)
    if target is None or target.bits > 32:
        raise ValueError(f"data_type: {data_type!r} is no format of at most 32 bits")
    if target.specials == "scale":
        return _encode_scale(values.to(torch.float64))
    rounded = round_to(values, target, saturate=saturate)
    magnitude = rounded.abs()
    mantissa_bits = target.mantissa_bits
    finite = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    exponent = floor_log2(finite).clamp(min=target.min_exponent)
    exponent = torch.where(finite == 0, target.min_exponent, exponent)
    significand = (finite / power_of_two(exponent - mantissa_bits)).to(torch.int64)
    implicit = 1 << mantissa_bits
    # A subnormal has no implicit bit and exponent code 0.
    normal = significand >= implicit
    codes = torch.where(
        normal, ((exponent + target.bias) << mantissa_bits) + significand - implicit, significand
    )
    exponent_ones = ((1 << target.exponent_bits) - 1) << mantissa_bits
    if target.specials == "ieee":
        codes = torch.where(torch.isinf(magnitude), exponent_ones, codes)
        codes = torch.where(torch.isnan(rounded), exponent_ones | (implicit >> 1), codes)
    elif target.specials == "nan":
        codes = torch.where(torch.isnan(rounded), exponent_ones | (implicit - 1), codes)
    sign = torch.signbit(rounded).to(torch.int64) << (target.bits - 1)
    return codes | sign


def decode(codes: torch.Tensor, data_type: Any) -> torch.Tensor:
    """Values (float64, exact) of integer codes of a format of at most 32 bits."""
    source = format_of(data_type)
    if source is None or source.bits > 32:
        raise ValueError(f"data_type: {data_type!r} is no format of at most 32 bits")
    codes = codes.to(torch.int64) & ((1 << source.bits) - 1)
    if source.specials == "scale":
        values = power_of_two(codes - source.bias)
        return torch.where(codes == 255, float("nan"), values)
    mantissa_bits = source.mantissa_bits
    exponent_ones = (1 << source.exponent_bits) - 1
    exponent = (codes >> mantissa_bits) & exponent_ones
    mantissa = codes & ((1 << mantissa_bits) - 1)
    significand = torch.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    scale_exponent = exponent.clamp(min=1) - source.bias - mantissa_bits
    values = significand.to(torch.float64) * power_of_two(scale_exponent)
    top = exponent == exponent_ones
    if source.specials == "ieee":
        values = torch.where(top & (mantissa == 0), float("inf"), values)
        values = torch.where(top & (mantissa != 0), float("nan"), values)
    elif source.specials == "nan":
        values = torch.where(top & (mantissa == (1 << mantissa_bits) - 1), float("nan"), values)
    negative = (codes >> (source.bits - 1)) == 1
    return torch.where(negative, -values, values)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (int64) of bytes with two each, the low nibble first; doubles the last axis."""
    data = packed.to(torch.int64) & 0xFF
    pairs = torch.stack((data & 0xF, data >> 4), dim=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Bytes (uint8) of codes 0..15, two a byte, the low nibble first; the last axis is even."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: the last axis must be even, not {codes.shape[-1]}")
    pairs = codes.to(torch.int64).reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Exact float64 values of a tensor; 8-bit formats are decoded from their codes."""
    if tensor.dtype == torch.float64:
        return tensor
    source = format_of(tensor.dtype)
    if source is not None and source.bits == 8:
        return decode(tensor.view(torch.uint8), source)
    return tensor.to(torch.float64)
