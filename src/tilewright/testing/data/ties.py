"""Exact ties: numbers halfway between two codes, which must become the even one.

Nothing here rounds: every number is a sum of two neighbouring codes' values times a scale, exact
in the input's type, and the right code is the even one of the two by construction. A quantizer
that multiplies by a rounded reciprocal moves some of the ties off their midpoints.
"""

from __future__ import annotations

import torch

from tilewright.oracle.formats import FORMATS, FloatFormat, decode
from tilewright.testing.data.cases import Built, DataCase, make, recipe
from tilewright.testing.data.draws import Draws, cast, dtype_name, dtype_of

__all__ = ["block_scale_ties", "format_ties", "midpoints"]

# The code of the largest number of each element type.
_LARGEST_CODES = {"FP4_E2M1": 0x7, "FP8_E4M3": 0x7E, "FP8_E5M2": 0x7B}
# In [1, 2), of the four significant bits that an E4M3 scale has; no power of two.
_SCALES = tuple(n / 8.0 for n in (9, 10, 11, 12, 13, 14, 15))


def _format(name: str) -> FloatFormat:
    if name not in _LARGEST_CODES:
        raise ValueError(f"element_type: {name!r}; expected one of {', '.join(_LARGEST_CODES)}")
    return FORMATS[name]


def midpoints(element_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every positive midpoint of a format (float64), and the even code beside each (int64)."""
    target = _format(element_type)
    codes = torch.arange(2 ** (target.bits - 1), dtype=torch.int64)
    values = decode(codes, target)
    codes = codes[torch.isfinite(values) & (values <= target.max_finite)]
    low, high = codes[:-1], codes[1:]
    middle = (decode(low, target) + decode(high, target)) / 2.0
    return middle, torch.where(low % 2 == 0, low, high)


def format_ties(
    generator: torch.Generator,
    *,
    element_type: str = "FP8_E4M3",
    copies: int = 2,
    dtype: torch.dtype | str = torch.float32,
) -> DataCase:
    """Every midpoint of a format in either sign, `copies` times each, in random order.

    Tensors: `x` (1, n), `expected_codes` uint8 (1, n): the codes of `element_type`.
    """
    _format(element_type)
    parameters = {"element_type": element_type, "copies": copies, "dtype": dtype_name(dtype)}
    return make("format_ties", generator, parameters)


@recipe("format_ties")
def _format_ties(draws: Draws, *, element_type: str, copies: int, dtype: str) -> Built:
    target = _format(element_type)
    middle, code = midpoints(element_type)
    sign_bit = 1 << (target.bits - 1)
    signed = torch.cat([middle, -middle]).repeat(copies)
    codes = torch.cat([code, code + sign_bit]).repeat(copies)
    order = draws.permutation("order", len(signed))
    x = cast(signed[order].reshape(1, -1), dtype_of(dtype))
    expected = codes[order].to(torch.uint8).reshape(1, -1)
    return Built({"x": x, "expected_codes": expected}, {})


def block_scale_ties(
    generator: torch.Generator,
    *,
    element_type: str = "FP4_E2M1",
    scale_type: str = "FP8_E4M3",
    rows: int = 8,
    blocks: int = 8,
    block_size: int = 16,
    dtype: torch.dtype | str = torch.float32,
) -> DataCase:
    """Blocks whose elements, divided by the block's scale, are exact ties.

    In each block one element is the format's largest number times the scale, of either sign,
    which makes the scale what it is: amax / largest. It is no power of two, so that its reciprocal
    is rounded. With "FP8_E8M0" scales are powers of two, as that format has no others. All other
    elements are midpoints times the scale.

    Tensors: `x` (rows, blocks * block_size); `expected_codes` uint8 of the same shape, one code an
    element; `expected_scales` float32 (rows, blocks).

    Raises:
        ValueError: The element or scale type is unknown, or the dtype cannot hold the ties.
    """
    _format(element_type)
    if scale_type not in ("FP8_E4M3", "FLOAT", "FP8_E8M0"):
        raise ValueError(f"scale_type: {scale_type!r}; expected FP8_E4M3, FLOAT or FP8_E8M0")
    parameters = {
        "element_type": element_type,
        "scale_type": scale_type,
        "rows": rows,
        "blocks": blocks,
        "block_size": block_size,
        "dtype": dtype_name(dtype),
    }
    return make("block_scale_ties", generator, parameters)


@recipe("block_scale_ties")
def _block_scale_ties(
    draws: Draws,
    *,
    element_type: str,
    scale_type: str,
    rows: int,
    blocks: int,
    block_size: int,
    dtype: str,
) -> Built:
    target = _format(element_type)
    middle, code = midpoints(element_type)
    shape = (rows, blocks, block_size)
    exponent = draws.integers("exponent", (rows, blocks, 1), -3, 4).to(torch.float64)
    scale = torch.ldexp(torch.ones_like(exponent), exponent)
    if scale_type != "FP8_E8M0":
        picks = draws.integers("scale", (rows, blocks, 1), 0, len(_SCALES))
        scale = scale * torch.tensor(_SCALES, dtype=torch.float64)[picks]
    picks = draws.integers("middle", shape, 0, len(middle))
    elements, codes = middle[picks], code[picks]
    top = torch.zeros(shape, dtype=torch.bool)
    position = draws.integers("top", (rows, blocks, 1), 0, block_size)
    top.scatter_(2, position, True)
    elements = torch.where(top, target.max_finite, elements)
    codes = torch.where(top, _LARGEST_CODES[element_type], codes)
    signs = draws.signs("sign", shape)
    codes = torch.where(signs < 0, codes + (1 << (target.bits - 1)), codes)
    exact = signs * elements * scale
    x = cast(exact, dtype_of(dtype))
    if not torch.equal(x.to(torch.float64), exact):
        raise ValueError(f"dtype: {dtype} cannot hold ties of {element_type} times these scales")
    return Built(
        {
            "x": x.reshape(rows, -1),
            "expected_codes": codes.to(torch.uint8).reshape(rows, -1),
            "expected_scales": scale.reshape(rows, blocks).to(torch.float32),
        },
        {},
    )
