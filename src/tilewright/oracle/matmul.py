"""Matrix multiplication: C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["forward"]


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    m_lengths: torch.Tensor | None = None,
    n_lengths: torch.Tensor | None = None,
    k_lengths: torch.Tensor | None = None,
    padding: float = 0.0,
) -> torch.Tensor:
    """The product (..., M, N) in float64 of a (..., M, K) and b (..., K, N).

    Batch axes broadcast where an extent is 1. The lengths, one for each index of the first axis,
    bound what is real: the sum runs over k below `k_lengths`, and elements at or past `m_lengths`
    and `n_lengths` are `padding`.
    """
    left, right = to_float64(a), to_float64(b)
    if k_lengths is not None:
        inside = _below(k_lengths, left.shape[-1], left)
        left = torch.where(inside.unsqueeze(-2), left, 0.0)
        right = torch.where(inside.unsqueeze(-1), right, 0.0)
    product = torch.matmul(left, right)
    if m_lengths is not None:
        inside = _below(m_lengths, product.shape[-2], product).unsqueeze(-1)
        product = torch.where(inside, product, padding)
    if n_lengths is not None:
        inside = _below(n_lengths, product.shape[-1], product).unsqueeze(-2)
        product = torch.where(inside, product, padding)
    return product


def _below(lengths: torch.Tensor, extent: int, like: torch.Tensor) -> torch.Tensor:
    """Boolean (B, 1, ..., extent), one axis less than `like`."""
    position = torch.arange(extent, device=like.device)
    inside = position[None, :] < lengths.reshape(-1, 1)
    return inside.reshape(inside.shape[0], *([1] * (like.dim() - 3)), extent)


@reference("matmul")
def _matmul(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    product = forward(
        inputs["A"],
        inputs["B"],
        m_lengths=inputs.get("M_override"),
        n_lengths=inputs.get("N_override"),
        k_lengths=inputs.get("K_override"),
        padding=float(getattr(operation, "padding", 0.0) or 0.0),
    )
    return {"C": product}
