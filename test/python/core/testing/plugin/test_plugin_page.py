"""docs/testing.md names everything that the plugin offers, and its example suite runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.testing import fixtures, levels, options, plugin

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]
PAGE = (Path(__file__).resolve().parents[5] / "docs/testing.md").read_text(encoding="utf-8")


def offered() -> list[str]:
    parser = pytest.Parser(_ispytest=True)
    options.declare_options(parser)
    flags = [name for option in parser.getgroup("tilewright").options for name in option.names()]
    ini = [name for name, *_ in options._INI]
    marks = [mark.partition(":")[0] for mark in plugin._MARKS]
    made = [
        value.name or name
        for name, value in vars(fixtures).items()
        if type(value).__name__ == "FixtureFunctionDefinition"
    ]
    assert flags and ini and marks and made
    return [*flags, *ini, *marks, *made, *levels.LEVELS]


def test_the_page_names_everything() -> None:
    assert [name for name in offered() if f"`{name}" not in PAGE] == []


def test_the_pages_suite_runs(suite: Suite) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```\n", PAGE, re.MULTILINE | re.DOTALL)
    ran = suite({"test_page.py": blocks[0]}, "-n0", more_ini="tilewright_levels = true\n")
    assert ran.status == 0, ran.text
    assert ran.outcomes == {"collected": 4, "passed": 2, "skipped": 2}, ran.text
    assert ran.lines_with("1 declined: q: head size 512 is above 256")
