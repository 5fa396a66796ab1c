"""How a generated kernel walks its index: which axes, and in what tiles. Pure; needs no Triton.

Axes are split where an access changes its stride, sorted as the largest tensor lies in memory, and
joined where every access steps them as one. A tile spans up to two lists of axes: ``inner`` (the
contiguous ones, or those that are reduced) and ``rows``; programs walk the others one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.engines.triton.addressing import (
    Axis,
    access_of,
    common_axes,
    merged,
)
from tilewright.engines.triton.pointwise_nodes import Apply, Node, Read, Reduce, joint_dim, walk
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor

# Elements of a tile: enough loads in flight, few enough registers.
_TILE = 2048
_TRANSPOSED_EDGE = 64
_REDUCED_TILE = 4096
# Elements of a row that is kept in registers between a reduction and what uses it.
MAX_ROW = 16384
# Fewer contiguous elements than this share a tile with the next axis.
_SHORT = 128
_MOST_NODES = 128
_ELEMENTS_A_THREAD = 32
_LOOPED_ELEMENTS_A_THREAD = 16
_WARPS = 4
_MOST_WARPS = 16
_INT32_MAX = 2**31 - 1
_PROGRAMS_A_MULTIPROCESSOR = 4
_MOST_PARTS = 1024


@dataclass(frozen=True)
class Walk:
    """The index of a kernel. ``strides`` of all axes follow the accesses: reads, then outputs.

    ``is_looped``: the reduced axes are walked tile by tile, and results are kept per element of a
    tile until the end. With several ``parts`` each of them is a program's, and a second kernel
    reduces their results.
    """

    outer: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    block_rows: int
    block_inner: int
    is_reduction: bool = False
    is_looped: bool = False
    parts: int = 1

    @property
    def kept(self) -> int:
        """The number of results of each reduction."""
        return math.prod(axis.extent for axis in self.outer) * _extent(self.rows)

    @property
    def row_tiles(self) -> int:
        return _tiles(self.rows, self.block_rows)

    @property
    def inner_tiles(self) -> int:
        return 1 if self.is_reduction else _tiles(self.inner, self.block_inner)

    @property
    def programs(self) -> int:
        outer = math.prod(axis.extent for axis in self.outer)
        return outer * self.row_tiles * self.inner_tiles * self.parts

    @property
    def warps(self) -> int:
        elements = self.block_rows * self.block_inner
        if self.is_looped:
            return max(1, min(_MOST_WARPS, elements // (32 * _LOOPED_ELEMENTS_A_THREAD)))
        most = _MOST_WARPS if self.is_reduction else _WARPS
        return max(1, min(most, elements // (32 * _ELEMENTS_A_THREAD)))


@dataclass(frozen=True)
class Problem:
    """What a kernel is generated from.

    ``reads`` and ``offsets`` (of the reads) go with the first strides of an axis, ``outputs`` with
    the rest. ``rank`` is that of the joint index; ``reduced`` its axes that reductions take.
    """

    outputs: tuple[tuple[Tensor, Node], ...]
    nodes: tuple[Node, ...]
    reads: tuple[Read, ...]
    offsets: tuple[int, ...]
    rank: int
    reduced: frozenset[int]
    axes: tuple[tuple[Axis, ...], ...]

    def is_full(self, node: Node) -> bool:
        """True if the node has elements along the reduced axes."""
        shift = self.rank - len(node.dim)
        return any(
            extent != 1 and axis + shift in self.reduced for axis, extent in enumerate(node.dim)
        )

    def takes_axes(self, node: Node) -> bool:
        """True for a reduction that takes axes at all."""
        return isinstance(node, Reduce) and bool(_taken(node, self.rank))

    def results(self) -> frozenset[int]:
        """ids of the nodes that depend on a reduction, itself included."""
        found: set[int] = set()
        for node in self.nodes:
            operands = node.operands if isinstance(node, Apply) else ()
            if isinstance(node, Reduce):
                operands = (node.operand,)
            if self.takes_axes(node) or any(id(operand) in found for operand in operands):
                found.add(id(node))
        return frozenset(found)


def problem_of(outputs: Sequence[tuple[Tensor, Node]]) -> Problem:
    """The joint index of all outputs and reductions.

    Raises:
        NotSupportedError: if one index does not serve them all.
    """
    nodes = tuple(walk([node for _, node in outputs]))
    if len(nodes) > _MOST_NODES:
        raise NotSupportedError(
            f"the graph has {len(nodes)} values; a generated kernel has at most {_MOST_NODES}"
        )
    reductions = [node for node in nodes if isinstance(node, Reduce)]
    dim = joint_dim([t.dim for t, _ in outputs] + [node.source_dim for node in reductions])
    reduced = _reduced_axes(reductions, len(dim))
    reads = tuple(node for node in nodes if isinstance(node, Read))
    accesses = [node.access.expanded(dim) for node in reads]
    accesses += [access_of(tensor.dim, tensor.stride).expanded(dim) for tensor, _ in outputs]
    axes = tuple(tuple(common_axes(accesses, position)) for position in range(len(dim)))
    offsets = tuple(access.offset for access in accesses[: len(reads)])
    return Problem(tuple(outputs), nodes, reads, offsets, len(dim), reduced, axes)


def walk_of(problem: Problem, sm_count: int) -> Walk:
    """Tiles for a problem.

    Raises:
        NotSupportedError: if a row does not fit, or too few programs would reduce too much.
    """
    kept = [axis for at, axes in enumerate(problem.axes) for axis in axes if not _in(problem, at)]
    order = _memory_order(problem, kept)
    if problem.reduced:
        reduced = [
            axis for at, axes in enumerate(problem.axes) for axis in axes if _in(problem, at)
        ]
        return _reducing_walk(problem, order, _memory_order(problem, reduced), sm_count)
    return _plain_walk(order)


def _in(problem: Problem, position: int) -> bool:
    return position in problem.reduced


def _plain_walk(axes: list[Axis]) -> Walk:
    if not axes:
        return Walk((), (), (), 1, 1)
    inner, rest = _take(axes, _SHORT)
    size = _extent(inner)
    across = _contiguous_elsewhere(inner, rest)
    if across is not None:
        rows = (rest.pop(across),)
        edges = (min(_power(_extent(rows)), _TRANSPOSED_EDGE), min(_power(size), _TRANSPOSED_EDGE))
        return Walk(tuple(rest), rows, inner, *edges)
    is_repeated = rest and any(
        own and not step for own, step in zip(inner[-1].strides, rest[-1].strides, strict=True)
    )
    # What all rows share is read once for several of them.
    tile, block = (2 * _TILE, _TILE // 2) if is_repeated else (_TILE, _TILE)
    block = min(_power(size), block)
    if not rest or block == tile:
        return Walk(tuple(rest), (), inner, 1, block)
    rows = (rest.pop(),)
    return Walk(tuple(rest), rows, inner, min(_power(_extent(rows)), tile // block), block)


def combining(walk: Walk) -> Walk:
    """The walk of the kernel that reduces the results of the parts."""
    block = _power(walk.parts)
    rows = max(1, min(walk.block_rows, _REDUCED_TILE // block))
    none = (0,) * len((*walk.outer, *walk.rows, *walk.inner)[0].strides)
    inner = (Axis(walk.parts, none),)
    return Walk(walk.outer, walk.rows, inner, rows, block, is_reduction=True)


def _reducing_walk(problem: Problem, kept: list[Axis], reduced: list[Axis], sm_count: int) -> Walk:
    results = problem.results()
    length = _extent(reduced)
    if length > _INT32_MAX:
        raise NotSupportedError(f"a reduction of {length} elements; the kernel takes {_INT32_MAX}")
    # A row has to stay where something of its size is computed from its reduction.
    is_fed_back = any(
        (id(node) in results and problem.is_full(node) and not isinstance(node, Reduce))
        or (problem.takes_axes(node) and id(node.operand) in results)
        for node in problem.nodes
    )
    if is_fed_back and _power(length) > MAX_ROW:
        raise NotSupportedError(
            f"a value of {length} elements is reduced and used again; the kernel keeps {MAX_ROW}"
        )
    rows, rest = _take(kept, _SHORT) if kept else ((), [])
    steps = zip(rows[-1].strides, reduced[-1].strides, strict=True) if rows else ()
    across = any(row == 1 and inner > 1 for row, inner in steps)
    block_rows = min(_power(_extent(rows)), _TRANSPOSED_EDGE) if across else 1
    block = min(_power(length), max(_REDUCED_TILE // block_rows, 1))
    if is_fed_back or _power(length) * block_rows <= 2 * _REDUCED_TILE:
        block = _power(length)
        block_rows = max(1, min(block_rows, MAX_ROW // block))
    if not across:
        block_rows = max(1, min(_power(_extent(rows)), _REDUCED_TILE // block))
    walk = Walk(tuple(rest), rows, tuple(reduced), block_rows, block, True, block < length)
    return replace(walk, parts=_parts(walk, sm_count)) if walk.is_looped else walk


def _parts(walk: Walk, sm_count: int) -> int:
    """Parts of about equally many tiles, for enough programs."""
    tiles = _tiles(walk.inner, walk.block_inner)
    wanted = -(-_PROGRAMS_A_MULTIPROCESSOR * sm_count // walk.programs)
    wanted = max(1, min(wanted, tiles, _MOST_PARTS))
    return -(-tiles // -(-tiles // wanted))


def _reduced_axes(reductions: Sequence[Reduce], rank: int) -> frozenset[int]:
    found: frozenset[int] = frozenset()
    for node in reductions:
        taken = _taken(node, rank)
        if taken and found and taken != found:
            raise NotSupportedError(
                f"{node.operation.title()} reduces {node.source_dim} to {node.dim}; another "
                "reduction of the graph takes other axes"
            )
        found = taken or found
    return found


def _taken(node: Reduce, rank: int) -> frozenset[int]:
    shift = rank - len(node.dim)
    pairs = zip(node.source_dim, node.dim, strict=True)
    return frozenset(axis + shift for axis, (before, after) in enumerate(pairs) if before != after)


def _memory_order(problem: Problem, axes: Sequence[Axis]) -> list[Axis]:
    """Sorted as the access that steps most of them lies in memory, outputs first; then joined."""
    axes = [axis for axis in axes if axis.extent > 1]
    count = len(problem.reads) + len(problem.outputs)
    ranks = sorted(
        range(count),
        key=lambda k: (
            -math.prod(axis.extent for axis in axes if axis.strides[k]),
            k < len(problem.reads),
            k,
        ),
    )
    ordered = sorted(axes, key=lambda axis: tuple(-axis.strides[k] for k in ranks))
    return merged(ordered)


def _take(axes: Sequence[Axis], want: int) -> tuple[tuple[Axis, ...], list[Axis]]:
    """The last axes, at least one and until they have ``want`` elements; and the rest."""
    rest = list(axes)
    taken = [rest.pop()]
    while rest and _extent(taken) < want and _extent(taken) * rest[-1].extent <= _INT32_MAX:
        taken.insert(0, rest.pop())
    return tuple(taken), rest


def _contiguous_elsewhere(inner: Sequence[Axis], rest: Sequence[Axis]) -> int | None:
    """The position of the axis that an access steps by 1 which does not step ``inner`` so."""
    if len(inner) > 1:
        return None
    for position, axis in enumerate(rest):
        pairs = zip(axis.strides, inner[0].strides, strict=True)
        if any(step == 1 and own > 1 for step, own in pairs):
            return position
    return None


def _extent(axes: Sequence[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)


def _tiles(axes: Sequence[Axis], block: int) -> int:
    return -(-_extent(axes) // block)


def _power(value: int) -> int:
    """The next power of two."""
    return 1 << max(value - 1, 0).bit_length()
