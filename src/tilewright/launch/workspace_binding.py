"""A call's workspace: checked against the plan and every operand, and viewed as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewright.errors import BindingError
from tilewright.launch.slots import Slot

if TYPE_CHECKING:
    from tilewright.launch.facts import OperandFacts

# Of float64 and int64, in bytes.
_WIDEST_ITEM = 8


def check_workspace(
    workspace: Any,
    needed: int,
    alignment: int,
    device: torch.device,
    slots: Sequence[Slot],
    starts: Sequence[int],
    stops: Sequence[int],
) -> None:
    """Require ``needed`` bytes on ``device`` that overlap no slot's range [start, stop).

    Raises:
        BindingError: naming what was given, what was expected, and the rule.
    """
    if workspace is None or (isinstance(workspace, int) and workspace == 0):
        if needed:
            raise BindingError(f"workspace: none given; the plan needs {needed} bytes")
        return
    facts = _observe(workspace, "workspace", is_written=True)
    if facts.span_bytes is not None and facts.span_bytes < needed:
        raise BindingError(f"workspace: {facts.span_bytes} bytes given; the plan needs {needed}")
    if facts.device is not None and facts.device != device:
        raise BindingError(f"workspace: on {facts.device}; expected {device}")
    start, stop = facts.pointer, facts.pointer + needed
    if needed and start % alignment:
        raise BindingError(
            f"workspace: address {start:#x} is not a multiple of "
            f"{alignment} bytes, which the plan needs"
        )
    for slot, low, high in zip(slots, starts, stops, strict=True):
        # Of ranges of no bytes neither shares one, wherever it lies.
        if max(start, low) < min(stop, high):
            raise BindingError(
                f"workspace: its bytes [{start:#x}, {stop:#x}) overlap those of tensor "
                f"{slot.label} [{low:#x}, {high:#x})"
            )


def workspace_view(workspace: Any, size_bytes: int, device: torch.device) -> torch.Tensor | None:
    """A uint8 view of the first ``size_bytes`` of a workspace; None if no byte is needed."""
    if size_bytes == 0:
        return None
    facts = _observe(workspace, "workspace")
    # PyTorch views bytes as a wider type only at a whole number of them from the storage's start,
    # whatever the address is.
    if facts.tensor is None or _offset_bytes(facts.tensor) % _WIDEST_ITEM:
        from tilewright.launch.pointers import bytes_at

        return bytes_at(facts.pointer, size_bytes, device)
    count = -(-size_bytes // facts.tensor.element_size())
    flat = facts.tensor.as_strided((count,), (1,))
    return (flat if flat.dtype is torch.uint8 else flat.view(torch.uint8))[:size_bytes]


def workspace_pointer(workspace: Any) -> int:
    """The address of a workspace that was bound."""
    return _observe(workspace, "workspace").pointer


def _offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _observe(buffer: Any, label: str, *, is_written: bool = False) -> OperandFacts:
    # Plain calls never ask, so a first call need not load it.
    from tilewright.launch.facts import observe

    return observe(buffer, label, is_written=is_written)
