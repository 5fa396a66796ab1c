"""How rotations are cut: positions and lines a program, warps; which batches share one table."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from tilewright.engines.compiled.compiler import POINTER_ALIGNMENT_BYTES
from tilewright.graph.tensor import Tensor

WARP_THREADS = 32
_MAX_LINES = 2**31 - 1


@dataclass(frozen=True)
class RopeConfig:
    """TOKENS positions a program, HEADS lines a step, lines in GROUPS programs."""

    tokens: int
    heads: int
    groups: int
    warps: int


@dataclass(frozen=True)
class _Walk:
    """``warps`` warps, ``heads`` lines a step, ``programs`` wanted on each multiprocessor."""

    warps: int
    heads: int
    programs: int


# (one table for all batches?, heads next to one another in memory?): as measured on an H200
# (benchmark/norms.md).
_WALKS = {
    (False, True): _Walk(warps=8, heads=8, programs=4),
    (False, False): _Walk(warps=4, heads=4, programs=8),
    (True, True): _Walk(warps=4, heads=8, programs=32),
    (True, False): _Walk(warps=4, heads=4, programs=16),
}
# Where the next lines wait in shared memory.
_STAGED_WALK = _Walk(warps=8, heads=8, programs=4)


def choose_config(
    source: Tensor, freqs: Tensor, half: int, sm_count: int, warps: int | None = None
) -> RopeConfig:
    """One 16-byte vector of each half a thread and step: few registers, many programs.

    Every thread has elements of its own in a step, so none reads what another has rotated.
    """
    batch, heads, length, _ = source.dim
    shares = is_shared(source, freqs, half)
    tables, lines = (1, batch * heads) if shares else (batch, heads)
    walk = _WALKS[shares, not positions_adjoin(source)]
    if freqs.dim[3] == 2 * half and not shares:
        walk = _STAGED_WALK
    warps = walk.warps if warps is None else warps
    most_lines, most_tokens = (triton.next_power_of_2(max(n, 1)) for n in (lines, length))
    vector = POINTER_ALIGNMENT_BYTES * 8 // source.data_type.bits
    block = triton.next_power_of_2(half)
    rows = max(1, WARP_THREADS * vector // block) * warps
    step = min(walk.heads, rows, most_lines)
    tokens = min(rows // step, most_tokens)
    step = min(rows // tokens, most_lines)
    while warps > 1 and tokens * step * block < WARP_THREADS * warps * vector:
        warps //= 2
    programs = max(tables * triton.cdiv(length, tokens), 1)
    wanted = walk.programs * walk.warps // warps * sm_count
    groups = max(1, min(round(wanted / programs), lines // step))
    return RopeConfig(tokens, step, groups, warps)


def positions_adjoin(source: Tensor) -> bool:
    """True if positions, not heads, are next to one another in memory.

    Programs that start together then take neighbouring positions, not parts of one position's
    lines.
    """
    return source.stride[2] < source.stride[1]


def is_shared(source: Tensor, freqs: Tensor, half: int) -> bool:
    """True if one program rotates heads of several batches, which have the same angles.

    That pays where there are two tables to make; one is made while the first heads are on their
    way.
    """
    batch, heads = source.dim[:2]
    has_second = freqs.dim[3] == 2 * half
    return has_second and freqs.dim[0] == 1 and batch > 1 and batch * heads <= _MAX_LINES
