"""Operand facts: what a caller's buffer really is, read once and never guessed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError, NotSupportedError
from tilewright.graph.shapes import span_elements
from tilewright.launch.slots import owned_bytes
from tilewright.torch_dtypes import from_torch


class OperandFacts(NamedTuple):
    """One buffer as observed.

    ``dim`` and ``stride`` are the producer's own, in elements. ``span_bytes`` is the number of
    bytes from ``pointer`` that the producer is known to own, or None for a bare pointer.
    ``tensor`` is the torch view of it, None for a bare pointer.
    """

    pointer: int
    dim: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    data_type: DataType | None
    device: torch.device | None
    span_bytes: int | None
    tensor: torch.Tensor | None


def observe(buffer: Any, label: str) -> OperandFacts:
    """The facts of a torch tensor, an int pointer, or anything with ``__dlpack__``.

    Raises:
        BindingError: for any other object, or a DLPack object that cannot be exported, naming
            the tensor ``label``.
    """
    if isinstance(buffer, torch.Tensor):
        return observe_tensor(buffer, label)
    if isinstance(buffer, int) and not isinstance(buffer, bool):
        if not 0 <= buffer < 2**63:
            raise BindingError(
                f"tensor {label}: pointer {buffer}; expected an address from 0 to 2**63 - 1"
            )
        return OperandFacts(buffer, None, None, None, None, None, None)
    if hasattr(buffer, "__dlpack__"):
        return observe_tensor(import_dlpack(buffer, label), label)
    raise BindingError(
        f"tensor {label}: got {type(buffer).__name__}; expected a torch tensor, an int pointer, "
        "or an object with __dlpack__"
    )


def observe_tensor(tensor: torch.Tensor, label: str) -> OperandFacts:
    """The facts of a torch tensor; its span is that of its own view, as far as its storage goes."""
    if tensor.layout is not torch.strided:
        raise BindingError(f"tensor {label}: layout {tensor.layout}; expected torch.strided")
    if tensor.requires_grad:
        tensor = tensor.detach()
    dim, stride = tuple(tensor.shape), tuple(tensor.stride())
    return OperandFacts(
        tensor.data_ptr(),
        dim,
        stride,
        _data_type(tensor, label),
        tensor.device,
        min(span_elements(dim, stride) * tensor.element_size(), owned_bytes(tensor)),
        tensor,
    )


def _data_type(tensor: torch.Tensor, label: str) -> DataType:
    try:
        return from_torch(tensor.dtype)
    except NotSupportedError as error:
        raise BindingError(f"tensor {label}: {error}") from error


def import_dlpack(buffer: Any, label: str) -> torch.Tensor:
    """A torch view of a DLPack object, without a copy.

    Raises:
        BindingError: if the producer refuses, with its reason.
    """
    try:
        return torch.utils.dlpack.from_dlpack(buffer)
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise BindingError(f"tensor {label}: DLPack import failed: {error}") from error
