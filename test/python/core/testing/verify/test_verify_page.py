"""docs/testing/verify.md shows what really comes out."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.cli.main import main

pytestmark = pytest.mark.L0

PAGES = Path(__file__).resolve().parents[5] / "docs/testing"
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)^```$", re.M | re.S
)
BLOCKS = [
    (match["command"].replace("\\\n", " "), match["output"])
    for match in BLOCK.finditer((PAGES / "verify.md").read_text(encoding="utf-8"))
]
# A last digit depends on the processor, and so does which of several NaN comes first.
FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?|-?\d+e[-+]\d+")
WORST = re.compile(r"^ *at \(.*$", re.M)


def plain(text: str) -> list[str]:
    text = WORST.sub("    at ...", FLOAT.sub("#", text))
    return [re.sub(r"─+", "-", line.rstrip()) for line in text.strip().splitlines()]


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[f"{i}" for i in range(len(BLOCKS))])
def test_the_page_shows_real_output(
    command: str,
    output: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command)
    if words[0] == "TRITON_INTERPRET=1":
        done = subprocess.run(
            [sys.executable, "-m", "tilewright.cli.main", *words[2:]],
            cwd=root,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        status, printed = done.returncode, done.stdout
    else:
        assert words.pop(0) == "tilewright"
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        device = [] if "--signature" in words else ["--device", "cpu"]
        status = main([*words, *device])
        printed = capsys.readouterr().out
    assert plain(f"{printed}[status {status}]") == plain(output)


def test_the_page_shows_each_bug() -> None:
    from examples.verify import planted

    for bug in planted.BUGS:
        assert any(f"attention_{bug}" in command for command, _ in BLOCKS), bug


def test_every_detector_is_on_its_page() -> None:
    from tilewright.testing import detectors

    page = (PAGES / "detectors.md").read_text(encoding="utf-8")
    for name in detectors._DETECTORS:
        assert f"`{name}`" in page, name


def test_the_example_of_the_detectors_page_runs(run_python: Callable[..., str]) -> None:
    page = (PAGES / "detectors.md").read_text(encoding="utf-8")
    match = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.S)
    assert match is not None
    assert run_python(match[1]) == match[2]
