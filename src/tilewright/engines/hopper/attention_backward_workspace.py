"""The workspace of attention's backward on SM90: what is in it, and where.

    lse, delta           Stats and Delta of every row, float32
    sums                 dQ's sums, float32
    lse_parts, delta_parts
                         Stats and Delta as products add them up
    shares               dK and dV of programs that share keys, float32
    arrivals             who has come of those, int32

``attention_backward_rows`` has the layout of the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.launch.workspace import plan_workspace

# Columns of row statistics in parts.
PARTS = 16
FLOAT_BYTES = 4
_ITEM_BYTES, _COUNT_BYTES = 2, 4
_NAMES = {
    "lse": "row statistics",
    "delta": "row products",
    "sums": "sums of dQ",
    "lse_parts": "parts of Stats",
    "delta_parts": "parts of Delta",
    "shares": "shares of dK and dV",
    "arrivals": "arrivals",
}


@dataclass(frozen=True)
class Workspace:
    """Sizes in bytes by name, in order."""

    sizes: dict[str, int]

    @property
    def scratch(self) -> tuple[tuple[str, int], ...]:
        """The sizes as a plan has them."""
        return tuple((_NAMES[name], size) for name, size in self.sizes.items())

    def at(self, name: str) -> int:
        """The offset of an array in bytes; 0, where nobody looks, of one that is not there."""
        pieces = plan_workspace(list(self.sizes.items())).pieces
        return {piece.name: piece.offset_bytes for piece in pieces}.get(name, 0)


def lay_out(
    rows: int, depth: int, depth_v: int, *, has_sums: bool, sharing: int, keys: int
) -> Workspace:
    """For ``rows`` rows of all heads and ``sharing`` programs of ``keys`` keys that share them."""
    sizes = {"lse": rows * FLOAT_BYTES, "delta": rows * FLOAT_BYTES}
    if has_sums:
        sizes["sums"] = rows * depth * FLOAT_BYTES
        sizes["lse_parts"] = sizes["delta_parts"] = rows * PARTS * _ITEM_BYTES
    if sharing:
        sizes["shares"] = sharing * keys * (depth + depth_v) * FLOAT_BYTES
        # One a consumer.
        sizes["arrivals"] = 2 * sharing * _COUNT_BYTES
    return Workspace(sizes)
