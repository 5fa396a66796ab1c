"""What the functions say to torch.func's transforms and to forward-mode derivatives: no.

A tensor inside a transform has no storage of its own, and a tangent is no part of a buffer. Neither
is seen by a kernel, so each would be lost without a word, or fail in odd ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewright.errors import NotSupportedError


def is_transformed() -> bool:
    """True inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refusal(operation: str) -> NotSupportedError:
    """The error of a call inside a transform."""
    return NotSupportedError(
        f"{operation}: called inside a torch.func transform (grad, vmap, jvp, functionalize, ...), "
        "which has no rule for it; call it outside, with a batch axis, or with torch.autograd"
    )


def apply(operation: str, function: Any, *operands: Any) -> Any:
    """``function.apply``, of an autograd function.

    Raises:
        NotSupportedError: inside a transform, or if an operand has a tangent.
    """
    try:
        return function.apply(*operands)
    except RuntimeError as error:
        if is_transformed():
            raise refusal(operation) from error
        forbid_tangents(operation, (o for o in operands if isinstance(o, torch.Tensor)))
        raise


def forbid_tangents(operation: str, operands: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that ``torch.autograd.forward_ad`` made dual.

    Raises:
        NotSupportedError: if an operand has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for operand in operands:
        dual = forward_ad.unpack_dual(operand)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            raise NotSupportedError(
                f"{operation}: an operand has a tangent; there is no forward-mode derivative"
            )
