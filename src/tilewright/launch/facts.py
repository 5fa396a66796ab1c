"""Operand facts: what a caller's buffer really is, read once and never guessed."""

from __future__ import annotations

from collections.abc import Iterable
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


def observe(buffer: Any, label: str, *, is_written: bool = False) -> OperandFacts:
    """The facts of a torch tensor, an int pointer, or anything with ``__dlpack__``.

    Raises:
        BindingError: for any other object, a DLPack object that cannot be exported, or one that
            says it is read-only where ``is_written``; naming the tensor ``label``.
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
        return observe_tensor(import_dlpack(buffer, label, is_written=is_written), label)
    raise BindingError(
        f"tensor {label}: got {type(buffer).__name__}; expected a torch tensor, an int pointer, "
        "or an object with __dlpack__"
    )


def observe_tensor(tensor: torch.Tensor, label: str) -> OperandFacts:
    """The facts of a torch tensor; its span is that of its own view, as far as its storage goes."""
    if tensor.layout is not torch.strided:
        raise BindingError(f"tensor {label}: layout {tensor.layout}; expected torch.strided")
    if tensor.is_nested:
        raise BindingError(f"tensor {label}: a nested tensor; expected one of one shape")
    if tensor.is_neg():
        raise BindingError(
            f"tensor {label}: a view that is negated when it is read; its storage holds other "
            "numbers, so give tensor.resolve_neg()"
        )
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


def refuse_hidden_storage(buffers: Iterable[Any], labels: Iterable[str]) -> None:
    """Refuse the first tensor whose storage PyTorch does not show.

    Raises:
        BindingError: naming the tensor, if there is one.
    """
    for buffer, label in zip(buffers, labels, strict=True):
        if not isinstance(buffer, torch.Tensor):
            continue
        try:
            observe_tensor(buffer, label)
        except RuntimeError as error:
            raise BindingError(
                f"tensor {label}: a tensor without storage ({error}); expected one that has its "
                "elements in memory: a graph is called outside of torch.func's transforms"
            ) from error


def _data_type(tensor: torch.Tensor, label: str) -> DataType:
    try:
        return from_torch(tensor.dtype)
    except NotSupportedError as error:
        raise BindingError(f"tensor {label}: {error}") from error


def import_dlpack(buffer: Any, label: str, *, is_written: bool = False) -> torch.Tensor:
    """A torch view of a DLPack object, without a copy.

    Raises:
        BindingError: if the producer refuses, with its reason; if a stride is negative; or if the
            object is read-only and ``is_written``.
    """
    _check_array(buffer, label, is_written)
    try:
        return torch.utils.dlpack.from_dlpack(buffer)
    except (RuntimeError, TypeError, ValueError, BufferError, AssertionError) as error:
        # An assertion: PyTorch was built without the object's device.
        raise BindingError(f"tensor {label}: DLPack import failed: {error}") from error


def _check_array(buffer: Any, label: str, is_written: bool) -> None:
    """What an array says of itself that PyTorch's import does not ask.

    PyTorch ends the process over a negative stride, and takes an array that is read-only as one
    that is not.
    """
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        told = getattr(buffer, protocol, None)
        if not isinstance(told, dict):
            continue
        shape, strides = told["shape"], told.get("strides")
        if strides and 0 not in shape and min(strides) < 0:
            raise BindingError(
                f"tensor {label}: an array with strides {tuple(strides)} in bytes; expected none "
                "below 0"
            )
        data = told.get("data")
        if is_written and isinstance(data, tuple) and data[1]:
            raise BindingError(f"tensor {label}: a read-only array; expected one to write into")
