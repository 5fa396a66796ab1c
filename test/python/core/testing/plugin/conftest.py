"""Run small suites under the plugin, in processes of their own."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

PLUGIN = "tilewright.testing.plugin"
ISOLATED = f"[pytest]\naddopts = -p {PLUGIN}\ntilewright_isolation = true\n"


@dataclass(frozen=True)
class Ran:
    """One finished run."""

    status: int
    text: str
    # What pytest's own last line counts, and what the plugin's line of outcomes does.
    counts: dict[str, int]
    outcomes: dict[str, int]

    def failed(self) -> list[str]:
        """Names in the short summary's FAILED lines."""
        return re.findall(r"^FAILED (\S+)", self.text, re.MULTILINE)

    def lines_with(self, part: str) -> list[str]:
        """Lines of the output that hold ``part``."""
        return [line for line in self.text.splitlines() if part in line]


Suite = Callable[..., Ran]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Return a function (files, *arguments, ini=ISOLATED, more_ini="", timeout_s=240) -> Ran.

    ``files`` maps a path of the suite to its text. The run has no device, no worker of an outer
    run, no options but the given ones, and of the installed plugins xdist alone.
    """
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PYTEST_ADDOPTS", "CUDA_VISIBLE_DEVICES", "TILEWRIGHT_NO_ISOLATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEWRIGHT_DEVICES", "")
    # The others take most of a worker's start.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def run(
        files: dict[str, str],
        *arguments: str,
        ini: str = ISOLATED,
        more_ini: str = "",
        timeout_s: float = 240.0,
    ) -> Ran:
        (pytester.path / "pytest.ini").write_text(ini + more_ini)
        for path, text in files.items():
            target = pytester.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(textwrap.dedent(text))
        done = pytester.runpytest_subprocess(
            "-p", "xdist", "-p", "no:cacheprovider", *arguments, timeout=timeout_s
        )
        text = done.stdout.str() + "\n" + done.stderr.str()
        try:
            counts = done.parseoutcomes()
        except ValueError:
            counts = {}
        line = re.search(r"^outcomes: (\d+) collected = (.*)$", text, re.MULTILINE)
        outcomes = {}
        if line:
            outcomes = {name: int(n) for n, name in re.findall(r"(\d+) ([a-z]+)", line[2])}
            outcomes["collected"] = int(line[1])
        return Ran(int(done.ret), text, counts, outcomes)

    return run
