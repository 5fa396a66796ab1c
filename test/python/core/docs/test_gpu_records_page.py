"""docs/gpu_records.md is generated, and hides nothing that a record tells."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def summary() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_summary", ROOT / "test/gpu/summary.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(summary: Any) -> None:
    current = (ROOT / "docs/gpu_records.md").read_text(encoding="utf-8")
    assert current == summary.page(), "run: python test/gpu/summary.py > docs/gpu_records.md"


def test_what_had_no_time_is_told_as_the_run_tells_it(summary: Any) -> None:
    # The page is made without pytest, which the run's own file needs.
    text = (ROOT / "test/gpu/gpu_tests.py").read_text(encoding="utf-8")
    assert f'LEFT_OUT = "{summary.LEFT_OUT}"' in text


def test_what_failed_is_on_the_page(
    summary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"device": "GPU", "date": "2026-01-02", "versions": {"torch": "2.11"}}
    run = {"command": "pytest", "exit_status": 124, "seconds": 9.6, "totals": {"failed": 1}}
    check = {"name": "ours", "families": ["norms"], "counts": {"broken": 1}, "deviates": []}
    side = {
        "tests": {"passed": 2, "skipped": 1},
        "cases_run": 40,
        "cases_declined": 3,
        "failed": {"e": "far"},
    }

    def of(tool: str, sample: str, summary: str, status: int) -> dict[str, Any]:
        return {"tool": tool, "sample": sample, "summary": summary, "status": status}

    dealt, late = ({"partition words": 1, "other": other} for other in (0, 1))
    records = {
        "tests": {
            "pytest": run,
            "tests": {
                "test/python/a.py::b": ["failed", 1.0, "two\n| lines"],
                "c": ["passed", 1.0],
                "d": ["skipped", 0.0, f"{summary.LEFT_OUT}late"],
                "e": ["crashed", 1.0, "signal 11"],
            },
            "verify": [{**check, "broken": ["y is off"]}],
        },
        "sanitizer": {
            "runs": [
                {**of("memcheck", "norm", "1 error", 9), "clean": False},
                {**of("racecheck", "dealt", "1 hazard", 9), "reports": dealt, "clean": True},
                {**of("racecheck", "late", "2 hazards", 9), "reports": late, "clean": False},
            ],
            "controls": [{**of("racecheck", "ring", "none", 0), "clean": True}],
        },
        "pairs": {d: {**side, "declined_by_reason": {"why": 3}} for d in ("forward", "backward")},
        "isolation": {"runs": [{"name": "alone", "outcomes": "1 passed", "found_outcomes": "?"}]},
    }
    for kind, record in records.items():
        (tmp_path / f"gpu_{kind}.json").write_text(json.dumps({**machine, **record}))
    monkeypatch.setattr(summary, "RECORDS", tmp_path)
    page = summary.page()
    for told in (
        "1 failed, 1 of them for want of time, in 10 s, when its time was over.",
        "| e | signal 11 |",
        "| a.py::b | two \\| lines |",
        "| ours, broken | y is off |",
        "memcheck 0 of 1",
        "| memcheck: norm | 1 error |",
        "memcheck 0 of 1, racecheck 1 of 2.",
        "| racecheck: dealt | 1 of partition words, 0 of other; clean but for partition words |",
        "| racecheck: late | 1 of partition words, 1 of other |",
        "racecheck 1 of 1",
        "Forward: 40 cases ran, 3 declined; tests: 2 passed, 1 left out for want of time.",
        "| why | 3 |",
        "| e | far |",
        "NOT as expected: alone",
    ):
        assert told in page, told
    assert "| c |" not in page
