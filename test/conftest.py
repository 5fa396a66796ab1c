"""What holds for every test of the project.

- Every test has exactly one level mark, L0 to L4; plain `pytest` runs L0.
- Every file that holds tests is collected by the default sweep.
- The package under test is this tree's `src/tilewright`, here and in child interpreters, and the
  banner prints its path.

Nothing here imports torch, and collection never asks for a device.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import pytest

# With no GPU, Triton kernels run under its interpreter, which must be chosen before its import.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

LEVELS = ("L0", "L1", "L2", "L3", "L4")
PACKAGE = "tilewright"
# More than this many names in one message help nobody.
_LISTED = 20


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another tree, and make child interpreters import this one."""
    source = config.rootpath / "src"
    found = _package_path()
    if found != source / PACKAGE:
        raise pytest.UsageError(
            f"the package under test would be {found}, not {source / PACKAGE}: something puts "
            "another copy first on the import path"
        )
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in inherited if entry and entry != str(source)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), *others])


def pytest_report_header(config: pytest.Config) -> str:
    """Name the tree under test."""
    return f"package under test: {_package_path()}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find test files that the default sweep would never collect."""
    lost = _lost_test_files(session.config.rootpath, session.config)
    if lost:
        raise pytest.UsageError(_listing("tests that no run collects", lost))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a test with no level, or with several, into a collection error of its file.

    This comes before a marker expression deselects anything, and holds in xdist workers too.
    """
    report = yield
    wrong = []
    for item in report.result or ():
        if isinstance(item, pytest.Item):
            levels = sorted({mark.name for mark in item.iter_markers()} & set(LEVELS))
            if len(levels) != 1:
                wrong.append(f"{item.nodeid}: {' and '.join(levels) or 'no level'}")
    if wrong:
        report.outcome = "failed"
        report.longrepr = _listing("each test takes exactly one level mark, L0 to L4", wrong)
        report.result = []
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """See that no conftest and no test module redirected the package."""
    if _package_path() != session.config.rootpath / "src" / PACKAGE:
        raise pytest.UsageError(f"a conftest or a test module changed {PACKAGE}.__path__")


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs code in a fresh interpreter and returns what it printed.

    The code imports the tree under test. It runs in `folder`, by default a new, empty one. A child
    that exits with another status than 0 fails the test and shows both streams.
    """

    def run(
        code: str, *arguments: str, folder: Path | None = None, timeout_s: float = 300.0
    ) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=folder or tmp_path_factory.mktemp("child"),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(
                f"the child interpreter exited with status {done.returncode}\n"
                f"--- code\n{code}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
            )
        return done.stdout

    return run


def _package_path() -> Path | None:
    """Return the folder that `import tilewright` would take, or has taken."""
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None:
        return Path(next(iter(loaded.__path__))).resolve()
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def _lost_test_files(root: Path, config: pytest.Config) -> list[str]:
    """Return the files with tests that lie where, or are named so that, no run collects them."""
    swept = [root / path for path in config.getini("testpaths")]
    skipped = tuple(config.getini("norecursedirs"))
    patterns = tuple(config.getini("python_files"))
    lost = []
    for top in ("benchmark", "docs", "examples", "src", "test"):
        for path in sorted((root / top).rglob("*.py")):
            reason = None
            if not any(path.is_relative_to(folder) for folder in swept):
                reason = f"outside {', '.join(config.getini('testpaths'))}"
            elif not any(path.match(pattern) for pattern in patterns):
                reason = f"its name matches none of {', '.join(patterns)}"
            elif any(_matches(part, skipped) for part in path.relative_to(root).parts[:-1]):
                reason = "in a folder that collection skips"
            if reason and _defines_tests(path):
                lost.append(f"{path.relative_to(root)}: {reason}")
    return lost


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(Path(name).match(pattern) for pattern in patterns)


def _defines_tests(path: Path) -> bool:
    """Tell whether the module holds what pytest would take for a test, at its top level."""
    text = path.read_text(encoding="utf-8")
    if "test" not in text.lower():
        return False
    for node in ast.parse(text, filename=str(path)).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            return True
        if (
            isinstance(node, ast.ClassDef)
            and node.name.startswith("Test")
            and any(isinstance(n, ast.FunctionDef) and n.name.startswith("test") for n in node.body)
        ):
            return True
    return False


def _listing(rule: str, entries: list[str]) -> str:
    shown = "\n  ".join(entries[:_LISTED])
    rest = f"\n  ... and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return f"{rule}:\n  {shown}{rest}"
