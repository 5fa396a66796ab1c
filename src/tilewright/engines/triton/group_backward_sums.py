"""Sums of BatchNorm's and InstanceNorm's backward: of a row's parts, and of a channel's samples.

Both are sums of the same two numbers, g and g * xhat, in a fixed order; dscale and dbias are such
sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.norm_problem import NormProblem
from tilewright.launch.prepared import Scratch

_WARPS = 4
_JOINED_ROWS = 32
# Tile of the kernel that sums over samples.
_SUM_ROWS = 32
_SUM_COLUMNS = 32


@triton.jit
def group_sums(
    part_g,
    part_gx,
    sums_g,
    sums_gx,
    dscale,
    dbias,
    rows,
    outer_rows,
    dscale_inner,
    dbias_inner,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_GRADIENTS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Adds PARTS parts of each row, into the workspace, into dscale and dbias, or both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    sum_g = tl.zeros((PARTS_BLOCK, ROWS), dtype=COMPUTE)
    sum_gx = tl.zeros((PARTS_BLOCK, ROWS), dtype=COMPUTE)
    for first in range(0, PARTS, PARTS_BLOCK):
        part = first + tl.arange(0, PARTS_BLOCK).to(tl.int64)
        inside = (part < PARTS)[:, None] & in_rows[None, :]
        at = part[:, None] * outer_rows + row[None, :]
        sum_g += tl.load(part_g + at, mask=inside, other=0.0)
        sum_gx += tl.load(part_gx + at, mask=inside, other=0.0)
    total_g, total_gx = tl.sum(sum_g, axis=0), tl.sum(sum_gx, axis=0)
    if HAS_SUMS:
        tl.store(sums_g + row, total_g, mask=in_rows)
        tl.store(sums_gx + row, total_gx, mask=in_rows)
    if HAS_GRADIENTS:
        at = dscale + row * dscale_inner
        tl.store(at, total_gx.to(dscale.dtype.element_ty), mask=in_rows)
        at = dbias + row * dbias_inner
        tl.store(at, total_g.to(dbias.dtype.element_ty), mask=in_rows)


def join_kernel(problem: NormProblem, assembly: Assembly, parts: int) -> PlannedKernel:
    """Sums of rows from their parts; the gradients too, where a row is a channel."""
    rows = problem.plane.rows
    assembly.integer("outer_rows", rows)
    return assembly.kernel(
        group_sums,
        (triton.cdiv(rows, _JOINED_ROWS), 1, 1),
        _WARPS,
        PARTS=parts,
        PARTS_BLOCK=min(_SUM_ROWS, triton.next_power_of_2(parts)),
        ROWS=_JOINED_ROWS,
        HAS_SUMS=True,
        HAS_GRADIENTS=not has_samples(problem),
        COMPUTE=problem.compute,
    )


def gradients_kernel(
    problem: NormProblem, slots: Mapping[int, int], sums: Sequence[int], is_aligned: bool
) -> PlannedKernel:
    """dscale and dbias from the sums of rows, over the samples of a channel."""
    grounds = problem.plane
    channels = problem.tensors["x"].dim[1]
    samples = grounds.rows // channels
    assembly = Assembly(slots, is_aligned=is_aligned)
    problem.operands(assembly, ("dscale", "dbias"))
    for name, offset in zip(("part_g", "part_gx"), sums, strict=True):
        assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
    # Not looked at.
    for name, offset in zip(("sums_g", "sums_gx"), sums, strict=True):
        assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
    assembly.integer("rows", channels)
    assembly.integer("outer_rows", channels)
    return assembly.kernel(
        group_sums,
        (triton.cdiv(channels, _SUM_COLUMNS), 1, 1),
        _WARPS,
        PARTS=samples,
        PARTS_BLOCK=min(_SUM_ROWS, triton.next_power_of_2(samples)),
        ROWS=_SUM_COLUMNS,
        HAS_SUMS=False,
        HAS_GRADIENTS=True,
        COMPUTE=problem.compute,
    )


def has_samples(problem: NormProblem) -> bool:
    """True if a row is a channel of one sample, so that gradients are sums over samples."""
    return problem.operation.kind == "instancenorm_backward"
