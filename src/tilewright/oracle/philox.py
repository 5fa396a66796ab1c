"""Philox4x32-10 in integer arithmetic, and the dropout masks made of it.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The
32-bit products are formed of 16-bit halves in int64, so that nothing overflows.
"""

from __future__ import annotations

import math

import torch

__all__ = ["dropout_keep", "philox4x32"]

_ROUNDS = 10
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_KEY_STEP_0 = 0x9E3779B9
_KEY_STEP_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF


def _multiply(word: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the 64-bit product of a 32-bit word and a constant."""
    word_low, word_high = word & 0xFFFF, word >> 16
    low, high = constant & 0xFFFF, constant >> 16
    bottom = word_low * low
    middle = word_high * low + (bottom >> 16)
    other = word_low * high + (middle & 0xFFFF)
    product_low = ((other & 0xFFFF) << 16) | (bottom & 0xFFFF)
    product_high = word_high * high + (middle >> 16) + (other >> 16)
    return product_high & _WORD, product_low


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words for each counter.

    Args:
        counter: c0, c1, c2, c3: int64 tensors of one shape, values 0 .. 2**32 - 1.
        key: k0, k1, each 0 .. 2**32 - 1.

    Returns:
        Four int64 tensors of the counters' shape, values 0 .. 2**32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEP_0) & _WORD, (k1 + _KEY_STEP_1) & _WORD
    return c0, c1, c2, c3


def dropout_keep(
    flat_index: torch.Tensor, *, probability: float, seed: int, offset: int
) -> torch.Tensor:
    """Which elements a dropout keeps: boolean, the shape of `flat_index`.

    Element i takes word `i % 4` of the counter (low and high word of `i // 4`, low and high word of
    `offset`) under the key (low and high word of `seed`), and is kept where the word is at least
    `floor(probability * 2**32)`. For attention, i is `((b * H + h) * S_q + row) * S_kv + col`.

    Args:
        flat_index: int64, not negative.
        probability: Of dropping, 0 <= probability <= 1.
        seed, offset: 64-bit integers; negative ones are taken modulo 2**64.
    """
    group = flat_index >> 2
    seed, offset = seed & (2**64 - 1), offset & (2**64 - 1)
    constant = torch.zeros_like(group)
    words = philox4x32(
        (group & _WORD, group >> 32, constant + (offset & _WORD), constant + (offset >> 32)),
        (seed & _WORD, seed >> 32),
    )
    lane = flat_index & 3
    word = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    return word >= math.floor(probability * 2.0**32)
