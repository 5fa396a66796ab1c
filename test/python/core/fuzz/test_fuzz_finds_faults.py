"""The random graphs' checks fail on broken engines: each rule is shown to find its fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzzing.drawing import Case
from fuzzing.judging import judge
from fuzzing.ledger import Ledger, reason_of
from fuzzing.running import MARGIN_BYTES, PATTERNS, run

import tilewright
from tilewright.errors import GraphError

pytestmark = pytest.mark.L0

DIM, STRIDE = (3, 4), (7, 1)
Break = Callable[[dict[int, torch.Tensor], torch.Tensor, int, int], None]


def broken(fault: Break) -> Case:
    """A sum of two matrices with gaps, whose execution ends with ``fault``."""
    graph: Any = tilewright.pygraph(io_data_type="float32", intermediate_data_type="float32")
    first, second = (graph.tensor(DIM, STRIDE, name=name) for name in ("first", "second"))
    out = graph.add(graph.exp(first), second).set_output(True).set_dim(DIM).set_stride(STRIDE)
    graph.build()
    execute = graph.execute

    def execute_and_break(pack: dict[int, torch.Tensor], workspace: torch.Tensor) -> None:
        execute(pack, workspace)
        fault(pack, workspace, first.uid, out.uid)

    graph.execute = execute_and_break
    return Case(graph, seed=3)


def beside(view: torch.Tensor, offset: int) -> torch.Tensor:
    """The element ``offset`` places after the first of a view."""
    return view.as_strided((1,), (1,), view.storage_offset() + offset)


FAULTS: dict[str, tuple[Break, str]] = {
    "gap": (lambda p, w, i, o: beside(p[o], 5).zero_(), "outside its elements"),
    "before": (lambda p, w, i, o: beside(p[o], -1).zero_(), "outside its elements"),
    "behind": (lambda p, w, i, o: beside(p[o], 2 * 7 + 4).zero_(), "outside its elements"),
    "input": (lambda p, w, i, o: p[i][0, 0].add_(1.0), "input 'first' was changed"),
    "workspace": (lambda p, w, i, o: beside(w, w.numel()).zero_(), "beside the workspace"),
    "unwritten": (
        lambda p, w, i, o: p[o][2, 3:].copy_(beside(p[o], 2 * 7 + 4)),
        "depend on what",
    ),
    "gap read": (lambda p, w, i, o: p[o][0, :1].add_(beside(p[i], 4)), "depend on what"),
    "value": (lambda p, w, i, o: p[o][1, 1].mul_(1.001), "elements differ, first at (1, 1)"),
    "nan": (lambda p, w, i, o: p[o][1, 2].fill_(float("nan")), "got nan"),
    "infinity": (lambda p, w, i, o: p[o][1, 2].fill_(float("inf")), "got inf"),
}


def test_a_right_engine_passes() -> None:
    case = broken(lambda pack, workspace, first, out: None)
    assert judge(case, run(case)) is False


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    act, message = FAULTS[fault]
    with pytest.raises(AssertionError) as caught:
        case = broken(act)
        judge(case, run(case))
    assert message in str(caught.value)


def test_the_patterns_differ_and_margins_are_not_empty() -> None:
    assert len(set(PATTERNS)) == 2
    assert MARGIN_BYTES > 8


def test_an_untyped_error_and_a_silent_refusal_are_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = broken(lambda pack, workspace, first, out: None)
    case.error = GraphError(" ")
    with pytest.raises(AssertionError, match="GraphError without a reason"):
        Ledger().check(case)
    case.error = None

    def crash(*arguments: Any) -> None:
        raise RuntimeError("from inside")

    monkeypatch.setattr(case.graph, "execute", crash)
    with pytest.raises(RuntimeError, match="from inside"):
        Ledger().check(case)


def test_reasons_are_counted_without_names_and_numbers() -> None:
    first = GraphError("matmul 'a': tensor 'x' (B) has dim (2, 3); expected 4 rows")
    second = GraphError("matmul 'b': tensor #17 (B) has dim (5, 1, 7); expected 11 rows")
    assert reason_of(first) == reason_of(second)
    ledger = Ledger()
    for error in (first, second):
        case = broken(lambda pack, workspace, first, out: None)
        case.error = error
        ledger.check(case)
    assert (ledger.graphs, ledger.declined, len(ledger.reasons)) == (2, 2, 1)
    total = Ledger()
    total.merge(ledger.as_plain())
    total.merge(ledger.as_plain())
    assert total.declined == 4
    assert any("declined     4" in line for line in total.lines())
