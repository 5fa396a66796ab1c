"""Figures in pages are those of the committed results."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import figures

    yield figures
    for name in [name for name in sys.modules if name.startswith("figures")]:
        del sys.modules[name]


def test_every_page_is_current(figures: Any) -> None:
    named = set()
    for path in figures.pages():
        text = path.read_text(encoding="utf-8")
        assert text == figures.renewed(text), f"{path.name}; run: python benchmark/figures.py"
        named |= set(re.findall("<!-- figures: (.*) -->", text))
        assert text.count("<!-- figures: ") == text.count("<!-- end of figures -->")
    assert named == set(figures.BLOCKS)


def test_another_result_makes_another_page(
    figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import figures_reading

    for path in figures_reading.RESULTS.glob("*.csv"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(figures_reading, "RESULTS", tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.renewed(text) == text
    total = figures_reading.row("artifacts", step="total")["from_store_ms"]
    path = tmp_path / "artifacts.csv"
    path.write_text(path.read_text().replace(f"total,{total}", "total,77.6"))
    assert "| 78 milliseconds after torch's import" in figures.renewed(text)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("total")))
    with pytest.raises(LookupError, match=r"artifacts\.csv has no row with .*total"):
        figures.renewed(text)


def test_figures_that_are_not_there_are_an_error(figures: Any) -> None:
    with pytest.raises(KeyError, match="speeds"):
        figures.renewed("<!-- figures: speeds -->\n<!-- end of figures -->")
