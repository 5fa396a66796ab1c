"""Isolation on a GPU: real faults of a device, each ending one worker and no more.

    PYTHONPATH=src python test/gpu/isolation.py --record RECORD.json

Needs a CUDA device, torch, triton, pytest and pytest-xdist; nothing of it runs under pytest itself.
It lays out a suite whose tests end the device's context in every known way, with healthy tests
between them, runs it as a stranger would, and compares every outcome. The record tells device,
versions, commands and outcomes; the exit status is 0 if all were as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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


@pytest.mark.deadline(25)
def test_12_kernel_never_ends_and_the_test_waits():
    spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()


def test_13_healthy():
    check_device()


@pytest.mark.deadline(25)
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
    says = (
        "the context of CUDA device 0 is dead",
        "it passed its deadline of 0:00:25",
        "needs 1000 GPUs",
    )
    return (
        Run("one injected worker", (), whole, victims, says),
        Run("two workers on one device", ("-n", "2"), whole, victims, says),
        Run("two workers by file", ("-n", "2", "--dist", "loadfile"), whole, victims, says),
        Run(
            "no worker: a dead context stops the run",
            ("-s", "-k", "test_01 or test_04 or test_05"),
            "3 collected = 1 passed + 1 failed + 1 without outcome",
            ("test_04_illegal_address_passes",),
            ("No worker process to replace, so no later test can run",),
        ),
    )


def perform(run: Run, folder: Path) -> dict[str, Any]:
    """Run it, and tell what came of it beside what was expected."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *run.arguments]
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
    )
    seconds = time.monotonic() - begin
    text = done.stdout + done.stderr
    line = re.search(r"^outcomes: (.*)$", text, re.MULTILINE)
    outcomes = line[1].strip() if line else ""
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) \S+::(test_\w+)", text, re.MULTILINE)))
    missing = [part for part in run.says if part not in text]
    as_expected = (
        done.returncode == 1
        and outcomes == run.outcomes
        and failed == list(run.failed)
        and not missing
    )
    if not as_expected:
        print(text[-20000:])
    waited = {
        name: float(s) for name, s in re.findall(r"WAITED \S+::(\w+) .*? ([\d.]+)$", text, re.M)
    }
    return {
        **asdict(run),
        "command": " ".join(["python", *command[1:]]),
        "exit_status": done.returncode,
        "found_outcomes": outcomes,
        "found_failed": failed,
        "missing_text": missing,
        "longest_wait_of_a_healthy_test_s": max(waited.values(), default=None),
        "said_that_device_work_goes_on": "device work that it started goes on" in text,
        "seconds": round(seconds, 1),
        "as_expected": as_expected,
    }


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
        versions[name] = metadata.version(name)
    return {**json.loads(told.stdout), "versions": versions}


def main() -> int:
    """Run everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, required=True, metavar="PATH")
    parser.add_argument("--only", metavar="TEXT", help="runs whose name holds this")
    arguments = parser.parse_args()
    # The children run elsewhere, and find the package where this one does.
    source = Path(__file__).resolve().parents[2] / "src"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    for name in ("PYTEST_ADDOPTS", "TILEWRIGHT_NO_ISOLATION"):
        os.environ.pop(name, None)
    record: dict[str, Any] = {
        "what": "isolation of tests that end a device's context",
        "command": "PYTHONPATH=src python test/gpu/isolation.py --record RECORD.json",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **machine(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pytest.ini").write_text(INI)
        (folder / "test_faults.py").write_text(SUITE)
        for run in runs():
            if arguments.only and arguments.only not in run.name:
                continue
            result = perform(run, folder)
            record["runs"].append(result)
            verdict = "as expected" if result["as_expected"] else "NOT AS EXPECTED"
            print(f"{run.name}: {result['found_outcomes']} in {result['seconds']} s: {verdict}")
            arguments.record.parent.mkdir(parents=True, exist_ok=True)
            arguments.record.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(result["as_expected"] for result in record["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
