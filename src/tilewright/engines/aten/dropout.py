"""Attention dropout by a counter-based generator, so that any part can be made again alone.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). The key is the 64-bit seed. Element (b, h, row, col) of the probabilities has the flat
index ``((b * H + h) * Sq + row) * Skv + col``; the counter is (low and high word of
``flat // 4``, low and high word of the offset) and the element takes output word ``flat % 4``.
It is kept where that word is at least ``floor(p * 2**32)``.

The words are held in int64: a product of two of them wraps modulo 2**64, which keeps both halves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

# A host integer, or a 0-d int64 tensor that the host must not read.
Word = int | torch.Tensor


class Region(NamedTuple):
    """A box of the probabilities, half-open bounds in global indices."""

    batch: tuple[int, int]
    head: tuple[int, int]
    row: tuple[int, int]
    col: tuple[int, int]


class PhiloxDropout(NamedTuple):
    """Which elements of probabilities of ``heads`` x ``rows`` x ``keys`` a sequence are kept."""

    probability: float
    seed: Word
    offset: Word
    heads: int
    rows: int
    keys: int

    @property
    def scale(self) -> float:
        """The factor on kept elements, 1 / (1 - p); 0 where nothing is kept."""
        return 1.0 / (1.0 - self.probability) if self.probability < 1.0 else 0.0

    def keep(self, region: Region, device: torch.device) -> torch.Tensor:
        """Booleans of shape (batch, head, row, col) of ``region``; true is kept."""
        batch, head, row = (
            torch.arange(*bounds, dtype=torch.int64, device=device)
            for bounds in (region.batch, region.head, region.row)
        )
        first, last = region.col
        width = last - first
        line = (batch[:, None, None] * self.heads + head[:, None]) * self.rows + row
        start = line * self.keys + first
        # A row need not start at a multiple of four: one more counter covers the rest.
        aligned = self.keys % 4 == 0 and first % 4 == 0
        counters = (width + 3) // 4 + (0 if aligned else 1)
        index = (start >> 2)[..., None] + torch.arange(counters, dtype=torch.int64, device=device)
        words = _philox(index, self.seed, self.offset)
        if aligned:
            words = words[..., :width]
        else:
            within = torch.arange(width, dtype=torch.int64, device=device)
            words = words.gather(-1, (start & 3)[..., None] + within)
        return words >= int(self.probability * 2.0**32)


def _philox(index: torch.Tensor, seed: Word, offset: Word) -> torch.Tensor:
    """The four output words of each counter, side by side along the last axis."""
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    zero = torch.zeros_like(index)
    word_0, word_1 = index & _WORD, (index >> 32) & _WORD
    word_2, word_3 = zero + (offset & _WORD), zero + ((offset >> 32) & _WORD)
    for _ in range(_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = ((product_1 >> 32) & _WORD).bitwise_xor_(word_1).bitwise_xor_(key_0)
        word_2 = ((product_0 >> 32) & _WORD).bitwise_xor_(word_3).bitwise_xor_(key_1)
        word_1 = product_1.bitwise_and_(_WORD)
        word_3 = product_0.bitwise_and_(_WORD)
        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    return torch.stack((word_0, word_1, word_2, word_3), dim=-1).flatten(-2)
