"""Every collected test has one outcome at the end, and the totals agree."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tilewright.testing import notes
from tilewright.testing.draws import as_option

OUTCOMES = ("passed", "failed", "skipped", "crashed")
# Later ones win where a test has several reports.
_ORDER = {"passed": 0, "skipped": 1, "failed": 2, "crashed": 3}
_LISTED = 20


class Ledger:
    """Counts collected tests and outcomes; lives where reports arrive.

    An expected failure counts as skipped and a failed set-up or tear-down as failed.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collected: dict[str, int] = {}
        self._outcome: dict[str, str] = {}
        self._ended: dict[str, int] = {}
        self._rerun: set[str] = set()
        self._unfit: set[str] = set()
        self._dims_read: set[str] = set()
        self._reasons: collections.Counter[tuple[str, str]] = collections.Counter()
        # Test -> "held" or "skipped", of those that asked for a large storage.
        self._storage: dict[str, str] = {}
        # Parts of --repro that its test did not ask for.
        self._unasked: set[str] = set()
        self._repros: list[str] = []
        self._problems: list[str] = []
        # Lines of workers that died where no test can be blamed.
        self.unblamed: list[str] = []

    def collected(self, ids: list[str]) -> None:
        """Say which tests there are, after deselection."""
        self._collected = dict(collections.Counter(ids))

    def made_unfit(self, nodeid: str) -> bool:
        """True if the test's own reports tell that no later test could run in its process."""
        return nodeid in self._unfit and nodeid in self._ended

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """In a run without workers, the items are here."""
        self.collected([item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report into account."""
        plain = notes.read(report)
        if plain.get("echo"):
            return
        outcome: str = report.outcome
        if outcome == "rerun":
            self._rerun.add(report.nodeid)
            return
        if plain.get("crashed"):
            outcome = "crashed"
        if "unfit" in plain:
            self._unfit.add(report.nodeid)
        if report.when == "teardown":
            self._unasked.update(plain.get("unasked", ()))
        if "storage" in plain:
            self._storage[report.nodeid] = plain["storage"]
        self._dims_read.update(plain.get("dims", ()))
        known = self._outcome.get(report.nodeid, "passed")
        self._outcome[report.nodeid] = max(known, outcome, key=_ORDER.__getitem__)
        if report.when == "teardown" or outcome == "crashed":
            self._ended[report.nodeid] = self._ended.get(report.nodeid, 0) + 1
            if self._config.option.dryrun and "repro" in plain:
                self._repros.append(plain["repro"])
        self._count_reason(report, plain)

    def _count_reason(self, report: pytest.TestReport, plain: dict[str, Any]) -> None:
        if not report.skipped or report.when == "teardown" or hasattr(report, "wasxfail"):
            return
        if "declined" in plain:
            self._reasons["declined", plain["declined"]] += 1
            return
        told = report.longrepr
        text = told[2] if isinstance(told, tuple) else str(told)
        self._reasons["skipped", text.removeprefix("Skipped: ")] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Make a run whose totals do not agree a failed one."""
        self._problems = self._find_problems(session, exitstatus)
        bad = self._problems or self.unblamed
        if bad and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print reasons, totals and what is wrong with them."""
        out = terminalreporter
        if self._reasons:
            out.section("skips and declines by reason")
            for (kind, reason), count in sorted(
                self._reasons.items(), key=lambda entry: (-entry[1], entry[0])
            ):
                out.line(f"{count:6d} {kind}: {reason}")
        if self._repros:
            out.section("cases of the dry run")
            for text in self._repros:
                out.line(as_option(text))
        unread = sorted({name for name, _ in self._config.option.dim} - self._dims_read)
        if unread and self._outcome:
            out.line(f"no test of this run asked for --dim {', '.join(unread)}", yellow=True)
        if self._unasked:
            told = ", ".join(sorted(self._unasked))
            out.line(f"the test did not ask for this part of --repro: {told}", yellow=True)
        if self._storage:
            held = sum(state == "held" for state in self._storage.values())
            shown = "" if held else "; what they are for has not been shown"
            out.line(
                f"large storage: {held} of {len(self._storage)} tests that asked had theirs{shown}",
                yellow=not held,
            )
        for line in (*self._problems, *self.unblamed):
            out.line(f"ERROR {line}", red=True)
        if not self._config.option.collectonly:
            out.line(self.totals())

    def totals(self) -> str:
        """One line: how many tests were collected, and what became of them."""
        counts = self._counts()
        shown = [f"{counts[name]} {name}" for name in OUTCOMES if counts[name]]
        return f"outcomes: {len(self._collected)} collected = {' + '.join(shown) or '0 run'}" + (
            f" + {counts['lost']} without outcome" if counts["lost"] else ""
        )

    def _counts(self) -> collections.Counter[str]:
        return collections.Counter(
            self._outcome[test] if test in self._ended else "lost" for test in self._collected
        )

    def _find_problems(self, session: pytest.Session, exitstatus: int) -> list[str]:
        if self._config.getoption("dist", "no") == "each":
            return []
        problems = []
        again = [
            test
            for test, times in self._ended.items()
            if times > self._collected.get(test, times) and test not in self._rerun
        ]
        if again:
            problems.append(_listing("ran more than once", again))
        strange = [test for test in self._outcome if test not in self._collected]
        if strange:
            problems.append(_listing("reported but not collected", strange))
        lost = [test for test in self._collected if test not in self._ended]
        if lost and not self._stopped(session, exitstatus):
            problems.append(_listing("collected, but ended with no outcome", lost))
        return problems

    def _stopped(self, session: pytest.Session, exitstatus: int) -> bool:
        """True where somebody asked for less than the whole run."""
        workers = self._config.pluginmanager.getplugin("dsession")
        return bool(
            session.shouldstop
            or session.shouldfail
            or getattr(workers, "shouldstop", False)
            or self._config.option.collectonly
            or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        )


def _listing(what: str, tests: list[str]) -> str:
    shown = "\n  ".join(tests[:_LISTED])
    rest = f"\n  ... and {len(tests) - _LISTED} more" if len(tests) > _LISTED else ""
    return f"{len(tests)} {what}:\n  {shown}{rest}"
