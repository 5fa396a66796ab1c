"""Whole runs over the planted kernels in the interpreter: slower than the quick sweep may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.L1
BUGS = ("", "_narrow_stride", "_unmasked_tail", "_missed_head", "_wrong_log", "_stale_scale")


@pytest.mark.parametrize("bug", [*BUGS, "_unwritten_rows"])
def test_a_whole_run_in_the_interpreter(bug: str, root: Path) -> None:
    target = f"examples.verify.planted_triton:attention{bug}"
    done = subprocess.run(
        [sys.executable, "-m", "tilewright.cli.main", "verify", "attention", "--target", target],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == (1 if bug else 0), done.stdout + done.stderr
    assert (" 0 broken" in done.stdout) is not bool(bug)


def test_the_triton_engine_in_the_interpreter(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tilewright.cli.main", "verify", "norms", "--engine", "triton"],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was looked at" not in done.stdout
