"""The command as a module: ``python -m tilewright``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tilewright

pytestmark = pytest.mark.L0


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "tilewright", "--version"]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert tilewright.__version__ in child.stdout
