"""The inputs of a graph: from a file where it has them, else drawn to make sense together."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tilewright.cli import storage
from tilewright.cli.draws import Draws
from tilewright.cli.exits import CommandError, ExitCode, fail
from tilewright.cli.forward_results import add_forward_results
from tilewright.cli.input_lengths import draw_lengths, row_counts, used_elements
from tilewright.cli.input_roles import MXFP8_BACKWARD_SCALES, Use, draw_values
from tilewright.dtypes import DataType
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import walk
from tilewright.graph.tensor import Tensor
from tilewright.torch_dtypes import to_torch

# Operands of block-scaled backward attention that hold the numbers of another one.
_TWINS = {"q_T": "q", "k_T": "k", "dO_T": "dO", "dO_f16": "dO"}


@dataclass
class InputSet:
    """Storage by uid, one axis each, on the CPU; ``notes`` say what was drawn and how."""

    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def make_inputs(graph: DeclaredGraph, given: Mapping[str, torch.Tensor], seed: int) -> InputSet:
    """Storage for every input of a validated graph.

    ``given`` holds tensors by name or uid (as text); the rest is drawn from ``seed``. The same
    seed gives the same numbers, whatever else is given.

    Raises:
        CommandError: if a given tensor fits no input, or memory does not suffice.
    """
    _require_memory(graph)
    inputs = InputSet()
    known = _match_names(graph, given)
    operations = list(walk(graph.operations))
    lengths = draw_lengths(operations, known, seed)
    numbers = {**lengths, **known}
    for tensor in graph.inputs():
        if tensor.uid in known:
            inputs.buffers[tensor.uid] = _given_storage(tensor, known[tensor.uid])
        elif tensor.value is not None:
            value = torch.full(tensor.dim, tensor.value, dtype=torch.float64)
            inputs.buffers[tensor.uid] = storage.store(tensor, value)
        elif tensor.uid in lengths:
            inputs.buffers[tensor.uid] = storage.store(tensor, lengths[tensor.uid])
        else:
            inputs.buffers[tensor.uid] = _drawn_storage(graph, tensor, numbers, seed)
    add_forward_results(graph, inputs.buffers, frozenset(known), inputs.notes)
    return inputs


def storage_elements(
    graph: DeclaredGraph, tensor: Tensor, buffers: Mapping[int, torch.Tensor]
) -> int:
    """How many elements a tensor's storage needs, for a ragged one as its lengths tell."""
    if tensor.ragged_offset is None:
        return storage.element_span(tensor)
    offsets = buffers[tensor.ragged_offset.uid].to(torch.int64)
    return used_elements(tensor, offsets, row_counts(graph, tensor, buffers))


def _uses(graph: DeclaredGraph, tensor: Tensor) -> list[Use]:
    return [
        (operation, port)
        for operation in walk(graph.operations)
        for port, read in operation.inputs.items()
        if read is tensor
    ]


def _drawn_storage(
    graph: DeclaredGraph, tensor: Tensor, numbers: Mapping[int, torch.Tensor], seed: int
) -> torch.Tensor:
    uses = _uses(graph, tensor)
    source, factor = _twin(tensor, uses)
    draws = Draws(seed, source.uid)
    shape = storage.values_shape(tensor)
    if tensor.ragged_offset is not None:
        shape = (storage_elements(graph, tensor, numbers),)
    values = draw_values(draws, tensor, uses, shape)
    if source is not tensor:
        values = storage.convert(values, source.data_type).to(torch.float32) * factor
    if tensor.ragged_offset is not None:
        return storage.store_flat(tensor, values)
    return storage.store(tensor, values)


def _twin(tensor: Tensor, uses: list[Use]) -> tuple[Tensor, float]:
    """The tensor whose numbers this one holds, and the factor between them; itself mostly."""
    for operation, port in uses:
        if operation.kind == "sdpa_mxfp8_backward" and port in _TWINS:
            source = operation.inputs[_TWINS[port]]
            return source, MXFP8_BACKWARD_SCALES["dO"] if port == "dO_f16" else 1.0
    return tensor, 1.0


def _match_names(
    graph: DeclaredGraph, given: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Given tensors by uid."""
    tensors = graph.inputs()
    found: dict[int, torch.Tensor] = {}
    for key, value in given.items():
        named = [tensor for tensor in tensors if tensor.name == key and key]
        if not named and key.isdecimal():
            named = [tensor for tensor in tensors if tensor.uid == int(key)]
        if len(named) > 1:
            uids = ", ".join(str(tensor.uid) for tensor in named)
            fail(f"inputs: name {key!r} is borne by several tensors; use a uid: {uids}")
        if not named:
            known = ", ".join(tensor.name or str(tensor.uid) for tensor in tensors)
            fail(f"inputs: no input of the graph is named {key!r}; its inputs are {known}")
        if named[0].uid in found:
            fail(f"inputs: tensor {named[0].label()} is given by name and by uid")
        found[named[0].uid] = value
    return found


def _given_storage(tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    value = _with_declared_type(tensor, value)
    if tensor.ragged_offset is not None:
        return storage.store_flat(tensor, value.flatten())
    needed = tensor.data_type.span_bytes(storage.element_span(tensor)) // value.element_size()
    is_flat = value.dim() == 1 and value.numel() >= needed
    if tensor.data_type.is_sub_byte or (is_flat and tuple(value.shape) != tensor.dim):
        if not is_flat:
            fail(
                f"inputs: tensor {tensor.label()} has shape {tuple(value.shape)}; expected its "
                f"storage as one axis of at least {needed} bytes"
            )
        result = storage.new_storage(tensor, value.numel() * 8 // tensor.data_type.bits)
        return result.copy_(value)
    if value.numel() == 1 and math.prod(tensor.dim) == 1:
        value = value.reshape(tensor.dim)
    if tuple(value.shape) != tensor.dim or storage.values_shape(tensor) != tensor.dim:
        fail(
            f"inputs: tensor {tensor.label()} has shape {tuple(value.shape)}; expected the "
            f"declared dim {tensor.dim}, or its storage as one axis of at least {needed} elements"
        )
    return storage.store(tensor, value)


def _with_declared_type(tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, its bits read as the declared type where the file had no such type."""
    dtype = to_torch(tensor.data_type)
    if value.dtype is dtype:
        return value
    is_code = value.dtype is torch.uint8 and dtype.itemsize == 1
    is_code |= value.dtype is torch.uint16 and tensor.data_type is DataType.BFLOAT16
    if is_code:
        return value.contiguous().view(dtype)
    fail(
        f"inputs: tensor {tensor.label()} has data type {str(value.dtype).removeprefix('torch.')}; "
        f"expected {tensor.data_type.name} as declared; nothing is converted"
    )


def _require_memory(graph: DeclaredGraph) -> None:
    """Refuse a graph whose operands this machine cannot hold, before it starts to swap.

    Raises:
        CommandError: telling what is needed and what there is.
    """
    needed = 0
    for tensor in (*graph.inputs(), *graph.outputs()):
        needed += tensor.data_type.span_bytes(math.prod(tensor.dim))
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return
    if needed > available:
        raise CommandError(
            f"the operands take {needed} bytes; this machine has {available} bytes of memory",
            ExitCode.CALL_FAILED,
        )
