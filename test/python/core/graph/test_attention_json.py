"""Attention graphs survive their JSON form, and hostile forms are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.json_form import fill_from_dict, fill_from_json, to_json
from tilewright.graph.operations.attention import Sdpa
from tilewright.graph.operations.attention_backward import SdpaBackward
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0

FLOAT, INT32, INT64 = DataType.FLOAT, DataType.INT32, DataType.INT64
B, HQ, HKV, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 16, 8


def new_graph() -> DeclaredGraph:
    return DeclaredGraph(io_data_type=DataType.HALF, intermediate_data_type=FLOAT)


def operands(graph: DeclaredGraph) -> dict[str, Tensor]:
    dims = {"q": (B, HQ, SQ, D), "k": (B, HKV, SKV, D), "v": (B, HKV, SKV, DV)}
    return {name: graph.tensor(dim, name=name) for name, dim in dims.items()}


def lengths(graph: DeclaredGraph) -> dict[str, Any]:
    made = [graph.tensor((B, 1, 1, 1), data_type=INT32) for _ in range(2)]
    return {"use_padding_mask": True, "seq_len_q": made[0], "seq_len_kv": made[1]}


def all_options(graph: DeclaredGraph) -> None:
    seed, offset = (graph.tensor((1, 1, 1, 1), data_type=INT64) for _ in range(2))
    graph.sdpa(
        **operands(graph),
        **lengths(graph),
        attn_scale=graph.tensor_scalar(0.25),
        bias=graph.tensor((1, HQ, SQ, SKV)),
        block_mask=graph.tensor((B, HQ, 1, 1), data_type=DataType.UINT8),
        use_alibi_mask=True,
        sliding_window_length=3,
        diagonal_band_right_bound=1,
        diagonal_alignment=diagonal_alignment.BOTTOM_RIGHT,
        dropout=(0.5, seed, offset),
        rng_dump=graph.tensor(name="draws"),
        generate_stats=True,
        score_max=graph.tensor(),
        score_sum_exp=graph.tensor(),
        sink_token=graph.tensor((1, HQ, 1, 1), data_type=FLOAT),
        max_total_seq_len_q=9,
        stats_use_log2=True,
        name="all",
    )


def ragged(graph: DeclaredGraph) -> None:
    given = operands(graph)
    for name, tensor in given.items():
        offset = graph.tensor((B + 1, 1, 1, 1), data_type=INT32, name=f"{name}_offset")
        tensor.set_ragged_offset(offset).set_ragged_offset_multiplier(8)
    output, _ = graph.sdpa(**given, **lengths(graph))
    assert output is not None
    output.set_ragged_offset(given["q"].ragged_offset)


def paged(graph: DeclaredGraph) -> None:
    tables = [graph.tensor((B, 1, 4, 1), data_type=INT32) for _ in range(2)]
    graph.sdpa(
        graph.tensor((B, HQ, SQ, D)),
        graph.tensor((9, HKV, 2, D)),
        graph.tensor((9, HKV, 2, DV)),
        paged_attention_k_table=tables[0],
        paged_attention_v_table=tables[1],
        paged_attention_max_seq_len_kv=SKV,
    )


def backward(graph: DeclaredGraph) -> None:
    rows = {"o": (B, HQ, SQ, DV), "dO": (B, HQ, SQ, DV), "stats": (B, HQ, SQ, 1)}
    made = {name: graph.tensor(dim, data_type=FLOAT) for name, dim in rows.items()}
    graph.sdpa_backward(
        **operands(graph),
        **made,
        bias=graph.tensor((1, 1, SQ, SKV)),
        dBias=graph.tensor(),
        use_causal_mask=True,
        use_deterministic_algorithm=True,
        score_mod=capped,
        score_mod_bprop=capped_gradient,
    )


CAP = 30.0


def capped(graph: DeclaredGraph, score: Tensor) -> Tensor:
    """cap tanh(score / cap)."""
    cap = graph.tensor_scalar(CAP)
    return graph.mul(graph.tanh(graph.div(score, cap)), cap)


def capped_gradient(graph: DeclaredGraph, gradient: Tensor, score: Tensor) -> Tensor:
    return graph.tanh_backward(gradient, graph.div(score, graph.tensor_scalar(CAP)))


def score_program(graph: DeclaredGraph) -> None:
    shift = graph.tensor((1, HQ, 1, 1), data_type=FLOAT, name="shift")
    graph.sdpa(
        **operands(graph), score_mod=lambda g, score: g.add(capped(g, score), shift), name="capped"
    )


GRAPHS = [all_options, ragged, paged, backward, score_program]


def text_of(declare: Callable[[DeclaredGraph], None]) -> str:
    graph = new_graph()
    declare(graph)
    for tensor in graph.operations[-1].outputs.values():
        tensor.set_output(True)
    graph.validate()
    return to_json(graph)


def read(text: str) -> DeclaredGraph:
    graph = DeclaredGraph()
    fill_from_json(graph, text)
    return graph


@pytest.mark.parametrize("declare", GRAPHS)
def test_round_trip(declare: Callable[[DeclaredGraph], None]) -> None:
    text = text_of(declare)
    graph = read(text)
    graph.validate()
    assert to_json(graph) == text


def test_a_graph_can_be_written_before_it_is_complete() -> None:
    """What the file leaves open is inferred again."""
    document = json.loads(text_of(all_options))
    made = set(document["operations"][0]["outputs"].values())
    for entry in document["tensors"]:
        if entry["uid"] in made:
            entry["dim"], entry["stride"] = [], []
    graph = DeclaredGraph()
    fill_from_dict(graph, document)
    graph.validate()
    assert to_json(graph) == text_of(all_options)


def test_ragged_tensors_share_their_offset_again() -> None:
    graph = read(text_of(ragged))
    graph.validate()
    operation = graph.operations[0]
    assert operation.inputs["q"].ragged_offset is operation.outputs["O"].ragged_offset
    assert operation.inputs["q"].ragged_offset is not None
    assert operation.inputs["k"].ragged_offset_multiplier == 8


def test_a_score_program_is_read_back() -> None:
    graph = read(text_of(score_program))
    graph.validate()
    operation = graph.operations[0]
    assert isinstance(operation, Sdpa)
    program = operation.score_mod
    assert program is not None
    assert [step.kind for step in program.operations] == ["pointwise"] * 4
    assert program.external_inputs() == tuple(
        operation.inputs[f"score_mod_{index}"] for index in range(2)
    )
    assert program.input.dim == (B, HQ, SQ, SKV)
    assert [t.name for t in graph.inputs()][-1:] != [program.input.name]


def test_a_gradient_program_is_read_back() -> None:
    graph = read(text_of(backward))
    graph.validate()
    operation = graph.operations[0]
    assert isinstance(operation, SdpaBackward)
    program = operation.score_mod_bprop
    assert program is not None and program.gradient is not None
    assert program.own_inputs() == (program.gradient, program.input)
    assert operation.inputs["score_mod_bprop_0"].value == CAP


Change = Callable[[dict[str, Any]], object]


def of(document: dict[str, Any], part: str) -> dict[str, Any]:
    found: dict[str, Any] = document["operations"][0][part]
    return found


def uid_of(document: dict[str, Any], name: str) -> int:
    return next(int(entry["uid"]) for entry in document["tensors"] if entry["name"] == name)


def entry_of(document: dict[str, Any], uid: int) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in document["tensors"] if e["uid"] == uid)
    return found


def program_of(document: dict[str, Any], name: str = "score_mod") -> dict[str, Any]:
    found: dict[str, Any] = of(document, "attributes")[name]
    return found


def rewire(document: dict[str, Any], name: str, field: str, uid: int | None) -> None:
    """Put tensor ``uid`` in the place of a program's own input."""
    program = program_of(document, name)
    old, program[field] = program[field], uid
    for step in program["operations"]:
        for port, given in step["inputs"].items():
            if given == old:
                step["inputs"][port] = program["input"] if uid is None else uid


def drop_gradient(document: dict[str, Any]) -> None:
    rewire(document, "score_mod_bprop", "gradient", None)


HOSTILE: dict[str, tuple[Callable[[DeclaredGraph], None], Change, str]] = {
    "O taken away": (
        all_options,
        lambda d: of(d, "outputs").pop("O"),
        "the output 'O' is missing",
    ),
    "Stats taken away": (
        all_options,
        lambda d: of(d, "outputs").pop("Stats"),
        "the output Stats exists exactly if they ask for it",
    ),
    "dK taken away": (
        backward,
        lambda d: of(d, "outputs").pop("dK"),
        "the output 'dK' is missing",
    ),
    "unknown output": (
        paged,
        lambda d: of(d, "outputs").update(X=of(d, "outputs")["O"]),
        "no output 'X'",
    ),
    "unknown input": (
        paged,
        lambda d: of(d, "inputs").update({"0": of(d, "inputs")["q"]}),
        "no input '0'",
    ),
    "unknown attribute": (
        paged,
        lambda d: of(d, "attributes").update(speed=3),
        "no attribute 'speed'",
    ),
    "mask of text": (
        paged,
        lambda d: of(d, "attributes").update(use_causal_mask="yes"),
        "expected True or False",
    ),
    "flags that contradict": (
        all_options,
        lambda d: of(d, "attributes").update(is_inference=True),
        "is_inference is True and generate_stats is True",
    ),
    "probability without seed": (
        paged,
        lambda d: of(d, "attributes").update(dropout_probability=0.5),
        "dropout_probability is 0.5 and dropout has no tensor",
    ),
    "seed without offset": (
        all_options,
        lambda d: of(d, "inputs").pop("dropout_offset"),
        "dropout has dropout_seed",
    ),
    "seed without probability": (
        all_options,
        lambda d: of(d, "attributes").update(dropout_probability=None),
        "dropout_probability is None",
    ),
    "scale twice": (
        all_options,
        lambda d: of(d, "attributes").update(attn_scale=2.0),
        "attn_scale is both a number and a tensor",
    ),
    "infinite scale": (
        paged,
        lambda d: of(d, "attributes").update(attn_scale="inf"),
        "attn_scale is inf",
    ),
    "program of a matmul": (
        score_program,
        lambda d: program_of(d)["operations"][0].update(kind="matmul"),
        "pointwise operations only",
    ),
    "program that reads q as the score": (
        score_program,
        lambda d: rewire(d, "score_mod", "input", uid_of(d, "q")),
        "(q) lives inside a score program",
    ),
    "program that returns a foreign tensor": (
        score_program,
        lambda d: program_of(d).update(output=uid_of(d, "shift")),
        "which it does not compute",
    ),
    "program with a port too few": (
        score_program,
        lambda d: of(d, "inputs").pop("score_mod_1"),
        "expected it on port 'score_mod_1'",
    ),
    "program with a port too many": (
        score_program,
        lambda d: of(d, "inputs").update(score_mod_7=uid_of(d, "shift")),
        "(score_mod_7) is read by no score program",
    ),
    "program with a gradient": (
        score_program,
        lambda d: program_of(d).update(gradient=program_of(d)["input"]),
        "score_mod has a gradient to read; expected none",
    ),
    "gradient program without gradient": (
        backward,
        drop_gradient,
        "score_mod_bprop has no gradient to read; expected one",
    ),
    "scores of another dim": (
        score_program,
        lambda d: entry_of(d, program_of(d)["input"]).update(dim=[1, 1, SQ, SKV]),
        "there is one score for each query and key",
    ),
    "program that stores its result": (
        score_program,
        lambda d: entry_of(d, program_of(d)["output"]).update(is_virtual=False),
        "scores are never stored",
    ),
    "program of text": (
        score_program,
        lambda d: of(d, "attributes").update(score_mod="import os"),
        "expected an object",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_refused(name: str) -> None:
    declare, change, fragment = HOSTILE[name]
    document = json.loads(text_of(declare))
    change(document)
    graph = DeclaredGraph()
    with pytest.raises(GraphError) as caught:
        fill_from_dict(graph, document)
        graph.validate()
    assert fragment in str(caught.value)


STRANGE = [None, True, -1, 0, 1, 3, 2**63, 10**400, 1.5, "", "inf", "q", [], {}, [0, 0, 0, 0]]


def mutated(node: Any, random: Random) -> Any:
    """``node`` with one entry somewhere inside replaced, removed or doubled."""
    if not isinstance(node, dict | list) or not node or random.random() < 0.15:
        return random.choice(STRANGE)
    key = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
    changed = node.copy()
    if random.random() < 0.1:
        del changed[key]
    elif isinstance(changed, list) and random.random() < 0.1:
        changed.append(changed[key])
    else:
        changed[key] = mutated(changed[key], random)
    return changed


@pytest.mark.parametrize("declare", GRAPHS)
def test_strange_forms_raise_nothing_but_graph_errors(
    declare: Callable[[DeclaredGraph], None],
) -> None:
    """Each form is read and validated, or refused; a few are harmless and stay right."""
    random = Random(20_205)
    document = json.loads(text_of(declare))
    refused = 0
    for _ in range(300):
        graph = DeclaredGraph()
        try:
            fill_from_dict(graph, mutated(document, random))
            graph.validate()
        except GraphError:
            refused += 1
    assert refused > 100
