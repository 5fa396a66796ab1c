"""Operands under ``torch.autocast``: the functions take them in the type that PyTorch's own do.

Attention, products and convolutions run in the region's type, norms on a GPU in float32, and what
is elementwise keeps the type of its operands. As with PyTorch's, float64 stays float64, and a call
with ``out=`` has the types that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CAST = (torch.float32, torch.float16, torch.bfloat16)
# On any type of device. It is asked at each call, and this is the one question that costs little.
is_autocast = torch._C._is_any_autocast_enabled


@dataclass(frozen=True)
class Casts:
    """Of which operands, and to which type on a type of device; None leaves them."""

    names: frozenset[str]
    type_on: Callable[[str], torch.dtype | None]

    def call(
        self,
        function: Callable[..., Any],
        order: Sequence[str],
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        """``function`` of cast operands, which runs inside as it does outside of a region.

        ``order`` names the positional ``arguments``.
        """
        device = _autocast_device((*arguments, *options.values()))
        if device is None or options.get("out") is not None:
            return function(*arguments, **options)
        dtype = self.type_on(device)
        cast = [
            _as(value, dtype) if index < len(order) and order[index] in self.names else value
            for index, value in enumerate(arguments)
        ]
        named = {
            name: _as(value, dtype) if name in self.names else value
            for name, value in options.items()
        }
        with torch.autocast(device, enabled=False):
            return function(*cast, **named)


def to_region_type(names: Iterable[str]) -> Casts:
    """Operands of these names are cast to the region's type."""
    return Casts(frozenset(names), torch.get_autocast_dtype)


def to_float32(names: Iterable[str]) -> Casts:
    """Operands of these names are cast to float32 on a GPU, as PyTorch's norms do.

    On a CPU those keep their operands' types.
    """
    return Casts(frozenset(names), lambda device: None if device == "cpu" else torch.float32)


def _as(value: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of a type that autocast casts in ``dtype``; anything else as it is."""
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype not in _CAST:
        return value
    return value.to(dtype)


def _autocast_device(values: Iterable[Any]) -> str | None:
    """The type of device of the first tensor, if autocast is on for it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            device = value.device.type
            return device if _has_regions(device) and torch.is_autocast_enabled(device) else None
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_regions(device: str) -> bool:
    """Whether autocast knows this type of device; PyTorch 2.11's compiler cannot trace the call."""
    return torch.amp.is_autocast_available(device)
