"""README.md tells the truth: its code runs, and its commands exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A block of code, and the output that a block headed `text` right below it promises.
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
BLOCKS = [(match["code"], match["output"]) for match in BLOCK.finditer(README)]


def test_the_readme_has_code() -> None:
    assert BLOCKS
    assert README.count("```python") == len(BLOCKS)


@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_code_runs_as_printed(
    run_python: Callable[..., str], code: str, output: str | None
) -> None:
    printed = run_python(code)
    if output is not None:
        assert printed == output


def test_make_targets_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert script.rstrip().endswith("\nmake test")


def test_links_to_files_of_the_project_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_code_is_short() -> None:
    lines = [line for line in BLOCKS[0][0].splitlines() if line.strip()]
    assert len(lines) <= 12
