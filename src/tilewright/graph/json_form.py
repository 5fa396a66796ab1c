"""The JSON form of a graph. Reading it never executes anything; hostile input raises GraphError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.attributes import coerce, encode, shown
from tilewright.graph.builder import Builder
from tilewright.graph.enums import knob_type, tensor_reordering
from tilewright.graph.operation import (
    Operation,
    attribute_hints,
    check_ports,
    coerce_attributes,
    operation_kinds,
)
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor

FORMAT_VERSION = 1
_PROGRAM_FIELDS = ("score_mod", "score_mod_bprop")
_TENSOR_FIELDS: dict[str, Any] = {
    "uid": int,
    "name": str,
    "dim": tuple[int, ...],
    "stride": tuple[int, ...],
    "data_type": DataType,
    "is_virtual": bool,
    "is_output": bool,
    "is_pass_by_value": bool,
    "ragged_offset": int | None,
    "ragged_offset_multiplier": int,
    "reordering_type": tensor_reordering,
    "alignment_value": int,
}


def to_dict(graph: Builder) -> dict[str, Any]:
    """The graph as plain dicts and lists. Tensors must have uids (validate numbers them)."""
    return {
        "tilewright_graph": FORMAT_VERSION,
        "name": graph.name,
        "io_data_type": graph.io_data_type.name,
        "intermediate_data_type": graph.intermediate_data_type.name,
        "compute_data_type": graph.compute_data_type.name,
        "tensors": [_tensor_to_dict(tensor) for tensor in graph.tensors],
        "operations": [_operation_to_dict(operation) for operation in graph.operations],
    }


def to_json(graph: Builder, indent: int | None = None) -> str:
    """The graph as a JSON document."""
    return json.dumps(to_dict(graph), indent=indent, allow_nan=False)


def parse(text: Any) -> Mapping[str, Any]:
    """The JSON object in ``text`` (str or bytes).

    Raises:
        GraphError: if it is no JSON object.
    """
    try:
        document = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise GraphError(f"graph JSON: not a JSON document: {error}") from error
    return _mapping(document, "graph JSON")


def fill_from_json(graph: Builder, text: str | bytes) -> None:
    """Declare on an empty ``graph`` what ``text`` says.

    Raises:
        GraphError: if the text is no JSON, or not the form of a graph.
    """
    fill_from_dict(graph, parse(text))


def read_plan(entry: Any) -> tuple[int, dict[knob_type, int]]:
    """(engine id, knobs) of a stored plan.

    Raises:
        GraphError: if it is not the form of one.
    """
    plan = _mapping(entry, "graph JSON: plan")
    engine = coerce(int, plan.get("engine"), "graph JSON: plan: engine")
    knobs = _mapping(plan.get("knobs", {}), "graph JSON: plan: knobs")
    return engine, {
        coerce(knob_type, name, "graph JSON: plan: knob"): coerce(
            int, value, f"graph JSON: plan: knob {name}"
        )
        for name, value in knobs.items()
    }


def fill_from_dict(graph: Builder, document: Any) -> None:
    """Declare on an empty ``graph`` what ``document`` says.

    Raises:
        GraphError: if it is not the form of a graph, naming the entry at fault.
    """
    root = _mapping(document, "graph JSON")
    version = root.get("tilewright_graph")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise GraphError(
            f"graph JSON: tilewright_graph is {shown(version)}; this version reads {FORMAT_VERSION}"
        )
    graph.name = coerce(str, root.get("name", "test_graph"), "graph JSON: name")
    for field in ("io_data_type", "intermediate_data_type", "compute_data_type"):
        setattr(graph, field, coerce(DataType, root.get(field, "NOT_SET"), f"graph JSON: {field}"))
    tensors = _read_tensors(graph, root)
    for entry in _sequence(root.get("operations"), "graph JSON: operations"):
        graph.operations.append(_read_operation(entry, tensors))


def _tensor_to_dict(tensor: Tensor) -> dict[str, Any]:
    entry: dict[str, Any] = {
        name: encode(getattr(tensor, name)) for name in _TENSOR_FIELDS if name != "ragged_offset"
    }
    entry["ragged_offset"] = None if tensor.ragged_offset is None else tensor.ragged_offset.uid
    entry["value"] = encode(tensor.value)
    return entry


def _operation_to_dict(operation: Operation) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, value in operation.attributes().items():
        if isinstance(value, ScoreProgram):
            attributes[name] = {
                "input": value.input.uid,
                "output": value.output.uid,
                "gradient": None if value.gradient is None else value.gradient.uid,
                "operations": [_operation_to_dict(nested) for nested in value.operations],
            }
        else:
            attributes[name] = encode(value)
    return {
        "kind": operation.kind,
        "name": operation.name,
        "compute_data_type": operation.compute_data_type.name,
        "inputs": {port: tensor.uid for port, tensor in operation.inputs.items()},
        "outputs": {port: tensor.uid for port, tensor in operation.outputs.items()},
        "attributes": attributes,
    }


def _read_tensors(graph: Builder, root: Mapping[str, Any]) -> dict[int, Tensor]:
    tensors: dict[int, Tensor] = {}
    offsets: list[tuple[Tensor, int]] = []
    for position, raw in enumerate(_sequence(root.get("tensors"), "graph JSON: tensors")):
        where = f"graph JSON: tensors[{position}]"
        entry = _mapping(raw, where)
        unknown = set(entry) - set(_TENSOR_FIELDS) - {"value"}
        if unknown:
            raise GraphError(f"{where}: unknown field {sorted(unknown)[0]!r}")
        given = {
            name: coerce(_TENSOR_FIELDS[name], entry[name], f"{where}: {name}")
            for name in entry
            if name != "value"
        }
        if "uid" not in given:
            raise GraphError(f"{where}: uid is missing")
        uid = given.pop("uid")
        offset = given.pop("ragged_offset", None)
        tensor = graph.tensor(name=given.pop("name", ""), uid=-2 if uid == -1 else uid)
        for name, value in given.items():
            setattr(tensor, name, value)
        tensor.value = _read_value(entry.get("value"), tensor, where)
        tensors[uid] = tensor
        if offset is not None:
            offsets.append((tensor, offset))
    for tensor, uid in offsets:
        tensor.ragged_offset = _lookup(tensors, uid, f"tensor {tensor.label()}: ragged_offset")
    return tensors


def _read_value(value: Any, tensor: Tensor, where: str) -> bool | int | float | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and not tensor.data_type.is_floating:
        return int(coerce(int, value, f"{where}: value"))
    return float(coerce(float, value, f"{where}: value"))


def _read_operation(raw: Any, tensors: Mapping[int, Tensor]) -> Operation:
    entry = _mapping(raw, "graph JSON: operation")
    kinds = operation_kinds()
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise GraphError(f"graph JSON: operation kind {shown(kind)}; known are {', '.join(kinds)}")
    record = kinds[kind]
    name = coerce(str, entry.get("name", ""), f"{kind}: name")
    title = f"{kind} {name!r}" if name else kind
    inputs = _read_ports(entry.get("inputs"), tensors, f"{title}: inputs")
    outputs = _read_ports(entry.get("outputs"), tensors, f"{title}: outputs")
    check_ports(record, inputs, title)
    for port in outputs:
        if port not in record.produces and port not in record.accepts_outputs:
            raise GraphError(f"{title}: no output {port!r}")
    for port in (*record.produces[:1], *record.required_outputs):
        if port not in outputs:
            raise GraphError(f"{title}: the output {port!r} is missing")
    attributes = dict(_mapping(entry.get("attributes", {}), f"{title}: attributes"))
    for field in _PROGRAM_FIELDS:
        # A kind without programs refuses the attribute below; reading it here would nest.
        if attributes.get(field) is not None and field in attribute_hints(record):
            attributes[field] = _read_program(attributes[field], tensors, f"{title}: {field}")
    return record(
        name=name,
        compute_data_type=coerce(
            DataType, entry.get("compute_data_type", "NOT_SET"), f"{title}: compute_data_type"
        ),
        inputs=inputs,
        outputs=outputs,
        **coerce_attributes(record, attributes),
    )


def _read_program(raw: Any, tensors: Mapping[int, Tensor], where: str) -> ScoreProgram:
    entry = _mapping(raw, where)
    nested = _sequence(entry.get("operations"), f"{where}: operations")
    for operation in nested:
        if _mapping(operation, where).get("kind") != "pointwise":
            raise GraphError(f"{where}: a score program has pointwise operations only")
    gradient = entry.get("gradient")
    return ScoreProgram(
        input=_lookup(tensors, entry.get("input"), f"{where}: input"),
        output=_lookup(tensors, entry.get("output"), f"{where}: output"),
        gradient=None if gradient is None else _lookup(tensors, gradient, f"{where}: gradient"),
        operations=tuple(_read_operation(operation, tensors) for operation in nested),
    )


def _read_ports(raw: Any, tensors: Mapping[int, Tensor], where: str) -> dict[str, Tensor]:
    ports = _mapping(raw, where)
    return {port: _lookup(tensors, uid, f"{where}: {port}") for port, uid in ports.items()}


def _lookup(tensors: Mapping[int, Tensor], uid: Any, where: str) -> Tensor:
    if isinstance(uid, bool) or not isinstance(uid, int) or uid not in tensors:
        raise GraphError(f"{where}: no tensor has uid {shown(uid)}")
    return tensors[uid]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise GraphError(f"{where} is {type(value).__name__}; expected an object")
    return value


def _sequence(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{where} is {type(value).__name__}; expected a list")
    return value
