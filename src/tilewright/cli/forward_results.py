"""What a backward operation reads of its forward: computed, since random numbers would not fit.

Normalization statistics follow from the operation's input by their definition. Attention's output
and softmax statistics come from the float64 reference of the forward operation.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from tilewright.cli import storage
from tilewright.cli.input_lengths import ragged_places, row_counts, row_mask
from tilewright.cli.input_roles import EPSILON
from tilewright.errors import TilewrightError
from tilewright.graph import json_form
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation, attribute_hints, operation_kinds
from tilewright.graph.tensor import Tensor

Buffers = MutableMapping[int, torch.Tensor]
_ATTENTION_FORWARD = {
    "sdpa_backward": "sdpa",
    "sdpa_fp8_backward": "sdpa_fp8",
    # Its v has scales along another axis than the forward's; the numbers are the same.
    "sdpa_mxfp8_backward": "sdpa",
}
# Amaxes and the output's scale are operands of the forward alone.
_FP8_OUTPUTS = ("Amax_S", "Amax_O")


def add_forward_results(
    graph: DeclaredGraph, buffers: Buffers, given: frozenset[int], notes: list[str]
) -> None:
    """Replace what was drawn for statistics and forward outputs that are inputs of ``graph``.

    ``given`` are the uids that came from a file and stay. What cannot be derived (the forward's
    own inputs are intermediate results) keeps its random numbers, and ``notes`` say so.
    """
    free = {tensor.uid for tensor in graph.inputs()} - given
    for operation in graph.operations:
        if operation.kind in _ATTENTION_FORWARD:
            _add_attention(graph, operation, buffers, free, notes)
        elif "inv_variance" in operation.inputs and operation.kind.endswith("_backward"):
            _add_statistics(operation, buffers, free, notes)


# -- normalization ----------------------------------------------------------------------------


def _add_statistics(
    operation: Operation, buffers: Buffers, free: set[int], notes: list[str]
) -> None:
    source, deviation = operation.inputs["input"], operation.inputs["inv_variance"]
    mean = operation.inputs.get("mean")
    if deviation.uid not in free and (mean is None or mean.uid not in free):
        return
    if source.uid not in buffers:
        notes.append(f"{operation.title()}: mean and inv_variance are random: input is virtual")
        return
    x = storage.logical_view(source, buffers[source.uid]).to(torch.float64)
    axes = [
        axis
        for axis, (have, whole) in enumerate(zip(deviation.dim, source.dim, strict=True))
        if have == 1 and whole != 1
    ]
    centre = torch.zeros(())
    if mean is not None:
        centre = x.mean(axes, keepdim=True) if axes else x
        if mean.uid in free:
            buffers[mean.uid] = storage.store(mean, centre)
    if deviation.uid in free:
        square = (x - centre).square()
        variance = square.mean(axes, keepdim=True) if axes else square
        buffers[deviation.uid] = storage.store(deviation, (variance + EPSILON).rsqrt())


# -- attention --------------------------------------------------------------------------------


def _add_attention(
    graph: DeclaredGraph, operation: Operation, buffers: Buffers, free: set[int], notes: list[str]
) -> None:
    output = operation.inputs.get("o") or operation.inputs["o_f16"]
    stats = operation.inputs["stats"]
    wanted = {tensor.uid: tensor for tensor in (output, stats) if tensor.uid in free}
    if not wanted:
        return
    try:
        forward, inputs = _forward_graph(graph, operation, output, stats, buffers)
        from tilewright.oracle import evaluate

        results = evaluate(forward, inputs)
    except TilewrightError as error:
        names = " and ".join(tensor.label() for tensor in wanted.values())
        reason = str(error).splitlines()[0]
        notes.append(f"{operation.title()}: {names} random, no forward to derive from: {reason}")
        return
    for uid, tensor in wanted.items():
        if tensor.ragged_offset is None:
            buffers[uid] = storage.store(tensor, results[uid])
        else:
            offsets = buffers[tensor.ragged_offset.uid]
            exists = row_mask(tensor, row_counts(graph, tensor, buffers)).expand(tensor.dim)
            values = storage.convert(results[uid][exists], tensor.data_type)
            buffers[uid][ragged_places(tensor, offsets)[exists]] = values


def _forward_graph(
    graph: DeclaredGraph,
    operation: Operation,
    output: Tensor,
    stats: Tensor,
    buffers: Mapping[int, torch.Tensor],
) -> tuple[DeclaredGraph, dict[int, torch.Tensor]]:
    """The forward of a backward attention as a graph of its own, and its inputs by uid.

    It includes the operations that make the attention's intermediate operands. Tensors keep their
    uids.
    """
    document = json_form.to_dict(graph)
    kind = _ATTENTION_FORWARD[operation.kind]
    record = operation_kinds()[kind]
    ports = {*record.required, *record.optional}
    lists = (record.list_port,) if isinstance(record.list_port, str) else record.list_port
    position = graph.operations.index(operation)
    backward = document["operations"][position]
    entry: dict[str, Any] = {
        **backward,
        "kind": kind,
        "inputs": {
            port: uid
            for port, uid in backward["inputs"].items()
            if port in ports or any(_is_listed(port, prefix) for prefix in lists if prefix)
        },
        "outputs": {"O": output.uid, "Stats": stats.uid},
        "attributes": {
            name: value
            for name, value in backward["attributes"].items()
            if name in attribute_hints(record)
        },
    }
    entry["attributes"]["generate_stats"] = True
    tensors = {tensor["uid"]: dict(tensor) for tensor in document["tensors"]}
    values = dict(buffers)
    if kind == "sdpa_fp8":
        _add_fp8_operands(entry, tensors, values, operation)
    if operation.kind == "sdpa_mxfp8_backward":
        _dequantize_operands(tensors, values, operation)
    for uid in (output.uid, stats.uid):
        tensors[uid] |= {"is_virtual": False, "is_output": True}
    producers = _producers(document["operations"][:position], entry["inputs"].values())
    document["operations"] = [*producers, entry]
    used = _named_uids(document["operations"], tensors)
    made = {uid for op in document["operations"] for uid in op["outputs"].values()}
    # An output of the backward graph is a plain intermediate here unless it is one of the two.
    document["tensors"] = [tensor for uid, tensor in tensors.items() if uid in used]
    forward = DeclaredGraph()
    json_form.fill_from_dict(forward, document)
    forward.validate()
    return forward, {uid: v for uid, v in values.items() if uid in used and uid not in made}


def _is_listed(port: str, prefix: str) -> bool:
    return port.removeprefix(prefix).isdecimal() and port.startswith(prefix)


def _producers(earlier: list[dict[str, Any]], uids: Any) -> list[dict[str, Any]]:
    """The operations of ``earlier`` that make ``uids``, and what those need, in order."""
    needed = set(uids)
    chosen = []
    for entry in reversed(earlier):
        if needed & set(entry["outputs"].values()):
            chosen.append(entry)
            needed |= set(entry["inputs"].values())
    return chosen[::-1]


def _named_uids(entries: list[dict[str, Any]], tensors: Mapping[int, dict[str, Any]]) -> set[int]:
    used: set[int] = set()
    for entry in entries:
        used |= {*entry["inputs"].values(), *entry["outputs"].values()}
        program = entry["attributes"].get("score_mod")
        if program is not None:
            used |= {program["input"], program["output"]}
            used |= _named_uids(program["operations"], tensors)
    offsets = {tensors[uid].get("ragged_offset") for uid in used}
    return used | {uid for uid in offsets if uid is not None}


def _add_fp8_operands(
    entry: dict[str, Any],
    tensors: dict[int, dict[str, Any]],
    values: dict[int, torch.Tensor],
    operation: Operation,
) -> None:
    free = max(tensors) + 1
    names = ("scale_o", *_FP8_OUTPUTS)
    for uid, name in enumerate(names, start=free):
        tensors[uid] = {
            "uid": uid,
            "name": name,
            "dim": [1, 1, 1, 1],
            "stride": [1, 1, 1, 1],
            "data_type": "FLOAT",
            "is_output": name in _FP8_OUTPUTS,
        }
        if name in _FP8_OUTPUTS:
            entry["outputs"][name] = uid
        else:
            entry["inputs"][name] = uid
            # What the backward divides by is what the forward multiplied with.
            values[uid] = 1.0 / values[operation.inputs["descale_o"].uid].to(torch.float32)


def _dequantize_operands(
    tensors: dict[int, dict[str, Any]], values: dict[int, torch.Tensor], operation: Operation
) -> None:
    """q, k and v as float32 in their own layouts, times the one scale of their blocks."""
    for port in ("q", "k", "v"):
        uid = operation.inputs[port].uid
        tensors[uid] |= {"data_type": "FLOAT"}
        if uid in values:
            scales = values[operation.inputs[f"descale_{port}"].uid].to(torch.float32)
            # A slice: of no elements there is no scale either.
            values[uid] = values[uid].to(torch.float32) * scales.flatten()[:1]
