"""An output gate behind attention forward: sdpa -> O, sigmoid(gate), and their product.

The three operations are one attention whose kernels multiply before they store. Which graphs that
is, and the declaration of the kernels: as of attention alone, with the product as O and with a port
"gate". Pure; needs no Triton.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.dtypes import DataType
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

_TYPES = (DataType.HALF, DataType.BFLOAT16, DataType.FLOAT)


def read_graph(graph: DeclaredGraph) -> AttentionSpec:
    """The declaration of a graph of attention forward, alone or with a gate.

    Raises:
        NotSupportedError: for what the kernels do not take, naming the tensor or operation and the
            rule.
    """
    attention = next(item for item in graph.operations if item.kind == "sdpa")
    others = [item for item in graph.operations if item is not attention]
    if not others:
        return read_spec(attention)
    o = attention.outputs["O"]
    sigmoid, product = _gate_and_product(graph, attention, others)
    gate, gated = sigmoid.inputs["in0"], product.outputs["out"]
    weight = sigmoid.outputs["out"]
    factors = {product.inputs["in0"].uid, product.inputs["in1"].uid}
    if factors != {o.uid, weight.uid}:
        raise NotSupportedError(
            f"{product.title()}: its operands are not tensor {o.label()} (O) of "
            f"{attention.title()} and tensor {weight.label()} of {sigmoid.title()}"
        )
    for tensor in (o, weight):
        if not tensor.is_virtual:
            raise NotSupportedError(
                f"tensor {tensor.label()} is an output; of a gated attention the kernels store the "
                "product, and O's and the gate's factor alone nowhere"
            )
    _check_gate(graph, gate, o)
    for tensor in (o, weight, gated):
        if tensor.data_type not in _TYPES:
            raise NotSupportedError(
                f"tensor {tensor.label()} has data type {tensor.data_type.name}; the kernels "
                f"multiply O and the gate's factor in float32, and round to {_names()}"
            )
    if gated.dim != o.dim:
        raise NotSupportedError(
            f"tensor {gated.label()} (out) has dim {gated.dim}; the kernels store O's dim {o.dim}"
        )
    if gated.is_virtual:
        raise NotSupportedError(f"tensor {gated.label()} (out) is virtual: nobody reads it")
    for tensor in (o, gate):
        if (tensor.ragged_offset is None) is not (gated.ragged_offset is None):
            raise NotSupportedError(
                f"tensor {tensor.label()} and tensor {gated.label()} (out): one is ragged and one "
                "is not; of a gated attention O, gate and product are alike"
            )
    if o.ragged_offset is not gated.ragged_offset:
        raise NotSupportedError(
            f"tensor {gated.label()} (out) has another ragged offset than tensor {o.label()} (O)"
        )
    spec = read_spec(attention)
    return replace(
        spec,
        ports={**spec.ports, "O": gated, "gate": gate},
        gate_rounding=(o.data_type, weight.data_type),
    )


def without_gate(spec: AttentionSpec) -> AttentionSpec:
    """The same attention with O alone in the product's place."""
    ports = {port: tensor for port, tensor in spec.ports.items() if port != "gate"}
    return replace(spec, ports=ports, gate_rounding=None)


def _gate_and_product(
    graph: DeclaredGraph, attention: Operation, others: list[Operation]
) -> tuple[Operation, Operation]:
    modes = {item.mode: item for item in others if item.kind == "pointwise"}
    if len(others) != 2 or modes.keys() != {"sigmoid", "mul"}:
        raise NotSupportedError(
            f"graph {graph.name!r}: beside {attention.title()} the Triton attention takes a gate, "
            "one sigmoid and the product of O with it"
        )
    return modes["sigmoid"], modes["mul"]


def _check_gate(graph: DeclaredGraph, gate: Tensor, o: Tensor) -> None:
    if gate.uid not in {tensor.uid for tensor in graph.inputs()} or gate.is_pass_by_value:
        raise NotSupportedError(
            f"tensor {gate.label()} (in0) is no buffer that the graph reads; the kernels read the "
            "gate of an attention from memory"
        )
    if gate.data_type not in _TYPES:
        raise NotSupportedError(
            f"tensor {gate.label()} (in0) has data type {gate.data_type.name}; the kernels take a "
            f"gate of {_names()}"
        )
    fits = gate.rank == o.rank and all(
        have in (1, want) for have, want in zip(gate.dim, o.dim, strict=True)
    )
    if not fits:
        raise NotSupportedError(
            f"tensor {gate.label()} (in0) has dim {gate.dim}; the kernels take a gate with 1 or "
            f"the extent of O's dim {o.dim} on each axis"
        )


def _names() -> str:
    return ", ".join(data_type.name for data_type in _TYPES)
