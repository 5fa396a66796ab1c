"""Makes plan_samples.py importable; its engine beside ATen."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tilewright.dtypes import DataType
from tilewright.planning import graph as graph_module
from tilewright.planning import plans, selection, table
from tilewright.planning.rows import CapabilityRow
from tilewright.planning.table import ENGINE_TABLE, EngineEntry

if TYPE_CHECKING:
    from plan_samples import StubEngine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    """A second engine, named triton, that takes float32 products on any device."""
    from plan_samples import StubEngine

    engine = StubEngine(workspace_bytes=1024)
    monkeypatch.setitem(sys.modules, "stub_engine", types.ModuleType("stub_engine"))
    sys.modules["stub_engine"].ENGINE = engine  # type: ignore[attr-defined]
    row = CapabilityRow(("matmul",), frozenset({DataType.FLOAT}))
    entry = EngineEntry(1, "triton", "stub_engine", 30, (row,), "a stub")
    entries = (ENGINE_TABLE[0], entry, *ENGINE_TABLE[2:])
    for module in (table, plans, selection):
        monkeypatch.setattr(module, "ENGINE_TABLE", entries)
    monkeypatch.setattr(
        graph_module, "propose_plans", lambda *a: plans.propose_plans(*a, table=entries)
    )
    return engine
