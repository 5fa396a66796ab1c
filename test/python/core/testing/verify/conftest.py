"""Run `tilewright verify` in this process, from the root of the project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[5]


class Verified:
    """The exit status, what was printed, and the checks of the JSON file."""

    def __init__(self, code: int, out: str, err: str, document: dict[str, Any]) -> None:
        self.code = code
        self.out = out
        self.err = err
        self.document = document

    def checks(self, status: str) -> list[dict[str, str]]:
        return [check for check in self.document["checks"] if check["status"] == status]

    def rules(self, status: str) -> set[str]:
        return {check["rule"] for check in self.checks(status)}


@pytest.fixture(autouse=True)
def forget_scales() -> Iterator[None]:
    """Clear what the kernel with a stale scale remembers: addresses come again in other tests."""
    yield
    for name in ("planted", "planted_triton"):
        module = sys.modules.get(f"examples.verify.{name}")
        if module is not None:
            module._SCALES.clear()


@pytest.fixture
def root() -> Path:
    """Return the root of the project."""
    return ROOT


@pytest.fixture
def verify(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Verified]:
    """Return a function that runs ``tilewright verify`` with the given arguments."""
    from tilewright.cli.main import main

    monkeypatch.syspath_prepend(str(ROOT))
    # What runs in this process is no Triton kernel, whatever other tests set.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def run(*arguments: str) -> Verified:
        capsys.readouterr()
        file = tmp_path / "checks.json"
        code = main(["verify", *arguments, "--json", str(file), "--device", "cpu"])
        printed = capsys.readouterr()
        document = json.loads(file.read_text()) if file.exists() else {}
        return Verified(code, printed.out, printed.err, document)

    return run


@pytest.fixture
def interpreted() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function (*arguments) that runs Python with Triton's kernels interpreted."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run
