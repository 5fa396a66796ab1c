"""Which ATen function prepares which operation kind.

A preparer decides everything that depends on the declaration alone and returns a kernel: a
closure that takes the operands of one call and writes the outputs in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.errors import NotSupportedError

Operands = Mapping[str, torch.Tensor]
Kernel = Callable[[Operands, Operands], None]
# The operation is Any here: each preparer takes its own record type, and the kind that it
# is registered under is what ties the two together.
Preparer = Callable[[Any, torch.device], Kernel]

_PREPARERS: dict[str, Preparer] = {}


def implements(*kinds: str) -> Callable[[Preparer], Preparer]:
    """Register the decorated preparer for operation ``kinds``."""

    def register(preparer: Preparer) -> Preparer:
        for kind in kinds:
            if kind in _PREPARERS:
                raise ValueError(f"operation kind {kind!r} has two ATen preparers")
            _PREPARERS[kind] = preparer
        return preparer

    return register


def prepare(operation: Any, device: torch.device) -> Kernel:
    """The kernel of one operation on ``device``.

    Raises:
        NotSupportedError: if no preparer takes the operation, with the reason.
    """
    preparer = _PREPARERS.get(operation.kind)
    if preparer is None:
        raise NotSupportedError(
            f"operation {operation.name!r}: the ATen engine has no {operation.kind}"
        )
    return preparer(operation, device)
