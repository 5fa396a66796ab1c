"""Run a drawn graph between guard bytes, twice, and hold every byte to the contract.

Whatever is not a declared element (margins, stride gaps, the workspace before the call) holds a
pattern, another one in each run. So an element that is left out, a gap that is read and a byte
that is written beside the elements all make a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fuzzing.drawing import Case
from tilewright.cli import storage
from tilewright.cli.input_lengths import ragged_places, row_counts, row_mask
from tilewright.cli.inputs import make_inputs, storage_elements
from tilewright.errors import GraphError, NotSupportedError
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.operation import Operation
from tilewright.graph.shapes import self_overlaps
from tilewright.graph.tensor import Tensor
from tilewright.oracle import layout
from tilewright.oracle.formats import to_float64
from tilewright.torch_dtypes import to_torch

MARGIN_BYTES = 64
# All ones is NaN in every floating format that has one; the other is a plain number everywhere.
PATTERNS = (0xFF, 0x5A)
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -3e4)

Buffers = Mapping[int, torch.Tensor]


@dataclass
class Placed:
    """A buffer amid guard bytes: all bytes, the part to bind, and which bits are elements'."""

    raw: torch.Tensor
    view: torch.Tensor
    bits: torch.Tensor


@dataclass
class Run:
    """Inputs (element storage by uid) and outputs (declared dim, float64 or integers, by uid)."""

    inputs: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor]


def declined(case: Case) -> GraphError | NotSupportedError | None:
    """Why the graph is not run: the typed refusal to declare, validate or plan it."""
    if case.error is not None:
        return case.error
    try:
        case.graph.validate()
        case.graph.build()
    except (GraphError, NotSupportedError) as error:
        return error
    return None


def run(case: Case) -> Run:
    """Run a built graph twice.

    Raises:
        AssertionError: for an element that is not written, a byte beside the elements that is,
            or an input that changed.
    """
    inputs = draw_inputs(case)
    first, second = (_run_once(case, inputs, pattern) for pattern in PATTERNS)
    results = {}
    for tensor in case.graph.outputs():
        one, other = first[tensor.uid], second[tensor.uid]
        differ = (one.raw ^ other.raw) & one.bits != 0
        assert not differ.any(), (
            f"output {tensor.label()}: {int(differ.sum())} bytes of its elements depend on what "
            "its buffer, the workspace or a gap of an input held before"
        )
        offsets = None if tensor.ragged_offset is None else inputs[tensor.ragged_offset.uid]
        results[tensor.uid] = to_float64(layout.load(tensor, _flat(tensor, one), offsets))
    return Run(inputs, results)


def draw_inputs(case: Case) -> dict[int, torch.Tensor]:
    """Storage of each input by uid: by its role, and what the draw decides."""
    given = {
        str(tensor.uid): torch.tensor(numbers, dtype=to_torch(tensor.data_type)).reshape(tensor.dim)
        for tensor, numbers in case.given
    }
    bound = {tensor.uid for tensor in case.graph.inputs()}
    given = {uid: values for uid, values in given.items() if int(uid) in bound}
    buffers = make_inputs(case.graph, given, case.seed).buffers
    generator = torch.Generator().manual_seed(case.seed)
    for tensor in case.special:
        flat = buffers.get(tensor.uid)
        if flat is None or not flat.numel():
            continue
        places = torch.randint(flat.numel(), (3,), generator=generator)
        chosen = torch.randint(len(_SPECIAL), (3,), generator=generator)
        flat[places] = torch.tensor(_SPECIAL)[chosen].to(flat.dtype)
    if case.seed % 2:
        for operation in case.graph.operations:
            _hide_nan(operation, buffers)
    return buffers


_QUERY_PORTS = ("q", "q_T", "o", "o_f16", "dO", "dO_T", "dO_f16")
_KEY_PORTS = ("k", "k_T", "v")


def _hide_nan(operation: Operation, buffers: Buffers) -> None:
    """Fill the rows of dense attention operands past their sequences' ends with NaN."""
    is_paged = "paged_attention_k_table" in operation.inputs
    for lengths, ports in (("seq_len_q", _QUERY_PORTS), ("seq_len_kv", _KEY_PORTS)):
        if lengths not in operation.inputs or (is_paged and lengths == "seq_len_kv"):
            continue
        rows = buffers[operation.inputs[lengths].uid].flatten().tolist()
        for port in ports:
            tensor = operation.inputs.get(port)
            if tensor is None or tensor.uid not in buffers or tensor.ragged_offset is not None:
                continue
            if self_overlaps(tensor.dim, tensor.stride):
                continue
            values = buffers[tensor.uid].as_strided(tensor.dim, tensor.stride)
            for sequence, count in zip(values, rows, strict=True):
                sequence[:, count:] = float("nan")


def element_places(case: Case, tensor: Tensor, buffers: Buffers) -> torch.Tensor:
    """Where the declared elements lie in a tensor's storage: one axis, int64, in elements."""
    if tensor.ragged_offset is not None:
        offsets = buffers[tensor.ragged_offset.uid]
        exists = row_mask(tensor, row_counts(case.graph, tensor, buffers)).expand(tensor.dim)
        return ragged_places(tensor, offsets)[exists]
    if tensor.reordering_type is tensor_reordering.F8_128x4:
        return layout.scale_tile_offsets(tensor.dim, tensor.stride).flatten()
    return storage.element_offsets(tensor).flatten()


def _place(
    case: Case, tensor: Tensor, buffers: Buffers, pattern: int, content: torch.Tensor | None
) -> Placed:
    elements = storage_elements(case.graph, tensor, buffers)
    if content is not None:
        elements = content.numel() * content.element_size() * 8 // tensor.data_type.bits
    size = tensor.data_type.span_bytes(elements)
    itemsize = max(tensor.data_type.bits // 8, 1)
    # Buffers start at any multiple of their element.
    start = MARGIN_BYTES + itemsize * ((case.seed + tensor.uid) % 8)
    raw = torch.full((start + size + MARGIN_BYTES,), pattern, dtype=torch.uint8)
    places = element_places(case, tensor, buffers)
    bits = torch.zeros(raw.numel(), dtype=torch.uint8)
    if tensor.data_type.is_sub_byte:
        # The low nibble holds the element of even index.
        bits[start + places[places % 2 == 0] // 2] |= 0x0F
        bits[start + places[places % 2 == 1] // 2] |= 0xF0
    else:
        for byte in range(itemsize):
            bits[start + places * itemsize + byte] = 0xFF
    inner, kept = raw[start : start + size], bits[start : start + size]
    if content is not None:
        inner.copy_((inner & ~kept) | (content.view(torch.uint8) & kept))
    return Placed(raw, inner.view(to_torch(tensor.data_type)), bits)


def _run_once(case: Case, inputs: Buffers, pattern: int) -> dict[int, Placed]:
    graph = case.graph
    pack: dict[int, torch.Tensor] = {}
    kept: dict[Tensor, tuple[Placed, torch.Tensor]] = {}
    placed: dict[int, Placed] = {}
    for tensor in graph.inputs():
        if tensor.is_pass_by_value and tensor.value is not None:
            continue
        buffer = _place(case, tensor, inputs, pattern, inputs[tensor.uid])
        kept[tensor] = (buffer, buffer.raw.clone())
        pack[tensor.uid] = _bound(case, tensor, buffer)
    for tensor in graph.outputs():
        buffer = _place(case, tensor, inputs, pattern, None)
        placed[tensor.uid] = buffer
        pack[tensor.uid] = _bound(case, tensor, buffer)
    needed = graph.get_workspace_size()
    scratch = torch.full((needed + 2 * MARGIN_BYTES,), pattern, dtype=torch.uint8)
    graph.execute(pack, scratch[MARGIN_BYTES : MARGIN_BYTES + needed])
    edges = torch.cat((scratch[:MARGIN_BYTES], scratch[MARGIN_BYTES + needed :]))
    assert (edges == pattern).all(), "bytes beside the workspace were written"
    for tensor, (buffer, before) in kept.items():
        assert torch.equal(buffer.raw, before), f"input {tensor.label()} was changed"
    for tensor in graph.outputs():
        buffer = placed[tensor.uid]
        beside = (buffer.raw ^ pattern) & ~buffer.bits
        assert not beside.any(), f"output {tensor.label()}: bytes outside its elements were written"
    return placed


def _bound(case: Case, tensor: Tensor, buffer: Placed) -> torch.Tensor:
    plain = tensor.ragged_offset is None and tensor.reordering_type is tensor_reordering.NONE
    if case.flat or not plain or tensor.data_type.is_sub_byte:
        return buffer.view
    return buffer.view.as_strided(tensor.dim, tensor.stride)


def _flat(tensor: Tensor, buffer: Placed) -> torch.Tensor:
    # The oracle reads storage from the first element to the end of the storage.
    return buffer.view.clone()
