"""How Hypothesis draws a run's graphs: so many, the same ones for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase


def check_each(seed: int, count: int, strategy: Any, check: Callable[[Any], None]) -> None:
    """Call ``check`` with ``count`` drawn cases; a failing one is shrunk."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # Not Phase.explain: it traces every line, for minutes.
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @hypothesis.given(strategy)
    def each(case: Any) -> None:
        check(case)

    each()
