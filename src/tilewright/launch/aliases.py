"""Alias checks (L6): byte ranges of what is written against everything else of a call."""

from __future__ import annotations

from typing import NamedTuple

# The exact test walks a Diophantine problem; this bounds its work. Undecided counts as a clash.
_MAX_WORK = 100_000


class ByteRange(NamedTuple):
    """The bytes of one strided operand: [start, stop), and the view inside it."""

    start: int
    stop: int
    dim: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    item_bytes: int


class _Interface:
    """Carries numpy's array interface for an address that is never read."""

    def __init__(self, view: ByteRange) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": view.dim,
            "typestr": f"|V{view.item_bytes}",
            "data": (view.start, True),
            "strides": view.stride_bytes,
        }


def ranges_clash(first: ByteRange, second: ByteRange) -> bool:
    """True if the two views share a byte, or if that cannot be ruled out in bounded work.

    Interleaved views (dQ, dK, dV in one packed buffer) overlap as ranges and share nothing.
    """
    if first.start >= second.stop or second.start >= first.stop:
        return False
    # Few calls come here, and a process that makes none need not load it.
    import numpy as np

    try:
        return np.shares_memory(
            np.asarray(_Interface(first)), np.asarray(_Interface(second)), max_work=_MAX_WORK
        )
    except (np.exceptions.TooHardError, ValueError, OverflowError):
        return True
