"""Torch modules over ``tilewright.ops``: LayerNorm and RMSNorm.

They are subclasses of PyTorch's own, with its arguments, parameters, names in a state dict and
``isinstance`` relations; only the computation differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewright import ops
from tilewright.errors import NotSupportedError


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last axis, computed by ``tilewright.ops.layer_norm``.

    x is (..., N) of a float type; the result has x's shape and type. Weight and bias are (N,) of
    any float type. Source: Ba, Kiros and Hinton 2016 (arXiv:1607.06450).

    Raises:
        NotSupportedError: from the constructor, if ``normalized_shape`` has more than one axis.
        BindingError: from a call, if x is no float tensor of N on its last axis.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            _one_axis("LayerNorm", normalized_shape), eps, elementwise_affine, bias, device, dtype
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` (..., N) over its last axis."""
        return _first(ops.layer_norm(input, self.weight, self.bias, self.eps))


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last axis, computed by ``tilewright.ops.rms_norm``.

    x is (..., N) of a float type; the result has x's shape and type. ``eps=None`` stands for the
    machine epsilon of x's type, as in PyTorch. ``offset`` is added to the weight in float32: the
    Gemma family stores w - 1 and normalizes with ``offset=1``. Source: Zhang and Sennrich 2019
    (arXiv:1910.07467).

    Raises:
        NotSupportedError: from the constructor, if ``normalized_shape`` has more than one axis.
        BindingError: from a call, if x is no float tensor of N on its last axis.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        offset: float = 0.0,
    ) -> None:
        self.offset = offset
        super().__init__(
            _one_axis("RMSNorm", normalized_shape), eps, elementwise_affine, device, dtype
        )

    def reset_parameters(self) -> None:
        """Set the weight so that the module starts as a plain normalization."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x`` (..., N) over its last axis."""
        eps = self.eps
        if eps is None:
            # What is no float tensor is refused by the function, by name.
            is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
            eps = torch.finfo(x.dtype).eps if is_float else 0.0
        # Without a weight, which would be 1 - offset, there is nothing to add an offset to.
        offset = 0.0 if self.weight is None else self.offset
        return _first(ops.rms_norm(x, self.weight, eps=eps, offset=offset))

    def extra_repr(self) -> str:
        """PyTorch's, and the offset."""
        return f"{super().extra_repr()}, offset={self.offset}"


def _one_axis(module: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        raise NotSupportedError(
            f"{module}: normalized_shape {shape} has {len(shape)} axes ({math.prod(shape)} "
            "elements); expected one, the last axis of the input"
        )
    return shape


def _first(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The normalized tensor; the sum comes second, and only where a residual was given."""
    return result[0] if isinstance(result, tuple) else result
