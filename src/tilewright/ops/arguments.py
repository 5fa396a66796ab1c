"""Argument checks of the functions: each error names the argument, what came, what is accepted."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.graph.shapes import self_overlaps, span_elements
from tilewright.launch.slots import owned_bytes
from tilewright.ops.custom import is_traced, needs_gradient
from tilewright.ops.transforms import is_transformed

_FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What a result can be rounded to, saturating.
_OUT_TYPES = (*FLOAT_TYPES, torch.float8_e4m3fn, torch.float8_e5m2)


def require_tensor(name: str, value: Any, rank: int | None = None) -> torch.Tensor:
    """``value`` as a strided torch tensor of ``rank`` axes.

    Raises:
        BindingError: if it is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise BindingError(f"{name}: got {type(value).__name__}; expected a torch tensor")
    if value.layout is not torch.strided:
        raise BindingError(f"{name}: layout {value.layout}; expected torch.strided")
    if value.is_nested:
        raise BindingError(f"{name}: a nested tensor; expected one of one shape")
    if rank is not None and value.dim() != rank:
        raise BindingError(
            f"{name}: shape {tuple(value.shape)} has {value.dim()} axes; expected {rank}"
        )
    require_storage(name, value)
    return value


def require_storage(name: str, tensor: torch.Tensor) -> None:
    """Require that the storage has what the tensor says: it may have been resized under it.

    PyTorch does not ask, and reads and writes whatever lies there.
    """
    if is_traced(tensor) or is_transformed() or tensor.device.type == "meta":
        return
    needed = span_elements(tensor.shape, tensor.stride()) * tensor.element_size()
    if owned_bytes(tensor) < needed:
        raise BindingError(
            f"{name}: its storage has {owned_bytes(tensor)} bytes from its first element; expected "
            f"{needed} for shape {tuple(tensor.shape)} with stride {tensor.stride()}"
        )


def require_float(
    name: str, tensor: torch.Tensor, types: Sequence[torch.dtype] = FLOAT_TYPES
) -> None:
    """Require one of the float types that the functions take, or of ``types``."""
    if tensor.dtype not in types:
        accepted = ", ".join(str(dtype) for dtype in types)
        raise BindingError(f"{name}: data type {tensor.dtype}; expected one of {accepted}")


def require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], rule: str) -> None:
    """Require exactly ``shape``."""
    if tuple(tensor.shape) != tuple(shape):
        raise BindingError(f"{name}: shape {tuple(tensor.shape)}; expected {tuple(shape)}: {rule}")


def require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require the device of the first operand."""
    if tensor.device != device:
        raise BindingError(f"{name}: on {tensor.device}; expected {device}, as the first operand")


def require_parameters(
    x: torch.Tensor,
    shape: Sequence[int],
    rule: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Require of a weight and a bias that are given: a float type, ``shape``, x's device."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require_float(name, require_tensor(name, parameter, len(shape)))
            require_shape(name, parameter, shape, rule)
            require_device(name, parameter, x.device)


def require_type_of_x(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Require of a weight, and of a bias that is given, x's data type and device."""
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if require_tensor(name, tensor).dtype is not x.dtype:
            raise BindingError(f"{name}: data type {tensor.dtype}; expected x's {x.dtype}")
        require_device(name, tensor, x.device)


def require_broadcast(name: str, tensor: torch.Tensor, shape: Sequence[int], rule: str) -> None:
    """Require that ``tensor`` broadcasts to ``shape``."""
    padded = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
    # Not "in (1, want)": a compiler's symbolic extent is found in no tuple.
    fits = len(padded) == len(shape) and all(
        have == 1 or have == want for have, want in zip(padded, shape, strict=True)
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
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _FLOAT32_MAX:
        raise BindingError(f"{name}: got {value!r}; expected a finite number that float32 holds")
    return number


def require_flag(name: str, value: Any) -> bool:
    """``value`` as a bool: a string, say, is true whatever it says.

    Raises:
        BindingError: if it is neither True nor False, nor 1, 0 or numpy's bool.
    """
    if isinstance(value, bool):
        return value
    is_flag = isinstance(value, int) or type(value).__name__ in ("bool", "bool_")
    if not is_flag or value not in (True, False):
        raise BindingError(f"{name}: got {value!r}; expected True or False")
    return bool(value)


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


def require_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    rule: str,
    operands: Sequence[torch.Tensor | None],
    types: Sequence[torch.dtype] = _OUT_TYPES,
) -> None:
    """Require of ``out``, if it is given, what a result can be written into.

    That is ``shape``, on the device of the first operand, of one of ``types`` (floats, FP8 among
    them), with an element for each index. A call with ``out=`` has no autograd, so neither it nor
    an operand may take part in one; autograd is told that it is written.

    Raises:
        BindingError: naming what does not fit.
    """
    if out is None:
        return
    if needs_gradient(*operands):
        raise BindingError("out: given while an operand requires grad; use it under torch.no_grad")
    require_shape("out", require_tensor("out", out), shape, rule)
    require_float("out", out, types)
    if operands[0] is not None:
        require_device("out", out, operands[0].device)
    if torch.is_grad_enabled() and out.requires_grad:
        raise BindingError(
            "out: requires grad; expected a tensor without it, or torch.no_grad: what is written "
            "there has no gradient"
        )
    require_distinct("out", out)
    if not is_traced(out):
        # Kernels write past PyTorch, which then would not find what it saved overwritten.
        torch.autograd.graph.increment_version(out)


def require_distinct(name: str, tensor: torch.Tensor) -> None:
    """Require that no two indices of ``tensor``, which is written, name one element."""
    # A traced tensor is a result of torch's, or is checked when the trace is run.
    if not is_traced(tensor) and self_overlaps(tensor.shape, tensor.stride()):
        raise BindingError(
            f"{name}: shape {tuple(tensor.shape)} with stride {tensor.stride()}, whose elements "
            "overlap; expected distinct ones, since they are written"
        )


def require_epsilon(value: Any) -> float:
    """``eps`` as a float from 0 up."""
    if not require_number("eps", value) >= 0:
        raise BindingError(f"eps: got {value!r}; expected a number from 0 up")
    return float(value)
