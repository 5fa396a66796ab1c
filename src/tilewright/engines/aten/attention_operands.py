"""How attention finds a sequence in its operands: lengths, ragged starts and page tables.

On a CPU the host reads them and each sequence becomes a view of exactly its elements, so nothing
else can be read or written. On another device the host must not wait: sequences are gathered into
dense tensors of the declared extent by device arithmetic, and results are put back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.engines.aten.attention_spec import AttentionSpec
from tilewright.errors import BindingError

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]


class RaggedPort:
    """A (B, H, S, X) operand whose sequences lie one after another.

    Sequence b starts ``offset[b] * multiplier`` elements behind the operand's first; within it the
    declared strides of heads, rows and the last axis hold. The operand comes as any view that
    starts there; a view of one axis also tells how many elements there are.
    """

    def __init__(self, port: str, record: Any, title: str) -> None:
        self.port = port
        self.label = f"{title}: {port}"
        self.batch, self.heads, self.rows, self.width = record.dim
        self.stride = tuple(record.stride[1:])
        self.multiplier = record.ragged_offset_multiplier

    def starts(self, inputs: Operands) -> Tensor:
        """The B + 1 offsets in elements, int64, on the operand's device."""
        offsets = inputs[f"{self.port}.ragged_offset"]
        starts: Tensor = offsets.reshape(-1).to(torch.int64) * self.multiplier
        return starts

    def sequence(self, operand: Tensor, start: int, rows: int) -> Tensor:
        """Rows of the sequence at ``start`` as a view (1, H, rows, X).

        Raises:
            BindingError: if it reaches beyond the operand.
        """
        size = (1, self.heads, rows, self.width)
        if 0 in size:
            return operand.as_strided(size, (1, *self.stride))
        last = sum((n - 1) * step for n, step in zip(size[1:], self.stride, strict=True))
        if operand.dim() == 1:
            owned = operand.numel()
        else:
            owned = self._flat(operand).numel()
        if start < 0 or start + last >= owned:
            raise BindingError(
                f"{self.label}: a sequence of {rows} rows at element {start} reaches element "
                f"{start + last}; the buffer has {owned}"
            )
        return operand.as_strided(size, (1, *self.stride), operand.storage_offset() + start)

    def gather(self, operand: Tensor, inputs: Operands) -> Tensor:
        """All sequences as a dense (B, H, S, X); what lies beyond a sequence is anything."""
        flat = self._flat(operand)
        if flat.numel() == 0:
            return flat.new_zeros((self.batch, self.heads, self.rows, self.width))
        index = self._index(inputs).clamp_(0, flat.numel() - 1)
        return _select(flat, index.reshape(-1)).view(index.shape)

    def scatter(self, operand: Tensor, inputs: Operands, values: Tensor, lengths: Tensor) -> None:
        """Write rows below ``lengths`` (B,) of dense ``values``; all else keeps its bytes."""
        flat = self._flat(operand)
        rows = torch.arange(self.rows, device=flat.device).view(1, 1, -1, 1)
        index = self._index(inputs)
        index = torch.where(rows < lengths.view(-1, 1, 1, 1), index, flat.numel())
        # One element more takes what is not to be written.
        padded = torch.cat(
            (
                flat.view(torch.uint8).view(-1, flat.element_size()),
                flat.new_zeros(1).view(torch.uint8).view(1, -1),
            )
        )
        cells = values.contiguous().view(torch.uint8).view(-1, flat.element_size())
        padded[index.reshape(-1).clamp_(0, flat.numel())] = cells
        flat.view(torch.uint8).copy_(padded[:-1].reshape(-1))

    def _flat(self, operand: Tensor) -> Tensor:
        if operand.dim() == 1:
            return operand
        owned = int(operand.untyped_storage().nbytes()) // operand.element_size()
        return operand.as_strided((owned - int(operand.storage_offset()),), (1,))

    def _index(self, inputs: Operands) -> Tensor:
        index = self.starts(inputs)[: self.batch].view(-1, 1, 1, 1)
        axes = zip((self.heads, self.rows, self.width), self.stride, strict=True)
        for axis, (extent, step) in enumerate(axes):
            shape = [1, 1, 1, 1]
            shape[axis + 1] = extent
            steps = torch.arange(extent, dtype=torch.int64, device=index.device) * step
            index = index + steps.view(shape)
        return index


class Lengths:
    """The lengths of one side, "q" or "kv": given, or their running sums, or all the declared."""

    def __init__(self, spec: AttentionSpec, side: str) -> None:
        self.limit = spec.rows if side == "q" else spec.keys
        self._batch = spec.batch
        self._port = next(
            (port for port in (f"seq_len_{side}", f"cu_seq_len_{side}") if port in spec.lengths),
            None,
        )

    def on_device(self, inputs: Operands, device: torch.device) -> Tensor:
        """(B,) int64 on ``device``, within [0, declared extent]."""
        if self._port is None:
            return torch.full((self._batch,), self.limit, dtype=torch.int64, device=device)
        counts = inputs[self._port].reshape(-1).to(torch.int64)
        if self._port.startswith("cu"):
            counts = counts[1:] - counts[:-1]
        return counts.to(device).clamp(0, self.limit)

    def on_host(self, inputs: Operands) -> list[int]:
        """The same as Python integers."""
        counts: list[int] = self.on_device(inputs, torch.device("cpu")).tolist()
        return counts


class PagedPort:
    """A container (pages, Hkv, page size, X) and its table (B, 1, entries, 1) of page numbers.

    The rows of a ragged table lie one after another.
    """

    def __init__(self, op: Any, spec: AttentionSpec, side: str) -> None:
        self.side = side
        self.table = f"paged_attention_{side}_table"
        self.label = f"{spec.title}: {self.table}"
        self.ragged: RaggedPort | None = None
        if self.table in spec.ragged:
            self.ragged = RaggedPort(self.table, op.inputs[self.table], spec.title)
        self.keys = spec.keys
        self.page = int(op.inputs[side].dim[2])

    def pages(self, inputs: Operands, batch: int, length: int) -> Tensor:
        """The used page numbers of a sequence, read on the host.

        Raises:
            BindingError: if one of them is not a page of the container.
        """
        table, needed = inputs[self.table], -(-length // self.page)
        if self.ragged is None:
            row = table[batch].reshape(-1)[:needed]
        else:
            start = int(self.ragged.starts(inputs)[batch])
            row = self.ragged.sequence(table, start, needed).reshape(-1)
        used = row.to(torch.int64)
        count = inputs[self.side].shape[0]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= count):
            raise BindingError(
                f"{self.label}: sequence {batch} of length {length} has pages {used.tolist()}; "
                f"the container has {count}"
            )
        return used

    def sequence(self, container: Tensor, pages: Tensor, length: int) -> Tensor:
        """The tokens of ``pages`` as (1, Hkv, length, X): of the last page only its used rows."""
        gathered = _select(container, pages).transpose(0, 1)
        heads, count, page, width = gathered.shape
        return gathered.reshape(1, heads, count * page, width)[:, :, :length]

    def gather(self, inputs: Operands) -> Tensor:
        """Every sequence as (B, Hkv, keys, X); what lies beyond its length is anything."""
        container = inputs[self.side]
        table = inputs[self.table]
        if self.ragged is not None:
            table = self.ragged.gather(table, inputs)
        batch = table.shape[0]
        used = table.reshape(batch, -1)[:, : -(-self.keys // self.page)].to(torch.int64)
        # Entries behind the last used one may name no page.
        used = used.clamp(0, container.shape[0] - 1)
        gathered = _select(container, used.reshape(-1))
        _, heads, page, width = gathered.shape
        gathered = gathered.view(batch, -1, heads, page, width).transpose(1, 2)
        return gathered.reshape(batch, heads, -1, width)[:, :, : self.keys]


def _select(operand: Tensor, index: Tensor) -> Tensor:
    """``operand.index_select(0, index)``, which ATen has not for 8-bit floating types."""
    if operand.element_size() != 1:
        return operand.index_select(0, index)
    return operand.view(torch.uint8).index_select(0, index).view(operand.dtype)
