"""A pytest plugin that keeps the tests which use a GPU, and writes down each outcome as it comes.

Loaded by test/gpu/record.py as ``-p gpu_tests``. A test uses a GPU if its marks say so
(``needs_gpus``, ``gpu_exclusive``), if the reason of its skip mark does, or of a skip in one of its
fixtures, or if its module asked for a GPU and found one (``HAS_GPU``). There is no list to keep.

What the run before had not, or left out for want of time, comes first, then what nothing but a GPU
shows, and of each the longest first, so that all workers end at about one time. Where the time
seems too short for all, the longest of those that also run elsewhere come last. A test is left out
where the time that is left is short of what it may take.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

# The file that outcomes are appended to, one JSON object a line.
OUTCOMES = "TILEWRIGHT_GPU_OUTCOMES"
# When all must be over, in seconds since the epoch.
UNTIL = "TILEWRIGHT_GPU_UNTIL"
# How many seconds all workers have for tests, together.
ROOM = "TILEWRIGHT_GPU_ROOM"
# The record of the run before, if there is one.
LAST = "TILEWRIGHT_GPU_LAST"
# No test runs its kernels without a GPU, so that more of their levels are worth a record.
ENGINE_MARK = "hopper"
LEFT_OUT = "left out: "
NO_TIME = f"{LEFT_OUT}this run had no time for it"
# How much longer than the last time a test may take when the time is nearly over.
_SLOWER = 1.5
# Of one that has not run yet, and of whose file none has.
_UNKNOWN_S = 10.0
_REASON = re.compile(r"\b(GPUs?|CUDA)\b")
_SKIP = re.compile(r"\bskip\([^)]*\b(GPUs?|CUDA)\b")
# The fixture of tests that compile for devices which need not be there, and use none.
_COMPILING = "compiled_facts"
# What a file holds that has such tests, or whose folder's conftest does.
MENTIONS = re.compile(r"\bGPUs?\b|\bCUDA\b|needs_gpus|gpu_exclusive|HAS_GPU|nvidiactl")
_REASON_LENGTH = 400
# Of freed device memory, what a process may keep from one test to the next.
_KEPT_BYTES = 2**30


def candidates(folder: Path) -> list[Path]:
    """Test files under ``folder`` that may hold tests which use a GPU, sorted."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        conftests = (up / "conftest.py" for up in path.parents if folder in up.parents)
        texts = (each.read_text(encoding="utf-8") for each in (path, *conftests) if each.exists())
        if any(MENTIONS.search(text) for text in texts):
            found.append(path)
    return found


def how_it_uses_a_gpu(item: pytest.Item) -> str | None:
    """ "only" for a test that skips without one, "if there" for one that chooses, else None."""
    if item.get_closest_marker("needs_gpus") or item.get_closest_marker("gpu_exclusive"):
        return "only"
    for mark in item.iter_markers("skipif"):
        # One that skips here is of a test for machines without a GPU.
        is_met = any(isinstance(condition, bool) and condition for condition in mark.args)
        if not is_met and _REASON.search(str(mark.kwargs.get("reason", ""))):
            return "only"
    if any(_SKIP.search(source) for source in _sources(item)):
        return "only"
    if _COMPILING in getattr(item, "fixturenames", ()):
        return None
    module = getattr(item, "module", None)
    return "if there" if getattr(module, "HAS_GPU", False) else None


def _sources(item: pytest.Item) -> list[str]:
    """The text of the test and of the fixtures that it takes."""
    functions = [getattr(item, "function", None)]
    info = getattr(item, "_fixtureinfo", None)
    for definitions in (info.name2fixturedefs if info else {}).values():
        functions += [definition.func for definition in definitions]
    found = []
    for function in functions:
        # Fixtures of pytest itself have no GPU in them, and some no source.
        if function is not None and not function.__module__.startswith(("_pytest", "xdist")):
            try:
                found.append(inspect.getsource(function))
            except (OSError, TypeError):
                continue
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Deselect what uses no GPU; mark what is of one engine, whose levels may be asked for.

    What is left when marks and levels have been looked at is put in order.
    """
    kept, left = [], []
    for item in items:
        if ENGINE_MARK in item.path.parts:
            item.add_marker(ENGINE_MARK)
        how = how_it_uses_a_gpu(item)
        if how is None:
            left.append(item)
        else:
            item.user_properties.append(("gpu", how))
            kept.append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)
    yield
    last, seconds = last_tests(), expected_s([item.nodeid for item in items])
    postponed = _postponed(items, seconds)
    items.sort(
        key=lambda item: (
            item.nodeid in postponed,
            not _is_due(last.get(item.nodeid)),
            not _is_only_here(item),
            -seconds[item.nodeid],
        )
    )
    config.stash[_SECONDS] = seconds


_SECONDS = pytest.StashKey[dict[str, float]]()


def _is_only_here(item: pytest.Item) -> bool:
    return dict(item.user_properties).get("gpu") == "only"


def last_tests() -> dict[str, list[Any]]:
    """Of the run before, by test: the outcome, its seconds, and a reason if any."""
    path = os.environ.get(LAST)
    if not path:
        return {}
    tests: dict[str, list[Any]] = json.loads(Path(path).read_text(encoding="utf-8"))["tests"]
    return tests


def _was_left_out(told: list[Any] | None) -> bool:
    return told is not None and str(told[-1]).startswith(LEFT_OUT)


def _is_due(told: list[Any] | None) -> bool:
    return told is None or _was_left_out(told)


def expected_s(names: Iterable[str]) -> dict[str, float]:
    """What each test takes: what it took, or where it has not run what those of its file did."""
    took = {name: float(told[1]) for name, told in last_tests().items() if not _was_left_out(told)}
    files: dict[str, list[float]] = {}
    for name, seconds in took.items():
        files.setdefault(name.partition("::")[0], []).append(seconds)
    usual = {path: sum(values) / len(values) for path, values in files.items()}
    return {name: took.get(name, usual.get(name.partition("::")[0], _UNKNOWN_S)) for name in names}


def _postponed(items: Sequence[pytest.Item], seconds: dict[str, float]) -> set[str]:
    """Tests that wait so that the rest has the time: the longest of what runs elsewhere too."""
    room_s = float(os.environ.get(ROOM, "inf"))
    last = last_tests()
    needed_s = sum(seconds[item.nodeid] for item in items)
    out: set[str] = set()
    for item in sorted(items, key=lambda item: -seconds[item.nodeid]):
        if needed_s <= room_s:
            break
        if not _is_only_here(item) and not _is_due(last.get(item.nodeid)):
            out.add(item.nodeid)
            needed_s -= seconds[item.nodeid]
    return out


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what there is no time for; give back kept memory."""
    left_s = float(os.environ.get(UNTIL, "inf")) - time.time()
    if left_s < _SLOWER * item.config.stash[_SECONDS][item.nodeid]:
        pytest.skip(NO_TIME)
    _give_memory_back()


def _give_memory_back() -> None:
    """torch keeps what tests freed; the test of a process beside may need it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


class _Writing:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Append one phase of one test."""
        told = getattr(report, "tilewright", {})
        if told.get("echo"):
            return
        line = {
            "id": report.nodeid,
            "when": report.when,
            "outcome": "crashed" if told.get("crashed") else report.outcome,
            "seconds": report.duration,
            "gpu": dict(report.user_properties).get("gpu"),
            "reason": _reason(report),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    told = report.longrepr
    if isinstance(told, tuple):
        return str(told[2]).removeprefix("Skipped: ")
    crash = getattr(told, "reprcrash", None)
    return str(crash.message if crash else told)[:_REASON_LENGTH]


def pytest_configure(config: pytest.Config) -> None:
    """Write in the process where all reports arrive."""
    config.addinivalue_line("markers", f"{ENGINE_MARK}: the tests under a folder of this name")
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writing(Path(path)), "gpu_tests.writing")
