"""Testing of kernels: comparing, data that finds bugs, detectors, and the pytest plugin.

The names are loaded at first use, so that importing the package takes neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    **dict.fromkeys(
        ("Comparison", "assert_all_close", "assert_bitwise_equal", "assert_close"),
        "tilewright.testing.compare",
    ),
    **dict.fromkeys(
        ("Flip", "Fp8Comparison", "assert_close_fp8"),
        "tilewright.testing.compare_fp8",
    ),
    **dict.fromkeys(
        ("Intermediates", "backward_intermediates", "forward_intermediates"),
        "tilewright.testing.fp8_flip",
    ),
    **dict.fromkeys(
        ("GluFailure", "explain_glu_failure", "glu_report"),
        "tilewright.testing.compare_glu",
    ),
    **dict.fromkeys(
        ("assert_keys_seen", "keys_seen"),
        "tilewright.testing.compare_visible",
    ),
    **dict.fromkeys(("Draws", "check_ignores_global_state"), "tilewright.testing.draws"),
    "allocate_or_skip": "tilewright.testing.large_storage",
    "copy_source": "tilewright.testing.tree",
    "count_taken": "tilewright.testing.taken_paths",
    "xfail_plan": "tilewright.testing.expected",
    "error_picture": "tilewright.testing.report",
    **dict.fromkeys(("DataCase", "from_repro"), "tilewright.testing.data"),
}
_SUBMODULES = ("data",)

__all__ = sorted([*_EXPORTS, *_SUBMODULES])


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
