"""The RED check: a regression test fails on the unfixed source and passes on the fixed one.

Both sources are git worktrees of their own, made from the working tree as it is (uncommitted
changes and new files included), so nothing in the working tree moves. Of the fix, only the part
outside the test's top folder is taken away: the test itself is in both. A test that fails because
it cannot be imported or collected has shown nothing, and neither has one that was skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tilewright.testing.tree import child_path

# What a check of the test's own raises: assert statements and helpers, and pytest.fail.
ASSERTIONS = ("AssertionError", "Failed")
CRASH = "crash"
_LOG = "TILEWRIGHT_RED_LOG"
_RECORDER = """\
import json, os, pytest

def _tell(**line):
    with open(os.environ["TILEWRIGHT_RED_LOG"], "a") as log:
        log.write(json.dumps(line) + "\\n")

def pytest_collectreport(report):
    if report.failed:
        _tell(test=report.nodeid, when="collect", outcome="failed", types=[])

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    types = [] if call.excinfo is None else [kind.__name__ for kind in call.excinfo.type.__mro__]
    _tell(test=item.nodeid, when=report.when, outcome=report.outcome, types=types)
    return report
"""


class RedError(Exception):
    """The question cannot be put: no such fix, or it applies to neither source."""


@dataclass(frozen=True)
class Side:
    """What the test did on one source."""

    name: str
    status: int
    output: str
    passed: tuple[str, ...]
    # Test id -> names of the raised type and its bases.
    failed: tuple[tuple[str, tuple[str, ...]], ...]
    # What is neither a pass nor a failure of a test's body.
    other: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Both runs, and what is wrong with them; nothing, if the check holds."""

    unfixed: Side
    fixed: Side
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if the test is red without the fix and green with it."""
        return not self.problems


def check(
    tests: Sequence[str],
    fix: str,
    *,
    repository: Path,
    raises: Sequence[str] = (),
    timeout_s: float = 1800.0,
    arguments: Sequence[str] = (),
) -> Verdict:
    """Run ``tests`` (node ids from the repository's root) without the fix and with it.

    ``fix`` is a commit or a patch file; the working tree may hold the fix or lack it. ``raises``
    names further exception types, or "crash", that count as the expected failure. ``arguments``
    go to pytest.

    Raises:
        RedError: if there is no such test file or fix, the fix touches nothing outside the test's
            top folder, or it applies to the working tree in neither direction.
    """
    root = Path(_git(repository, "rev-parse", "--show-toplevel").strip())
    kept = _kept_folders(root, tests)
    patch = _patch(root, fix, kept)
    with tempfile.TemporaryDirectory(prefix="tilewright-red-") as temporary:
        folder = Path(temporary)
        path = folder / "fix.patch"
        path.write_text(patch, encoding="utf-8", errors="surrogateescape", newline="")
        with (
            _worktree(root, folder / "unfixed") as unfixed,
            _worktree(root, folder / "fixed") as fixed,
        ):
            if _applies(unfixed, path, "--reverse"):
                _git(unfixed, "apply", "--reverse", str(path))
            elif _applies(fixed, path):
                _git(fixed, "apply", str(path))
            else:
                raise RedError(
                    f"the fix {fix} applies to the working tree neither forward nor backward"
                )
            sides = [
                _run(name, tree, folder, tests, arguments, timeout_s)
                for name, tree in (("unfixed", unfixed), ("fixed", fixed))
            ]
    return Verdict(sides[0], sides[1], tuple(_problems(sides[0], sides[1], raises)))


def _problems(unfixed: Side, fixed: Side, raises: Sequence[str]) -> Iterator[str]:
    accepted = {*ASSERTIONS, *raises}
    for test, types in unfixed.failed:
        if not accepted.intersection(types):
            yield (
                f"unfixed: {test} fails by {types[0] if types else 'no exception'}, not by an "
                "assertion"
            )
    for what in unfixed.other:
        yield f"unfixed: {what}"
    if not unfixed.failed and not unfixed.other:
        yield "unfixed: no test fails" + ("" if unfixed.passed else ", and none ran")
    for test, types in fixed.failed:
        yield f"fixed: {test} fails by {types[0] if types else 'no exception'}"
    for what in fixed.other:
        yield f"fixed: {what}"
    for test, _ in unfixed.failed:
        if test not in fixed.passed and test not in dict(fixed.failed):
            yield f"fixed: {test} did not run"


def _run(
    name: str,
    tree: Path,
    folder: Path,
    tests: Sequence[str],
    arguments: Sequence[str],
    timeout_s: float,
) -> Side:
    plugins = folder / "plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "tilewright_red_recorder.py").write_text(_RECORDER, encoding="utf-8")
    log = folder / f"{name}.log"
    log.touch()
    source = tree / "src" if (tree / "src").is_dir() else tree
    environment = {
        **os.environ,
        _LOG: str(log),
        "PYTHONDONTWRITEBYTECODE": "1",
        # A crash then shows as this process's, and the recorder sees every report.
        "TILEWRIGHT_NO_ISOLATION": "1",
        "PYTHONPATH": child_path(
            source, os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
        ),
    }
    # An expression that every level meets: the project's own default would deselect some.
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tilewright_red_recorder"),
        *("-p", "no:cacheprovider", "-m", "L0 or not L0"),
        *arguments,
        *tests,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Side(name, -1, "", (), (), (f"the run took longer than {timeout_s:g} s",))
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return _side(name, done.returncode, done.stdout, lines)


def _side(name: str, status: int, output: str, lines: list[dict[str, object]]) -> Side:
    passed, failed, other = [], [], []
    ended = set()
    for line in lines:
        test, when, outcome = str(line["test"]), line["when"], line["outcome"]
        types = line["types"]
        if when == "call":
            ended.add(test)
        if when == "collect":
            other.append(f"{test or 'the suite'} could not be collected")
        elif outcome == "skipped":
            other.append(f"{test} was skipped")
        elif outcome == "failed" and when == "call":
            failed.append((test, tuple(types) if isinstance(types, list) else ()))
        elif outcome == "failed":
            other.append(f"{test} failed in {when}, not in its body")
        elif outcome == "passed" and when == "call":
            passed.append(test)
    begun = [str(line["test"]) for line in lines if line["when"] == "setup"]
    crashed = [test for test in begun if test not in ended]
    if status < 0 and crashed:
        failed.append((crashed[-1], (CRASH,)))
    elif status not in (0, 1) and not other:
        other.append(f"pytest ended with status {status}")
    return Side(name, status, output, tuple(passed), tuple(failed), tuple(other))


def _kept_folders(root: Path, tests: Sequence[str]) -> tuple[str, ...]:
    """What belongs to the test, not to the fix: each test's top folder, or file."""
    kept = []
    for test in tests:
        path = test.partition("::")[0]
        if not (root / path).exists():
            raise RedError(f"no test file {path} in {root}")
        kept.append(Path(path).parts[0])
    return tuple(dict.fromkeys(kept))


def _patch(root: Path, fix: str, kept: Sequence[str]) -> str:
    outside = [".", *(f":(exclude){name}" for name in kept)]
    if Path(fix).is_file():
        with tempfile.TemporaryDirectory() as temporary:
            # Git itself says which files a patch touches.
            listed = _git(root, "apply", "--numstat", "-z", str(Path(fix).resolve()))
            touched = [entry.split("\t")[-1] for entry in listed.split("\0") if "\t" in entry]
            if all(Path(name).parts[0] in kept for name in touched if name):
                raise RedError(f"the patch {fix} changes nothing outside {', '.join(kept)}")
            copy = Path(temporary) / "part.patch"
            shutil.copy(fix, copy)
            return _without(copy.read_text(encoding="utf-8", errors="surrogateescape"), kept)
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", f"{fix}^{{commit}}").strip()
    except RedError:
        raise RedError(f"{fix!r} is neither a patch file nor a commit") from None
    patch = _git(root, "diff", "--binary", f"{commit}^", commit, "--", *outside)
    if not patch:
        raise RedError(f"the commit {fix} changes nothing outside {', '.join(kept)}")
    return patch


def _without(patch: str, kept: Sequence[str]) -> str:
    """The patch without its parts on files in ``kept``."""
    parts: list[list[str]] = [[]]
    for line in patch.splitlines(keepends=True):
        starts = line.startswith("diff --git ") or (
            line.startswith("--- ") and not any("diff --git " in old for old in parts[-1][:1])
        )
        if starts:
            parts.append([])
        parts[-1].append(line)
    return "".join("".join(part) for part in parts[1:] if not _is_in(part, kept))


def _is_in(part: Sequence[str], kept: Sequence[str]) -> bool:
    for line in part:
        if line.startswith(("--- ", "+++ ")):
            name = line[4:].partition("\t")[0].strip().strip('"')
            if name != "/dev/null":
                return Path(name.partition("/")[2]).parts[:1] in [(one,) for one in kept]
    name = part[0].split(" b/")[-1].strip()
    return Path(name).parts[:1] in [(one,) for one in kept]


@contextmanager
def _worktree(root: Path, target: Path) -> Iterator[Path]:
    """A worktree that equals the working tree, ignored files left out."""
    _git(root, "worktree", "add", "--detach", "--quiet", str(target), "HEAD")
    try:
        changes = _git(root, "diff", "--binary", "HEAD")
        if changes:
            path = target.with_suffix(".changes")
            path.write_text(changes, encoding="utf-8", errors="surrogateescape", newline="")
            _git(target, "apply", str(path))
        for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0"):
            if name and (root / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target / name)
        yield target
    finally:
        _git(root, "worktree", "remove", "--force", str(target))


def _applies(tree: Path, patch: Path, *options: str) -> bool:
    try:
        _git(tree, "apply", "--check", *options, str(patch))
    except RedError:
        return False
    return True


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except OSError as error:
        raise RedError(f"git cannot be run in {folder}: {error}") from error
    if done.returncode != 0:
        raise RedError(f"git {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout
