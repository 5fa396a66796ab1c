"""What test/gpu runs on a GPU, as far as that can be seen without one."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.L0

SCRIPT = Path(__file__).resolve().parents[4] / "gpu/isolation.py"


def load(name: str) -> ModuleType:
    path = SCRIPT.with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script() -> ModuleType:
    return load("isolation")


def test_every_expectation_is_of_a_test_that_is_there(script: ModuleType) -> None:
    names = [
        node.name for node in ast.parse(script.SUITE).body if isinstance(node, ast.FunctionDef)
    ]
    tests = [name for name in names if name.startswith("test_")]
    expected = [*script.FAILED, *script.CRASHED, *script.SKIPPED]
    assert len(set(expected)) == len(expected) and set(expected) < set(tests)
    # The order of the file is the order of the run: a healthy test follows each fault.
    assert tests == sorted(tests)
    whole = script.runs()[0]
    assert whole.outcomes.startswith(f"{len(tests)} collected = ")
    assert sum(map(int, whole.outcomes.split()[3::3])) == len(tests)


USES = """
    import pytest

    @pytest.fixture
    def operands():
        if True:
            pytest.skip("needs a CUDA device")

    @pytest.mark.needs_gpus(2)
    def test_by_a_mark(): pass

    @pytest.mark.gpu_exclusive
    def test_alone(): pass

    @pytest.mark.skipif(False, reason="needs an NVIDIA GPU")
    def test_by_a_reason(): pass

    def test_by_a_fixture(operands): pass

    def test_by_its_own_skip():
        pytest.skip("this GPU has no room")

    @pytest.mark.skipif(True, reason="a GPU has no sparse files")
    def test_without_one(): pass

    @pytest.mark.skipif(False, reason="needs POSIX")
    def test_of_another_need(tmp_path): pass
"""


def test_tests_that_use_a_gpu_are_found_by_their_marks_and_reasons(
    suite: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcomes = tmp_path / "outcomes"
    monkeypatch.setenv("TILEWRIGHT_GPU_OUTCOMES", str(outcomes))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    )
    files = {"test_uses.py": USES, "test_either.py": "HAS_GPU = True\ndef test_a(): pass\n"}
    ran = suite(files, "-p", "gpu_tests", "-n", "1")
    assert ran.status == 0, ran.text
    phases = [json.loads(line) for line in outcomes.read_text().splitlines()]
    assert {phase["id"]: phase["gpu"] for phase in phases} == {
        "test_either.py::test_a": "if there",
        **{
            f"test_uses.py::test_{name}": "only"
            for name in ("by_a_mark", "alone", "by_a_reason", "by_a_fixture", "by_its_own_skip")
        },
    }
    reasons = {phase["id"]: phase["reason"] for phase in phases if phase["outcome"] == "skipped"}
    assert reasons["test_uses.py::test_by_a_fixture"] == "needs a CUDA device"
    assert "needs 2 GPUs" in reasons["test_uses.py::test_by_a_mark"]


TIMED = """
    import pytest

    HAS_GPU = True

    def test_quick(): pass

    def test_slow(): pass

    def test_left_out(): pass

    def test_new(): pass

    @pytest.mark.skipif(False, reason="needs an NVIDIA GPU")
    def test_slow_on_a_gpu(): pass

    @pytest.fixture
    def compiled_facts(): pass

    def test_for_other_devices(compiled_facts): pass

    @pytest.mark.long
    def test_that_is_not_asked_for(): pass
"""


def test_what_had_no_time_comes_first_and_what_has_none_is_left_out(
    suite: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finder = load("gpu_tests")
    outcomes, last = tmp_path / "outcomes", tmp_path / "last.json"
    told: dict[str, list[Any]] = {name: ["passed", 90.0] for name in ("slow", "slow_on_a_gpu")}
    told |= {"that_is_not_asked_for": ["passed", 90.0], "quick": ["passed", 0.1]}
    told |= {"left_out": ["skipped", 0.0, finder.NO_TIME]}
    tests = {f"test_timed.py::test_{name}": entry for name, entry in told.items()}
    last.write_text(json.dumps({"tests": tests}))
    monkeypatch.setenv("TILEWRIGHT_GPU_OUTCOMES", str(outcomes))
    monkeypatch.setenv("TILEWRIGHT_GPU_LAST", str(last))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    )
    ran = {}
    # Room for all of five minutes; for less; less time than the longest ones need at their turn.
    for left_s, room_s in ((3600, 320), (3600, 230), (110, 3600)):
        outcomes.write_text("")
        monkeypatch.setenv("TILEWRIGHT_GPU_UNTIL", str(time.time() + left_s))
        monkeypatch.setenv("TILEWRIGHT_GPU_ROOM", str(room_s))
        options = ("-p", "gpu_tests", "-n", "1", "-m", "not long")
        assert suite({"test_timed.py": TIMED}, *options).status == 0
        phases = [json.loads(line) for line in outcomes.read_text().splitlines()]
        ran[left_s, room_s] = [
            phase["id"].partition("test_timed.py::test_")[2]
            for phase in phases
            if phase["when"] == "call"
        ]
    assert ran[3600, 320] == ["left_out", "new", "slow_on_a_gpu", "slow", "quick"]
    assert ran[3600, 230] == ["left_out", "new", "slow_on_a_gpu", "quick", "slow"]
    assert ran[110, 3600] == ["left_out", "new", "quick"]


def test_candidates_mention_a_gpu_or_their_conftest_does(tmp_path: Path) -> None:
    finder = load("gpu_tests")
    for path, text in {
        "a/test_plain.py": "def test_a(): pass",
        "a/test_gpu.py": "reason='needs an NVIDIA GPU'",
        "b/conftest.py": "skip('needs a CUDA device')",
        "b/c/test_below.py": "def test_a(): pass",
        # The folder's own conftest is everybody's.
        "conftest.py": "# with no GPU",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    names = [path.name for path in finder.candidates(tmp_path)]
    assert names == ["test_gpu.py", "test_below.py"]


def test_a_record_holds_the_worst_phase_of_each_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    record = load("record")
    phases = [
        ("a", "passed", ""),
        ("a", "failed", "why"),
        ("a", "passed", ""),
        ("b", "skipped", "no"),
    ]
    lines = [
        json.dumps({"id": i, "outcome": o, "seconds": 0.5, "gpu": "only", "reason": r})
        for i, o, r in phases
    ]
    (tmp_path / "outcomes").write_text("\n".join(lines))
    tests = record.read_outcomes(tmp_path / "outcomes")
    assert tests["a"] == {"outcome": "failed", "seconds": 1.5, "gpu": "only", "reason": "why"}
    record.write(tmp_path / "record.json", {"what": "x", "pytest": {"totals": {}, "tests": tests}})
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["tests"] == {"a": ["failed", 1.5, "why"], "b": ["skipped", 0.5, "no"]}


def test_the_longest_pairs_come_first_and_what_has_no_time_is_left_out(
    suite: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    pairs = load("pairs")
    # The record tells of two directions; a third has none.
    seconds = {"plain scores, dense": (["passed"], 5.0), "backward": (["passed", "skipped"], 40.0)}
    record = {
        direction: {"tests": dict.fromkeys(outcomes, 2), "seconds_of_tests": 2 * each}
        for direction, (outcomes, each) in seconds.items()
    }
    last, lines = tmp_path / "last.json", tmp_path / "lines"
    last.write_text(json.dumps(record))
    dense, other, backward = (
        "::".join(pairs.DIRECTIONS[name])
        for name in ("plain scores, dense", "plain scores, packed", "backward")
    )
    expected = pairs.expected_s(str(last))
    assert [expected[name] for name in (dense, other, backward)] == [5.0, 15.0, 40.0]
    files: dict[str, str] = {}
    for name in (dense, other, backward):
        path, _, test = name.partition("::")
        files[f"{pairs.FOLDER}/{path}"] = files.get(f"{pairs.FOLDER}/{path}", "") + (
            f"def {test}(record_property): record_property('attention_pairs', 12)\n"
        )
    monkeypatch.setenv("PAIRS_LINES", str(lines))
    monkeypatch.setenv("PAIRS_LAST", str(last))
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent), prepend=os.pathsep)
    for left_s, outcomes in ((3600, ["passed"] * 3), (60, ["skipped", "passed", "passed"])):
        lines.write_text("")
        monkeypatch.setenv("PAIRS_UNTIL", str(time.time() + left_s))
        assert suite(files, "-p", "pairs", "-n", "1").status == 0
        told = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [line["test"] for line in told] == [backward, other, dense]
        assert [line["outcome"] for line in told] == outcomes
        assert pairs.summed(told)["cases_run"] == 12 * outcomes.count("passed")


def test_declined_pairs_are_counted_by_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    line = {"test": "a", "outcome": "passed", "seconds": 1.0, "reason": ""}
    lines = [{**line, "values": values} for values in ([9, "no bias", "no bias"], [3, "too wide"])]
    lines.append({**line, "outcome": "failed", "values": [], "reason": "off by 2"})
    told = load("pairs").summed(lines)
    assert (told["cases_run"], told["cases_declined"]) == (12, 3)
    assert told["declined_by_reason"] == {"no bias": 2, "too wide": 1}
    assert told["tests"] == {"failed": 1, "passed": 2} and told["failed"] == {"a": "off by 2"}


def test_a_run_tells_how_far_it_is_and_is_ended_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    record = load("record")
    monkeypatch.setattr(record, "_TOLD_EVERY_S", 0.2)
    code = "import time; print('.... [  4%]', '.... [ 37%]', flush=True); time.sleep({})"
    command = [sys.executable, "-c"]
    assert record.ended([*command, code.format(60)], tmp_path / "log", 2.0) == 124
    assert "s: 37% of the tests are over" in capsys.readouterr().out
    assert record.ended([*command, code.format(0)], tmp_path / "log", 60.0) == 0
