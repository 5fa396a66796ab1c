"""Argument checks of the functions: each error names the argument, what came, what is accepted."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.errors import BindingError

_FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def require_tensor(name: str, value: Any, rank: int | None = None) -> torch.Tensor:
    """``value`` as a strided torch tensor of ``rank`` axes.

    Raises:
        BindingError: if it is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise BindingError(f"{name}: got {type(value).__name__}; expected a torch tensor")
    if value.layout is not torch.strided:
        raise BindingError(f"{name}: layout {value.layout}; expected torch.strided")
    if rank is not None and value.dim() != rank:
        raise BindingError(
            f"{name}: shape {tuple(value.shape)} has {value.dim()} axes; expected {rank}"
        )
    return value


def require_float(name: str, tensor: torch.Tensor) -> None:
    """Require one of the float types that the functions take."""
    if tensor.dtype not in FLOAT_TYPES:
        accepted = ", ".join(str(dtype) for dtype in FLOAT_TYPES)
        raise BindingError(f"{name}: data type {tensor.dtype}; expected one of {accepted}")


def require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], rule: str) -> None:
    """Require exactly ``shape``."""
    if tuple(tensor.shape) != tuple(shape):
        raise BindingError(f"{name}: shape {tuple(tensor.shape)}; expected {tuple(shape)}: {rule}")


def require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require the device of the first operand."""
    if tensor.device != device:
        raise BindingError(f"{name}: on {tensor.device}; expected {device}, as the first operand")


def require_broadcast(name: str, tensor: torch.Tensor, shape: Sequence[int], rule: str) -> None:
    """Require that ``tensor`` broadcasts to ``shape``."""
    padded = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
    fits = len(padded) == len(shape) and all(
        have in (1, want) for have, want in zip(padded, shape, strict=True)
    )
    if not fits:
        raise BindingError(
            f"{name}: shape {tuple(tensor.shape)} does not broadcast to {tuple(shape)}: {rule}"
        )


def require_number(name: str, value: Any) -> float:
    """``value`` as a float that float32 holds, which is what engines compute scalars in.

    Raises:
        BindingError: if it is no number, or none that float32 holds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat):
        raise BindingError(f"{name}: got {value!r}; expected a number")
    if not abs(float(value)) <= _FLOAT32_MAX:
        raise BindingError(f"{name}: got {value!r}; expected a finite number that float32 holds")
    return float(value)


def require_choice(name: str, value: Any, accepted: Sequence[Any]) -> None:
    """Require one of ``accepted``."""
    if value not in accepted:
        names = ", ".join(repr(choice) for choice in accepted)
        raise BindingError(f"{name}: got {value!r}; accepted are {names}")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with packed strides; the same tensor if they are packed already.

    Lengths, prefix sums and sinks are declared packed. A conversion to the type that a tensor
    has, or a reshape, can keep a slice's strides, so packing is made sure of here.
    """
    return tensor.detach().contiguous()


def forbid_grad_with_out(out: torch.Tensor | None, operands: Sequence[torch.Tensor | None]) -> None:
    """``out=`` has no autograd.

    Raises:
        BindingError: if ``out`` is given while an operand requires grad.
    """
    if out is None or not torch.is_grad_enabled():
        return
    if any(operand is not None and operand.requires_grad for operand in operands):
        raise BindingError("out: given while an operand requires grad; use it under torch.no_grad")
