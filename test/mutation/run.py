"""Run the tests of each mutant, and say which mutants no test notices.

    python test/mutation/run.py mutants.json --jobs 16 --output results.csv

A run forks this process, which has imported torch and pytest but nothing of the package, so a
mutant costs its tests and little more. The fork imports the changed module in place of the file.
A mutant is killed if one of its tests fails, crashes or takes longer than the limit. Before, all
tests that are named run once on the code as it is; one that fails then is not asked again.
The exit status is 1 if less than 90% are killed, 2 if tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import csv
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
# After so many runs one line tells how far it is.
TOLD_EVERY = 20
LIMIT_SECONDS = 60
MEMORY_BYTES = 7 << 30
WANTED_SHARE = 0.9


class _Selection:
    """A pytest plugin: runs the named tests in their order, and remembers which one failed."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"collection of {report.nodeid}")


class _ChangedModule(importlib.machinery.SourceFileLoader):
    """Imports one module from other code than its file's."""

    def __init__(self, name: str, path: str, code: str) -> None:
        super().__init__(name, path)
        self._code = code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._code, self.path, "exec", dont_inherit=True)
        return code


@dataclass
class Run:
    """One fork: what it is to do, and what came of it."""

    tests: list[str]
    mutant: dict[str, Any] | None = None
    stop_at_first: bool = True
    started: float = 0.0
    seconds: float = 0.0
    status: int | None = None
    failed: list[str] | None = None

    @property
    def outcome(self) -> tuple[str, str]:
        """(killed or survived, the evidence)."""
        if not self.tests:
            return "survived", "no test runs it"
        if self.status is None:
            return "killed", f"over {LIMIT_SECONDS} s"
        if self.failed:
            return "killed", self.failed[0]
        if self.status == 0:
            return "survived", f"{len(self.tests)} tests pass"
        return "killed", f"wait status {self.status}"


def run_all(runs: Sequence[Run], jobs: int, deadline: float) -> list[Run]:
    """Run each in a fork, ``jobs`` at a time; those that were done by ``deadline``."""
    import pytest
    import torch

    # Imported once, for all forks.
    assert pytest.__version__ and torch.__version__
    waiting = iter(runs)
    active: dict[int, tuple[Run, Any]] = {}
    done: list[Run] = []
    more = True
    while True:
        while more and len(active) < jobs and time.monotonic() < deadline:
            run = next(waiting, None)
            if run is None:
                more = False
            elif not run.tests:
                done.append(run)
            else:
                report = tempfile.TemporaryFile()  # noqa: SIM115
                active[_fork(run, report)] = (run, report)
        if not active:
            return done
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            run, report = active.pop(pid)
            run.status, run.seconds = status, time.monotonic() - run.started
            report.seek(0)
            text = report.read().decode(errors="replace")
            run.failed = json.loads(text) if text.endswith("]") else []
            done.append(run)
            if len(done) % TOLD_EVERY == 0:
                print(f"{len(done)} of {len(runs)} runs are over", flush=True)
            continue
        now = time.monotonic()
        for pid, (run, _) in list(active.items()):
            if now > deadline or now - run.started > LIMIT_SECONDS:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del active[pid]
                run.seconds = now - run.started
                if now <= deadline:
                    done.append(run)
        if now > deadline:
            return done
        time.sleep(0.01)


def _fork(run: Run, report: Any) -> int:
    run.started = time.monotonic()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        status, failed = _run_pytest(run)
        report.write(json.dumps(failed).encode())
        report.flush()
    finally:
        os._exit(status)


def _run_pytest(run: Run) -> tuple[int, list[str]]:
    import pytest

    if run.mutant is not None:
        path = ROOT / run.mutant["file"]
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        code = mutated(run.mutant)
        assert code is not None
        sys.meta_path.insert(0, _ChangedModule(name, str(path), code))
    selection = _Selection(run.tests)
    files = sorted({test.partition("::")[0] for test in run.tests})
    command = [
        "-q",
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--assert=plain",
    ]
    command += ["-m", "L0 or L1", *(["-x"] if run.stop_at_first else []), *files]
    status = int(pytest.main(command, plugins=[selection]))
    return status, selection.failed


def mutated(mutant: dict[str, Any]) -> str | None:
    """The file with the mutant's lines in place of its own; None if those are not there."""
    lines = (ROOT / mutant["file"]).read_text().split("\n")
    first, before = mutant["first"], mutant["before"]
    places = range(len(lines) - len(before) + 1)
    for place in sorted(places, key=lambda place: abs(place - first)):
        if lines[place : place + len(before)] == before and (before or place == first):
            lines[place : place + len(before)] = mutant["after"]
            return "\n".join(lines)
    return None


def without_mutants(tests: Sequence[str], jobs: int, deadline: float) -> list[str]:
    """Tests that fail, or were not seen to pass, on the code as it is."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    parts = []
    for group in by_file.values():
        size = max(1, len(group) // 4) if len(group) > 200 else len(group)
        parts += [group[first : first + size] for first in range(0, len(group), size)]
    parts.sort(key=len, reverse=True)
    runs = [Run(part, stop_at_first=False) for part in parts]
    run_all(runs, jobs, deadline)
    wrong: list[str] = []
    for run in runs:
        if run.status is None or (run.status and not run.failed):
            wrong += run.tests
        wrong += run.failed or []
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mutants", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0**6, help="give up after this")
    arguments = parser.parse_args()
    started = time.monotonic()
    deadline = started + arguments.seconds
    prepare_process()
    drawn = json.loads(arguments.mutants.read_text())
    mutants = drawn["mutants"]
    for mutant in mutants:
        mutant["tests"] = [drawn["tests"][number] for number in mutant["tests"]]
    named = sorted({test for mutant in mutants for test in mutant["tests"]})
    wrong = set(without_mutants(named, arguments.jobs, deadline))
    for test in sorted(wrong):
        print(f"fails without a mutant, not asked: {test}")
    print(f"{len(named)} tests without a mutant: {time.monotonic() - started:.0f} s", flush=True)
    runs = []
    for mutant in mutants:
        if mutated(mutant) is None:
            print(f"not judged, its line is not there: {mutant['file']}: {mutant['change']}")
            continue
        runs.append(Run([test for test in mutant["tests"] if test not in wrong], mutant))
    # The longest first, so that none is left for the end.
    runs.sort(key=lambda run: -len(run.tests))
    done = run_all(runs, arguments.jobs, deadline)
    results = [dict(_row(run)) for run in done]
    results.sort(key=lambda row: (row["outcome"] == "killed", row["file"], row["change"]))
    with arguments.output.open("w", newline="") as file:
        import torch

        python = ".".join(str(part) for part in sys.version_info[:3])
        file.write(f"# torch {torch.__version__}, Python {python}, {arguments.jobs} jobs\n")
        writer = csv.DictWriter(file, list(results[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)
    killed = sum(row["outcome"] == "killed" for row in results)
    late = len(runs) - len(done)
    if late:
        print(f"{late} of {len(runs)} mutants were not judged in time")
    print(f"{killed} of {len(results)} mutants killed in {time.monotonic() - started:.0f} s")
    for row in results:
        if row["outcome"] == "survived":
            print(f"survived: {row['file']}: {row['operator']}: {row['change']}")
    if wrong:
        return 2
    return 0 if killed >= WANTED_SHARE * len(mutants) else 1


def prepare_process() -> None:
    """What forks inherit: one thread, no GPU, no isolation, the package of this tree."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["TILEWRIGHT_NO_ISOLATION"] = "1"
    os.environ["PYTHONPATH"] = str(SOURCE)
    os.chdir(ROOT)
    sys.path.insert(0, str(SOURCE))


def _row(run: Run) -> Iterator[tuple[str, Any]]:
    assert run.mutant is not None
    for name in ("file", "operator", "occurrence", "change"):
        yield name, run.mutant[name]
    outcome, evidence = run.outcome
    yield "outcome", outcome
    yield "seconds", f"{run.seconds:.1f}"
    yield "evidence", evidence[:160]


if __name__ == "__main__":
    sys.exit(main())
