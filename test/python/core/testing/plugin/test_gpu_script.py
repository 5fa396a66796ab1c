"""The suite that test/gpu/isolation.py runs on a GPU is whole."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.L0

SCRIPT = Path(__file__).resolve().parents[4] / "gpu/isolation.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_isolation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_isolation", module)
    spec.loader.exec_module(module)
    return module


def test_every_expectation_is_of_a_test_that_is_there(script: ModuleType) -> None:
    names = [
        node.name for node in ast.parse(script.SUITE).body if isinstance(node, ast.FunctionDef)
    ]
    tests = [name for name in names if name.startswith("test_")]
    expected = [*script.FAILED, *script.CRASHED, *script.SKIPPED]
    assert len(set(expected)) == len(expected) and set(expected) < set(tests)
    # The order of the file is the order of the run: a healthy test follows each fault.
    assert tests == sorted(tests)
    whole = script.runs()[0]
    assert whole.outcomes.startswith(f"{len(tests)} collected = ")
    assert sum(map(int, whole.outcomes.split()[3::3])) == len(tests)
