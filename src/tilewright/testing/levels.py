"""Levels: each test carries exactly one mark of L0 to L4, and a plain run takes L0."""

from __future__ import annotations

import pytest

LEVELS = {
    "L0": "quick smoke run, the default",
    "L1": "more shapes, layouts and data types of what L0 covers",
    "L2": "wide sweeps",
    "L3": "long or large-memory runs",
    "L4": "stress and soak runs",
}
DEFAULT = "L0"
# More than this many names in one message help nobody.
_LISTED = 20


def choose_default(config: pytest.Config) -> None:
    """Take L0 where no marker expression is given."""
    if not config.option.markexpr:
        config.option.markexpr = DEFAULT


def check(report: pytest.CollectReport) -> None:
    """Turn a test with no level, or with several, into a collection error of its file.

    This comes before a marker expression deselects anything, and holds in workers too.
    """
    wrong = []
    for item in report.result or ():
        if isinstance(item, pytest.Item):
            levels = sorted({mark.name for mark in item.iter_markers()} & set(LEVELS))
            if len(levels) != 1:
                wrong.append(f"{item.nodeid}: {' and '.join(levels) or 'no level'}")
    if wrong:
        report.outcome = "failed"
        report.longrepr = listing("each test takes exactly one level mark, L0 to L4", wrong)
        report.result = []


def listing(rule: str, entries: list[str]) -> str:
    """A rule and what breaks it, bounded."""
    shown = "\n  ".join(entries[:_LISTED])
    rest = f"\n  ... and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return f"{rule}:\n  {shown}{rest}"
