"""Makes the attention cases that engines share importable, and those of this engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
sys.path.insert(0, str(Path(__file__).parent))
