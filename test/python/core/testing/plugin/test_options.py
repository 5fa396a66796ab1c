"""Options, per-test draws, summaries by reason, banner; and a stranger's suite left alone."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]
PLUGIN = "[pytest]\naddopts = -p tilewright.testing.plugin\n"
DRAWS = """
    import pytest
    @pytest.mark.parametrize("part", [1, 2])
    def test_draws(draws, rng, part):
        heads = draws.value("heads", lambda r: r.randrange(10**9))
        print("DREW", part, heads, rng.randrange(10**9), draws.dim("s_q", 128))
        assert draws.dim("s_q", 128) == 128 and part == 1
"""


def drawn(ran: Any) -> list[str]:
    """What tests printed as drawn, each once."""
    return sorted(set(re.findall("DREW .*", ran.text)))


def test_a_plugin_that_nobody_asked_for_does_nothing(suite: Suite) -> None:
    files = {
        "conftest.py": """
            import pytest
            def pytest_addoption(parser):
                for name in ("--seed", "--perf", "--dim", "--repro", "--dryrun", "--deadline"):
                    parser.addoption(name, default="theirs")
            @pytest.fixture
            def draws(): return "theirs"
        """,
        "test_a.py": """
            import os, sys
            def test_unmarked(draws, request):
                assert draws == "theirs" and request.config.option.seed == "theirs"
                assert "PYTEST_XDIST_WORKER" not in os.environ
                assert not [name for name in sys.modules if name.startswith("tilewright.testing.")
                            and name.split(".")[-1] in ("running", "controlling", "ledger")]
        """,
    }
    ran = suite(files, "--strict-markers", "--strict-config", ini=PLUGIN)
    assert ran.status == 0, ran.text
    assert ran.counts == {"passed": 1}
    assert not ran.lines_with("outcomes:") and not ran.lines_with("isolation:")


def test_levels_by_the_ini_file_alone(suite: Suite) -> None:
    files = {
        "test_a.py": "import pytest\npytestmark = pytest.mark.L0\ndef test_a(): pass\n",
        "test_b.py": "import pytest\n@pytest.mark.L1\ndef test_b(): pass\n",
    }
    ini = PLUGIN + "tilewright_levels = true\n"
    ran = suite(files, "--strict-markers", ini=ini)
    assert ran.counts == {"passed": 1, "deselected": 1}, ran.text
    assert not ran.lines_with("isolation:")
    assert suite(files, "-m", "L1", ini=ini).counts == {"passed": 1, "deselected": 1}
    assert suite(files, "-m", "L0 or L1", ini=ini).counts == {"passed": 2}
    ran = suite({**files, "test_c.py": "def test_c(): pass\n"}, ini=ini)
    assert ran.status == int(pytest.ExitCode.INTERRUPTED)
    assert ran.lines_with("test_c.py::test_c: no level")


def test_draws_depend_on_the_seed_and_the_test_alone(suite: Suite) -> None:
    first = suite({"test_a.py": DRAWS}, "-s", "-n0")
    again = suite({"test_a.py": "import random; random.random()\n" + strip(DRAWS)}, "-n", "2")
    assert len(drawn(first)) == 2 and "seed: 0" in first.text
    # The failing one is printed in both runs.
    assert drawn(again)[-1] == drawn(first)[-1]
    other = suite({"test_a.py": DRAWS}, "-n0", "--seed=7")
    assert "seed: 7" in other.text
    assert drawn(other)[-1] != drawn(first)[-1]
    parts = [line.split()[2] for line in drawn(first)]
    assert len(set(parts)) == 2, "both parameters drew the same"


def strip(code: str) -> str:
    """Code with its common indentation removed."""
    return re.sub(r"^    ", "", code, flags=re.MULTILINE)


def test_repro_runs_exactly_the_printed_case(suite: Suite) -> None:
    failing = suite({"test_a.py": DRAWS}, "--seed", "5", "--dim", "s_q=77", "-n0")
    printed = [line for line in failing.text.splitlines() if line.startswith("--repro ")]
    assert len(printed) == 2, failing.text
    arguments = shlex.split(printed[1])
    assert "'s_q': 77" in arguments[1] and "'seed': 5" in arguments[1]
    # No --seed and no --dim here: the case carries them. A level or name filter does not count.
    again = suite({"test_a.py": DRAWS}, *arguments, "-k", "nothing", "-n0")
    assert again.outcomes == {"collected": 1, "failed": 1}, again.text
    assert drawn(again) == drawn(failing)[1:]
    changed = arguments[1].replace("'heads': ", "'heads': 1")
    assert (
        f"DREW 2 1{drawn(failing)[1].split()[2]} "
        in suite({"test_a.py": DRAWS}, arguments[0], changed).text
    )


# What a shell would read as signs of its own, in any quotes.
PART = 'say "$HOME" `id` \\ it\'s! \n'
ODD = f"""
    import os, pytest

    @pytest.fixture
    def part(draws): return draws.value("part", lambda rng: {PART!r})

    @pytest.mark.parametrize("name", ['a::b', '"q"', "'", "$HOME", "d e", "é"])
    def test_odd(part, name): assert not os.environ.get("FAIL_ODD")
"""


def test_a_printed_case_is_one_argument_of_a_shell(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_ODD", "1")
    failing = suite({"test_a.py": ODD}, "-n0")
    printed = [line for line in failing.text.splitlines() if line.startswith("--repro ")]
    assert len(printed) == 6, failing.text
    shell = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {' '.join(printed)}"],
        capture_output=True,
        text=True,
        check=True,
    )
    cases = [ast.literal_eval(line) for line in shell.stdout.splitlines() if line != "--repro"]
    assert [case["part"] for case in cases] == [PART] * 6
    # One process runs one case; the oddest of them.
    again = suite({"test_a.py": ODD}, "--repro", repr(cases[1]), "-n0")
    assert again.outcomes == {"collected": 1, "failed": 1}, again.text
    assert printed[1] in again.text


def test_a_case_of_another_version_of_the_test_is_told(suite: Suite) -> None:
    code = "def test_a(draws): draws.dim('n', 3)\n"
    case = "{'test': 'test_a.py::test_a', 'seed': 0, 'n': 2, 'heads': 4}"
    ran = suite({"test_a.py": code}, "--repro", case, "-n0")
    assert ran.status == 0, ran.text
    assert ran.lines_with("the test did not ask for this part of --repro: heads")


def test_a_drawn_seed_is_one_for_all_workers_and_printed(suite: Suite) -> None:
    code = "def test_a(draws): print('DREW', draws.seed); assert 0\ntest_b = test_a\n"
    ran = suite({"test_a.py": code}, "--seed", "random", "-n", "2")
    (banner,) = ran.lines_with("seed: ")
    assert drawn(ran) == [f"DREW {banner.rpartition(' ')[2]}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dim", "s_q"), "'s_q' is not like s_q=128"),
        (("--seed", "-1"), "'-1' is neither an integer from 0 up nor 'random'"),
        (("--repro", "{'seed': 1}"), "is not a printed case"),
        (("--repro", "f()"), "is not a printed case"),
        (("--repro", "{'test': 'test_a.py', 'seed': 1}"), "is not a printed case"),
        (("--repro", "(" * 3000), "is not a printed case"),
        (("--repro=" + "-" * 9000 + "1",), "is not a printed case"),
        (("--repro", "{[]: 1}"), "is not a printed case"),
        (("--deadline", "soon"), "'soon' is not a number of seconds from 0 up"),
    ],
)
def test_bad_values_are_usage_errors(
    suite: Suite, arguments: tuple[str, ...], message: str
) -> None:
    ran = suite({"test_a.py": "def test_a(): pass\n"}, *arguments)
    assert ran.status == int(pytest.ExitCode.USAGE_ERROR)
    assert message in ran.text


def test_a_dimension_that_no_test_takes_is_told(suite: Suite) -> None:
    code = "def test_a(draws): assert draws.dim('d', 64) == 32\n"
    ran = suite({"test_a.py": code}, "--dim", "d=32", "--dim", "s_kv=5", "-n0")
    assert ran.status == 0, ran.text
    assert ran.lines_with("no test of this run asked for --dim s_kv")


def test_a_dry_run_prints_cases_and_calls_nothing(suite: Suite) -> None:
    code = """
        import pytest
        @pytest.fixture
        def heads(draws): return draws.value("heads", lambda r: r.choice([3, 4]))
        def test_a(heads): assert 0, "called"
    """
    ran = suite({"test_a.py": code}, "--dryrun")
    assert ran.outcomes == {"collected": 1, "skipped": 1}, ran.text
    (line,) = ran.lines_with("--repro ")
    assert re.search(r"'test': 'test_a.py::test_a', 'seed': 0, 'heads': [34]\}", line)


def test_perf_tests_run_under_perf(suite: Suite) -> None:
    code = "import pytest\n@pytest.mark.perf\ndef test_a(): pass\n"
    assert suite({"test_a.py": code}, "-s").outcomes == {"collected": 1, "skipped": 1}
    assert suite({"test_a.py": code}, "-s", "--perf").outcomes == {"collected": 1, "passed": 1}


@pytest.mark.parametrize("workers", ["0", "1"])
def test_skips_and_declines_are_counted_by_reason(suite: Suite, workers: str) -> None:
    code = """
        import pytest
        from tilewright.errors import NotSupportedError
        @pytest.mark.parametrize("size", range(3))
        def test_declined(declined, size):
            try:
                raise NotSupportedError("q: head size 512 is above 256")
            except NotSupportedError as error:
                declined(error)
        @pytest.mark.skip(reason="not here")
        def test_marked(): pass
        def test_skips(): pytest.skip("not now")
        @pytest.mark.xfail(reason="known", strict=True)
        def test_expected(): assert 0
        def test_bug(): raise NotSupportedError("not asked for")
    """
    ran = suite({"test_a.py": code}, "-n", workers)
    assert ran.outcomes == {"collected": 7, "failed": 1, "skipped": 6}, ran.text
    assert ran.counts == {"failed": 1, "skipped": 5, "xfailed": 1}
    assert ran.lines_with("     3 declined: q: head size 512 is above 256")
    assert ran.lines_with("     1 skipped: not here")
    assert ran.lines_with("     1 skipped: not now")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_lost_test_is_an_error(suite: Suite, workers: str) -> None:
    files = {
        "conftest.py": """
            import pytest
            # A plugin that swallows a test, as a scheduler's bug would.
            @pytest.hookimpl(tryfirst=True)
            def pytest_runtest_protocol(item):
                return True if item.name == "test_b" else None
        """,
        "test_a.py": "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n",
    }
    ran = suite(files, "-n", workers)
    assert ran.status == int(pytest.ExitCode.TESTS_FAILED), ran.text
    assert ran.counts == {"passed": 2}
    assert ran.lines_with("ERROR 1 collected, but ended with no outcome:")
    assert ran.lines_with("  test_a.py::test_b")
    assert ran.lines_with("outcomes: 3 collected = 2 passed + 1 without outcome")


def test_a_run_that_was_told_to_stop_has_lost_nothing(suite: Suite) -> None:
    code = "def test_a(): assert 0\ndef test_b(): pass\ndef test_c(): pass\n"
    for workers in ("0", "1"):
        ran = suite({"test_a.py": code}, "-x", "-n", workers)
        assert ran.status in (1, 2)
        assert not ran.lines_with("ended with no outcome"), ran.text


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_collection_error_fails_the_run(suite: Suite, workers: str) -> None:
    files = {"test_a.py": "def test_a(): pass\n", "test_b.py": "import nowhere_to_be_found\n"}
    ran = suite(files, "-n", workers)
    assert ran.status in (int(pytest.ExitCode.TESTS_FAILED), int(pytest.ExitCode.INTERRUPTED))
    assert ran.lines_with("ERROR test_b.py")


@pytest.mark.parametrize("arguments", [(), ("-s",)])
def test_the_allocator_is_set_before_torch_is_imported(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    files = {
        # As torch does, the stand-in reads the setting when it is imported.
        "torch.py": "import os\nsetting = os.environ.get('PYTORCH_CUDA_ALLOC_CONF')\n",
        "conftest.py": "import torch\n",
        "test_a.py": "import torch\ndef test_a(): assert torch.setting == 'backend:native'\n",
    }
    ini = "tilewright_allocator = backend:native\npythonpath = .\n"
    ran = suite(files, *arguments, more_ini=ini)
    assert ran.status == 0, ran.text
    files["early.py"] = "import torch\n"
    ran = suite(
        files, *arguments, ini=f"[pytest]\naddopts = -p early -p tilewright.testing.plugin\n{ini}"
    )
    assert ran.status != 0
    assert "torch was imported before PYTORCH_CUDA_ALLOC_CONF=backend:native" in ran.text
    del files["early.py"]
    files["conftest.py"] = "import os, torch\ndel os.environ['PYTORCH_CUDA_ALLOC_CONF']\n"
    ran = suite(files, "-s", more_ini=ini)
    assert ran.status != 0 and "removed PYTORCH_CUDA_ALLOC_CONF" in ran.text


def test_the_order_of_imports_is_kept(suite: Suite) -> None:
    files = {
        "first_one.py": "",
        "second_one.py": "",
        "conftest.py": "import second_one\n",
        "test_a.py": "def test_a(): pass\n",
    }
    ini = "tilewright_import_first = not_installed first_one second_one\npythonpath = .\n"
    ran = suite(files, "-s", more_ini=ini)
    assert ran.status == int(pytest.ExitCode.USAGE_ERROR), ran.text
    assert "second_one was imported before first_one" in ran.text
    files["conftest.py"] = ""
    assert suite(files, "-s", more_ini=ini).status == 0
