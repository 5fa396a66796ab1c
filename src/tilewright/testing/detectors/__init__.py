"""Detectors: reusable checks of the launch contract's rules, for any callable or graph.

Each is a function that returns a `Verdict`, and has an ``assert_`` form. docs/testing/detectors.md
lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.testing.detectors.allocation import assert_no_allocation, no_allocation
    from tilewright.testing.detectors.artifacts import (
        assert_torn_artifacts_are_misses,
        torn_artifacts_are_misses,
    )
    from tilewright.testing.detectors.beside import (
        assert_beside_another_process,
        beside_another_process,
    )
    from tilewright.testing.detectors.frames import (
        assert_frame_independence,
        frame_independence,
    )
    from tilewright.testing.detectors.naming import (
        assert_no_silent_fallback,
        no_silent_fallback,
    )
    from tilewright.testing.detectors.refusal import (
        alias_refusal,
        assert_alias_refusal,
        assert_optional_operands,
        assert_storage_bound,
        assert_untouched_on_refusal,
        optional_operands,
        storage_bound,
        untouched_on_refusal,
    )
    from tilewright.testing.detectors.repetition import assert_determinism, determinism
    from tilewright.testing.detectors.replay import assert_replay_freshness, replay_freshness
    from tilewright.testing.detectors.subject import Subject, callable_subject, graph_subject
    from tilewright.testing.detectors.verdict import Outcome, Verdict
    from tilewright.testing.detectors.waiting import (
        assert_no_synchronization,
        assert_stream_order,
        no_synchronization,
        stream_order,
    )
    from tilewright.testing.detectors.wide import assert_wide_strides, wide_strides
    from tilewright.testing.detectors.written import (
        assert_every_element_written,
        assert_guards_unchanged,
        assert_nothing_outside_read,
        every_element_written,
        guards_unchanged,
        nothing_outside_read,
    )

# Name -> the module that has it, loaded at first use.
_DETECTORS = {
    "alias_refusal": "refusal",
    "beside_another_process": "beside",
    "determinism": "repetition",
    "every_element_written": "written",
    "frame_independence": "frames",
    "guards_unchanged": "written",
    "no_allocation": "allocation",
    "no_silent_fallback": "naming",
    "no_synchronization": "waiting",
    "nothing_outside_read": "written",
    "optional_operands": "refusal",
    "replay_freshness": "replay",
    "storage_bound": "refusal",
    "stream_order": "waiting",
    "torn_artifacts_are_misses": "artifacts",
    "untouched_on_refusal": "refusal",
    "wide_strides": "wide",
}
_MODULES = {
    **_DETECTORS,
    **{f"assert_{name}": module for name, module in _DETECTORS.items()},
    "Outcome": "verdict",
    "Subject": "subject",
    "Verdict": "verdict",
    "callable_subject": "subject",
    "graph_subject": "subject",
}

__all__ = [
    "Outcome",
    "Subject",
    "Verdict",
    "alias_refusal",
    "assert_alias_refusal",
    "assert_beside_another_process",
    "assert_determinism",
    "assert_every_element_written",
    "assert_frame_independence",
    "assert_guards_unchanged",
    "assert_no_allocation",
    "assert_no_silent_fallback",
    "assert_no_synchronization",
    "assert_nothing_outside_read",
    "assert_optional_operands",
    "assert_replay_freshness",
    "assert_storage_bound",
    "assert_stream_order",
    "assert_torn_artifacts_are_misses",
    "assert_untouched_on_refusal",
    "assert_wide_strides",
    "beside_another_process",
    "callable_subject",
    "determinism",
    "every_element_written",
    "frame_independence",
    "graph_subject",
    "guards_unchanged",
    "no_allocation",
    "no_silent_fallback",
    "no_synchronization",
    "nothing_outside_read",
    "optional_operands",
    "replay_freshness",
    "storage_bound",
    "stream_order",
    "torn_artifacts_are_misses",
    "untouched_on_refusal",
    "wide_strides",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
