"""Makes the attention cases that engines share importable, and those of this engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def hopper_gpu() -> None:
    """Skip where the GPU is of another generation (``needing_hopper``)."""
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
