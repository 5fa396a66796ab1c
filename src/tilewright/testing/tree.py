"""The tree under test is the one that was chosen, here and in child interpreters."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Another process renames bytecode files while a copy enumerates them.
_LEFT_OUT = ("__pycache__", "*.pyc", "*.pyo", "*.egg-info")


def package_path(name: str) -> Path | None:
    """Return the folder that ``import name`` would take, or has taken."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__path__", None):
        return Path(next(iter(loaded.__path__))).resolve()
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def choose(package: Path) -> None:
    """Refuse to test another tree than ``package``'s, and make child interpreters import this one.

    Raises:
        pytest.UsageError: if the package would come, or has come, from elsewhere.
    """
    found = package_path(package.name)
    if found != package.resolve():
        raise pytest.UsageError(
            f"the package under test would be {found}, not {package.resolve()}: something puts "
            "another copy first on the import path"
        )
    os.environ["PYTHONPATH"] = child_path(package.parent, os.environ.get("PYTHONPATH", ""))


def child_path(source: Path, inherited: str) -> str:
    """PYTHONPATH with ``source`` first and what was inherited after it."""
    others = [entry for entry in inherited.split(os.pathsep) if entry and entry != str(source)]
    return os.pathsep.join([str(source), *others])


def check_unchanged(package: Path) -> None:
    """See that no conftest and no test module redirected the package.

    Raises:
        pytest.UsageError: if one did.
    """
    if package_path(package.name) != package.resolve():
        raise pytest.UsageError(f"a conftest or a test module changed {package.name}.__path__")


def run_python(
    code: str, *arguments: str, folder: Path, package: Path | None = None, timeout_s: float = 300.0
) -> str:
    """Run ``code`` in a fresh interpreter in ``folder`` and return what it printed.

    The child imports the chosen tree. One that exits with another status than 0, or that finds
    ``package`` elsewhere, fails the test and shows both streams.
    """
    if package is not None:
        _check_child(package, folder, timeout_s)
    done = _child(code, arguments, folder, timeout_s)
    if done.returncode != 0:
        pytest.fail(
            f"the child interpreter exited with status {done.returncode}\n"
            f"--- code\n{code}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
        )
    return done.stdout


def _check_child(package: Path, folder: Path, timeout_s: float) -> None:
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec(sys.argv[1]); "
        "print(list(found.submodule_search_locations)[0] if found else None)"
    )
    done = _child(code, (package.name,), folder, timeout_s)
    found = done.stdout.strip()
    if done.returncode != 0 or Path(found).resolve() != package.resolve():
        pytest.fail(
            f"a child interpreter would import {package.name} from {found or done.stderr}, not "
            f"from {package.resolve()}"
        )


def _child(
    code: str, arguments: tuple[str, ...], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def copy_source(source: Path, target: Path) -> Path:
    """Copy a source tree without its bytecode caches, and return ``target``."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    return target
