"""Run every pair of attention's features on a GPU and write a record: how many cases, and declines.

    PYTHONPATH=src python test/gpu/pairs.py --record test/gpu/records/DEVICE_pairs.json

Needs a CUDA device, torch, triton, pytest and pytest-xdist. The tests are those of level L2 in
test_triton_attention_pairs.py and test_triton_plain_pairs.py and, on compute capability 9.0, in
test_hopper_attention_pairs.py and test_hopper_backward_pairs.py; each runs a dozen or a few dozen
cases against the float64 oracle.
The record holds device, versions, command, and for each direction of each engine, and for few
queries whose keys are split, the cases that ran, those that an engine declined by reason, and the
tests that failed; the exit status is 0 if none did and all were run. The directions whose tests are
longest in the record before (--last; the device's in test/gpu/records) come first.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import shlex
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import record as gpu_record

COMMAND = "PYTHONPATH=src python test/gpu/pairs.py --record RECORD.json"
FOLDER = "test/python/sdpa"
_TRITON = "triton/test_triton_attention_pairs.py"
_PLAIN = "triton/test_triton_plain_pairs.py"
# What is told apart: a file, and a test in it.
DIRECTIONS = {
    "forward": (_TRITON, "test_every_pair_of_features"),
    "split keys": (_TRITON, "test_every_pair_of_features_where_keys_are_split"),
    "backward": (_TRITON, "test_every_pair_of_features_backward"),
    "plain scores, dense": (_PLAIN, "test_dense"),
    "plain scores, packed": (_PLAIN, "test_packed"),
    "plain scores, few queries": (_PLAIN, "test_few_queries"),
    "plain scores, several tiles": (_PLAIN, "test_queries_of_several_tiles"),
    "plain scores, backward": (_PLAIN, "test_backward"),
}
ON_HOPPER = {
    "forward on Hopper": ("hopper/test_hopper_attention_pairs.py", "test_every_pair_of_features"),
    "backward on Hopper": ("hopper/test_hopper_backward_pairs.py", "test_every_pair_of_features"),
}
# In the environment: where the plugin below writes, when all must be over, and the record before.
_LINES, _UNTIL, _LAST = "PAIRS_LINES", "PAIRS_UNTIL", "PAIRS_LAST"
_PROPERTY = "attention_pairs"
# From the end of the last test to that of pytest.
_ENDING_S = 6.0
# What a test takes of a direction that has no record, and how much longer than others one may take.
_UNKNOWN_S = 15.0
_SLOWER = 2.0


def direction_of(test: str) -> str:
    """File and name of a test, without its parameters."""
    return test.removeprefix(f"{FOLDER}/").partition("[")[0]


@functools.cache
def expected_s(last: str) -> dict[str, float]:
    """Seconds of a test of each direction, by its file and name, as they were in a record."""
    record = json.loads(Path(last).read_text(encoding="utf-8")) if last else {}
    expected = {}
    for direction, names in (DIRECTIONS | ON_HOPPER).items():
        told = record.get(direction, {"tests": {}})
        ran = sum(n for outcome, n in told["tests"].items() if outcome != "skipped")
        expected["::".join(names)] = told["seconds_of_tests"] / ran if ran else _UNKNOWN_S
    return expected


def _expected_s(item: Any) -> float:
    return expected_s(os.environ[_LAST]).get(direction_of(item.nodeid), _UNKNOWN_S)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin: the longest first, so that all processes end at about one time."""
    items.sort(key=_expected_s, reverse=True)


def pytest_runtest_setup(item: Any) -> None:
    """As a plugin: leave a test out when the time that is left is short of what it may take."""
    import pytest

    if float(os.environ[_UNTIL]) - time.time() < _SLOWER * _expected_s(item):
        pytest.skip("the time is over")


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin: a line a test, written where the test's process is not."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line = {
        "test": report.nodeid.removeprefix(f"{FOLDER}/"),
        "outcome": report.outcome,
        "seconds": report.duration,
        "values": [value for name, value in report.user_properties if name == _PROPERTY],
        "reason": "" if report.passed else str(report.longrepr)[-1500:],
    }
    with open(os.environ[_LINES], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def summed(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of the cases of one direction."""
    values = [value for line in lines for value in line["values"]]
    declined = collections.Counter(value for value in values if isinstance(value, str))
    outcomes = collections.Counter(line["outcome"] for line in lines)
    return {
        "tests": dict(sorted(outcomes.items())),
        "seconds_of_tests": round(sum(line["seconds"] for line in lines), 1),
        "cases_run": sum(value for value in values if isinstance(value, int)),
        "cases_declined": sum(declined.values()),
        "declined_by_reason": dict(declined.most_common()),
        "failed": {line["test"]: line["reason"] for line in lines if line["outcome"] == "failed"},
    }


def main() -> int:
    """Run the tests and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, required=True, metavar="PATH")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="test processes (16)")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="of all")
    parser.add_argument("--last", type=Path, metavar="PATH", help="the record before")
    arguments = parser.parse_args()
    places = [str(gpu_record.ROOT / "src"), str(Path(__file__).resolve().parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Many processes whose references each use all cores take turns instead of work.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ[_UNTIL] = str(time.time() + arguments.limit - _ENDING_S)
    head = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pairs", "-p", "no:cacheprovider"]
    # A test is handed out when a process is free for it: some compile ten times as long as others.
    machine = gpu_record.machine()
    last = arguments.last or gpu_record.last_record(machine["device"], "pairs")
    os.environ[_LAST] = "" if last is None else str(last.resolve())
    directions = DIRECTIONS | (ON_HOPPER if machine["capability"] == [9, 0] else {})
    head += ["-q", "-n", str(arguments.workers), "--maxschedchunk", "1", "-m", "L2"]
    head += [f"{FOLDER}/{file}" for file in dict.fromkeys(file for file, _ in directions.values())]
    found: dict[str, Any] = {
        "what": "every pair of attention's features on an engine, against the float64 oracle",
        "command": COMMAND,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **machine,
        "pytest": shlex.join(["python", *head[1:]]),
    }
    with tempfile.TemporaryDirectory() as temporary:
        path, log = Path(temporary) / "lines", Path(temporary) / "pytest.log"
        path.touch()
        os.environ[_LINES] = str(path)
        began = time.monotonic()
        status = gpu_record.ended(head, log, arguments.limit)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if status != 0:
            print(log.read_text(errors="replace")[-6000:])
    found |= {"exit_status": status, "seconds": round(time.monotonic() - began, 1)}
    for direction, names in directions.items():
        test = "::".join(names)
        found[direction] = summed([line for line in lines if direction_of(line["test"]) == test])
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for direction in directions:
        told = found[direction]
        print(
            f"{direction}: {told['cases_run']} cases ran, {told['cases_declined']} declined, "
            f"tests {told['tests']}"
        )
        for reason, count in told["declined_by_reason"].items():
            print(f"  {count} declined: {reason}")
        for test, reason in told["failed"].items():
            print(f"  FAILED {test}: {reason[-300:]}")
    is_whole = all("skipped" not in found[direction]["tests"] for direction in directions)
    return 0 if status == 0 and is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
