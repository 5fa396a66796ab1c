"""Running graphs: order, rounding, integers, scalars, errors, and the registry."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.errors import BindingError, GraphError, NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import operation_kinds
from tilewright.oracle import evaluate, registry
from tilewright.oracle.evaluation import stored

pytestmark = pytest.mark.L0


def test_every_operation_kind_has_a_reference() -> None:
    missing = set(operation_kinds()) - set(registry.kinds())
    assert not missing


def test_an_unknown_kind_is_declined_with_the_known_ones() -> None:
    with pytest.raises(NotSupportedError, match=r"'fold'.*matmul"):
        registry.reference_of("fold")


def test_a_kind_has_one_reference() -> None:
    with pytest.raises(ValueError, match="'matmul'"):
        registry.reference("matmul")(lambda _, __: {})


def _sum_and_square(virtual_type: str) -> tuple[DeclaredGraph, list[int]]:
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type=virtual_type)
    a, b = graph.tensor((1,)), graph.tensor((1,))
    total = graph.add(a, b)
    out = graph.mul(total, total).set_output(True)
    graph.validate()
    return graph, [a.uid, b.uid, total.uid, out.uid]


def test_virtual_tensors_keep_float64_unless_asked() -> None:
    graph, (a, b, total, out) = _sum_and_square("HALF")
    pack = {a: torch.tensor([1.0]), b: torch.tensor([2.0**-12])}
    exact = 1.0 + 2.0**-12
    found = evaluate(graph, pack)
    assert found[total].item() == exact and found[out].item() == exact * exact
    found = evaluate(graph, pack, round_virtual=True)
    assert found[total].item() == 1.0 and found[out].item() == 1.0


def test_results_are_rounded_only_if_asked() -> None:
    graph, (a, b, _, out) = _sum_and_square("FLOAT")
    pack = {a: torch.tensor([1.0]), b: torch.tensor([2.0**-23])}
    exact = (1.0 + 2.0**-23) ** 2
    assert evaluate(graph, pack)[out].item() == exact
    rounded = evaluate(graph, pack, round_outputs=True)[out].item()
    assert rounded == 1.0 + 2.0**-22 != exact


def test_eight_bit_results_saturate_and_keep_nan() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((4,))
    out = graph.identity(x).set_output(True).set_data_type("FP8_E4M3")
    graph.validate()
    given = torch.tensor([1.01, 1e6, -math.inf, math.nan])
    found = evaluate(graph, {x.uid: given})[out.uid]
    assert found[:3].tolist() == [float(given[0]), 448.0, -448.0] and torch.isnan(found[3])
    rounded = evaluate(graph, {x.uid: given}, round_outputs=True)[out.uid]
    assert rounded[0].item() == 1.0


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        ("INT8", [1, -1, 127, -128, 0, 127]),
        ("UINT8", [1, 0, 200, 0, 0, 255]),
        ("INT32", [1, -1, 200, -200, 0, 2**31 - 1]),
        ("INT64", [1, -1, 200, -200, 0, 2**63 - 1]),
    ],
)
def test_integers_truncate_and_saturate(data_type: str, expected: list[int]) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((6,))
    out = graph.identity(x).set_output(True).set_data_type(data_type)
    graph.validate()
    given = torch.tensor([1.9, -1.9, 200.0, -200.7, -0.5, 1e30])
    found = evaluate(graph, {x.uid: given})[out.uid]
    assert found.dtype == torch.int64 and found.tolist() == expected


def test_scalars_by_value_and_by_buffer() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((2,))
    factor = graph.tensor_scalar(3.0)
    out = graph.mul(x, factor).set_output(True)
    graph.validate()
    given = torch.tensor([1.0, 2.0])
    assert evaluate(graph, {x.uid: given})[out.uid].tolist() == [3.0, 6.0]
    # A buffer for the scalar wins; records are accepted as keys, and None is ignored.
    found = evaluate(graph, {x: given, factor: torch.tensor([5.0]), None: given})
    assert found[out.uid].tolist() == [5.0, 10.0]


def test_inputs_are_not_changed_and_extra_entries_are_ignored() -> None:
    graph, (a, b, _, out) = _sum_and_square("FLOAT")
    pack = {a: torch.tensor([2.0]), b: torch.tensor([1.0]), out: torch.tensor([-7.0]), 999: None}
    assert evaluate(graph, pack)[out].item() == 9.0  # type: ignore[arg-type]
    assert [pack[key].item() for key in (a, b, out)] == [2.0, 1.0, -7.0]  # type: ignore[union-attr]


def test_a_list_of_operations_and_a_missing_operand() -> None:
    graph, (a, b, total, out) = _sum_and_square("FLOAT")
    given = {total: torch.tensor([4.0])}
    assert evaluate(graph.operations[1:], given)[out].item() == 16.0
    with pytest.raises(BindingError, match=f"uid {b}"):
        evaluate(graph, {a: torch.tensor([1.0])})


def test_a_reference_that_does_not_fit_its_declaration_is_an_error() -> None:
    record = DeclaredGraph().tensor((2, 3), data_type="FLOAT", name="Y", uid=4)
    with pytest.raises(GraphError, match=r"'Y' \(uid 4\).*\(2, 3\).*\(3, 2\)"):
        stored(record, torch.ones(3, 2), rounds=False)
    scalar = DeclaredGraph().tensor((1, 1), data_type="FLOAT")
    assert stored(scalar, torch.tensor(2.0), rounds=False).shape == (1, 1)
