"""Random graphs of pointwise operations, reductions and moves, run by generated Triton kernels.

As `test_random_graphs.py`, but every plan is the Triton engine's, interpreted without a GPU; graphs
that it declines are counted and left to the other test.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fuzzing import elementwise
from fuzzing.drawing import Case, Drawing
from fuzzing.exploring import check_each
from fuzzing.judging import judge
from fuzzing.ledger import reason_of
from fuzzing.running import run
from hypothesis import strategies as st

from tilewright.engines.triton.engine import interpreting
from tilewright.errors import GraphError, NotSupportedError
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES

pytestmark = [
    pytest.mark.skipif(
        os.path.exists("/dev/nvidiactl"), reason="runs on the CPU; a GPU has its own tests"
    ),
    # numpy's, under the interpreter.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

FAMILIES = (
    *(elementwise.pointwise,) * 6,
    *(elementwise.reduction,) * 2,
    elementwise.reshape,
    elementwise.slice_,
    elementwise.transpose,
)
# Of the graphs that are right at all.
LEAST_TAKEN = 0.6
CHUNKS, CHUNK = 10, 300


@st.composite
def chains(draw: Callable[..., Any]) -> Case:
    """A graph of the Triton engine's chain family, not validated."""
    d = Drawing(draw(st.randoms(use_true_random=False)))
    try:
        for _ in range(d.pick((1, 1, 2, 2, 3, 4, 5))):
            source = d.values[-1] if d.values and d.chance(80) else None
            d.pick(FAMILIES)(d, source)
    except GraphError as error:
        d.case.error = error
        return d.case
    read = {id(t) for op in d.graph.operations for t in op.inputs.values()}
    for operation in d.graph.operations:
        for tensor in operation.outputs.values():
            if id(tensor) not in read:
                tensor.set_output(True)
    return d.case


class Counts:
    """What became of the graphs."""

    def __init__(self) -> None:
        self.taken = 0
        self.declined: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()

    def check(self, case: Case) -> None:
        if case.error is not None or _beyond_torch(case):
            return
        try:
            case.graph.validate()
        except GraphError:
            return
        with interpreting():
            case.graph.build()
            if case.graph.selected_engine != "triton":
                verdicts = case.graph.explain().verdicts
                reason = next(v.reason for v in verdicts if v.engine_name == "triton")
                self.declined[reason_of(NotSupportedError(reason))] += 1
                return
            judge(case, run(case))
        self.taken += 1
        self.modes.update(getattr(op, "mode", op.kind) for op in case.graph.operations)


def _beyond_torch(case: Case) -> bool:
    """True if the reference would slice by a step over which its stride overflows."""
    operations = case.graph.operations
    slices = any(operation.kind == "slice" for operation in operations)
    return slices and any(max(t.stride, default=0) >= 2**60 for t in case.graph.tensors)


def check_chains(seed: int, count: int) -> Counts:
    """Check ``count`` graphs, the same ones for the same seed."""
    counts = Counts()
    check_each(seed, count, chains(), counts.check)
    total = counts.taken + sum(counts.declined.values())
    assert counts.taken >= LEAST_TAKEN * total, counts.declined
    return counts


@pytest.mark.L0
def test_a_sample_of_random_chains() -> None:
    check_chains(seed=0, count=25)


@pytest.mark.L1
@pytest.mark.parametrize("chunk", range(1, CHUNKS + 1))
def test_thousands_of_random_chains(chunk: int) -> None:
    counts = check_chains(seed=chunk, count=CHUNK)
    missing = set(POINTWISE_MODES) - set(counts.modes)
    assert len(missing) <= len(POINTWISE_MODES) // 4, missing
