"""Which function is the reference of which operation kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.errors import NotSupportedError

__all__ = ["Reference", "kinds", "reference", "reference_of"]

Reference = Callable[[Any, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""`(operation, inputs by port) -> outputs by port`, both in the tensors' declared axis order.

Inputs come in the dtype of their storage; a reference converts what it computes with to float64.
A port whose tensor is ragged has its offsets (in elements, B + 1 of them) under the additional name
`"<port>.ragged_offset"`.
"""

_references: dict[str, Reference] = {}


def reference(*kinds: str) -> Callable[[Reference], Reference]:
    """Register the decorated function as the reference of the given operation kinds.

    Raises:
        ValueError: A kind has a reference already.
    """

    def register(function: Reference) -> Reference:
        for kind in kinds:
            if kind in _references:
                raise ValueError(f"operation kind {kind!r} has a reference already")
            _references[kind] = function
        return function

    return register


def reference_of(kind: str) -> Reference:
    """The reference of an operation kind.

    Raises:
        NotSupportedError: There is none; the message lists the kinds that have one.
    """
    try:
        return _references[kind]
    except KeyError:
        raise NotSupportedError(
            f"operation kind {kind!r} has no reference; known: {', '.join(kinds())}"
        ) from None


def kinds() -> tuple[str, ...]:
    """The operation kinds that have a reference, sorted."""
    return tuple(sorted(_references))
