"""Compiled kernels that outlive the process: keys, the store, the environment, counters.

See docs/artifacts.md. Nothing here imports an engine, torch or Triton.
"""

from __future__ import annotations

from tilewright.artifact.counting import Counters as Counters
from tilewright.artifact.counting import counters as counters
from tilewright.artifact.counting import reset_counters as reset_counters
from tilewright.artifact.forbidding import compiler_forbidden as compiler_forbidden
from tilewright.artifact.location import current_store as current_store

__all__ = ["Counters", "compiler_forbidden", "counters", "current_store", "reset_counters"]
