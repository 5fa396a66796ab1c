"""A slot: what a plan expects of one operand, decided once when the plan is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.dtypes import DataType
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.shapes import span_elements
from tilewright.graph.tensor import Scalar, Tensor
from tilewright.records import record
from tilewright.torch_dtypes import to_torch


@record(frozen=True)
class Slot:
    """The declaration of one bound operand.

    ``span_bytes`` is what a buffer must own at least; a ragged operand needs no declared span
    (its offsets say where it ends) and is bound flat, as is a packed sub-byte one.
    """

    uid: int
    label: str
    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    data_type: DataType
    dtype: torch.dtype
    is_output: bool
    is_pass_by_value: bool
    value: Scalar | None
    is_ragged: bool
    alignment_bytes: int
    span_bytes: int

    @property
    def is_flat(self) -> bool:
        """True if the operand is bound as a one-axis view of all that its buffer owns."""
        return self.is_ragged or self.data_type.is_sub_byte


def make_slot(tensor: Tensor, *, is_output: bool) -> Slot:
    """The slot of a validated graph tensor."""
    dtype = to_torch(tensor.data_type)
    return Slot(
        uid=tensor.uid,
        label=tensor.label(),
        name=tensor.name,
        dim=tensor.dim,
        stride=tensor.stride,
        data_type=tensor.data_type,
        dtype=dtype,
        is_output=is_output,
        is_pass_by_value=tensor.is_pass_by_value,
        value=tensor.value,
        is_ragged=tensor.ragged_offset is not None,
        alignment_bytes=max(tensor.alignment_value, dtype.itemsize),
        span_bytes=tensor.data_type.span_bytes(span_elements(tensor.dim, tensor.stride)),
    )


def make_slots(graph: DeclaredGraph) -> tuple[Slot, ...]:
    """Every operand of a validated graph: inputs first, then outputs, in declaration order."""
    return (
        *(make_slot(tensor, is_output=False) for tensor in graph.inputs()),
        *(make_slot(tensor, is_output=True) for tensor in graph.outputs()),
    )


def owned_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its storage.

    A storage that was made smaller under a tensor holds less than the tensor's dim says.
    """
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    return max(int(tensor.untyped_storage().nbytes() - offset_bytes), 0)


def in_place_pairs(graph: DeclaredGraph, slots: Sequence[Slot]) -> frozenset[tuple[int, int]]:
    """Pairs (output uid, input uid) that may share one buffer.

    An operation must declare the pair, and no later operation may read the input.
    """
    last_reader: dict[int, int] = {}
    for position, operation in enumerate(graph.operations):
        for tensor in operation.inputs.values():
            last_reader[tensor.uid] = position
    bound = {slot.uid for slot in slots}
    pairs = set()
    for position, operation in enumerate(graph.operations):
        for out_port, in_port in operation.in_place:
            out, source = operation.outputs.get(out_port), operation.inputs.get(in_port)
            if out is None or source is None or not {out.uid, source.uid} <= bound:
                continue
            if last_reader[source.uid] == position:
                pairs.add((out.uid, source.uid))
    return frozenset(pairs)
