"""Run every test that uses a GPU, and ``tilewright verify`` there, and write a record of it.

    PYTHONPATH=src python test/gpu/record.py --record test/gpu/records/DEVICE.json

Needs a CUDA device, torch, triton, pytest and pytest-xdist. Which tests those are is found by their
marks and reasons (gpu_tests.py beside this file). The record holds device, versions, commands, each
test's outcome and seconds, and what verify found; the exit status is 0 if nothing failed. What the
record before (--last; the device's in test/gpu/records) lacks for want of time comes first.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_tests

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "PYTHONPATH=src python test/gpu/record.py --record RECORD.json"
_VERSIONS = ("torch", "triton", "numpy", "pytest", "pytest-xdist")
# Verify's runs, side by side: compiling takes most of their time. What no family is named of is
# examined by the last of ours.
_APART = (
    ("attention",),
    ("attention_backward",),
    ("attention_ragged", "attention_paged"),
    ("norms",),
)
_SDPA = ("attention", "--target", "tilewright.testing.verify.adapters:torch_sdpa")


def verify_runs() -> list[tuple[str, tuple[str, ...]]]:
    """A name and the arguments of each run."""
    from tilewright.testing.verify.families import FAMILIES, GROUPS

    apart = {n for names in _APART for name in names for n in GROUPS.get(name, (name,))}
    rest = tuple(name for name in FAMILIES if name not in apart)
    ours = [("our best plan", names) for names in (*_APART, rest)]
    return [*ours, ("PyTorch's attention", _SDPA)]


_SEVERITY = {"passed": 0, "skipped": 1, "failed": 2, "crashed": 3}
_SHOWN = 6
_RESERVE_S = 5.0
# Until the first test begins, and from the end of the last one to that of pytest.
_STARTING_S, _ENDING_S = 25.0, 6.0
# How much of the time between workers have a test to run.
_BUSY = 0.95
# How often a run tells how far it is, and how pytest does.
_TOLD_EVERY_S = 20.0
_SHARE = re.compile(r"\[ *(\d+%)\]")
_RECORDS = ROOT / "test/gpu/records"


@dataclass(frozen=True)
class Verifying:
    """One run of verify under way."""

    name: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]
    found: Path
    log: Path


def ended(command: list[str], log: Path, limit_s: float) -> int:
    """Run pytest with its output in a file; its exit status, or 124 if it was ended at the limit.

    How far it is, is printed now and then.
    """
    began = time.monotonic()
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        while (left_s := began + limit_s - time.monotonic()) > 0:
            try:
                return process.wait(timeout=min(left_s, _TOLD_EVERY_S))
            except subprocess.TimeoutExpired:
                shares = _SHARE.findall(log.read_text(errors="replace"))
                told = f"{shares[-1]} of the tests are over" if shares else "tests are being run"
                print(f"{time.monotonic() - began:.0f} s: {told}", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return 124


def last_record(device: str, subject: str) -> Path | None:
    """The record of the device that is kept of "tests" or "pairs", if there is one."""
    name = "_".join(device.lower().split())
    path = _RECORDS / f"{name}_{subject}.json"
    return path if path.exists() else None


def run_tests(
    folder: Path, workers: int, levels: str, limit_s: float, last: Path | None
) -> dict[str, Any]:
    """Run the tests; what came of each, and of all."""
    outcomes, log = folder / "outcomes", folder / "pytest.log"
    outcomes.touch()
    os.environ[gpu_tests.OUTCOMES] = str(outcomes)
    os.environ[gpu_tests.UNTIL] = str(time.time() + limit_s - _ENDING_S)
    os.environ[gpu_tests.ROOM] = str(workers * (limit_s - _STARTING_S - _ENDING_S) * _BUSY)
    os.environ[gpu_tests.LAST] = "" if last is None else str(last.resolve())
    files = [str(path.relative_to(ROOT)) for path in gpu_tests.candidates(ROOT / "test/python")]
    head = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "gpu_tests"]
    head += ["-p", "no:cacheprovider", "-q", "-n", str(workers), "--maxschedchunk", "2"]
    head += ["-m", levels]
    began = time.monotonic()
    status = ended([*head, *files], log, limit_s)
    seconds = round(time.monotonic() - began, 1)
    tests = read_outcomes(outcomes)
    text = log.read_text(errors="replace")
    counts = collections.Counter(test["outcome"] for test in tests.values())
    physical = [line.strip() for line in text.splitlines() if line.startswith("large storage:")]
    if status != 0:
        print(text[-6000:])
    return {
        "command": shlex.join(["python", *head[1:], "FILES"]),
        "exit_status": status,
        "seconds": seconds,
        "totals": dict(sorted(counts.items())),
        "large_storage": physical,
        "tests": tests,
    }


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """By test: the worst outcome of its phases, their seconds together, and a reason if any."""
    tests: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        phase = json.loads(line)
        test = tests.setdefault(
            phase["id"], {"outcome": "passed", "seconds": 0.0, "gpu": phase["gpu"], "reason": ""}
        )
        test["seconds"] = round(test["seconds"] + phase["seconds"], 2)
        if _SEVERITY[phase["outcome"]] > _SEVERITY[test["outcome"]]:
            test["outcome"], test["reason"] = phase["outcome"], phase["reason"]
    return dict(sorted(tests.items()))


def start_verify(folder: Path) -> list[Verifying]:
    """Start verify's runs, side by side."""
    started = []
    for index, (name, arguments) in enumerate(verify_runs()):
        found, log = folder / f"verify-{index}.json", folder / f"verify-{index}.log"
        command = [sys.executable, "-m", "tilewright", "verify", *arguments]
        command += ["--device", "cuda", "--json", str(found), "--brief"]
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        started.append(Verifying(name, arguments, process, found, log))
    return started


def finish_verify(started: list[Verifying], end: float) -> list[dict[str, Any]]:
    """Wait for them until ``end`` at most; counts, and what is broken or deviates."""
    results = []
    for run in started:
        try:
            status = run.process.wait(timeout=max(end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            run.process.kill()
            status = 124
        command = ["tilewright", "verify", *run.arguments, "--device", "cuda"]
        result: dict[str, Any] = {"name": run.name, "command": shlex.join(command)}
        result["exit_status"] = status
        if run.found.exists():
            document = json.loads(run.found.read_text())
            result["families"] = document["families"]
            result["counts"] = document["counts"]
            for kind in ("broken", "deviates"):
                result[kind] = [
                    f"{c['family']}, {c['case']}: {c['rule']} ({c['detector']}): {c['text'][:300]}"
                    for c in document["checks"]
                    if c["status"] == kind
                ]
        if status != 0:
            print(run.log.read_text(errors="replace")[-3000:])
        results.append(result)
    return results


def machine() -> dict[str, Any]:
    """Device and versions; asked in a child, so that this process holds no context."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'device': p.name, 'capability': [p.major, p.minor], "
        "'cuda': torch.version.cuda}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {**json.loads(told.stdout), "versions": versions}


def write(path: Path, record: dict[str, Any]) -> None:
    """As JSON, with one line a test."""
    tests = record["pytest"].pop("tests")
    text = json.dumps(record, indent=1)
    lines = []
    for name, test in tests.items():
        kept = [test["outcome"], test["seconds"], *([test["reason"]] if test["reason"] else [])]
        lines.append(f"  {json.dumps(name)}: {json.dumps(kept)}")
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text[:-2]},\n "tests": {{\n{body}\n }}\n}}\n', encoding="utf-8")
    record["pytest"]["tests"] = tests


def main() -> int:
    """Run everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, required=True, metavar="PATH")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="test processes (8)")
    parser.add_argument("--levels", default="L0", metavar="MARKS", help="mark expression (L0)")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="of all")
    parser.add_argument("--last", type=Path, metavar="PATH", help="the record before")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.limit
    # Children find the package, and the plugin beside this file.
    places = [str(ROOT / "src"), str(Path(__file__).resolve().parent)]
    sys.path.insert(0, places[0])
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Many processes whose references each use all cores take turns instead of work.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    record: dict[str, Any] = {
        "what": "all tests that use a GPU, and tilewright verify on it",
        "command": COMMAND,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **machine(),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        verifying = start_verify(folder)
        limit = end - time.monotonic() - _RESERVE_S
        last = arguments.last or last_record(record["device"], "tests")
        record["pytest"] = run_tests(folder, arguments.workers, arguments.levels, limit, last)
        write(arguments.record, record)
        record["verify"] = finish_verify(verifying, end)
    write(arguments.record, record)
    tests = record["pytest"]
    bad = [
        name for name, test in tests["tests"].items() if test["outcome"] in ("failed", "crashed")
    ]
    print(f"tests: {tests['totals']} in {tests['seconds']} s, status {tests['exit_status']}")
    for name in bad[:_SHOWN]:
        print(f"  {name}: {tests['tests'][name]['reason'][:200]}")
    for result in record["verify"]:
        what = ", ".join([result["name"], *result.get("families", ())])
        print(f"verify, {what}: {result.get('counts')}, status {result['exit_status']}")
        for line in result.get("broken", ())[:_SHOWN]:
            print(f"  {line}")
    statuses = [tests["exit_status"], *(result["exit_status"] for result in record["verify"])]
    return 0 if not any(statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
