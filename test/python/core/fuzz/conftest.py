"""Makes the helpers in `fuzzing/` importable, and sums up what became of all drawn graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# The name under which a test hands its counts to the summary, across worker processes too.
PROPERTY = "random_graphs"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many graphs ran, and every reason for which one was declined."""
    plain = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if not plain:
        return
    from fuzzing.ledger import Ledger

    total = Ledger()
    for entry in plain:
        total.merge(entry)
    terminalreporter.section("random graphs")
    for line in total.lines():
        terminalreporter.line(line)


@pytest.fixture
def hand_in(record_property: Any) -> Any:
    """A function that hands a ledger to the summary."""
    return lambda ledger: record_property(PROPERTY, ledger.as_plain())
