"""`import tilewright` is quick and loads none of the heavy packages."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

LIMIT_S = 0.15
INTERPRETERS = 5
HEAVY = ("torch", "triton", "numpy", "transformers", "jax", "matplotlib")

# Processor time, not elapsed time: other work on the machine must not fail the test.
MEASURE = """
import sys, time
started = time.process_time()
__import__(sys.argv[1])
spent = time.process_time() - started
print(spent, *(name for name in sys.argv[2:] if name in sys.modules))
"""

Run = Callable[..., str]


def measure(run_python: Run, module: str, folder: Path | None = None) -> tuple[float, set[str]]:
    """Return the median import time in seconds, and which heavy packages the import loaded."""
    times_s, loaded = [], set()
    for _ in range(INTERPRETERS):
        spent, *found = run_python(MEASURE, module, *HEAVY, folder=folder).split()
        times_s.append(float(spent))
        loaded.update(found)
    return statistics.median(times_s), loaded


def test_import_is_quick_and_lazy(run_python: Run) -> None:
    median_s, loaded = measure(run_python, "tilewright")
    assert not loaded
    assert median_s < LIMIT_S


def test_the_check_sees_a_slow_import_and_a_heavy_package(run_python: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "slow_package.py").write_text(
        "import time, torch\nend = time.process_time() + 0.2\n"
        "while time.process_time() < end: pass\n"
    )
    median_s, loaded = measure(run_python, "slow_package", tmp_path)
    assert loaded == {"torch"}
    assert median_s > LIMIT_S
