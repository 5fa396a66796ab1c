"""Attention in float64, dense and with gradients: what functions are compared with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tol: float) -> None:
    expected = expected.detach()
    assert actual.shape == expected.shape
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    finite = torch.isfinite(expected)
    bound = tol * max(expected[finite].abs().max().item() if finite.any() else 0.0, 1.0)
    error = (actual.double() - expected)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= bound, f"error {error:.3e} over {bound:.3e}"


def visible(
    rows: int,
    keys: int,
    *,
    causal: bool = False,
    align: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
) -> torch.Tensor:
    """Row by row and key by key, from the words of the documentation."""
    shift = keys - rows if align == "bottom_right" else 0
    left, right = window or (None, None)
    table = torch.ones(rows, keys, dtype=torch.bool)
    for i, j in itertools.product(range(rows), range(keys)):
        row = i + shift
        hidden = (causal and j > row) or (left is not None and j < row - left)
        hidden = hidden or (right is not None and j > row + right)
        table[i, j] = not hidden
    return table


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    may: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64 attention and its log-sum-exp, differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    if slopes is not None:
        rows, keys = scores.shape[-2:]
        distance = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
        scores = scores + slopes.view(1, -1, 1, 1) * distance
    if may is not None:
        scores = scores.masked_fill(~may, -math.inf)
    joined = scores
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        joined = torch.cat((scores, column), -1)
    stats = torch.logsumexp(joined, -1)
    level = torch.where(torch.isneginf(stats), torch.zeros_like(stats), stats)
    weights = torch.exp(scores - level.unsqueeze(-1))
    return weights @ v, stats


def check_call(
    tensors: dict[str, torch.Tensor], call: Any, expected: Any, generator: torch.Generator
) -> None:
    """Values, Stats and all gradients (a loss on O and on Stats) of one call."""
    dtype = tensors["q"].dtype
    given = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    o, stats = call(**given)
    o_ref, stats_ref = expected(**wide)
    tol = TOLERANCE[dtype]
    close(o, o_ref, tol)
    close(stats, stats_ref, min(tol, 1e-2))
    do = draw(generator, *o.shape, dtype=dtype)
    dstats = torch.where(torch.isfinite(stats_ref), draw(generator, *stats.shape).double(), 0.0)
    torch.autograd.backward([o, stats], [do, dstats.to(stats.dtype)])
    torch.autograd.backward([o_ref, stats_ref], [do.double(), dstats])
    for name in tensors:
        close(given[name].grad, torch.nan_to_num(wide[name].grad), 3 * tol)
