"""Data that finds bugs: frozen cases, drawn on the CPU, that another machine rebuilds bit by bit.

Each maker takes a `torch.Generator`, draws one seed from it, and builds a `DataCase` from the
seed and its parameters alone; `case.repro` is plain JSON, and `from_repro` builds the case again.
"""

from __future__ import annotations

from tilewright.testing.data.attention import PROFILES as ATTENTION_PROFILES
from tilewright.testing.data.attention import attention_values
from tilewright.testing.data.cases import DataCase, ReproError, from_repro, rebuild
from tilewright.testing.data.draws import Draws
from tilewright.testing.data.global_state import assert_unmoved_by_global_state
from tilewright.testing.data.guards import Guarded, guard, guard_all
from tilewright.testing.data.layouts import LAYOUTS, layout, layouts
from tilewright.testing.data.paged import UNUSED_ENTRIES, paged_cache
from tilewright.testing.data.ragged import PROFILES as RAGGED_PROFILES
from tilewright.testing.data.ragged import ragged, ragged_lengths
from tilewright.testing.data.ties import block_scale_ties, format_ties
from tilewright.testing.data.values import PROFILES as VALUE_PROFILES
from tilewright.testing.data.values import values

__all__ = [
    "ATTENTION_PROFILES",
    "LAYOUTS",
    "RAGGED_PROFILES",
    "UNUSED_ENTRIES",
    "VALUE_PROFILES",
    "DataCase",
    "Draws",
    "Guarded",
    "ReproError",
    "assert_unmoved_by_global_state",
    "attention_values",
    "block_scale_ties",
    "format_ties",
    "from_repro",
    "guard",
    "guard_all",
    "layout",
    "layouts",
    "paged_cache",
    "ragged",
    "ragged_lengths",
    "rebuild",
    "values",
]
