"""Marks of what runs on a Hopper GPU alone; elsewhere it is skipped, and says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

NEEDS_HOPPER = [
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidiactl"),
        reason="needs an NVIDIA GPU of compute capability 9.0",
    ),
    # Not at import: asking makes a context on the GPU.
    pytest.mark.usefixtures("hopper_gpu"),
]


def needs_hopper(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test with these marks."""
    for mark in NEEDS_HOPPER:
        test = mark(test)
    return test
