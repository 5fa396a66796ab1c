"""Triton's interpreter and sparse operands.

After a kernel the interpreter copies the storage of every tensor argument back to where it came
from, on a CPU onto itself. For a storage of many gigabytes of untouched pages that would make all
of them real, so while the wide-stride detector runs, copies onto themselves are left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch


def is_interpreting() -> bool:
    """True if Triton kernels were made for the interpreter in this process."""
    has_kernels = "triton.runtime.interpreter" in sys.modules
    return has_kernels and os.environ.get("TRITON_INTERPRET") == "1"


@contextlib.contextmanager
def without_self_copies() -> Iterator[bool]:
    """Leave out copies of a storage onto itself; gives False where this Triton has no such place.

    Not for several threads at once: it replaces a method of the interpreter for the time.
    """
    if not is_interpreting():
        yield True
        return
    try:
        from triton.runtime.interpreter import GridExecutor

        restore = GridExecutor._restore_args_dev
    except (ImportError, AttributeError):
        yield False
        return

    def restore_others(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, host: Any) -> None:
        pairs = [*zip(args_dev, args_hst, strict=True)]
        pairs += [(kwargs[name], host[name]) for name in kwargs]
        if not all(_is_same(device_side, host_side) for device_side, host_side in pairs):
            restore(self, args_dev, args_hst, kwargs, host)

    GridExecutor._restore_args_dev = restore_others
    try:
        yield True
    finally:
        GridExecutor._restore_args_dev = restore


def _is_same(device_side: Any, host_side: Any) -> bool:
    """True if there is nothing to copy back: no memory at all, or the same."""
    if isinstance(device_side, torch.Tensor) and isinstance(host_side, torch.Tensor):
        first, second = device_side.untyped_storage(), host_side.untyped_storage()
        return first.data_ptr() == second.data_ptr()
    return isinstance(device_side, int | float | bool | str | torch.dtype | type(None))
