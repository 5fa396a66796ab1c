"""FlashAttention's CuTe kernels (flash-attn-4 on PyPI) as a peer; absent where it is not installed.

Operands come as (batch, heads, length, head size) and are brought into that library's own order,
(batch, length, heads, head size), before anything is timed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


@functools.cache
def module() -> Any:
    """``flash_attn.cute``, or None with the reason printed once."""
    try:
        return importlib.import_module("flash_attn.cute")
    except (ImportError, OSError) as error:
        print(f"FA-cute is left out: {error}")
        return None


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call | None:
    """A call that gives O as (batch, length, heads, head size)."""
    if module() is None:
        return None
    own = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    return functools.partial(_first, module().flash_attn_func, *own, causal=causal)


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor, longest: int
) -> Call | None:
    """A causal call on packed (tokens, heads, head size) operands with int32 prefix sums."""
    if module() is None:
        return None
    return functools.partial(
        _first,
        module().flash_attn_varlen_func,
        q,
        k,
        v,
        cu_seqlens_q=sums,
        cu_seqlens_k=sums,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_o: torch.Tensor, causal: bool
) -> Call | None:
    """A call that gives (dQ, dK, dV), each (batch, length, heads, head size)."""
    if module() is None:
        return None
    own = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
    out = _first(module().flash_attn_func, *own, causal=causal)
    upstream = d_o.transpose(1, 2).contiguous()
    return functools.partial(torch.autograd.grad, out, own, upstream, retain_graph=True)


def _first(function: Any, *operands: Any, **options: Any) -> Any:
    made = function(*operands, **options)
    return made[0] if isinstance(made, tuple) else made
