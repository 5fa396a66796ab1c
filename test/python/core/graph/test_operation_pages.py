"""The pages on operations: their examples run, and each method is on a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewright.graph.operation import operation_kinds
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES

pytestmark = pytest.mark.L0

PAGES = Path(__file__).resolve().parents[4] / "docs" / "operations"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{position}")
    for page in sorted(PAGES.glob("*.md"))
    for position, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str) -> None:
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 10


def test_every_method_is_on_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    methods = (operation_kinds().keys() - {"pointwise"}) | POINTWISE_MODES.keys()
    missing = [name for name in sorted(methods) if not re.search(rf"`{name}\b", text)]
    assert missing == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES.glob("*.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == []
