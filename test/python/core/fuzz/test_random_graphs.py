"""Random graphs over all families decline with a typed reason or match the float64 references.

`fuzzing/strategies.py` draws them, `fuzzing/running.py` runs them between guard bytes and
`fuzzing/judging.py` says what a match is. A failure prints the graph; Hypothesis shrinks it first.
The summary at the end of a run lists every reason for which a graph was declined.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzzing.exploring import check_each
from fuzzing.ledger import Ledger
from fuzzing.strategies import graphs

from tilewright.graph.operation import operation_kinds

HandIn = Callable[[Ledger], None]

SAMPLE = 400
CHUNKS, CHUNK = 20, 560
# Hypothesis draws a few graphs twice; what is left over is at least this many in all.
DISTINCT = 10_000
MOST_DECLINED = 0.25


def check_graphs(seed: int, count: int) -> Ledger:
    """Check ``count`` graphs, the same ones for the same seed."""
    ledger = Ledger()
    check_each(seed, count, graphs(), ledger.check)
    return ledger


def require_coverage(ledger: Ledger) -> None:
    assert ledger.declined <= MOST_DECLINED * ledger.graphs, "\n".join(ledger.lines())
    missing = set(operation_kinds()) - set(ledger.kinds)
    assert not missing, f"drawn, but never run: {sorted(missing)}"


@pytest.mark.L0
def test_a_sample_of_random_graphs(hand_in: HandIn) -> None:
    ledger = check_graphs(seed=0, count=SAMPLE)
    hand_in(ledger)
    require_coverage(ledger)


@pytest.mark.L1
@pytest.mark.parametrize("chunk", range(1, CHUNKS + 1))
def test_ten_thousand_random_graphs(chunk: int, hand_in: HandIn) -> None:
    ledger = check_graphs(seed=chunk, count=CHUNK)
    hand_in(ledger)
    require_coverage(ledger)
    assert ledger.distinct >= DISTINCT / CHUNKS
