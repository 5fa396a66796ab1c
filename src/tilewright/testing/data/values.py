"""Numbers at the ends of a data type, for operations on one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewright.oracle.formats import FloatFormat, format_of
from tilewright.testing.data.cases import Built, DataCase, make, recipe
from tilewright.testing.data.draws import Draws, cast, dtype_name, dtype_of

__all__ = ["PROFILES", "values"]

PROFILES = ("normal", "large", "denormals", "infinities", "nan", "zeros", "constant", "huge_offset")
"""normal; large: up to the type's largest number, either sign; denormals: subnormals and the
smallest normal; infinities: normal with both infinities; nan: with those and NaN; zeros: of both
signs; constant: each row one number; huge_offset: normal around 1000, which a variance computed
as E[x^2] - E[x]^2 loses."""

# One element in this many is special.
_RARE = 7


def values(
    generator: torch.Generator,
    *,
    dim: Sequence[int],
    profile: str = "normal",
    dtype: torch.dtype | str = torch.float32,
) -> DataCase:
    """A tensor `x` (`dim`, contiguous) of a floating dtype; profiles are `PROFILES`.

    Raises:
        ValueError: An unknown profile, or one whose numbers the dtype does not have.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile: {profile!r}; expected one of {', '.join(PROFILES)}")
    target = _format(dtype_of(dtype_name(dtype)))
    if (profile == "infinities" and target.specials != "ieee") or (
        profile == "nan" and target.specials == "none"
    ):
        raise ValueError(f"profile: {profile!r}; {target.name} has no such number")
    parameters = {"dim": [int(n) for n in dim], "profile": profile, "dtype": dtype_name(dtype)}
    return make("values", generator, parameters)


def _format(dtype: torch.dtype) -> FloatFormat:
    found = format_of(dtype)
    if found is None or found.specials == "scale":
        raise ValueError(f"dtype: {dtype}; expected a floating type with a sign")
    return found


def numbers(
    draws: Draws, name: str, shape: Sequence[int], profile: str, dtype: torch.dtype
) -> torch.Tensor:
    """Float64 numbers of a profile; `cast` takes those that are no numbers of the type to it."""
    target = _format(dtype)
    plain = draws.normal(name, shape)
    special = draws.integers(f"{name}/special", shape, 0, _RARE) == 0
    signs = draws.signs(f"{name}/sign", shape)
    if profile == "large":
        exponent = draws.integers(f"{name}/exponent", shape, 0, 4).to(torch.float64)
        top = torch.where(special, 1.0, torch.exp2(-exponent) * 0.875)
        return signs * top * target.max_finite
    if profile == "denormals":
        steps = 2**target.mantissa_bits
        count = draws.integers(f"{name}/count", shape, 1, min(steps, 2**30) + 1)
        smallest = math.ldexp(1.0, target.min_exponent - target.mantissa_bits)
        return signs * count.to(torch.float64) * smallest
    if profile in ("infinities", "nan"):
        found = torch.where(special, signs * math.inf, plain)
        if profile == "nan":
            also = draws.integers(f"{name}/nan", shape, 0, _RARE) == 0
            found = torch.where(also, math.nan, found)
        return found
    if profile == "zeros":
        return signs * 0.0
    if profile == "constant":
        return plain[..., :1].expand(plain.shape) if plain.dim() else plain
    if profile == "huge_offset":
        return plain + 1000.0
    return plain


@recipe("values")
def _build(draws: Draws, *, dim: list[int], profile: str, dtype: str) -> Built:
    kind = dtype_of(dtype)
    return Built({"x": cast(numbers(draws, "x", dim, profile, kind).contiguous(), kind)}, {})
