"""Levels, the collection audit and the tree check, on small trees that break their rules."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[5]
USAGE_ERROR = int(pytest.ExitCode.USAGE_ERROR)
COLLECTION_ERROR = int(pytest.ExitCode.INTERRUPTED)
PASSING = "def test_passes():\n    pass\n"
L0_MODULE = "import pytest\n\npytestmark = pytest.mark.L0\n\n\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Lay out an empty project with this project's pytest configuration and its plugin."""
    (tmp_path / "test/python").mkdir(parents=True)
    (tmp_path / "src/tilewright/testing").mkdir(parents=True)
    (tmp_path / "src/tilewright/__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in (ROOT / "src/tilewright/testing").glob("*.py"):
        shutil.copy(path, tmp_path / "src/tilewright/testing")
    return tmp_path


@pytest.fixture
def sweep(tree: Path) -> Run:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tree,
            env={
                "PATH": "/usr/bin:/bin",
                # Before pytest 9, `pythonpath` comes after plugins of the command line.
                "PYTHONPATH": str(tree / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TILEWRIGHT_NO_ISOLATION": "1",
                # Other installed plugins take most of a start.
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_a_plain_run_takes_l0_and_an_expression_takes_another_level(tree: Path, sweep: Run) -> None:
    (tree / "test/python/test_a.py").write_text(L0_MODULE + PASSING)
    (tree / "test/python/test_b.py").write_text(
        "import pytest\n\n\n@pytest.mark.L1\n@pytest.mark.parametrize('case', [1, 2])\n"
        "def test_passes(case):\n    pass\n"
    )
    plain, other = sweep(), sweep("-m", "L1")
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert re.search(r"\b1 passed, 2 deselected", plain.stdout)
    assert re.search(r"\b2 passed, 1 deselected", other.stdout)


def test_the_banner_names_the_tree_under_test(tree: Path, sweep: Run) -> None:
    (tree / "test/python/test_a.py").write_text(L0_MODULE + PASSING)
    assert f"package under test: {tree.resolve() / 'src/tilewright'}\n" in sweep().stdout


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["one-process", "xdist"])
def test_an_unmarked_test_is_an_error(tree: Path, sweep: Run, workers: tuple[str, ...]) -> None:
    if workers:
        pytest.importorskip("xdist")
    (tree / "test/python/test_a.py").write_text(L0_MODULE + PASSING)
    (tree / "test/python/test_b.py").write_text(PASSING)
    done = sweep(*workers)
    output = done.stdout + done.stderr
    assert done.returncode == (int(pytest.ExitCode.TESTS_FAILED) if workers else COLLECTION_ERROR)
    assert "test/python/test_b.py::test_passes: no level" in output
    assert "ERROR test/python/test_b.py" in output


def test_two_levels_on_one_test_are_an_error(tree: Path, sweep: Run) -> None:
    (tree / "test/python/test_a.py").write_text(f"{L0_MODULE}@pytest.mark.L2\n{PASSING}")
    done = sweep()
    assert done.returncode == COLLECTION_ERROR
    assert "test_a.py::test_passes: L0 and L2" in done.stdout + done.stderr


def test_an_unknown_mark_is_an_error(tree: Path, sweep: Run) -> None:
    (tree / "test/python/test_a.py").write_text(f"{L0_MODULE}@pytest.mark.L5\n{PASSING}")
    done = sweep()
    assert done.returncode == COLLECTION_ERROR
    assert "'L5' not found in `markers`" in done.stdout


def test_a_level_does_not_travel_with_a_reexported_test(tree: Path, sweep: Run) -> None:
    (tree / "test/python/shared_cases.py").write_text(
        "import pytest\n\npytestmark = pytest.mark.L0\n"
    )
    (tree / "src/tilewright/cases.py").write_text("class TestCase:\n    pass\n")
    (tree / "test/python/test_a.py").write_text(L0_MODULE + PASSING)
    (tree / "test/python/test_b.py").write_text(
        "import importlib.util, pathlib\n"
        "spec = importlib.util.spec_from_file_location("
        "'a', pathlib.Path(__file__).with_name('test_a.py'))\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "test_passes = module.test_passes\n"
    )
    done = sweep()
    assert done.returncode == COLLECTION_ERROR
    assert "test_b.py::test_passes: no level" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("test/python/rope/rope_cases.py", "its name matches none of"),
        ("test/python/build/test_a.py", "in a folder that collection skips"),
        ("test/cpp/test_a.py", "outside test/python"),
        ("benchmark/test_a.py", "outside test/python"),
        ("src/tilewright/graph/checks.py", "outside test/python"),
    ],
)
def test_tests_that_no_run_collects_are_an_error(
    tree: Path, sweep: Run, path: str, reason: str
) -> None:
    (tree / "test/python/test_a.py").write_text(L0_MODULE + PASSING)
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(L0_MODULE + PASSING)
    done = sweep()
    assert done.returncode == USAGE_ERROR, done.stdout + done.stderr
    assert f"{path}: {reason}" in done.stdout + done.stderr


def test_a_test_inside_a_class_is_found_too(tree: Path, sweep: Run) -> None:
    (tree / "test/python/cases.py").write_text(
        "class TestCase:\n    def test_passes(self):\n        pass\n"
    )
    done = sweep()
    assert done.returncode == USAGE_ERROR
    assert "test/python/cases.py: its name matches none of" in done.stdout + done.stderr


def test_a_finder_that_resolves_elsewhere_is_refused(tree: Path, sweep: Run) -> None:
    (tree / "test/python/test_a.py").write_text(L0_MODULE + PASSING)
    other = tree / "other"
    shutil.copytree(tree / "src/tilewright", other / "tilewright")
    # What an editable installation leaves in site-packages, here before the import path.
    (other / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n\n\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'tilewright':\n"
        f"            return importlib.machinery.PathFinder.find_spec(name, [{str(other)!r}])\n"
        "        return None\n\n\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    done = sweep(PYTHONPATH=str(other))
    assert done.returncode == USAGE_ERROR, done.stdout + done.stderr
    assert f"the package under test would be {other.resolve() / 'tilewright'}" in done.stderr


def test_a_conftest_that_redirects_the_package_is_refused(tree: Path, sweep: Run) -> None:
    (tree / "test/python/nested").mkdir()
    (tree / "test/python/nested/test_a.py").write_text(L0_MODULE + PASSING)
    (tree / "test/python/nested/conftest.py").write_text(
        "import tilewright\n\ntilewright.__path__.insert(0, '/nowhere')\n"
    )
    done = sweep()
    assert done.returncode == USAGE_ERROR, done.stdout + done.stderr
    assert "changed tilewright.__path__" in done.stdout + done.stderr


def test_a_child_interpreter_imports_the_tree_under_test(run_python: Callable[..., str]) -> None:
    printed = run_python("import tilewright; print(list(tilewright.__path__)[0])")
    assert Path(printed.strip()).resolve() == ROOT / "src/tilewright"
