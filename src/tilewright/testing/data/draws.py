"""Random numbers that are the same on every machine: counters, integers, correctly rounded casts.

`torch.randn` is not: its vectorized logarithm differs between instruction sets. Here each named
draw is Philox words (`tilewright.oracle.philox`) under the case's seed, made into numbers with
integer operations and single IEEE divisions, so that no draw depends on another, on their order,
or on any generator's state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from tilewright.oracle.formats import FORMATS, encode, format_of
from tilewright.oracle.philox import philox4x32

__all__ = ["Draws", "cast", "dtype_name", "dtype_of", "poison"]

_WORD = 2**32 - 1
# The sum of eight 16-bit numbers has this mean and this deviation.
_MEAN = 8 * 65535 / 2
_DEVIATION = math.sqrt(8 * (65536**2 - 1) / 12)


class Draws:
    """Named draws under one seed; a name stands for one independent sequence of numbers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed & (2**64 - 1)

    def _words(self, name: str, count: int) -> torch.Tensor:
        """(count, 4) words of 32 bits."""
        stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        index = torch.arange(count, dtype=torch.int64)
        same = torch.zeros_like(index)
        counter = (index & _WORD, index >> 32, same + (stream & _WORD), same + (stream >> 32))
        return torch.stack(philox4x32(counter, (self.seed & _WORD, self.seed >> 32)), dim=1)

    def integers(self, name: str, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
        """Int64 numbers in [low, high), at most 2**31 apart."""
        if not 0 < high - low <= 2**31:
            raise ValueError(f"{name}: no integers in [{low}, {high}) of a range up to 2**31")
        count = math.prod(shape)
        words = self._words(name, -(-count // 4)).reshape(-1)[:count]
        return (((words * (high - low)) >> 32) + low).reshape(tuple(shape))

    def integer(self, name: str, low: int, high: int) -> int:
        """One number in [low, high)."""
        return int(self.integers(name, (1,), low, high)[0])

    def uniform(
        self, name: str, shape: Sequence[int], low: float = 0.0, high: float = 1.0
    ) -> torch.Tensor:
        """Float64 numbers in [low, high): 31 random bits each."""
        # Made float64 first: the quotient of an integer tensor takes the default dtype.
        words = self.integers(name, shape, 0, 2**31).to(torch.float64)
        return words / 2.0**31 * (high - low) + low

    def normal(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Float64 numbers of a bell of mean 0 and deviation 1: sums of eight uniform numbers.

        They stay within 4.9 deviations, unlike a normal distribution's.
        """
        words = self._words(name, math.prod(shape))
        sums = (words & 0xFFFF).sum(dim=1) + (words >> 16).sum(dim=1)
        return ((sums.to(torch.float64) - _MEAN) / _DEVIATION).reshape(tuple(shape))

    def signs(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Float64 numbers, 1 or -1."""
        return (self.integers(name, shape, 0, 2) * 2 - 1).to(torch.float64)

    def permutation(self, name: str, count: int) -> torch.Tensor:
        """The numbers below `count`, int64, in random order."""
        words = self._words(name, count)
        keys = (words[:, 0] << 31) ^ words[:, 1]
        return torch.sort(keys, stable=True).indices


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: {name!r} is no torch dtype")
    return found


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a torch dtype, checked."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    dtype_of(name)
    return name


def cast(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 numbers rounded once, to nearest even, to a dtype; finite ones saturate in 8 bits."""
    target = format_of(dtype)
    if target is not None and target.bits == 8:
        codes = encode(numbers, target)
        if target.specials == "ieee":
            infinite = encode(numbers, target, saturate=False)
            codes = torch.where(torch.isinf(numbers), infinite, codes)
        return codes.to(torch.uint8).view(dtype)
    if target is FORMATS["DOUBLE"] or target is None:
        return numbers.to(dtype)
    # A cast from float64 may go through float32 and round twice; codes are made directly.
    codes = encode(numbers, target)
    if target.bits == 16:
        return torch.where(codes >= 2**15, codes - 2**16, codes).to(torch.int16).view(dtype)
    return torch.where(codes >= 2**31, codes - 2**32, codes).to(torch.int32).view(dtype)


def poison(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """One axis of elements whose bytes are all ones: NaN, -1, or the largest unsigned number."""
    size = max(1, elements * dtype.itemsize)
    return torch.full((size,), 0xFF, dtype=torch.uint8)[: elements * dtype.itemsize].view(dtype)
