"""Scripts that run on a GPU alone import names that are there: a renamed one is met here first."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = sorted(
    path for folder in ("benchmark", "test/gpu") for path in ROOT.glob(f"{folder}/*.py")
)


def missing(source: str) -> Iterator[str]:
    """What ``source`` imports of this package that the package does not have."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tilewright"):
            continue
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            is_package = hasattr(module, "__path__")
            if hasattr(module, alias.name) or (is_package and importlib.util.find_spec(name)):
                continue
            yield name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(path: Path) -> None:
    assert not list(missing(path.read_text()))


def test_a_name_that_is_gone_is_told() -> None:
    source = "from tilewright.engines.compiled.code_cache import kernel_code, kernel_digests"
    gone = "tilewright.engines.compiled.code_cache.kernel_digests"
    assert list(missing(source)) == [gone]
