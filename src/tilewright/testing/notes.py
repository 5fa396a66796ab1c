"""What a test tells about itself beside its outcome; it travels with the test's reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tilewright.testing.draws import Draws, as_option

# The attribute of a report that carries a dict of plain values to the controller.
ATTRIBUTE = "tilewright"


@dataclass
class Notes:
    """Filled while one test runs."""

    draws: Draws | None = None
    # Why an engine declined, if the test ended by that.
    declined: str | None = None
    # Why this process can run no further test.
    unfit: str | None = None
    # "held" or "skipped": what became of its large storage, if it asked for one.
    storage: str | None = None
    # What the last probe found wrong.
    finding: str | None = None


KEY = pytest.StashKey[Notes]()


def of(item: pytest.Item) -> Notes:
    """The notes of this test, made at first use."""
    return item.stash.setdefault(KEY, Notes())


def node_id(item: pytest.Item) -> str:
    """The test's id without the group that xdist appends to it."""
    if item.get_closest_marker("xdist_group") is None:
        return item.nodeid
    return (
        item.nodeid.rpartition("@")[0]
        if item.nodeid.rfind("@") > item.nodeid.rfind("]")
        else item.nodeid
    )


def attach(report: pytest.TestReport, item: pytest.Item) -> None:
    """Put what the controller needs on the report."""
    notes = of(item)
    plain: dict[str, Any] = {}
    if notes.draws is not None:
        plain["dims"] = list(notes.draws.dims_read)
        plain["repro"] = repr(notes.draws.repro())
        plain["unasked"] = list(notes.draws.unasked)
        if report.failed:
            report.sections.append(("repro", as_option(plain["repro"])))
    if notes.declined is not None:
        plain["declined"] = notes.declined
    if notes.storage is not None:
        plain["storage"] = notes.storage
    if notes.unfit is not None:
        plain["unfit"] = notes.unfit
    setattr(report, ATTRIBUTE, plain)


def read(report: pytest.TestReport) -> dict[str, Any]:
    """What ``attach`` put on a report; empty for a report of something else."""
    found: dict[str, Any] = getattr(report, ATTRIBUTE, {})
    return found
