"""The code in docs/testing/comparing.md and data.md runs and prints what is written below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

FOLDER = Path(__file__).resolve().parents[5] / "docs" / "testing"
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
BLOCKS = [
    pytest.param(match["code"], match["output"], id=f"{name}-{index}")
    for name in ("comparing.md", "data.md")
    for index, match in enumerate(BLOCK.finditer((FOLDER / name).read_text(encoding="utf-8")))
]


def test_the_pages_have_code() -> None:
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_code_runs_as_printed(code: str, output: str | None) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs", "exec"), {"__name__": "docs"})
    assert printed.getvalue() == (output or "")
