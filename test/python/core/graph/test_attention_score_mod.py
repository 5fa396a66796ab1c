"""Score programs: what callbacks record, which tensors become ports, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operations.attention import Sdpa
from tilewright.graph.operations.attention_backward import SdpaBackward
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0

FLOAT, HALF = DataType.FLOAT, DataType.HALF
B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 5, 7, 16
SCORES = (B, HQ, SQ, SKV)
Modifier = Callable[[DeclaredGraph, Tensor], Any]


def new_graph(intermediate: DataType = FLOAT) -> DeclaredGraph:
    return DeclaredGraph(io_data_type=HALF, intermediate_data_type=intermediate)


def operands(graph: DeclaredGraph) -> dict[str, Tensor]:
    dims = {"q": (B, HQ, SQ, D), "k": (B, HKV, SKV, D), "v": (B, HKV, SKV, D)}
    return {name: graph.tensor(dim, name=name) for name, dim in dims.items()}


def modified(graph: DeclaredGraph, modifier: Modifier) -> Sdpa:
    output, _ = graph.sdpa(**operands(graph), score_mod=modifier)
    assert output is not None
    output.set_output(True)
    graph.validate()
    operation = graph.operations[-1]
    assert isinstance(operation, Sdpa)
    return operation


def program_of(operation: Sdpa | SdpaBackward) -> ScoreProgram:
    assert operation.score_mod is not None
    return operation.score_mod


def test_operations_go_to_the_program_and_not_to_the_graph() -> None:
    graph = new_graph()
    operation = modified(graph, lambda g, score: g.tanh(g.mul(score, score)))
    assert graph.operations == [operation]
    program = program_of(operation)
    modes = [step.attributes()["mode"] for step in program.operations]
    assert modes == ["mul", "tanh"]
    assert program.output is program.operations[1].outputs["out"]
    assert list(operation.nested_operations()) == list(program.operations)


def test_operations_after_the_callback_go_to_the_graph_again() -> None:
    graph = new_graph()
    output, _ = graph.sdpa(**operands(graph), score_mod=lambda g, score: g.tanh(score))
    assert output is not None
    graph.relu(output).set_output(True)
    graph.validate()
    assert [operation.kind for operation in graph.operations] == ["sdpa", "pointwise"]


def test_scores_are_float32_whatever_the_intermediate_type_is() -> None:
    graph = new_graph(intermediate=HALF)
    program = program_of(modified(graph, lambda g, score: g.tanh(score)))
    for tensor in (program.input, program.output):
        assert tensor.dim == SCORES
        assert tensor.stride == (HQ * SQ * SKV, SQ * SKV, SKV, 1)
        assert tensor.data_type is FLOAT
        assert tensor.is_virtual


def test_scores_are_no_operands_of_the_graph() -> None:
    graph = new_graph()
    program = program_of(modified(graph, lambda g, score: g.tanh(score)))
    assert [tensor.name for tensor in graph.inputs()] == ["q", "k", "v"]
    assert program.output not in graph.virtual_tensors()


def test_tensors_read_are_ports_in_order_of_first_use() -> None:
    graph = new_graph()
    shift = graph.tensor((1, HQ, 1, 1), data_type=FLOAT, name="shift")
    factor = graph.tensor((B, 1, SQ, 1), data_type=FLOAT, name="factor")

    def modifier(g: DeclaredGraph, score: Tensor) -> Tensor:
        scaled = g.mul(score, factor)
        return g.mul(g.add(scaled, shift), factor)

    operation = modified(graph, modifier)
    assert program_of(operation).external_inputs() == (factor, shift)
    assert operation.inputs["score_mod_0"] is factor
    assert operation.inputs["score_mod_1"] is shift
    assert "score_mod_2" not in operation.inputs
    assert {tensor.name for tensor in graph.inputs()} == {"q", "k", "v", "shift", "factor"}


def test_a_program_reads_what_the_graph_makes_before() -> None:
    graph = new_graph()
    given = operands(graph)
    slope = graph.exp(graph.tensor((1, HQ, 1, 1), data_type=FLOAT, name="log_slope"))
    output, _ = graph.sdpa(**given, score_mod=lambda g, score: g.mul(score, slope))
    assert output is not None
    output.set_output(True)
    graph.validate()
    assert graph.operations[1].inputs["score_mod_0"] is slope
    assert slope in graph.virtual_tensors()


def test_indices_count_in_the_scores() -> None:
    def modifier(g: DeclaredGraph, score: Tensor) -> Tensor:
        row, col = g.gen_index(score, axis=2), g.gen_index(score, axis=3)
        return g.binary_select(score, g.tensor_scalar(-1e9), g.cmp_ge(row, col))

    operation = modified(new_graph(), modifier)
    assert program_of(operation).output.dim == SCORES


def test_a_scalar_of_any_rank_is_an_operand() -> None:
    graph = new_graph()
    cap = graph.tensor((1,), data_type=FLOAT)
    operation = modified(graph, lambda g, score: g.div(score, cap))
    assert operation.inputs["score_mod_0"] is cap


def test_the_identity_is_a_program() -> None:
    program = program_of(modified(new_graph(), lambda g, score: score))
    assert program.operations == ()
    assert program.output is program.input


def gradient_graph(
    forward: Modifier, backward: Callable[[DeclaredGraph, Tensor, Tensor], Any]
) -> SdpaBackward:
    graph = new_graph()
    rows = {"o": (B, HQ, SQ, D), "dO": (B, HQ, SQ, D), "stats": (B, HQ, SQ, 1)}
    made = {name: graph.tensor(dim, data_type=FLOAT) for name, dim in rows.items()}
    found = graph.sdpa_backward(
        **operands(graph), **made, score_mod=forward, score_mod_bprop=backward
    )
    for tensor in found:
        tensor.set_output(True)
    graph.validate()
    operation = graph.operations[-1]
    assert isinstance(operation, SdpaBackward)
    return operation


def test_a_gradient_program_reads_the_gradient_and_its_own_scores() -> None:
    seen: list[Tensor] = []

    def backward(g: DeclaredGraph, gradient: Tensor, score: Tensor) -> Tensor:
        seen.extend((gradient, score))
        return g.tanh_backward(gradient, score)

    operation = gradient_graph(lambda g, score: g.tanh(score), backward)
    program = operation.score_mod_bprop
    assert program is not None
    assert seen == [program.gradient, program.input]
    assert program.input is not program_of(operation).input
    assert {tensor.dim for tensor in (*seen, program.output)} == {SCORES}
    assert {tensor.data_type for tensor in (*seen, program.output)} == {FLOAT}
    assert [step.attributes()["mode"] for step in operation.nested_operations()] == [
        "tanh",
        "tanh_backward",
    ]


def test_ports_of_both_programs_are_apart() -> None:
    def forward(g: DeclaredGraph, score: Tensor) -> Tensor:
        return g.mul(score, g.tensor_scalar(2.0))

    def backward(g: DeclaredGraph, gradient: Tensor, score: Tensor) -> Tensor:
        return g.mul(gradient, g.tensor_scalar(3.0))

    inputs = gradient_graph(forward, backward).inputs
    assert inputs["score_mod_0"].value == 2.0
    assert inputs["score_mod_bprop_0"].value == 3.0


def leaked(graph: DeclaredGraph, kept: list[Tensor]) -> Modifier:
    def modifier(g: DeclaredGraph, score: Tensor) -> Tensor:
        result = g.tanh(score)
        kept.extend((score, result))
        return result

    return modifier


REFUSED: dict[str, tuple[Modifier, str]] = {
    "no function": ("tanh", "score_mod is 'tanh'; expected a function"),  # type: ignore[dict-item]
    "nothing returned": (lambda g, score: None, "the returned score is NoneType"),
    "a matmul": (lambda g, score: g.matmul(score, score), "expected pointwise operations only"),
    "an attention": (
        lambda g, score: g.sdpa(score, score, score)[0],
        "expected pointwise operations only",
    ),
    "an attention with a program": (
        lambda g, score: g.sdpa(score, score, score, score_mod=lambda h, inner: inner)[0],
        "a score program has pointwise operations only",
    ),
    "another dim returned": (
        lambda g, score: g.add(score, score).set_dim((B, HQ, SQ, 1)),
        "does not broadcast",
    ),
    "a foreign tensor returned": (
        lambda g, score: g.tensor((B, HQ, SQ, SKV), data_type=FLOAT, name="foreign"),
        "returns tensor 'foreign', which it does not compute",
    ),
    "a smaller result returned": (
        lambda g, score: g.exp(g.tensor((1, HQ, 1, 1), data_type=FLOAT)),
        "of dim (1, 4, 1, 1); expected (2, 4, 5, 7)",
    ),
    "an operand that does not broadcast": (
        lambda g, score: g.add(score, g.tensor((1, HKV, 1, 1), data_type=FLOAT)),
        "operands broadcast",
    ),
    "an operand larger than the scores": (
        lambda g, score: g.add(score, g.tensor((3, 1, 1, 1, 1), data_type=FLOAT)),
        "expected 1 or the extent of (2, 4, 5, 7) on each axis",
    ),
    "an operand of lower rank": (
        lambda g, score: g.add(score, g.tensor((SQ, SKV), data_type=FLOAT, name="mask")),
        "'mask' (score_mod_0) has dim (5, 7)",
    ),
    "an output inside": (
        lambda g, score: g.tanh(g.exp(score).set_output(True)),
        "scores are never stored",
    ),
    "other scores declared": (
        lambda g, score: g.tanh(score.set_dim((1, 1, SQ, SKV))),
        "there is one score for each query and key",
    ),
    "stored scores": (
        lambda g, score: g.tanh(score.set_output(True)),
        "is not the scores that attention feeds in",
    ),
    "a tensor of another graph": (
        lambda g, score: g.add(score, new_graph().tensor(SCORES)),
        "belongs to another graph",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_programs_are_refused(name: str) -> None:
    modifier, fragment = REFUSED[name]
    with pytest.raises(GraphError) as caught:
        modified(new_graph(), modifier)
    assert fragment in str(caught.value)


def test_a_ragged_operand_is_refused() -> None:
    graph = new_graph()
    offset = graph.tensor((B + 1, 1, 1, 1), data_type=DataType.INT32)
    shift = graph.tensor((B, HQ, SQ, 1), data_type=FLOAT, ragged_offset=offset, name="shift")
    with pytest.raises(GraphError, match=r"'shift' \(score_mod_0\) has a ragged offset"):
        modified(graph, lambda g, score: g.add(score, shift))


def test_a_gradient_program_may_not_read_the_forward_program() -> None:
    kept: list[Tensor] = []

    def forward(g: DeclaredGraph, score: Tensor) -> Tensor:
        kept.append(g.tanh(score))
        return kept[0]

    with pytest.raises(GraphError, match="lives inside a score program"):
        gradient_graph(forward, lambda g, gradient, score: g.mul(gradient, kept[0]))


def test_an_exception_of_the_callback_passes_and_ends_the_recording() -> None:
    graph = new_graph()

    def broken(g: DeclaredGraph, score: Tensor) -> Tensor:
        raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        graph.sdpa(**operands(graph), score_mod=broken)
    output, _ = graph.sdpa(**operands(graph))
    assert output is not None
    output.set_output(True)
    graph.validate()
    assert [operation.kind for operation in graph.operations] == ["sdpa"]


@pytest.mark.parametrize("index", [0, 1], ids=["the scores", "a result"])
def test_what_a_program_makes_stays_inside(index: int) -> None:
    graph = new_graph()
    kept: list[Tensor] = []
    output, _ = graph.sdpa(**operands(graph), score_mod=leaked(graph, kept))
    assert output is not None
    output.set_output(True)
    graph.relu(kept[index]).set_output(True)
    with pytest.raises(GraphError, match="lives inside a score program"):
        graph.validate()
