"""Each way to end a process, alone in a run: exit status, outcomes, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.L1

Suite = Callable[..., Any]
FAILURES = int(pytest.ExitCode.TESTS_FAILED)
ALONE = {
    "segfault": ("def test_bad(): ctypes.string_at(0)", "killed by signal SIGSEGV"),
    "exit": ("def test_bad(): os._exit(0)", "it exited with status 0"),
    "exit-status": ("def test_bad(): os._exit(9)", "it exited with status 9"),
    "abort": ("def test_bad(): os.abort()", "killed by signal SIGABRT"),
    "kill": ("def test_bad(): os.kill(os.getpid(), 9)", "killed by signal SIGKILL"),
    "hang": (
        "@pytest.mark.deadline(1)\ndef test_bad(): ctypes.PyDLL(None).pause()",
        "it passed its deadline of 0:00:01",
    ),
    "hang-in-set-up": (
        "@pytest.fixture\ndef stuck(): ctypes.PyDLL(None).pause()\n"
        "@pytest.mark.deadline(1)\ndef test_bad(stuck): pass",
        "it passed its deadline of 0:00:01",
    ),
    "set-up": (
        "@pytest.fixture\ndef crash(): os._exit(1)\ndef test_bad(crash): pass",
        "it exited with status 1",
    ),
    "module-set-up": (
        "@pytest.fixture(scope='module')\ndef crash(): os._exit(1)\ndef test_bad(crash): pass",
        "it exited with status 1",
    ),
}


@pytest.mark.parametrize("place", ["first", "middle", "last", "only"])
@pytest.mark.parametrize("kind", list(ALONE))
def test_one_victim(suite: Suite, kind: str, place: str) -> None:
    body, how = ALONE[kind]
    before = "def test_before(): pass\n" if place in ("middle", "last") else ""
    after = "def test_after(): pass\n" if place in ("first", "middle") else ""
    code = f"import ctypes, os, pytest\n{before}{body}\n{after}"
    ran = suite({"test_a.py": code})
    passing = bool(before) + bool(after)
    expected = {"collected": 1 + passing, "crashed": 1}
    if passing:
        expected["passed"] = passing
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes == expected, ran.text
    assert ran.failed() == ["test_a.py::test_bad"]
    assert any(how in line for line in ran.lines_with("ended while it ran")), ran.text


def test_a_crash_in_tear_down_is_one_crashed_test(suite: Suite) -> None:
    code = """
        import os, pytest
        @pytest.fixture
        def late():
            yield
            os._exit(1)
        def test_bad(late): pass
        def test_after(): pass
    """
    ran = suite({"test_a.py": code})
    assert ran.status == FAILURES
    assert ran.outcomes == {"collected": 2, "passed": 1, "crashed": 1}, ran.text
    assert ran.failed() == ["test_a.py::test_bad"]


@pytest.mark.parametrize("mode", [("--dist", "loadfile", "-n", "1"), ("-n", "2")])
def test_twenty_crashes_in_other_modes(suite: Suite, mode: tuple[str, ...]) -> None:
    code = """
        import ctypes, pytest
        def test_before(): pass
        @pytest.mark.parametrize("index", range(20))
        def test_crash(index): ctypes.string_at(0)
        def test_after(): pass
    """
    ran = suite({"test_a.py": code}, *mode, timeout_s=500)
    assert ran.status == FAILURES
    assert ran.outcomes == {"collected": 22, "passed": 2, "crashed": 20}, ran.text
    assert len(set(ran.failed())) == 20


@pytest.mark.parametrize("workers", ["1", "2", "3"])
@pytest.mark.parametrize("mode", ["load", "loadfile", "loadscope", "loadgroup", "worksteal"])
def test_crashes_here_and_there(suite: Suite, mode: str, workers: str) -> None:
    files = {
        f"test_{letter}.py": f"""
            import os, pytest
            @pytest.mark.parametrize("index", range({size}))
            def test_any(index):
                if index in {crashing}:
                    os._exit(1)
        """
        for letter, size, crashing in (("a", 1, (0,)), ("b", 5, (1, 4)), ("c", 2, ()), ("d", 1, ()))
    }
    ran = suite(files, "-n", workers, "--dist", mode)
    assert ran.status == FAILURES
    assert ran.outcomes == {"collected": 9, "passed": 6, "crashed": 3}, ran.text


def test_a_module_that_hangs_at_collection_is_named(suite: Suite) -> None:
    files = {
        "test_a.py": "def test_a(): pass\n",
        "test_b.py": "import ctypes\nctypes.PyDLL(None).pause()\n",
    }
    ran = suite(files, "--deadline=2", "-n", "2")
    assert ran.status == FAILURES
    assert ran.outcomes == {"collected": 1, "passed": 1}, ran.text
    assert ran.lines_with("ERROR test_b.py")
    assert ran.lines_with("while it collected 'test_b.py': it passed its deadline of 0:00:02")


def test_a_conftest_that_ends_the_process_is_named(suite: Suite) -> None:
    files = {
        "test_a.py": "def test_a(): pass\n",
        "sub/conftest.py": "import os\nos._exit(1)\n",
        "sub/test_b.py": "def test_b(): pass\n",
    }
    ran = suite(files)
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes == {"collected": 1, "passed": 1}, ran.text
    assert ran.lines_with("ERROR sub")


def test_a_worker_that_cannot_start_stops_the_run(suite: Suite) -> None:
    code = "import os\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    os._exit(1)\n"
    ran = suite({"conftest.py": code, "test_a.py": "def test_a(): pass\n"}, timeout_s=60)
    assert ran.status != 0
    assert ran.lines_with("ended before it had collected the tests: it exited with status 1")


@pytest.mark.parametrize("argument", ["test_nowhere.py", "test_a.py::test_nowhere"])
def test_what_is_not_there_is_a_usage_error(suite: Suite, argument: str) -> None:
    ran = suite({"test_a.py": "def test_a(): pass\n"}, argument, timeout_s=60)
    assert ran.status == int(pytest.ExitCode.USAGE_ERROR), ran.text
    assert any("ot found: " in line and argument in line for line in ran.lines_with("ERROR"))


def test_workers_that_die_at_their_end_stop_the_run(suite: Suite) -> None:
    code = """
        import os
        def pytest_sessionfinish(session):
            if hasattr(session.config, "workerinput"):
                os._exit(1)
    """
    ran = suite({"conftest.py": code, "test_a.py": "def test_a(): pass\n"}, timeout_s=90)
    assert ran.status != 0
    assert ran.lines_with("workers in a row ended while they ran no test")


def test_a_death_between_tests_blames_no_test_but_fails_the_run(suite: Suite) -> None:
    code = """
        import os, pathlib
        def pytest_runtest_logfinish(nodeid):
            flag = pathlib.Path("once")
            if nodeid.endswith("test_b") and "PYTEST_XDIST_WORKER" in os.environ:
                if not flag.exists():
                    flag.touch()
                    os.environ["DIE"] = "1"
        import pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            if os.environ.get("DIE"):
                os._exit(5)
    """
    tests = "".join(f"def test_{letter}(): pass\n" for letter in "abcd")
    ran = suite({"conftest.py": code, "test_a.py": tests})
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes == {"collected": 4, "passed": 4}, ran.text
    assert ran.lines_with("ended while it ran no test: it exited with status 5")


def test_an_error_inside_a_plugin_ends_one_worker(suite: Suite) -> None:
    code = """
        def pytest_runtest_logfinish(nodeid):
            import os
            if nodeid.endswith("test_b") and "PYTEST_XDIST_WORKER" in os.environ:
                raise RuntimeError("a bug of a plugin")
    """
    tests = "".join(f"def test_{letter}(): pass\n" for letter in "abc")
    ran = suite({"conftest.py": code, "test_a.py": tests})
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes["collected"] == 3
    assert ran.outcomes["passed"] >= 2


@pytest.mark.parametrize("count", [1, 2])
def test_maxfail_counts_crashes(suite: Suite, count: int) -> None:
    code = "import os\n" + "".join(f"def test_{n}(): os._exit(1)\n" for n in range(6))
    ran = suite({"test_a.py": code}, f"--maxfail={count}")
    assert ran.status != 0
    assert len(ran.failed()) == count, ran.text
    assert "ended with no outcome" not in ran.text


def test_a_forked_child_that_comes_back_is_ended(suite: Suite) -> None:
    code = """
        import os, time
        def test_forks():
            child = os.fork()
            if child == 0:
                return
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 71
        def test_fails_in_the_child():
            child = os.fork()
            assert child != 0
            os.waitpid(child, 0)
        def test_after(): pass
    """
    for arguments in ((), ("-n", "0")):
        ran = suite({"test_a.py": code}, *arguments)
        assert ran.status == 0, ran.text
        assert ran.outcomes == {"collected": 3, "passed": 3}, ran.text


def test_an_interrupt_after_a_crash_stops_the_run(suite: Suite) -> None:
    code = """
        import os, signal, time
        def test_crash(): os._exit(1)
        def test_between(): pass
        def test_interrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        def test_after(): pass
    """
    ran = suite({"test_a.py": code}, "-n", "1")
    assert ran.status == int(pytest.ExitCode.INTERRUPTED), ran.text
    assert "INTERNALERROR" not in ran.text
    assert ran.outcomes["crashed"] == 1, ran.text


def test_a_worker_that_can_open_no_file_is_replaced(suite: Suite) -> None:
    code = """
        import resource
        def test_before(): pass
        def test_uses_them_up():
            resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
            [open("/dev/null") for _ in range(100)]
        def test_after(): pass
        def test_and_after(): pass
    """
    ran = suite({"test_a.py": code}, "-n", "2")
    assert ran.status == FAILURES, ran.text
    assert "INTERNALERROR" not in ran.text
    assert ran.outcomes["collected"] == 4 and "without" not in ran.outcomes, ran.text
