"""The switch that forbids the compiler: what runs then came from memory or the store."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from tilewright.errors import LaunchError

VARIABLE = "TILEWRIGHT_FORBID_COMPILER"

_lock = threading.Lock()
# Of the process, not of a context: autograd builds plans in threads of its own.
_depth = 0


@contextlib.contextmanager
def compiler_forbidden() -> Iterator[None]:
    """Inside, any compilation in this process raises ``LaunchError``, in every thread."""
    global _depth
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1


def is_compiler_forbidden() -> bool:
    """True inside ``compiler_forbidden``, or if TILEWRIGHT_FORBID_COMPILER is set, and not 0."""
    return _depth > 0 or os.environ.get(VARIABLE, "0") not in ("", "0")


def require_compiler(kernel: str, target: tuple[int, int], why: str = "") -> None:
    """Return if the compiler may run.

    Raises:
        LaunchError: naming the kernel, the target, and why the store did not serve it.
    """
    if is_compiler_forbidden():
        reason = f" (looked up: {why})" if why else ""
        raise LaunchError(
            f"kernel {kernel!r} for sm_{target[0]}{target[1]} is not in the store{reason}, and "
            f"the compiler is forbidden"
        )
