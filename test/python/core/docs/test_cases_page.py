"""docs/cases.md is generated, and every test that it names exists."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]


def load_cases() -> Any:
    spec = importlib.util.spec_from_file_location("cases_source", ROOT / "test" / "cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    missing = []
    for case in load_cases().CASES:
        for test in case.tests:
            name, _, function = test.partition("::")
            path = ROOT / name
            if path.is_dir():
                found = any(path.glob("test_*.py"))
            else:
                found = path.exists() and (not function or function in functions(path))
            if not found:
                missing.append(f"{case.id}: {test}")
    assert not missing


def test_ids_are_distinct_and_the_page_is_current() -> None:
    cases = load_cases()
    ids = [case.id for case in cases.CASES]
    assert len(ids) == len(set(ids))
    current = (ROOT / "docs" / "cases.md").read_text()
    assert current == cases.page(), "run: python test/cases.py > docs/cases.md"
