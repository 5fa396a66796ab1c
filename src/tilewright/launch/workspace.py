"""Workspace: one carve list a plan, in bytes, each piece aligned to 256."""

from __future__ import annotations

from tilewright.records import record

ALIGNMENT_BYTES = 256


@record(frozen=True)
class Piece:
    """One carved range: ``offset_bytes`` from the workspace's start."""

    name: str
    offset_bytes: int
    size_bytes: int


@record(frozen=True)
class WorkspacePlan:
    """The carve list and the exact byte count that the caller must provide."""

    pieces: tuple[Piece, ...]
    size_bytes: int


def plan_workspace(sizes: list[tuple[str, int]]) -> WorkspacePlan:
    """Lay out named sizes (bytes) one after another, each start aligned to 256 bytes."""
    pieces = []
    end = 0
    for name, size in sizes:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        pieces.append(Piece(name, start, size))
        end = start + size
    return WorkspacePlan(tuple(pieces), end)
