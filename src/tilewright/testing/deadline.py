"""The deadline of a test: faulthandler's watchdog, a thread of C code.

A driver call that hangs keeps the interpreter lock, and then neither a Python thread nor a signal
handler runs. The watchdog needs no lock: it prints every thread's stack and ends the process.
There is one in a process, so pytest's own ``faulthandler_timeout`` cannot be used beside it.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

# What faulthandler prints first when it ends a process.
MARK = "Timeout ("


def of(item: pytest.Item, default_s: float) -> float:
    """Seconds that the test may take, by its mark ``deadline(seconds)`` or by default; 0 = any.

    Raises:
        pytest.UsageError: for a mark with anything but one number from 0 up.
    """
    mark = item.get_closest_marker("deadline")
    if mark is None:
        return default_s
    value = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise pytest.UsageError(
            f"{item.nodeid}: the mark is deadline(seconds) with one number from 0 up, not "
            f"{mark.args} {mark.kwargs}"
        )
    return float(value)


@contextmanager
def limit(seconds: float, stream: IO[str]) -> Iterator[None]:
    """End the process if the body takes longer than ``seconds``; stacks go to ``stream``."""
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stream)
    try:
        yield
    finally:
        if seconds > 0:
            faulthandler.cancel_dump_traceback_later()


def check_timer_is_free(config: pytest.Config) -> None:
    """Refuse pytest's own use of the one watchdog.

    Raises:
        pytest.UsageError: if ``faulthandler_timeout`` is set.
    """
    try:
        taken = float(config.getini("faulthandler_timeout") or 0.0)
    except (KeyError, ValueError):
        return
    if taken > 0:
        raise pytest.UsageError(
            f"faulthandler_timeout = {taken:g} and the deadline of tilewright_isolation need the "
            "same watchdog: leave faulthandler_timeout out, or turn the deadline off by "
            "tilewright_deadline_s = 0 and tilewright_isolation = false"
        )
