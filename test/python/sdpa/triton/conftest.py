"""Makes the cases in `attention_cases/` importable, and sums up what became of all of them.

And the engines of kernels that the machine has.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# The name under which a test hands in how many cases ran, or why one was declined.
PROPERTY = "attention_pairs"


@pytest.fixture(params=["triton", "hopper"])
def engine(request: pytest.FixtureRequest) -> str:
    """An engine of kernels that the machine has; Triton's are interpreted without a GPU."""
    name = str(request.param)
    has_gpu = os.path.exists("/dev/nvidiactl")
    if name == "hopper" and not (has_gpu and torch.cuda.get_device_capability() == (9, 0)):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
    return name


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many attention cases ran, and every reason for which one was declined."""
    values = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if not values:
        return
    terminalreporter.section("attention cases")
    ran = sum(value for value in values if isinstance(value, int))
    terminalreporter.line(f"{ran} ran")
    declined = Counter(value for value in values if isinstance(value, str))
    for reason, count in declined.most_common():
        terminalreporter.line(f"{count} declined: {reason}")
