"""Whole runs over the planted kernels in the interpreter: slower than the quick sweep may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.L1
BUGS = ("", "_narrow_stride", "_unmasked_tail", "_missed_head", "_wrong_log", "_stale_scale")
VERIFY = ("-m", "tilewright.cli.main", "verify")


@pytest.mark.parametrize("bug", [*BUGS, "_unwritten_rows"])
def test_a_whole_run_in_the_interpreter(bug: str, interpreted: Callable[..., Any]) -> None:
    target = f"examples.verify.planted_triton:attention{bug}"
    done = interpreted(*VERIFY, "attention", "--target", target)
    assert done.returncode == (1 if bug else 0), done.stdout + done.stderr
    assert (" 0 broken" in done.stdout) is not bool(bug)


def test_the_triton_engine_in_the_interpreter(interpreted: Callable[..., Any]) -> None:
    done = interpreted(*VERIFY, "norms", "--engine", "triton")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was looked at" not in done.stdout
