"""Wrong graphs of every family but attention, each with the message that it must get."""

from __future__ import annotations

import pytest
from graph_cases.case import Case, Declare
from graph_cases.wrong_elements import ELEMENTS
from graph_cases.wrong_layouts import LAYOUTS
from graph_cases.wrong_norms import NORMS
from graph_cases.wrong_products import PRODUCTS

from tilewright.errors import GraphError, TilewrightError
from tilewright.graph.enums import reduction_mode
from tilewright.graph.operation import operation_kinds
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0
WRONG = {**LAYOUTS, **PRODUCTS, **NORMS, **ELEMENTS}


def message_of(declare: Declare) -> str:
    """What validating the declared graph says; the declared tensor is its output."""
    case = Case()
    with pytest.raises(GraphError) as caught:
        result = declare(case)
        if isinstance(result, Tensor):
            result.set_output(True)
        case.g.validate()
    assert isinstance(caught.value, TilewrightError) and isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_graph_gets_its_message(case: str) -> None:
    declare, message = WRONG[case]
    told = message_of(declare)
    assert message in told
    # What is refused is not among what is accepted.
    given, is_listed, accepted = told.partition("; accepted are ")
    assert not is_listed or given.rpartition(" is ")[2] not in accepted.split(", ")


def test_the_table_reaches_every_family_and_repeats_nothing() -> None:
    assert len(WRONG) >= 60
    messages = [message for _, message in WRONG.values()]
    # Two spans beyond 64 bits, declared and inferred, say the same.
    assert len(set(messages)) >= len(messages) - 2
    refused = " ".join(message_of(declare) for declare, _ in WRONG.values())
    attention = {kind for kind in operation_kinds() if kind.startswith("sdpa")}
    missing = [k for k in sorted(operation_kinds().keys() - attention) if k not in refused]
    assert missing == []


def test_a_wrong_graph_stays_open_and_can_be_mended() -> None:
    case = Case()
    out = case.g.reduction(case.t("x", 4, 4), reduction_mode.ADD)
    out.set_output(True)
    with pytest.raises(GraphError):
        case.g.validate()
    out.set_dim((4, 1))
    case.g.validate()
    assert case.g.is_validated


def test_an_operation_that_reads_a_later_result_is_refused() -> None:
    """Operations run in declaration order; the methods cannot declare this, JSON can."""
    case = Case()
    first = case.g.exp(case.t("x", 4), name="first")
    second = case.g.exp(first, name="second")
    second.set_output(True)
    case.g.operations.reverse()
    with pytest.raises(GraphError) as caught:
        case.g.validate()
    assert (
        "pointwise exp 'second': tensor 'first::out' (in0) is read before pointwise exp 'first' "
        "makes it; operations run in declaration order"
    ) in str(caught.value)


def test_a_tensor_with_two_producers_is_refused() -> None:
    case = Case()
    case.g.exp(case.t("x", 4), name="first").set_output(True)
    case.g.operations.append(case.g.operations[0])
    with pytest.raises(GraphError, match=r"is already made by pointwise exp 'first'"):
        case.g.validate()


def test_a_validated_graph_is_closed() -> None:
    case = Case()
    out = case.g.exp(case.t("x", 4), name="e").set_output(True)
    case.g.validate()
    case.g.validate()
    for change in (
        lambda: out.set_dim((4,)),
        lambda: case.t("late", 4),
        lambda: case.g.exp(out),
    ):
        with pytest.raises(GraphError, match=r"is validated and can no longer change"):
            change()
