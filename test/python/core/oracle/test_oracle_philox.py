"""Philox4x32-10 against the known answers of Random123, and the dropout made of it."""

from __future__ import annotations

import pytest
import torch

from tilewright.oracle import philox

pytestmark = pytest.mark.L0

# (counter, key, words), the philox4x32 10 rows of Random123's kat_vectors.
_KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), _KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([entry]) for entry in counter)
    assert tuple(w.item() for w in philox.philox4x32((c0, c1, c2, c3), key)) == words


def _plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same generator in Python's unbounded integers, written from the paper's round."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (right >> 32) ^ c[1] ^ k[0],
            right % 2**32,
            (left >> 32) ^ c[3] ^ k[1],
            left % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_keep_takes_the_documented_words() -> None:
    seed, offset, probability = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321, 0.3
    index = torch.tensor([0, 1, 2, 3, 4, 7, 12345, 2**34 + 5])
    kept = philox.dropout_keep(index, probability=probability, seed=seed, offset=offset)
    expected = []
    for flat in index.tolist():
        group = flat // 4
        words = _plain_philox(
            [group % 2**32, group // 2**32, offset % 2**32, offset // 2**32],
            [seed % 2**32, seed // 2**32],
        )
        expected.append(words[flat % 4] >= int(probability * 2**32))
    assert kept.tolist() == expected
    assert True in expected and False in expected


def test_probabilities_zero_and_one() -> None:
    index = torch.arange(1000)
    assert philox.dropout_keep(index, probability=0.0, seed=1, offset=0).all()
    assert not philox.dropout_keep(index, probability=1.0, seed=1, offset=0).any()


def test_kept_share_and_independence_of_seed_and_offset() -> None:
    index = torch.arange(20000)
    first = philox.dropout_keep(index, probability=0.25, seed=5, offset=0)
    assert abs(first.double().mean().item() - 0.75) < 0.015
    again = philox.dropout_keep(index, probability=0.25, seed=5, offset=0)
    assert torch.equal(first, again)
    for seed, offset in ((6, 0), (5, 1), (5 + 2**32, 0), (5, 2**32)):
        other = philox.dropout_keep(index, probability=0.25, seed=seed, offset=offset)
        agreement = (first == other).double().mean().item()
        # Independent draws agree with probability 0.75^2 + 0.25^2.
        assert abs(agreement - 0.625) < 0.02


def test_negative_seed_is_taken_modulo() -> None:
    index = torch.arange(64)
    first = philox.dropout_keep(index, probability=0.5, seed=-1, offset=0)
    assert torch.equal(first, philox.dropout_keep(index, probability=0.5, seed=2**64 - 1, offset=0))
