"""`tilewright bench`: the comparison is interleaved, checked, and written down."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.cli import bench, subjects
from tilewright.cli.exits import CommandError
from tilewright.cli.subjects import Measurement, Pair, measure

pytestmark = pytest.mark.L0

Runner = Callable[..., Any]


def pair(log: list[str], ours: float = 1.0, theirs: float = 1.0, **promise: float) -> Pair:
    return Pair(
        "case",
        "baseline",
        lambda: log.append("o"),
        lambda: log.append("t"),
        lambda: torch.tensor(ours),
        lambda: torch.tensor(theirs),
        **promise,  # type: ignore[arg-type]
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One quick subject in place of the real ones."""

    def subject() -> Any:
        yield pair([], promised_ratio=1e9)
        yield replace(pair([]), case="second [case]")

    monkeypatch.setattr(subjects, "SUBJECTS", dict.fromkeys(bench.SUBJECT_NAMES, subject))


def test_the_names_are_those_of_the_subjects() -> None:
    assert tuple(subjects.SUBJECTS) == bench.SUBJECT_NAMES


def test_calls_take_turns_and_the_first_alternates() -> None:
    log: list[str] = []
    result = measure("subject", replace(pair(log), calls=2, turns=2), 2)
    assert "".join(log[6:]) == "oottttoo" * 2
    assert result.samples == 4
    assert result.ours_us > 0
    assert result.ratio == result.ours_us / result.theirs_us


def test_a_result_that_differs_is_not_timed() -> None:
    log: list[str] = []
    with pytest.raises(CommandError, match=r"differs from baseline by 0\.5") as caught:
        measure("subject", pair(log, 1.5, 1.0), 3)
    assert caught.value.code == 1
    assert len(log) == 6


def test_the_clock_stands_still_while_another_process_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subjects, "uses_processor_time", lambda: True)
    assert subjects._time_us(lambda: time.sleep(0.05), 1) < 25_000
    monkeypatch.setattr(subjects, "uses_processor_time", lambda: False)
    assert subjects._time_us(lambda: time.sleep(0.05), 1) >= 50_000


def test_promises() -> None:
    base = Measurement("s", "c", "b", 30.0, 20.0, 9, None, None)
    assert (base.is_kept, base.promise) == (None, "")
    assert base.overhead_us == 10.0
    for bound, kept in ((1.5, True), (1.4, False)):
        promised = replace(base, promised_ratio=bound)
        assert (promised.is_kept, promised.promise) == (kept, f"ratio <= {bound:g}")
    for bound, kept in ((10.0, True), (9.0, False)):
        promised = replace(base, promised_overhead_us=bound)
        assert (promised.is_kept, promised.promise) == (kept, f"overhead <= {bound:g} us")


def test_a_graph_adds_little_to_the_call_that_it_makes(run: Runner) -> None:
    ran = run("bench", "matmul-execute", "--json", "--rounds", "9")
    document = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    cases = {entry["case"].split()[0]: entry for entry in document["measurements"]}
    assert set(cases) == {"graph.execute", "frame.launch"}
    for entry in cases.values():
        assert entry["promise"] == "overhead <= 15 us"
        assert entry["overhead_us"] == pytest.approx(entry["ours_us"] - entry["baseline_us"])
        # Ten times the promise: this is no place to measure, but a lost fast path shows.
        assert entry["overhead_us"] < 150
    assert "tilewright bench matmul-execute --rounds 9" in document["command"]
    assert "torch" in document["versions"]


@pytest.mark.parametrize("name", [name for name in bench.SUBJECT_NAMES if name != "matmul-execute"])
def test_each_subject_computes_what_pytorch_does(name: str) -> None:
    pairs = list(subjects.SUBJECTS[name]())
    assert pairs
    for found in pairs:
        subjects._require_equal(name, found)


def test_the_table_and_the_picture_are_written(small: None, run: Runner, tmp_path: Path) -> None:
    table, picture = tmp_path / "t.csv", tmp_path / "t.png"
    ran = run("bench", "sdpa", "--csv", table, "--png", picture, "--rounds", "2")
    assert (ran.code, ran.err) == (0, "")
    for text in ("second [case]", "ratio <= 1e+09: kept", "promised"):
        assert text in ran.out
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# device: ")
    assert lines[1].startswith("# versions: tilewright ")
    assert lines[2].startswith("# load: load ")
    assert lines[3] in ("# clock: processor time", "# clock: wall clock")
    assert lines[4] == "# command: tilewright bench sdpa --rounds 2"
    rows = list(csv.DictReader(lines[5:]))
    assert [row["case"] for row in rows] == ["case", "second [case]"]
    assert [row["kept"] for row in rows] == ["yes", ""]
    assert float(rows[0]["ours_us"]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(tmp_path.iterdir()) == [table, picture]


def test_all_subjects_are_measured_if_none_is_named(small: None, run: Runner) -> None:
    ran = run("bench", "--rounds", "1", "--json")
    found = [entry["subject"] for entry in json.loads(ran.out)["measurements"]]
    assert list(dict.fromkeys(found)) == list(bench.SUBJECT_NAMES)


def test_an_unknown_subject_or_an_unwritable_file_is_2(
    small: None, run: Runner, tmp_path: Path
) -> None:
    ran = run("bench", "speed")
    assert (ran.code, ran.out) == (2, "")
    assert "unknown subject 'speed'; known are matmul-execute" in ran.err
    (tmp_path / "file").touch()
    for option in ("--csv", "--png"):
        ran = run("bench", "sdpa", option, tmp_path / "file" / "below")
        assert (ran.code, ran.out) == (2, "")
        assert "is not a directory" in ran.err


def test_a_picture_without_matplotlib_is_2(
    small: None, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    ran = run("bench", "sdpa", "--png", tmp_path / "t.png")
    assert ran.code == 2
    assert "pip install 'tilewright[plots]'" in ran.err
