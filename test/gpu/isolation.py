"""Isolation on a GPU: real faults of a device, each ending one worker and no more.

    PYTHONPATH=src python test/gpu/isolation.py --record RECORD.json

Needs a CUDA device, torch, triton, pytest and pytest-xdist; nothing of it runs under pytest itself.
It lays out a suite whose tests end the device's context in every known way, with healthy tests
between them, runs it as a stranger would, and compares every outcome. The record tells device,
versions, commands and outcomes, and how each victim was reported; the exit status is 0 if all were
as expected. A run that does not end in its time is ended, and is not as expected.
"""

from __future__ import annotations

import argparse
import concurrent.futures
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
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

INI = """\
[pytest]
addopts = -p tilewright.testing.plugin
tilewright_isolation = true
tilewright_deadline_s = 240
"""

SUITE = '''\
import os
import time

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def store_far(pointer, distance):
    tl.store(pointer + distance, 1.0)


@triton.jit
def spin(flag):
    value = tl.load(flag, volatile=True)
    while value == 0:
        value = tl.load(flag, volatile=True)


def check_device():
    """A product with a known result; tells how long the device kept us waiting."""
    begin = time.monotonic()
    x = torch.eye(256, device="cuda")
    assert torch.equal(x @ x, x)
    torch.cuda.synchronize()
    print("WAITED %s %.1f" % (os.environ.get("PYTEST_CURRENT_TEST"), time.monotonic() - begin))


def store_illegally():
    # Terabytes beyond any allocation.
    store_far[(1,)](torch.zeros(1, device="cuda"), 2**42)


pytestmark = pytest.mark.needs_gpus(1)


def test_01_healthy():
    check_device()


def test_02_illegal_address_noticed():
    store_illegally()
    torch.cuda.synchronize()


def test_03_healthy():
    check_device()


def test_04_illegal_address_passes():
    store_illegally()


def test_05_healthy():
    check_device()


def test_06_device_assert_noticed():
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([1000], device="cuda")].cpu()


def test_07_healthy():
    check_device()


def test_08_device_assert_passes():
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([1000], device="cuda")]


def test_09_healthy():
    check_device()


def test_10_context_poisoned_before_a_skip():
    store_illegally()
    pytest.skip("after the launch")


def test_11_healthy():
    check_device()


@pytest.mark.deadline(15)
def test_12_kernel_never_ends_and_the_test_waits():
    spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()


def test_13_healthy():
    check_device()


@pytest.mark.deadline(15)
def test_14_kernel_never_ends_and_the_test_passes():
    spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))


def test_15_healthy():
    check_device()


def test_16_an_ordinary_failure_keeps_the_worker():
    check_device()
    assert 1 == 2


def test_17_out_of_memory_keeps_the_worker():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_exclusive
def test_18_exclusive():
    check_device()


@pytest.mark.needs_gpus(1000)
def test_19_needs_more():
    raise AssertionError("ran")


def test_20_last_one_poisons():
    store_illegally()
'''

# Everything else passes.
FAILED = (
    "test_02_illegal_address_noticed",
    "test_04_illegal_address_passes",
    "test_06_device_assert_noticed",
    "test_08_device_assert_passes",
    "test_10_context_poisoned_before_a_skip",
    "test_16_an_ordinary_failure_keeps_the_worker",
    "test_20_last_one_poisons",
)
CRASHED = (
    "test_12_kernel_never_ends_and_the_test_waits",
    "test_14_kernel_never_ends_and_the_test_passes",
)
SKIPPED = ("test_19_needs_more",)


COMMAND = "PYTHONPATH=src python test/gpu/isolation.py --record RECORD.json"
# Lines of a run's output that its record keeps.
_LINES = 40
_AFTER_KILL_S = 30.0
DEAD = "the context of CUDA device 0 is dead"


@dataclass(frozen=True)
class Run:
    """One run of the suite, or of a part of it."""

    name: str
    arguments: tuple[str, ...]
    # What the plugin's line of outcomes says.
    outcomes: str
    failed: tuple[str, ...]
    # Text that the output must hold.
    says: tuple[str, ...] = ()


def runs() -> tuple[Run, ...]:
    """What is run, and what must come of it."""
    names = re.findall(r"^def (test_\w+)", SUITE, re.MULTILINE)
    count = len(names)
    passed = count - len(FAILED) - len(CRASHED) - len(SKIPPED)
    whole = f"{count} collected = {passed} passed + {len(FAILED)} failed + " + (
        f"{len(SKIPPED)} skipped + {len(CRASHED)} crashed"
    )
    victims = tuple(sorted(FAILED + CRASHED))
    hang = "it passed its deadline of 0:00:15"
    says = (DEAD, hang, "needs 1000 GPUs")
    # A worker's start takes seconds, so these run parts of the suite, and wait for no deadline.
    by_file = ("01", "02", "03", "04", "05", "10", "11")
    by_scope = ("08", "09", "16", "17", "18", "19", "20")
    return (
        Run("one injected worker", (), whole, victims, says),
        Run(
            "no worker: a dead context stops the run",
            ("-s", "-k", _any_of("01", "04", "05")),
            "3 collected = 1 passed + 1 failed + 1 without outcome",
            ("test_04_illegal_address_passes",),
            (DEAD, "No worker process to replace, so no later test can run"),
        ),
        Run("two workers on one device", ("-n", "2"), whole, victims, says),
        Run(
            "two workers by file",
            ("-n", "2", "--dist", "loadfile", "-k", _any_of(*by_file)),
            "7 collected = 4 passed + 3 failed",
            _victims(by_file),
            (DEAD,),
        ),
        Run(
            "two workers by scope",
            ("-n", "2", "--dist", "loadscope", "-k", _any_of(*by_scope)),
            "7 collected = 3 passed + 3 failed + 1 skipped",
            _victims(by_scope),
            (DEAD, "needs 1000 GPUs"),
        ),
    )


def _any_of(*numbers: str) -> str:
    return " or ".join(f"test_{number}" for number in numbers)


def _victims(numbers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(name for name in FAILED + CRASHED if name[5:7] in numbers))


def perform(run: Run, folder: Path, end: float) -> dict[str, Any]:
    """Run it until ``end`` at most; tell what came of it beside what was expected."""
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-rA"]
    command += run.arguments
    begin = time.monotonic()
    status, text = _run(command, folder, max(end - time.monotonic(), 1.0))
    seconds = time.monotonic() - begin
    line = re.search(r"^outcomes: (.*)$", text, re.MULTILINE)
    outcomes = line[1].strip() if line else ""
    told = dict(re.findall(r"^(?:FAILED|ERROR) \S+::(test_\w+)(?: - (.*))?$", text, re.MULTILINE))
    missing = [part for part in run.says if part not in text]
    as_expected = (
        status == 1
        and outcomes == run.outcomes
        and sorted(told) == list(run.failed)
        and not missing
    )
    if not as_expected:
        print(text[-20000:])
    waited = {
        name: float(s) for name, s in re.findall(r"WAITED \S+::(\w+) .*? ([\d.]+)$", text, re.M)
    }
    return {
        **asdict(run),
        "command": shlex.join(["python", *command[1:]]),
        "exit_status": status,
        "found_outcomes": outcomes,
        "found_failed": {name: told[name] for name in sorted(told)},
        "said": _told(text),
        "missing_text": missing,
        "longest_wait_of_a_healthy_test_s": max(waited.values(), default=None),
        "said_that_device_work_goes_on": "device work that it started goes on" in text,
        "seconds": round(seconds, 1),
        "as_expected": as_expected,
    }


def _told(text: str) -> list[str]:
    """The distinct lines that tell how workers ended, in the order of the output."""
    parts = ("ended while it", DEAD, "has not ended after", "so no later test can run")
    lines = (line.strip() for line in text.splitlines() if any(part in line for part in parts))
    kept = (line for line in lines if not line.startswith(("FAILED", "ERROR")))
    return list(dict.fromkeys(kept))[:_LINES]


def _run(command: list[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Exit status and output; beyond the limit, it and its workers are ended (status 124)."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that the driver holds may keep its end of the pipe.
            try:
                text, _ = process.communicate(timeout=_AFTER_KILL_S)
            except subprocess.TimeoutExpired:
                text = "its output did not end either"
            return 124, f"{text}\nended after {limit_s:.0f} s"
        return process.returncode, text


def machine() -> dict[str, Any]:
    """Device and versions; asked in a child, so that this process holds no context."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'device': p.name, 'capability': [p.major, p.minor], "
        "'cuda': torch.version.cuda}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "triton", "pytest", "pytest-xdist"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {**json.loads(told.stdout), "versions": versions}


def main() -> int:
    """Run everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, required=True, metavar="PATH")
    parser.add_argument("--only", metavar="TEXT", help="runs whose name holds this")
    parser.add_argument(
        "--limit", type=float, default=900.0, metavar="SECONDS", help="for all runs together (900)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time; faults stay in theirs (1)"
    )
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.limit
    # The children run elsewhere, and find the package where this one does.
    source = Path(__file__).resolve().parents[2] / "src"
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    for name in ("PYTEST_ADDOPTS", "TILEWRIGHT_NO_ISOLATION"):
        os.environ.pop(name, None)
    # Of the installed plugins, xdist alone.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # So that pytest's summary has whole reasons.
    os.environ["COLUMNS"] = "200"
    from tilewright.testing import placement

    if not placement.devices(os.environ):
        # Some containers show no device file; the plugin then needs to be told.
        os.environ[placement.DEVICES] = "0"
    record: dict[str, Any] = {
        "what": "isolation of tests that end a device's context",
        "command": f"{COMMAND} --jobs {arguments.jobs}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **machine(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pytest.ini").write_text(INI)
        (folder / "test_faults.py").write_text(SUITE)
        chosen = [run for run in runs() if not arguments.only or arguments.only in run.name]
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            limited = [pool.submit(perform, run, folder, end) for run in chosen]
            for run, future in zip(chosen, limited, strict=True):
                result = future.result()
                record["runs"].append(result)
                verdict = "as expected" if result["as_expected"] else "NOT AS EXPECTED"
                print(f"{run.name}: {result['found_outcomes']} in {result['seconds']} s: {verdict}")
                arguments.record.parent.mkdir(parents=True, exist_ok=True)
                arguments.record.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(result["as_expected"] for result in record["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
