"""Backwards that have no backward of their own, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.errors import NotSupportedError


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the gradients that a ``backward`` returns raise where they are differentiated again.

    PyTorch's ``once_differentiable`` does so only if an incoming gradient requires grad. That of a
    sum does not, and yet ours are functions of the saved operands, and of ``ctx.anchors`` if set.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapped(ctx: Any, *incoming: Any) -> Any:
            if any(g is not None and _is_batched(g) for g in incoming):
                raise NotSupportedError(
                    f"{name}: gradients came in batches (is_grads_batched, vectorize=True), which "
                    "the backward has no rule for; ask for one after another"
                )
            with torch.no_grad():
                # Kernels read storage: a view that is negated when it is read becomes a copy.
                real = (g if g is None else g.resolve_neg() for g in incoming)
                made = backward(ctx, *real)
            if not torch.is_grad_enabled():
                return made
            tied = (*incoming, *ctx.saved_tensors, *getattr(ctx, "anchors", ()))
            tied = tuple(t for t in tied if t is not None and t.requires_grad)
            return tuple(
                _Last.apply(name, part.detach(), *tied)  # type: ignore[no-untyped-call]
                if isinstance(part, torch.Tensor)
                else part
                for part in made
            )

        return wrapped

    return decorate


def _is_batched(gradient: torch.Tensor) -> bool:
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


class _Last(torch.autograd.Function):
    """The identity of a gradient, tied to what it depends on; a gradient of it is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotSupportedError(f"{ctx.name}: a second derivative was asked for; there is none")
