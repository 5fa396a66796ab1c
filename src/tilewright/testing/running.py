"""What surrounds each test in the process that runs it: locks, deadline, probe, notes."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from tilewright.testing import deadline, locks, notes, placement, probe
from tilewright.testing.ending import Ending, LeaveWorker, StopRun

# In place of the id of what is being collected; no such id.
COLLECTED = "::"
# In a worker's output: the lines of a usage error.
USAGE = "tilewright_usage"
# The status of a forked child that would have gone on as if it were the worker.
_FORKED = 71
# What pytest itself needs to go on after a MemoryError is not to be had.
_OUT_OF_MEMORY = "the process ran out of host memory"


class Running:
    """Hooks around each test; ``ending`` decides what becomes of an unfit process."""

    def __init__(self, config: pytest.Config, deadline_s: float, ending: Ending) -> None:
        self._config = config
        self._deadline_s = deadline_s
        self._ending = ending
        self._stream = self.trace_stream()
        self._process = os.getpid()

    def trace_stream(self) -> IO[str]:
        """Where stacks go: standard error as it is before any capture."""
        return os.fdopen(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2), "w")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Hold the locks, keep the deadline, and end the process if the test made it unfit."""
        devices, exclusive = _devices_of(item)
        with (
            locks.held(devices, exclusive=exclusive),
            deadline.limit(deadline.of(item, self._deadline_s), self._stream),
        ):
            result = yield
        unfit = notes.of(item).unfit
        if unfit is not None:
            self._ending.end(item.nodeid, unfit)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what this machine or this run has not."""
        needed = devices_needed(item)
        present = len(placement.devices(os.environ))
        if needed > present:
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, this run may use {present}")
        if item.get_closest_marker("perf") and not self._config.option.perf:
            pytest.skip("measures; runs under --perf")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Probe after the body, so that the body's own fault fails the body."""
        if self._config.option.dryrun:
            pytest.skip("dry run")
        try:
            result = yield
        except BaseException:
            # A failure of the test's own stays; makereport sees to skips and expected failures.
            self._look(item)
            raise
        message = self._look(item)
        if message is not None:
            pytest.fail(message, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Probe after the last of the test, skipped and failed ones too."""
        result = yield
        message = self._look(item)
        if message is not None:
            pytest.fail(message, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the notes on the report; no skip and no expected failure hides a bad finding."""
        if os.getpid() != self._process:
            # A child that the test forked and that came back here would report it a second time,
            # and run all later tests, over its parent's connection.
            print(
                f"{item.nodeid}: a forked child came back from the test; it ends", file=sys.stderr
            )
            os._exit(_FORKED)
        report = yield
        finding = notes.of(item).finding
        if finding is not None and call.when == "call" and not report.failed:
            report.outcome = "failed"
            report.longrepr = finding
            vars(report).pop("wasxfail", None)
        if call.excinfo is not None and call.excinfo.errisinstance(MemoryError):
            notes.of(item).unfit = _OUT_OF_MEMORY
        unfit = notes.of(item).unfit
        if report.failed and unfit is not None:
            report.sections.append(("process", f"{unfit}; it runs no further test"))
        notes.attach(report, item)
        return report

    def _look(self, item: pytest.Item) -> str | None:
        """Probe, unless the process is known to be unfit; tell what is wrong."""
        known = notes.of(item)
        if known.unfit is not None:
            return None
        finding = probe.look()
        if finding.health is probe.Health.DEAD:
            known.unfit = finding.message
        known.finding = finding.message or None
        return known.finding


class RunningInWorker(Running):
    """The same in a worker, which the controller can replace and whose files it reads."""

    def __init__(self, config: pytest.Config, deadline_s: float, files: WorkerFiles) -> None:
        self._files = files
        super().__init__(config, deadline_s, LeaveWorker(files.note))

    def trace_stream(self) -> IO[str]:
        """Where the controller looks for stacks."""
        return self._files.trace.open("w")

    def pytest_sessionstart(self) -> None:
        """Let the stacks of a fatal signal go to the controller, who shows them with the victim.

        Not at configuration: pytest's own faulthandler plugin would take it back.
        """
        faulthandler.enable(file=self._stream)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Say what is being collected, in case that it ends the process."""
        self._files.collecting.write_text(collector.nodeid, encoding="utf-8")
        with deadline.limit(self._deadline_s, self._stream):
            report = yield
        self._files.collecting.write_text("", encoding="utf-8")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Hand a usage error to the controller: a path or test that is not there, for one."""
        try:
            return (yield)
        except pytest.UsageError as error:
            output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
            output[USAGE] = [str(line) for line in error.args]
            raise

    def pytest_collection_finish(self) -> None:
        """Say that all is collected."""
        self._files.collecting.write_text(COLLECTED, encoding="utf-8")

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo[Any]) -> None:
        """End this worker alone; xdist would end the run."""
        if excinfo.errisinstance((KeyboardInterrupt, pytest.UsageError)):
            return
        self._ending.end("", f"an error inside pytest or a plugin: {str(excrepr)[-4000:]}")


class Barring:
    """Fails the collection of what ended an earlier worker, and does not try it again."""

    def __init__(self, barred: Mapping[str, str]) -> None:
        self._barred = barred

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> pytest.CollectReport | None:
        """Tell the reason in place of a collection."""
        reason = self._barred.get(collector.nodeid)
        if reason is None:
            return None
        return pytest.CollectReport(
            nodeid=collector.nodeid, outcome="failed", longrepr=reason, result=[]
        )


class WorkerFiles:
    """The files by which a worker tells the controller what it cannot tell any more."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.note = folder / f"{worker}.note"
        self.trace = folder / f"{worker}.trace"
        self.collecting = folder / f"{worker}.collecting"


def in_worker(config: pytest.Config, deadline_s: float) -> RunningInWorker:
    """The hooks of a worker, as the controller configured it."""
    told = _input(config)
    config.pluginmanager.register(Barring(told["barred"]), "tilewright.testing.barring")
    return RunningInWorker(config, deadline_s, WorkerFiles(Path(told["folder"]), told["worker"]))


def in_process(config: pytest.Config, deadline_s: float) -> Running:
    """The hooks of a run with no workers."""
    return Running(config, deadline_s, StopRun())


def _input(config: pytest.Config) -> dict[str, Any]:
    told: dict[str, Any] = config.workerinput["tilewright"]  # type: ignore[attr-defined]
    return told


def devices_needed(item: pytest.Item) -> int:
    """How many devices the test needs by its marks.

    Raises:
        pytest.UsageError: for a mark ``needs_gpus`` with anything but one int from 1 up.
    """
    mark = item.get_closest_marker("needs_gpus")
    if mark is None:
        return 1 if item.get_closest_marker("gpu_exclusive") else 0
    value = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise pytest.UsageError(
            f"{item.nodeid}: the mark is needs_gpus(n) with an int from 1 up, not "
            f"{mark.args} {mark.kwargs}"
        )
    return value


def _devices_of(item: pytest.Item) -> tuple[tuple[str, ...], bool]:
    """The devices whose locks the test holds, and whether alone.

    A test without a mark may use the first device, so it holds that one's shared lock.
    """
    available = placement.devices(os.environ)
    needed = devices_needed(item)
    if needed > len(available):
        return (), False
    return available[: max(needed, 1)], item.get_closest_marker("gpu_exclusive") is not None
