"""Device locks and marks, workers' devices."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.testing import locks, placement

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]
HOLDER = """
    import sys, time
    from pathlib import Path
    from tilewright.testing import locks
    devices, exclusive, folder, log, name, hold = sys.argv[1:]
    with locks.held(devices.split(), exclusive=exclusive == "yes", where=Path(folder)):
        with open(log, "a") as file: file.write(name + " in\\n")
        time.sleep(float(hold))
        with open(log, "a") as file: file.write(name + " out\\n")
"""


class Holders:
    """Processes that hold device locks and log when they come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, devices: str, *, exclusive: bool, hold_s: float) -> None:
        self.processes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    textwrap.dedent(HOLDER),
                    devices,
                    "yes" if exclusive else "no",
                    str(self.folder),
                    str(self.log),
                    name,
                    str(hold_s),
                ]
            )
        )

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for(self, line: str) -> None:
        end = time.monotonic() + 60
        while line not in self.lines():
            assert time.monotonic() < end, f"no line {line!r} in {self.lines()}"
            time.sleep(0.01)

    def finish(self) -> list[str]:
        assert [process.wait(timeout=60) for process in self.processes] == [0] * len(self.processes)
        return self.lines()


@pytest.fixture
def holders(tmp_path: Path) -> Holders:
    return Holders(tmp_path)


def test_an_exclusive_holder_is_alone(holders: Holders) -> None:
    holders.start("shared", "0", exclusive=False, hold_s=1.0)
    holders.wait_for("shared in")
    holders.start("exclusive", "0", exclusive=True, hold_s=0.2)
    assert holders.finish() == ["shared in", "shared out", "exclusive in", "exclusive out"]


def test_a_shared_holder_waits_for_an_exclusive_one(holders: Holders) -> None:
    holders.start("exclusive", "0 1", exclusive=True, hold_s=1.0)
    holders.wait_for("exclusive in")
    holders.start("shared", "1", exclusive=False, hold_s=0.0)
    assert holders.finish() == ["exclusive in", "exclusive out", "shared in", "shared out"]


def test_shared_holders_and_other_devices_do_not_wait(holders: Holders) -> None:
    holders.start("first", "0", exclusive=False, hold_s=20.0)
    holders.wait_for("first in")
    holders.start("second", "0", exclusive=False, hold_s=0.0)
    holders.start("other", "1", exclusive=True, hold_s=0.0)
    for process in holders.processes[1:]:
        assert process.wait(timeout=15) == 0
    assert "first out" not in holders.lines()
    holders.processes[0].kill()
    holders.processes[0].wait()


def test_later_shared_holders_queue_behind_a_waiting_exclusive_one(holders: Holders) -> None:
    holders.start("first", "0", exclusive=False, hold_s=2.0)
    holders.wait_for("first in")
    holders.start("exclusive", "0", exclusive=True, hold_s=0.0)
    # It keeps the turnstile while it waits.
    end = time.monotonic() + 60
    with open(holders.folder / "cuda-0.turnstile") as turnstile:
        while True:
            assert time.monotonic() < end
            try:
                fcntl.flock(turnstile, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            fcntl.flock(turnstile, fcntl.LOCK_UN)
            time.sleep(0.01)
    holders.start("second", "0", exclusive=False, hold_s=0.0)
    names = [line.split()[0] for line in holders.finish()[::2]]
    assert names == ["first", "exclusive", "second"]


def test_a_killed_holder_leaves_no_lock(holders: Holders, tmp_path: Path) -> None:
    holders.start("killed", "0", exclusive=True, hold_s=600.0)
    holders.wait_for("killed in")
    holders.processes[0].kill()
    holders.processes[0].wait()
    with locks.held(["0"], exclusive=True, where=tmp_path):
        pass


def test_gpu_exclusive_serializes_across_workers(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEVICES", "0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = """
        import os, pathlib, pytest, time
        def visit(name):
            with open("log", "a") as log: log.write(f"{name} in {os.getpid()}\\n")
            time.sleep(0.3)
            with open("log", "a") as log: log.write(f"{name} out {os.getpid()}\\n")
        @pytest.mark.gpu_exclusive
        @pytest.mark.parametrize("index", range(3))
        def test_exclusive(index): visit("exclusive")
        @pytest.mark.parametrize("index", range(3))
        def test_plain(index): visit("plain")
    """
    ran = suite({"test_a.py": code}, "-n", "2", "--dist", "worksteal")
    assert ran.outcomes == {"collected": 6, "passed": 6}, ran.text
    lines = [line.split() for line in (Path.cwd() / "log").read_text().splitlines()]
    assert len({line[2] for line in lines}) == 2, "one worker ran everything: nothing is shown"
    inside: list[str] = []
    for name, way, _ in lines:
        if way == "in":
            assert "exclusive" not in inside and not (name == "exclusive" and inside), lines
            inside.append(name)
        else:
            inside.remove(name)


def test_needs_gpus_skips_with_the_count(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEVICES", "0,1")
    code = """
        import pytest
        @pytest.mark.needs_gpus(2)
        def test_two(): pass
        @pytest.mark.needs_gpus(3)
        def test_three(): pass
        @pytest.mark.gpu_exclusive
        def test_exclusive(): pass
    """
    ran = suite({"test_a.py": code}, "-s")
    assert ran.outcomes == {"collected": 3, "passed": 2, "skipped": 1}, ran.text
    assert ran.lines_with("1 skipped: needs 3 GPUs, this run may use 2")
    monkeypatch.setenv("TILEWRIGHT_DEVICES", "")
    ran = suite({"test_a.py": code}, "-s")
    assert ran.outcomes == {"collected": 3, "skipped": 3}, ran.text
    assert ran.lines_with("1 skipped: needs 1 GPU, this run may use 0")


def test_workers_take_different_first_devices_of_the_callers(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    code = """
        import os, time
        def test_a():
            open(os.environ["PYTEST_XDIST_WORKER"], "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
            time.sleep(0.3)
        test_b = test_a
    """
    ran = suite({"test_a.py": code, "test_b.py": code}, "-n", "2", "--dist", "loadfile")
    assert ran.status == 0, ran.text
    assert (Path.cwd() / "gw0").read_text() == "3,1"
    assert (Path.cwd() / "gw1").read_text() == "1,3"


@pytest.mark.parametrize(
    ("environment", "nodes", "expected"),
    [
        ({}, 0, ()),
        ({}, 2, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, ()),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 2, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 2, ("1", "0")),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, 2, ("0",)),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 2, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-12ab"}, 2, ("GPU-12ab",)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, ()),
        ({"TILEWRIGHT_DEVICES": "0, 1"}, 0, ("0", "1")),
        ({"TILEWRIGHT_DEVICES": ""}, 2, ()),
    ],
)
def test_devices_of_a_run(
    tmp_path: Path, environment: dict[str, str], nodes: int, expected: tuple[str, ...]
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(nodes))):
        (tmp_path / name).touch()
    assert placement.devices(environment, tmp_path) == expected


def test_each_worker_sees_every_device_of_the_run() -> None:
    assert placement.of_worker(0, ("a", "b", "c")) == ("a", "b", "c")
    assert placement.of_worker(4, ("a", "b", "c")) == ("b", "c", "a")
    assert placement.of_worker(1, ()) == ()
    assert placement.environment_of_worker(1, {"TILEWRIGHT_DEVICES": "0"}) == {}
