"""The controller's part: place workers, replace dead ones, and say whose fault it was."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tilewright.testing import deadline, notes, placement
from tilewright.testing.ledger import Ledger
from tilewright.testing.running import COLLECTED, USAGE, WorkerFiles

# How long to wait for a dead worker's process before its replacement starts.
_PROCESS_END_S = 60.0
# Workers that die one after another while they run no test.
_IDLE_DEATHS = 3
_STACK_LINES = 80
_RUNNER = re.compile(r'^  File "[^"]*[/\\](pluggy|_pytest|xdist|execnet)[/\\]|^  File "<string>"')
_RESCHEDULING = ("load", "worksteal", "loadscope", "loadfile", "loadgroup")


@dataclass(frozen=True)
class Death:
    """How a worker ended."""

    worker: str
    how: str
    note: str
    stacks: str

    def text(self, victim: str) -> str:
        """What the report of the victim says."""
        told = f"worker {self.worker!r} ended while it {victim}: {self.how}; it is replaced"
        return f"{told}\n{self.stacks}" if self.stacks else told


class Controlling:
    """Hooks of the process that hands tests to workers."""

    def __init__(self, config: pytest.Config, ledger: Ledger, seed: int) -> None:
        self._config = config
        self._ledger = ledger
        self._seed = seed
        self._folder = Path(tempfile.mkdtemp(prefix="tilewright-workers-"))
        # Collector id -> why it must not be collected again.
        self._barred: dict[str, str] = {}
        self._barred_at_start: dict[str, frozenset[str]] = {}
        self._collected: dict[str, bool] = {}
        self._ids: list[str] | None = None
        self._started: set[str] = set()
        self._put_back: set[str] = set()
        self._last: Death | None = None
        self._idle_deaths = 0
        self._crashes = 0

    def pytest_unconfigure(self) -> None:
        """Remove the workers' files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Take schedulers that lose no test."""
        from tilewright.testing import scheduling

        return scheduling.make(config, log)

    def pytest_xdist_setupnodes(self, specs: list[Any]) -> None:
        """Give each worker its devices; a replacement inherits them."""
        for index, spec in enumerate(specs):
            spec.env.update(placement.environment_of_worker(index, os.environ))

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker what it cannot know."""
        worker = node.gateway.id
        self._barred_at_start[worker] = frozenset(self._barred)
        node.workerinput["tilewright"] = {
            "folder": str(self._folder),
            "worker": worker,
            "seed": self._seed,
            "barred": dict(self._barred),
        }

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """See that every worker found the same tests: they are called by position."""
        worker = node.gateway.id
        self._collected[worker] = True
        if self._ids is None:
            self._ids = list(ids)
            self._ledger.collected(self._ids)
        elif list(ids) != self._ids:
            different = sorted(set(ids) ^ set(self._ids)) or ["their order"]
            raise pytest.exit.Exception(
                f"worker {worker} collected other tests than the first one: "
                f"{', '.join(different[:5])}",
                returncode=pytest.ExitCode.TESTS_FAILED,
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember what was started."""
        self._started.add(nodeid)

    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Find out how a worker ended, and whether another one can do better."""
        worker = node.gateway.id
        # Of an earlier worker; xdist blames a test for an interrupt too.
        self._last = None
        usage = getattr(node, "workeroutput", {}).get(USAGE)
        if error is None and usage:
            raise pytest.UsageError(*usage)
        # A pytest.exit in a worker arrives as an interrupt: somebody wants the run to stop.
        if error is None or error == "keyboard-interrupt":
            return
        death = self._examine(node, error)
        self._last = death
        collecting = _read(WorkerFiles(self._folder, worker).collecting)
        if not self._collected.get(worker) and collecting != COLLECTED:
            self._bar(worker, death, collecting)
            return
        self._idle_deaths += 1
        self._ledger.unblamed.append(
            f"worker {worker!r} ended while it ran no test: {death.how}\n{death.stacks}".rstrip()
        )
        if self._idle_deaths >= _IDLE_DEATHS:
            raise pytest.exit.Exception(
                f"{_IDLE_DEATHS} workers in a row ended while they ran no test; the last one, "
                f"{worker}: {death.how}",
                returncode=pytest.ExitCode.TESTS_FAILED,
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: Any) -> None:
        """Say how the worker ended with this test, unless the test's own reports do."""
        death = self._last
        if death is None:
            return
        started = crashitem in self._started
        again = crashitem in self._put_back
        if not started and not again and self._config.getvalue("dist") in _RESCHEDULING:
            # It was next, not running: nobody is to blame but the line noted above.
            self._put_back.add(crashitem)
            _silence(report)
            sched.mark_test_pending(crashitem)
            return
        self._idle_deaths = 0
        self._ledger.unblamed.pop()
        if self._ledger.made_unfit(crashitem):
            _silence(report)
            return
        report.longrepr = death.text(f"ran {crashitem!r}")
        # Reports are headed by it; xdist names the file alone.
        path, _, name = crashitem.partition("::")
        report.location = (path, None, name.replace("::", "."))
        setattr(report, notes.ATTRIBUTE, {"crashed": True})
        self._crashes += 1
        self._stop_after_failures()

    def _stop_after_failures(self) -> None:
        """Count crashes for ``--maxfail``, which xdist does not."""
        workers = self._config.pluginmanager.getplugin("dsession")
        most = self._config.getvalue("maxfail")
        failures = self._crashes + getattr(workers, "countfailures", 0)
        if most and failures >= most and not getattr(workers, "shouldstop", True):
            workers.shouldstop = f"stopping after {failures} failures"

    def _bar(self, worker: str, death: Death, collector: str) -> None:
        """After a death during collection: leave out what was being collected, or give up."""
        if not collector or collector in self._barred_at_start[worker]:
            raise pytest.exit.Exception(
                f"worker {worker} ended before it had collected the tests: {death.how}\n"
                f"{death.stacks}".rstrip(),
                returncode=pytest.ExitCode.TESTS_FAILED,
            )
        self._barred.setdefault(collector, death.text(f"collected {collector!r}"))

    def _examine(self, node: Any, error: object) -> Death:
        files = WorkerFiles(self._folder, node.gateway.id)
        note = _read(files.note)
        stacks = _read(files.trace)
        if note:
            how = note
        else:
            how = _how_it_ended(node, error)
            if stacks.startswith(deadline.MARK):
                limit = stacks.partition("\n")[0].removeprefix(deadline.MARK).rstrip("!)")
                how = f"it passed its deadline of {limit}"
        self._wait_for_process(node)
        return Death(node.gateway.id, how, note, _without_runner(stacks))

    def _wait_for_process(self, node: Any) -> None:
        """Wait for the end of a process whose kernel may still run, or say that it does."""
        process = _process(node)
        if process is None:
            return
        try:
            process.wait(timeout=_PROCESS_END_S)
        except subprocess.TimeoutExpired:
            reporter = self._config.pluginmanager.getplugin("terminalreporter")
            if reporter is not None:
                reporter.write_line(
                    f"\nprocess {process.pid} of {node.gateway.id} has not ended after "
                    f"{_PROCESS_END_S:g} s: device work that it started goes on, and tests "
                    "that need the device may wait for it"
                )


def _without_runner(stacks: str) -> str:
    """The stacks without the frames and threads of the test runner, bounded."""
    kept: list[str] = []
    for block in stacks.split("\n\n"):
        lines = [line for line in block.splitlines() if not _RUNNER.search(line)]
        if any(line.startswith("  File") for line in lines) or "hread 0x" not in block:
            kept.extend(lines)
    if len(kept) > _STACK_LINES:
        kept = [*kept[:_STACK_LINES], f"... and {len(kept) - _STACK_LINES} more lines"]
    return "\n".join(kept)


def _silence(report: pytest.TestReport) -> None:
    """Make a report that counts for nothing; xdist will send it whatever we do."""
    report.outcome = "passed"
    report.when = "setup"
    report.longrepr = None
    setattr(report, notes.ATTRIBUTE, {"echo": True})


def _process(node: Any) -> subprocess.Popen[bytes] | None:
    # execnet has no public name for the process of a gateway.
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    return process if isinstance(process, subprocess.Popen) else None


def _how_it_ended(node: Any, error: object) -> str:
    process = _process(node)
    if process is not None:
        try:
            status = process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return f"its connection broke ({error}) and its process has not ended yet"
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = str(-status)
            return f"killed by signal {name}"
        text = str(error)
        if text == "Not properly terminated":
            return f"it exited with status {status}"
    return str(error)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
