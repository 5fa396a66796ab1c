"""Which keys a row of attention sees, and how long its sequences are, as Hopper's kernels ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.tensor import Tensor

LENGTHS = {"q": ("seq_len_q", "cu_seq_len_q"), "kv": ("seq_len_kv", "cu_seq_len_kv")}


@dataclass(frozen=True)
class Bounds:
    """A row sees keys above row - ``left`` and up to row + ``right``; None hides nothing.

    ``shifts``: rows count from the ends of sequences of their own lengths. Where they do not, a
    bottom-right alignment is in the bounds already.
    """

    left: int | None
    right: int | None
    shifts: bool


def lengths_of(ports: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The tensor of sequences' lengths, or of their sums, of sides "q" and "kv"."""
    return {
        side: next((ports[name] for name in names if name in ports), None)
        for side, names in LENGTHS.items()
    }


def length_kind(ports: Mapping[str, Tensor], side: str) -> int:
    """NO_LENGTHS, LENGTHS or SUMS of the kernels, of side "q" or "kv"."""
    given = [name in ports for name in LENGTHS[side]]
    return given.index(True) + 1 if any(given) else 0


def read_bounds(operation: Any, rows: int, keys: int, *, has_lengths: bool) -> Bounds:
    """The bounds of an attention operation over ``rows`` and ``keys``."""
    left, right = operation.left_bound, operation.right_bound
    is_bottom = operation.alignment is diagonal_alignment.BOTTOM_RIGHT
    shifts = is_bottom and has_lengths
    if not shifts:
        # In the kernel's own rows; a bound beyond every row and key says nothing.
        shift = keys - rows if is_bottom else 0
        left = None if left is None or left - shift >= rows else left - shift
        right = None if right is None or right + shift >= keys - 1 else right + shift
    most = rows + keys
    left = None if left is None else min(max(left, -most), most)
    right = None if right is None else min(max(right, -most), most)
    return Bounds(left, right, shifts and (left is not None or right is not None))
