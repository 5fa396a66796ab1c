"""Expected failures that name the plan: a plan that works may be ranked first at any time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def xfail_plan(
    selected: str, *, plan: str, raises: type[BaseException], reason: str
) -> Iterator[None]:
    """Expect the body to raise ``raises`` if the plan that runs, ``selected``, is ``plan``.

    ``plan`` is a plan's whole name, as ``frame.plan_name`` gives it, or an engine's, as
    ``graph.selected_engine`` gives it. Under any other plan the body is an ordinary test. Under
    this one it is strict: if the body passes, the test fails, and any other exception propagates.

        with xfail_plan(frame.plan_name, plan="aten[]", raises=AssertionError, reason="NVBug 1"):
            check(output)

    Raises:
        ValueError: if the plan or the reason is empty, or ``raises`` would hide any bug.
    """
    if not plan or not reason:
        raise ValueError(f"an expected failure names a plan and a reason, not {plan!r}, {reason!r}")
    if raises in (BaseException, Exception, RuntimeError):
        raise ValueError(f"an expected failure names its exception; {raises.__name__} hides bugs")
    if selected != plan:
        yield
        return
    try:
        yield
    except raises as error:
        pytest.xfail(f"plan {plan}: {reason} ({type(error).__name__})")
    pytest.fail(f"plan {plan} passed, but was expected to raise {raises.__name__}: {reason}")
