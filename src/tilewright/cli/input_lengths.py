"""Lengths of attention sequences, and the ragged offsets and running sums that follow from them.

All tensors that speak of one side of an attention (its lengths, their running sums, the ragged
offsets of its operands) are tied: they describe the same sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.cli.draws import Draws
from tilewright.cli.exits import fail
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation, walk
from tilewright.graph.operations.attention_base import PAGE_PORTS
from tilewright.graph.tensor import Tensor

_QUERY_PORTS = frozenset(
    {"q", "o", "dO", "stats", "O", "Stats", "dQ", "q_T", "dO_T", "o_f16", "dO_f16"}
    | {"score_max", "score_sum_exp"}
)
_KEY_PORTS = frozenset({"k", "v", "dK", "dV", "k_T"})
# The axis of (batch, heads, sequence, head size) that steps from token to token.
_TOKEN_AXIS = 2


@dataclass
class _Side:
    """The queries or the keys of one attention: what its sequences are told by."""

    capacity: int
    max_total: int | None
    lengths: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    ragged: list[Tensor] = field(default_factory=list)
    # Ragged page tables, each with the tokens of a page.
    tables: list[tuple[Tensor, int]] = field(default_factory=list)

    def uids(self) -> set[int]:
        tables = [table for table, _ in self.tables]
        offsets = [tensor.ragged_offset for tensor in (*self.ragged, *tables)]
        return {t.uid for t in (*self.lengths, *self.sums, *offsets) if t is not None}


def draw_lengths(
    operations: Iterable[Operation], given: Mapping[int, torch.Tensor], seed: int
) -> dict[int, torch.Tensor]:
    """Values (int64, of the dim) of every length, running sum and ragged offset, by uid.

    What ``given`` holds (values by uid) is taken as it is, and the rest follows it.

    Raises:
        CommandError: if one offset tensor is asked to hold two different things.
    """
    values: dict[int, torch.Tensor] = {}
    for group in _tied_groups(operations):
        batch = group[0].ragged[0].dim[0] if group[0].ragged else _batch(group[0])
        lengths = _known_lengths(group, given)
        if lengths is None:
            draws = Draws(seed, min(uid for side in group for uid in side.uids()))
            capacity = min(side.capacity for side in group)
            lengths = _draw(draws, batch, capacity, _smallest(s.max_total for s in group))
        for side in group:
            _derive(side, lengths, values, given)
    return values


def row_counts(
    graph: DeclaredGraph, tensor: Tensor, buffers: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Rows (int64) of each sequence of a ragged tensor: its lengths, else what its offsets tell.

    ``buffers`` holds lengths, running sums and offsets by uid.
    """
    for operation in walk(graph.operations):
        if not operation.kind.startswith("sdpa"):
            continue
        for side in _sides(operation):
            if not any(member is tensor for member in side.ragged):
                continue
            for lengths in side.lengths:
                if lengths.uid in buffers:
                    return buffers[lengths.uid].flatten().to(torch.int64)
            for sums in side.sums:
                if sums.uid in buffers:
                    return buffers[sums.uid].flatten().to(torch.int64).diff()
    offset = tensor.ragged_offset
    if offset is None:
        raise ValueError(f"tensor {tensor.label()} is not ragged")
    return _rows_between(tensor, buffers[offset.uid].to(torch.int64))


def row_mask(tensor: Tensor, rows: torch.Tensor) -> torch.Tensor:
    """True where a ragged tensor has an element; broadcasts to its dim."""
    shape = [1] * len(tensor.dim)
    shape[_TOKEN_AXIS] = tensor.dim[_TOKEN_AXIS]
    positions = torch.arange(tensor.dim[_TOKEN_AXIS]).reshape(shape)
    return positions < rows.reshape(-1, *[1] * (len(tensor.dim) - 1))


def ragged_places(tensor: Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Where each element of a ragged tensor would lie in its storage: shape dim, int64."""
    first = offsets.flatten()[:-1].to(torch.int64) * tensor.ragged_offset_multiplier
    places = first.reshape(-1, *[1] * (len(tensor.dim) - 1)).expand(tensor.dim).clone()
    for axis in range(1, len(tensor.dim)):
        shape = [1] * len(tensor.dim)
        shape[axis] = tensor.dim[axis]
        places += (torch.arange(tensor.dim[axis]) * tensor.stride[axis]).reshape(shape)
    return places


def used_elements(tensor: Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> int:
    """Elements from the first of a ragged tensor to one past the last that its sequences use."""
    inner = sum(
        (extent - 1) * step
        for axis, (extent, step) in enumerate(zip(tensor.dim, tensor.stride, strict=True))
        if axis not in (0, _TOKEN_AXIS)
    )
    last = 0
    for start, count in zip(offsets.flatten().tolist(), rows.tolist(), strict=False):
        if count > 0 and 0 not in tensor.dim[1:]:
            first = start * tensor.ragged_offset_multiplier
            last = max(last, first + (count - 1) * tensor.stride[_TOKEN_AXIS] + inner + 1)
    return last


def _rows_between(tensor: Tensor, offsets: torch.Tensor) -> torch.Tensor:
    steps = offsets.flatten().diff() * tensor.ragged_offset_multiplier
    return (-(-steps // max(tensor.stride[_TOKEN_AXIS], 1))).clamp(0, tensor.dim[_TOKEN_AXIS])


def _tied_groups(operations: Iterable[Operation]) -> list[list[_Side]]:
    """The sides of all attentions, those together that share a tensor."""
    groups: list[list[_Side]] = []
    for operation in operations:
        if not operation.kind.startswith("sdpa"):
            continue
        for side in _sides(operation):
            uids = side.uids()
            if not uids:
                continue
            tied = [g for g in groups if any(uids & member.uids() for member in g)]
            groups = [g for g in groups if g not in tied]
            groups.append([member for g in tied for member in g] + [side])
    return groups


def _sides(operation: Any) -> tuple[_Side, _Side]:
    extents = operation.extents()
    queries = _Side(extents.rows, operation.max_total_seq_len_q)
    keys = _Side(extents.keys, operation.max_total_seq_len_kv)
    for side, name in ((queries, "q"), (keys, "kv")):
        for port, found in ((f"seq_len_{name}", side.lengths), (f"cu_seq_len_{name}", side.sums)):
            if port in operation.inputs:
                found.append(operation.inputs[port])
    for port, tensor in (*operation.inputs.items(), *operation.outputs.items()):
        if tensor.ragged_offset is None:
            continue
        if port in _QUERY_PORTS:
            queries.ragged.append(tensor)
        elif port in _KEY_PORTS:
            keys.ragged.append(tensor)
        elif port in PAGE_PORTS:
            pages = operation.inputs["kv"[PAGE_PORTS.index(port)]]
            keys.tables.append((tensor, pages.dim[2]))
    return queries, keys


def _batch(side: _Side) -> int:
    return side.lengths[0].dim[0] if side.lengths else side.sums[0].dim[0] - 1


def _known_lengths(
    group: Sequence[_Side], given: Mapping[int, torch.Tensor]
) -> torch.Tensor | None:
    for side in group:
        for tensor in side.lengths:
            if tensor.uid in given:
                return given[tensor.uid].flatten().to(torch.int64)
        for tensor in side.sums:
            if tensor.uid in given:
                return given[tensor.uid].flatten().to(torch.int64).diff()
    for side in group:
        for tensor in side.ragged:
            offset = tensor.ragged_offset
            if offset is not None and offset.uid in given:
                return _rows_between(tensor, given[offset.uid].to(torch.int64))
    room = [
        _rows_between(table, given[table.ragged_offset.uid].to(torch.int64)) * page
        for side in group
        for table, page in side.tables
        if table.ragged_offset is not None and table.ragged_offset.uid in given
    ]
    if not room:
        return None
    # As many tokens as every table that is given has pages for.
    capacity = min(side.capacity for side in group)
    return torch.stack(room).amin(0).clamp(max=capacity)


def _draw(draws: Draws, batch: int, capacity: int, max_total: int | None) -> torch.Tensor:
    """Lengths from 1 to ``capacity``, one of them the whole; their sum at most ``max_total``."""
    if batch == 0 or capacity == 0:
        return torch.zeros(batch, dtype=torch.int64)
    lengths = draws.integers((batch,), 1, capacity + 1)
    lengths[int(draws.integers((1,), 0, batch))] = capacity
    while max_total is not None and int(lengths.sum()) > max_total:
        longest = int(lengths.argmax())
        surplus = int(lengths.sum()) - max_total
        lengths[longest] -= min(surplus, max(int(lengths[longest]) // 2, 1))
    return lengths


def _derive(
    side: _Side,
    lengths: torch.Tensor,
    values: dict[int, torch.Tensor],
    given: Mapping[int, torch.Tensor],
) -> None:
    sums = _running_sums(lengths)
    for tensor in side.lengths:
        values[tensor.uid] = lengths.reshape(tensor.dim)
    for tensor in side.sums:
        values[tensor.uid] = sums.reshape(tensor.dim)
    counted = [(tensor, sums) for tensor in side.ragged]
    counted += [(table, _running_sums((lengths + page - 1) // page)) for table, page in side.tables]
    for tensor, units in counted:
        offset = tensor.ragged_offset
        if offset is None or offset.uid in given:
            continue
        found = _offsets(tensor, offset, units)
        earlier = values.get(offset.uid)
        if earlier is not None and not torch.equal(earlier, found):
            fail(
                f"tensor {offset.label()}: the ragged offsets of tensor {tensor.label()} and of "
                "another tensor cannot be the same numbers: a token or a page takes more of one; "
                "give the offsets and the data with --inputs"
            )
        values[offset.uid] = found


def _running_sums(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))


def _offsets(tensor: Tensor, offset: Tensor, sums: torch.Tensor) -> torch.Tensor:
    step, multiplier = tensor.stride[_TOKEN_AXIS], tensor.ragged_offset_multiplier
    elements = sums * step
    if bool((elements % multiplier).any()):
        fail(
            f"tensor {tensor.label()}: a step along axis {_TOKEN_AXIS} takes {step} elements, no "
            f"multiple of ragged_offset_multiplier {multiplier}; give its offsets with --inputs"
        )
    return (elements // multiplier).reshape(offset.dim)


def _smallest(bounds: Iterable[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
