"""What ends a process ends one test: signals, exits, hangs, dead contexts, lost memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.testing import controlling

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]
FAILURES = int(pytest.ExitCode.TESTS_FAILED)

# One of each, with a passing test before and after it, and the last test crashes.
MIXED = {
    "test_mixed.py": """
        import ctypes, os, pytest, resource

        def test_first(): pass
        def test_segfault(): ctypes.string_at(0)
        def test_between(): pass
        def test_exits(): os._exit(0)

        @pytest.mark.deadline(1)
        def test_hangs_with_the_interpreter_lock():
            # PyDLL keeps the lock, as a hung driver call does.
            ctypes.PyDLL(None).sleep(600)

        @pytest.fixture
        def crashing(): os.abort()
        def test_set_up(crashing): pass

        def test_leaks():
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**27, size + 2**27))
            globals()["leak"] = []
            while True:
                leak.append(bytearray(2**20))

        def test_has_memory(): assert len(bytearray(2**28)) == 2**28
        def test_fails(): assert 1 == 2
        def test_skips(): pytest.skip("no reason")
        def test_last(): ctypes.string_at(0)
    """,
    "test_ends_collection.py": "import os\nos._exit(7)\ndef test_never(): pass\n",
}


def test_each_victim_is_failed_by_name_and_the_others_run(suite: Suite) -> None:
    ran = suite(MIXED, "-v")
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes == {
        "collected": 11,
        "passed": 3,
        "failed": 2,
        "skipped": 1,
        "crashed": 5,
    }, ran.text
    # pytest's own counts agree: five crashes and two failures are its failed ones.
    assert ran.counts == {"passed": 3, "failed": 7, "skipped": 1, "errors": 1}, ran.text
    assert sorted(ran.failed()) == [
        "test_mixed.py::test_exits",
        "test_mixed.py::test_fails",
        "test_mixed.py::test_hangs_with_the_interpreter_lock",
        "test_mixed.py::test_last",
        "test_mixed.py::test_leaks",
        "test_mixed.py::test_segfault",
        "test_mixed.py::test_set_up",
    ]
    told = "".join(ran.lines_with("ended while it"))
    assert "ran 'test_mixed.py::test_segfault': killed by signal SIGSEGV" in told
    assert "ran 'test_mixed.py::test_exits': it exited with status 0" in told
    assert "it passed its deadline of 0:00:01" in told
    assert "ran 'test_mixed.py::test_set_up': killed by signal SIGABRT" in told
    assert "collected 'test_ends_collection.py': it exited with status 7" in told
    # A leak ends with its process: whatever test came next got a new one.
    assert ran.lines_with("the process ran out of host memory; it runs no further test")
    assert len(ran.lines_with("replacing crashed worker")) == 7
    # The stacks are with the victim and name the line, without the runner's own frames.
    assert ran.lines_with("in test_hangs_with_the_interpreter_lock")
    assert ran.lines_with("in test_segfault")
    assert not ran.lines_with("execnet/gateway_base.py")
    assert ran.lines_with("ERROR test_ends_collection.py")


@pytest.mark.parametrize("mode", ["load", "loadfile", "loadscope"])
def test_two_workers_that_crash_lose_no_test(suite: Suite, mode: str) -> None:
    files = {
        f"test_{letter}.py": """
            import ctypes, os, time
            def test_before(): pass
            def test_crash():
                # Both workers are in a crashing test at about the same time.
                time.sleep(0.2)
                ctypes.string_at(0)
            def test_after(): pass
            class TestGroup:
                def test_inner(self): pass
                def test_inner_crash(self): os._exit(1)
        """
        for letter in "ab"
    }
    files["test_c.py"] = "def test_single(): pass\n"
    ran = suite(files, "-n", "2", "--dist", mode)
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes == {"collected": 11, "passed": 7, "crashed": 4}, ran.text
    assert ran.counts == {"passed": 7, "failed": 4}, ran.text
    assert sorted(ran.failed()) == [
        f"test_{letter}.py::{name}"
        for letter in "ab"
        for name in ("TestGroup::test_inner_crash", "test_crash")
    ]


def test_twenty_crashes_in_a_row(suite: Suite) -> None:
    code = """
        import ctypes, pytest
        def test_before(): pass
        @pytest.mark.parametrize("index", range(20))
        def test_crash(index): ctypes.string_at(0)
        def test_after(): pass
    """
    ran = suite({"test_a.py": code}, timeout_s=500)
    assert ran.status == FAILURES
    assert ran.outcomes == {"collected": 22, "passed": 2, "crashed": 20}, ran.text
    assert len(set(ran.failed())) == 20


def test_a_clean_run_passes(suite: Suite) -> None:
    ran = suite({"test_a.py": "def test_a(): pass\ndef test_b(): pass\n"})
    assert ran.status == 0, ran.text
    assert ran.outcomes == {"collected": 2, "passed": 2}
    assert ran.lines_with("isolation: one replaceable worker; deadline: 1500 s")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("-s",), "-s"),
        (("-n", "0"), "-n 0"),
        (("--pdb",), "--pdb"),
        (("--collect-only",), "--collect-only"),
        (("-p", "no:xdist"), "pytest-xdist is not loaded"),
    ],
)
def test_no_worker_is_injected_where_the_caller_needs_the_process(
    suite: Suite, arguments: tuple[str, ...], why: str
) -> None:
    code = "import os\ndef test_a(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
    ran = suite({"test_a.py": code}, *arguments)
    assert ran.status == 0, ran.text
    assert ran.lines_with(f"isolation: no worker injected ({why})")
    assert bool(ran.lines_with("outcomes: ")) == (why != "--collect-only")


def test_the_opt_out_variable_injects_no_worker(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_NO_ISOLATION", "1")
    ran = suite({"test_a.py": "def test_a(worker_id): assert worker_id == 'master'\n"})
    assert ran.status == 0, ran.text
    assert ran.lines_with("no worker injected (TILEWRIGHT_NO_ISOLATION is set)")


def test_a_hang_with_no_worker_ends_the_run_with_its_stacks(suite: Suite) -> None:
    ran = suite(
        {"test_a.py": "import ctypes\ndef test_hang(): ctypes.PyDLL(None).sleep(600)\n"},
        "-s",
        "--deadline=1",
        timeout_s=60,
    )
    assert ran.status != 0
    assert "Timeout (0:00:01)" in ran.text
    assert "in test_hang" in ran.text


def test_a_deadline_of_0_is_none_and_a_mark_overrides_it(suite: Suite) -> None:
    code = """
        import faulthandler, pytest, time
        def test_long(): time.sleep(0.4)
        @pytest.mark.deadline(0)
        def test_longer(): time.sleep(0.4)
        @pytest.mark.deadline(1, 2)
        def test_wrong(): pass
    """
    ran = suite({"test_a.py": code}, "--deadline=0.2", "-s", "-k", "longer")
    assert ran.status == 0, ran.text
    ran = suite({"test_a.py": code}, "--deadline=0", "-s", "-k", "long")
    assert ran.outcomes == {"collected": 2, "passed": 2}, ran.text


def test_pytests_own_use_of_the_watchdog_is_refused(suite: Suite) -> None:
    ran = suite({"test_a.py": "def test_a(): pass\n"}, more_ini="faulthandler_timeout = 5\n")
    assert ran.status == int(pytest.ExitCode.USAGE_ERROR)
    assert "faulthandler_timeout = 5" in ran.text


def test_a_process_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose kernel still runs: the driver keeps the process until the kernel ends."""
    monkeypatch.setattr(controlling, "_PROCESS_END_S", 0.1)
    lines: list[str] = []
    reporter = SimpleNamespace(write_line=lines.append)
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=lambda name: reporter))
    ledger: Any = None
    controller = controlling.Controlling(config, ledger, 0)
    try:
        with subprocess.Popen(["sleep", "600"]) as process:
            gateway = SimpleNamespace(id="gw3", _io=SimpleNamespace(popen=process))
            controller._wait_for_process(SimpleNamespace(gateway=gateway))
            process.kill()
        assert f"process {process.pid} of gw3 has not ended" in lines[0]
        lines.clear()
        controller._wait_for_process(SimpleNamespace(gateway=gateway))
        assert lines == []
    finally:
        controller.pytest_unconfigure()
