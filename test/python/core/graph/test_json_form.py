"""The JSON form: every kind survives a round trip, and what is not a graph is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.json_form import fill_from_json, to_dict, to_json
from tilewright.graph.operation import operation_kinds

pytestmark = pytest.mark.L0
Samples = Mapping[str, Callable[[], DeclaredGraph]]


def read(text: str | bytes) -> DeclaredGraph:
    graph = DeclaredGraph()
    fill_from_json(graph, text)
    return graph


@pytest.mark.parametrize("kind", sorted(operation_kinds()))
def test_every_kind_survives_a_round_trip(declared_samples: Samples, kind: str) -> None:
    """A kind without a sample fails here too."""
    graph = declared_samples[kind]()
    assert kind in {operation.kind for operation in graph.operations}
    graph.validate()
    text = to_json(graph)
    copy = read(text)
    copy.validate()
    assert to_dict(copy) == json.loads(text)
    assert [t.uid for t in copy.inputs()] == [t.uid for t in graph.inputs()]
    assert [t.uid for t in copy.outputs()] == [t.uid for t in graph.outputs()]
    for ours, theirs in zip(graph.operations, copy.operations, strict=True):
        assert set(ours.attributes()) == set(theirs.attributes())
        for name, value in ours.attributes().items():
            if name not in ("score_mod", "score_mod_bprop"):
                assert theirs.attributes()[name] == value


def test_a_graph_that_is_read_infers_what_the_writer_left_open(declared_samples: Samples) -> None:
    graph = declared_samples["conv_fprop"]()
    graph.validate()
    document = to_dict(graph)
    virtual = next(t for t in document["tensors"] if t["is_virtual"])
    expected = dict(virtual)
    virtual.update(dim=[], stride=[], data_type="NOT_SET")
    copy = read(json.dumps(document))
    copy.validate()
    assert to_dict(copy)["tensors"][document["tensors"].index(virtual)] == expected


def test_numbers_that_json_has_not_are_words() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    graph.relu(graph.tensor((4,))).set_output(True)
    graph.validate()
    text = to_json(graph)
    assert '"upper_clip": "inf"' in text
    assert read(text).operations[0].attributes()["upper_clip"] == math.inf


def test_values_of_scalars_keep_their_type() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    scalars = [graph.tensor_scalar(value) for value in (2, 2.0, True)]
    graph.binary_select(*scalars).set_output(True)
    graph.validate()
    values = [t.value for t in read(to_json(graph)).tensors[:3]]
    assert [(type(v), v) for v in values] == [(int, 2), (float, 2.0), (bool, True)]


def document(**changes: object) -> str:
    base: dict[str, object] = {
        "tilewright_graph": 1,
        "name": "g",
        "io_data_type": "FLOAT",
        "tensors": [
            {"uid": 1, "dim": [4], "stride": [1]},
            {"uid": 2, "is_output": True},
        ],
        "operations": [
            {
                "kind": "pointwise",
                "inputs": {"in0": 1},
                "outputs": {"out": 2},
                "attributes": {"mode": "exp"},
            }
        ],
    }
    return json.dumps({**base, **changes})


def operation(**changes: object) -> list[dict[str, object]]:
    base = json.loads(document())["operations"][0]
    return [{**base, **changes}]


def test_the_smallest_document_is_a_graph() -> None:
    graph = read(document())
    graph.validate()
    assert graph.outputs()[0].dim == (4,)
    assert graph.outputs()[0].data_type is DataType.FLOAT


WRONG_DOCUMENTS: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "not a JSON document"),
    "no text": (b"\xff\xfe\x00\x80", "not a JSON document"),
    "empty": ("", "not a JSON document"),
    "deep": ("[" * 100_000, "not a JSON document"),
    "a long integer": (f'{{"tilewright_graph": {"9" * 5000}}}', "not a JSON document"),
    "a list": ("[]", "graph JSON is list; expected an object"),
    "no version": ("{}", "tilewright_graph is None; this version reads 1"),
    "another version": (document(tilewright_graph=2), "tilewright_graph is 2"),
    "true as version": (document(tilewright_graph=True), "tilewright_graph is True"),
    "no tensors": (document(tensors=None), "tensors is NoneType; expected a list"),
    "a tensor that is none": (document(tensors=[3]), "tensors[0] is int; expected an object"),
    "an unknown field": (document(tensors=[{"uid": 1, "dims": []}]), "unknown field 'dims'"),
    "no uid": (document(tensors=[{"dim": []}]), "tensors[0]: uid is missing"),
    "a uid twice": (document(tensors=[{"uid": 1}, {"uid": 1}]), "uid 1 is taken by tensor"),
    "a negative uid": (document(tensors=[{"uid": -1}]), "expected an int >= 0"),
    "a fractional extent": (
        document(tensors=[{"uid": 1, "dim": [1.5]}]),
        "tensors[0]: dim is 1.5; expected an integer",
    ),
    "an extent beyond 64 bits": (
        document(tensors=[{"uid": 1, "dim": [2**64]}]),
        "expected a 64-bit integer",
    ),
    "a string as dim": (
        document(tensors=[{"uid": 1, "dim": "12"}]),
        "dim is '12'; expected a sequence",
    ),
    "an unknown type": (
        document(tensors=[{"uid": 1, "data_type": "FLOAT99"}]),
        "tensors[0]: data_type is 'FLOAT99'; accepted are FLOAT, DOUBLE",
    ),
    "an offset that is not there": (
        document(tensors=[{"uid": 1, "ragged_offset": 9}]),
        "ragged_offset: no tensor has uid 9",
    ),
    "an unknown kind": (document(operations=operation(kind="exec")), "operation kind 'exec'"),
    "a list as kind": (document(operations=operation(kind=[])), "operation kind []"),
    "an unknown port": (
        document(operations=operation(inputs={"in0": 1, "in9": 1})),
        "pointwise: no input 'in9'",
    ),
    "an unknown output": (
        document(operations=operation(outputs={"out": 2, "extra": 1})),
        "pointwise: no output 'extra'",
    ),
    "no output": (
        document(operations=operation(outputs={})),
        "pointwise: the output 'out' is missing",
    ),
    "a missing input": (
        document(operations=operation(inputs={})),
        "pointwise: the required input 'in0' is missing",
    ),
    "an unknown attribute": (
        document(operations=operation(attributes={"mode": "exp", "code": "1"})),
        "pointwise: no attribute 'code'; known are mode",
    ),
    "a program where none belongs": (
        document(operations=operation(attributes={"mode": "exp", "score_mod": {}})),
        "pointwise: no attribute 'score_mod'",
    ),
    "true as a port": (
        document(operations=operation(inputs={"in0": True})),
        "inputs: in0: no tensor has uid True",
    ),
}


@pytest.mark.parametrize("case", WRONG_DOCUMENTS)
def test_what_is_not_a_graph_is_refused(case: str) -> None:
    text, message = WRONG_DOCUMENTS[case]
    with pytest.raises(GraphError) as caught:
        read(text)
    assert message in str(caught.value)


def test_a_refusal_is_short_whatever_was_given() -> None:
    with pytest.raises(GraphError) as caught:
        read(document(tensors=[{"uid": 1, "data_type": "x" * 1_000_000}]))
    assert len(str(caught.value)) < 1000
