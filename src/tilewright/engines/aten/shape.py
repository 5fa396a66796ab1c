"""Operations that move elements: reshape, slice, transpose, concatenate.

Elements of one type are moved as they are, bit for bit; between types they are loaded and
rounded like any result. A packed 4-bit tensor is unpacked, moved and packed again, since the
axis it is packed along may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor as TensorRecord
from tilewright.graph.tensor import packed_strides

Tensor = torch.Tensor
Move = Callable[[Tensor], Tensor]


@implements_dense("reshape")
def prepare_reshape(operation: Any, device: torch.device) -> Kernel:
    """``input`` in row-major order of its declared axes, under the dim of ``out``."""
    source, out = operation.inputs["input"], operation.outputs["out"]
    if math.prod(source.dim) != math.prod(out.dim):
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; a reshape of {source.dim} keeps the number "
            "of elements"
        )
    unchanged = source.data_type is out.data_type and not source.data_type.is_sub_byte
    if unchanged and out.stride == packed_strides(out.dim):
        dim = source.dim

        def run(inputs: Operands, outputs: Operands) -> None:
            # The packed output takes the input's axes, so a strided input is read once.
            outputs["out"].view(dim).copy_(inputs["input"])

        return run
    dim = out.dim
    return _moving(source, out, device, lambda x: x.reshape(dim))


@implements_dense("transpose")
def prepare_transpose(operation: Any, device: torch.device) -> Kernel:
    """``input`` with its axes permuted: axis i of ``out`` is axis permutation[i] of it."""
    source, out = operation.inputs["input"], operation.outputs["out"]
    order = tuple(operation.permutation)
    rank = len(source.dim)
    if sorted(order) != list(range(rank)):
        raise NotSupportedError(
            f"transpose permutation {order}; expected each of 0 to {rank - 1} once, the axes of "
            f"tensor {source.label()}"
        )
    if tuple(source.dim[axis] for axis in order) != out.dim:
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; {source.dim} permuted by {order} has not"
        )
    return _moving(source, out, device, lambda x: x.permute(order))


@implements_dense("slice")
def prepare_slice(operation: Any, device: torch.device) -> Kernel:
    """The part of ``input`` that ``slices`` name, one slice an axis, from the first axis on."""
    source, out = operation.inputs["input"], operation.outputs["out"]
    index = tuple(_as_slice(entry) for entry in operation.slices)
    if len(index) > len(source.dim):
        raise NotSupportedError(
            f"slice takes {len(index)} slices of tensor {source.label()} of dim {source.dim}; "
            "expected at most one an axis"
        )
    for entry in index:
        if entry.step is not None and entry.step < 1:
            raise NotSupportedError(f"slice {entry}; steps are at least 1")
    ranges = [range(extent) for extent in source.dim]
    dim = tuple(len(r[entry]) for r, entry in zip(ranges, index, strict=False))
    dim += source.dim[len(index) :]
    if dim != out.dim:
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; {source.dim} sliced by {index} has {dim}"
        )
    index = tuple(_shortest(r[entry]) for r, entry in zip(ranges, index, strict=False))
    return _moving(source, out, device, lambda x: x[index])


@implements_dense("concatenate")
def prepare_concatenate(operation: Any, device: torch.device) -> Kernel:
    """The inputs one after another along ``axis``.

    With ``in_place_index`` i, input i may already lie in its place of the output; it is then
    left there.
    """
    ports = sorted(operation.inputs, key=_position)
    out = operation.outputs["out"]
    rank = len(out.dim)
    axis = operation.axis + rank if operation.axis < 0 else operation.axis
    if not ports or not 0 <= axis < rank:
        raise NotSupportedError(
            f"concatenate of {len(ports)} inputs along axis {operation.axis} of rank {rank}; "
            "expected one input or more and an axis of the output"
        )
    records = [operation.inputs[port] for port in ports]
    _check_parts(records, out, axis)
    starts = [0]
    for record in records:
        starts.append(starts[-1] + record.dim[axis])
    loads, store = _codec(records, out, device)
    if out.data_type.is_sub_byte:
        return _concatenate_packed(ports, loads, store, axis)
    in_place = getattr(operation, "in_place_index", None)
    if in_place is not None and not 0 <= in_place < len(ports):
        raise NotSupportedError(
            f"concatenate in_place_index {in_place}; expected an index of its {len(ports)} inputs"
        )
    parts = [
        (port, start, record.dim[axis], index == in_place, load)
        for index, (port, start, record, load) in enumerate(
            zip(ports, starts, records, loads, strict=False)
        )
    ]

    def run(inputs: Operands, outputs: Operands) -> None:
        output = outputs["out"]
        for port, start, extent, may_lie_there, load in parts:
            part, target = inputs[port], output.narrow(axis, start, extent)
            if not (may_lie_there and target.data_ptr() == part.data_ptr()):
                store(target, load(part))

    return run


def _concatenate_packed(
    ports: Sequence[str], loads: Sequence[casts.Loader], store: casts.Storer, axis: int
) -> Kernel:
    def run(inputs: Operands, outputs: Operands) -> None:
        parts = [load(inputs[port]) for load, port in zip(loads, ports, strict=True)]
        store(outputs["out"], torch.cat(parts, axis))

    return run


def _check_parts(records: Sequence[TensorRecord], out: TensorRecord, axis: int) -> None:
    for record in records:
        others = (
            len(record.dim) == len(out.dim)
            and record.dim[:axis] == out.dim[:axis]
            and record.dim[axis + 1 :] == out.dim[axis + 1 :]
        )
        if not others:
            raise NotSupportedError(
                f"tensor {record.label()} has dim {record.dim}; expected that of the output "
                f"{out.dim} on every axis but {axis}"
            )
    total = sum(record.dim[axis] for record in records)
    if total != out.dim[axis]:
        raise NotSupportedError(
            f"tensor {out.label()} has extent {out.dim[axis]} on axis {axis}; its parts have "
            f"{total} in all"
        )


def _moving(source: TensorRecord, out: TensorRecord, device: torch.device, move: Move) -> Kernel:
    (load,), store = _codec([source], out, device)

    def run(inputs: Operands, outputs: Operands) -> None:
        store(outputs["out"], move(load(inputs["input"])))

    return run


def _codec(
    sources: Sequence[TensorRecord], out: TensorRecord, device: torch.device
) -> tuple[list[casts.Loader], casts.Storer]:
    """How elements are read from each source and written to ``out``."""
    if any(source.data_type is not out.data_type for source in sources):
        records = (*sources, out)
        whole = all(record.data_type.is_integer for record in records)
        dtype = torch.int64 if whole else casts.compute_dtype(records)
        return [casts.loader(source, dtype, device) for source in sources], casts.storer(out)
    if out.data_type.is_sub_byte:
        return [_codes_of(source) for source in sources], _code_storer(out)
    return [_as_it_is for _ in sources], _copy


def _codes_of(source: TensorRecord) -> casts.Loader:
    return lambda operand: casts.unpack_codes(operand, source)


def _code_storer(out: TensorRecord) -> casts.Storer:
    return lambda output, codes: casts.pack_codes(output, codes, out)


def _as_it_is(operand: Tensor) -> Tensor:
    return operand


def _copy(output: Tensor, value: Tensor) -> None:
    output.copy_(value)


def _as_slice(entry: Any) -> slice:
    """A slice from a slice or from (start, stop) or (start, stop, step)."""
    return entry if isinstance(entry, slice) else slice(*entry)


def _shortest(taken: range) -> slice:
    """What ``taken`` takes; a step that leads to nothing, times a stride, may overflow: without."""
    if len(taken) < 2:
        return slice(taken.start, taken.start + len(taken))
    return slice(taken.start, taken.stop, taken.step)


def _position(port: str) -> int:
    """The number of a list port: 2 for "input_2"."""
    digits = port.rpartition("_")[2]
    if not digits.isdecimal():
        raise NotSupportedError(f"concatenate input {port!r}; expected ports input_0, input_1, ...")
    return int(digits)
