"""Which tests run which lines of the numeric code: a pytest plugin that writes it as JSON.

    PYTHONPATH=src:test/mutation TILEWRIGHT_NO_ISOLATION=1 \
        python -m pytest -p lines --lines lines.json -m "L0 or L1" test/python/sdpa ...

A test that does not run a line cannot notice a change of it, so the runs of mutants leave such
tests out. Caches of the package are emptied before each test: what one test computed and another
would have found there counts for both.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from subjects import ROOT, subject_files

_FILES = {str(ROOT / name): name for name in subject_files()}
_RECORDS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, required=True, help="the JSON file to write")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RECORDS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    lines: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines.add((_FILES[frame.f_code.co_filename], frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename in _FILES else None

    _empty_caches()
    started = time.perf_counter()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        found: dict[str, list[int]] = {}
        for name, line in sorted(lines):
            found.setdefault(name, []).append(line)
        seconds = round(time.perf_counter() - started, 3)
        item.config.stash[_RECORDS][item.nodeid] = {"seconds": seconds, "lines": found}


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None:
        item.stash[_FAILED] = True


_FAILED = pytest.StashKey[bool]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    failed = {item.nodeid for item in session.items if item.stash.get(_FAILED, False)}
    records = {k: v for k, v in session.config.stash[_RECORDS].items() if k not in failed}
    session.config.option.lines.write_text(json.dumps(records))


def _empty_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("tilewright."):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()
