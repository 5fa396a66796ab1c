"""`tilewright red`: red without the fix by assertion, green with it, or said why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.testing import red

BUGGY = "def twice(x):\n    return x + x + 1\n"
FIXED = "def twice(x):\n    return 2 * x\n"
TEST = "from pack import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
GIT = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A repository whose only commit has the bug; returns a function that runs git in it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*arguments: str) -> str:
        return subprocess.run(
            ["git", *GIT, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    write(tmp_path, "src/pack/__init__.py", BUGGY)
    write(tmp_path, "pytest.ini", "[pytest]\n")
    write(tmp_path, ".gitignore", "__pycache__\n")
    run("init", "-q")
    run("add", ".")
    run("commit", "-qm", "one")
    return run


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def check(root: Path, fix: str, *tests: str, raises: tuple[str, ...] = ()) -> red.Verdict:
    return red.check(
        tests or ["test/test_pack.py::test_twice"], fix, repository=root, raises=raises
    )


@pytest.mark.L0
def test_a_commit_with_its_test(tmp_path: Path, git: Callable[..., str]) -> None:
    write(tmp_path, "src/pack/__init__.py", FIXED)
    write(tmp_path, "test/test_pack.py", TEST)
    git("add", ".")
    git("commit", "-qm", "fix")
    verdict = check(tmp_path, "HEAD")
    assert verdict.holds, verdict
    assert verdict.unfixed.failed[0][0] == "test/test_pack.py::test_twice"
    assert verdict.fixed.passed == ("test/test_pack.py::test_twice",)
    # Both are shown, nothing is left behind, and nothing moved.
    assert "1 failed" in verdict.unfixed.output and "1 passed" in verdict.fixed.output
    assert git("worktree", "list").count("\n") == 1
    assert git("status", "--porcelain") == ""


@pytest.mark.L0
def test_an_older_commit_and_a_test_written_today(tmp_path: Path, git: Callable[..., str]) -> None:
    write(tmp_path, "src/pack/__init__.py", FIXED)
    git("commit", "-qam", "fix")
    write(tmp_path, "README", "later work\n")
    git("add", ".")
    git("commit", "-qm", "later")
    write(tmp_path, "test/test_pack.py", TEST)
    assert check(tmp_path, "HEAD~1").holds
    assert git("status", "--porcelain") == "?? test/\n"


@pytest.mark.L1
@pytest.mark.parametrize("applied", [True, False], ids=["in-the-tree", "not-in-the-tree"])
def test_a_patch_of_uncommitted_work(
    tmp_path: Path, git: Callable[..., str], applied: bool
) -> None:
    write(tmp_path, "test/test_pack.py", TEST)
    write(tmp_path, "src/pack/__init__.py", FIXED)
    patch = tmp_path.parent / f"{tmp_path.name}.patch"
    patch.write_text(git("diff"))
    if not applied:
        write(tmp_path, "src/pack/__init__.py", BUGGY)
    assert check(tmp_path, str(patch)).holds


@pytest.mark.L1
def test_a_fix_on_another_branch(tmp_path: Path, git: Callable[..., str]) -> None:
    git("checkout", "-qb", "work")
    write(tmp_path, "src/pack/__init__.py", FIXED)
    write(tmp_path, "test/other.txt", "part of the commit, but the test's\n")
    git("add", ".")
    git("commit", "-qm", "fix")
    git("checkout", "-q", "-")
    write(tmp_path, "test/test_pack.py", TEST)
    assert check(tmp_path, "work").holds


@pytest.mark.L0
def test_an_import_error_is_not_red(tmp_path: Path, git: Callable[..., str]) -> None:
    write(tmp_path, "src/pack/extra.py", "def f():\n    return 1\n")
    write(tmp_path, "test/test_pack.py", "from pack.extra import f\n\ndef test_f(): assert f()\n")
    git("add", ".")
    git("commit", "-qm", "add")
    verdict = check(tmp_path, "HEAD", "test/test_pack.py::test_f")
    assert not verdict.holds
    assert any("could not be collected" in problem for problem in verdict.problems)


@pytest.mark.L0
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("assert twice(0) >= 0", "unfixed: no test fails"),
        ("assert twice(2) == 5", "unfixed: no test fails"),
        ("assert twice(2) == 6", "fixed: test/test_pack.py::test_twice fails by AssertionError"),
        ("{4: 1}[twice(2)]", "fails by KeyError, not by an assertion"),
        ("import pytest; pytest.skip('no')", "was skipped"),
        ("import os; twice(2) == 4 or os.abort()", "fails by crash, not by an assertion"),
    ],
)
def test_what_shows_nothing(
    tmp_path: Path, git: Callable[..., str], body: str, problem: str
) -> None:
    write(tmp_path, "src/pack/__init__.py", FIXED)
    git("commit", "-qam", "fix")
    code = f"from pack import twice\n\n\ndef test_twice():\n    {body}\n"
    write(tmp_path, "test/test_pack.py", code)
    verdict = check(tmp_path, "HEAD")
    assert not verdict.holds
    assert any(problem in line for line in verdict.problems), verdict.problems


@pytest.mark.L1
@pytest.mark.parametrize(
    ("body", "raises"),
    [
        ("{4: 1}[twice(2)]", "KeyError"),
        ("{4: 1}[twice(2)]", "LookupError"),
        ("import os; twice(2) == 4 or os.abort()", red.CRASH),
        ("import pytest; twice(2) == 4 or pytest.fail('no')", "AssertionError"),
    ],
)
def test_another_failure_counts_where_it_is_named(
    tmp_path: Path, git: Callable[..., str], body: str, raises: str
) -> None:
    write(tmp_path, "src/pack/__init__.py", FIXED)
    git("commit", "-qam", "fix")
    code = f"from pack import twice\n\n\ndef test_twice():\n    {body}\n"
    write(tmp_path, "test/test_pack.py", code)
    verdict = check(tmp_path, "HEAD", raises=(raises,))
    assert verdict.holds, verdict


@pytest.mark.L1
def test_a_set_up_failure_is_not_red(tmp_path: Path, git: Callable[..., str]) -> None:
    write(tmp_path, "src/pack/__init__.py", FIXED)
    git("commit", "-qam", "fix")
    write(
        tmp_path,
        "test/test_pack.py",
        "import pytest\nfrom pack import twice\n\n@pytest.fixture\ndef ready():\n"
        "    assert twice(2) == 4\n\ndef test_twice(ready): pass\n",
    )
    verdict = check(tmp_path, "HEAD")
    assert any("failed in setup" in problem for problem in verdict.problems), verdict.problems


@pytest.mark.L0
@pytest.mark.parametrize(
    ("fix", "test", "message"),
    [
        ("HEAD", "test/test_nowhere.py", "no test file test/test_nowhere.py"),
        ("nonsense", "test/test_pack.py", "'nonsense' is neither a patch file nor a commit"),
        ("HEAD", "test/test_pack.py", "changes nothing outside test"),
        ("away.patch", "test/test_pack.py", "applies to the working tree neither forward nor"),
    ],
)
def test_questions_that_cannot_be_put(
    tmp_path: Path, git: Callable[..., str], fix: str, test: str, message: str, monkeypatch: Any
) -> None:
    write(tmp_path, "test/test_pack.py", TEST)
    git("add", ".")
    git("commit", "-qm", "a test alone")
    patch = tmp_path / "away.patch"
    patch.write_text("--- a/src/away.py\n+++ b/src/away.py\n@@ -1 +1 @@\n-old\n+new\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(red.RedError, match=message):
        check(tmp_path, fix, test)
    assert git("worktree", "list").count("\n") == 1


@pytest.mark.L0
def test_the_command(tmp_path: Path, git: Callable[..., str]) -> None:
    write(tmp_path, "src/pack/__init__.py", FIXED)
    write(tmp_path, "test/test_pack.py", TEST)
    git("add", ".")
    git("commit", "-qm", "fix")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tilewright.cli.main", "red", *arguments],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )

    done = command("test/test_pack.py::test_twice", "--fix", "HEAD")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("unfixed source") < done.stdout.index("fixed source: pytest ended")
    assert "RED without the fix (1 failing by assertion), GREEN with it" in done.stdout
    done = command("test/test_pack.py::test_twice", "--fix", "HEAD", "--json")
    assert json.loads(done.stdout)["holds"] is True
    done = command("test/test_pack.py::test_twice", "--fix", "HEAD~1")
    assert done.returncode == 2
    assert "error:" in done.stderr
