"""What must come before anything imports torch: allocator settings, and the order of imports."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence

import pytest

# torch reads it once, when its allocator starts; newer releases know the second name too.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def export_allocator(setting: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Export the allocator's setting; the caller's own value stays.

    Raises:
        pytest.UsageError: if torch was imported already without it.
    """
    if not setting or environment.get(ALLOCATOR) or environment.get("PYTORCH_ALLOC_CONF"):
        return
    if "torch" in sys.modules:
        raise pytest.UsageError(
            f"torch was imported before {ALLOCATOR}={setting} could be exported: a plugin loaded "
            "earlier imports it. Load tilewright.testing.plugin before it, or export the variable"
        )
    environment[ALLOCATOR] = setting


def check_allocator(setting: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """See after collection that nobody took the setting away.

    Raises:
        pytest.UsageError: if it is gone.
    """
    if setting and not (environment.get(ALLOCATOR) or environment.get("PYTORCH_ALLOC_CONF")):
        raise pytest.UsageError(f"a conftest or a test module removed {ALLOCATOR}")


def import_in_order(names: Sequence[str]) -> None:
    """Import the installed ones of ``names``, in their order.

    Raises:
        pytest.UsageError: if a later one was imported before an earlier one.
    """
    for name in names:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    check_order(names)


def check_order(names: Sequence[str]) -> None:
    """See that the loaded ones of ``names`` were loaded in this order.

    Raises:
        pytest.UsageError: naming the pair that was not.
    """
    # sys.modules keeps the order of imports.
    order = [name for name in sys.modules if name in names]
    wanted = [name for name in names if name in order]
    for found, expected in zip(order, wanted, strict=True):
        if found != expected:
            raise pytest.UsageError(
                f"{found} was imported before {expected}; tilewright_import_first asks for "
                f"{', '.join(names)}"
            )
