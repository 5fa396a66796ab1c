"""Gradients of the functions against finite differences in float64, a feature at a time.

Beside ``sdpa/aten/test_attention_finite_differences.py``, which does so for the graph's operations:
packed sequences, gates, boolean masks and a loss on Stats are of the functions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import ops

HEADS, HEADS_KV, ROWS, KEYS, WIDTH, WIDTH_V = 4, 2, 5, 7, 4, 3
Leaves = dict[str, torch.Tensor]


def normal(seed: int, *dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64)


def dense_leaves() -> Leaves:
    return {
        "q": normal(1, 2, HEADS, ROWS, WIDTH),
        "k": normal(2, 2, HEADS_KV, KEYS, WIDTH),
        "v": normal(3, 2, HEADS_KV, KEYS, WIDTH_V),
    }


def packed_leaves() -> Leaves:
    # Two tokens at the end are of no sequence.
    return {
        "q": normal(1, 10, HEADS, WIDTH),
        "k": normal(2, 14, HEADS_KV, WIDTH),
        "v": normal(3, 14, HEADS_KV, WIDTH_V),
    }


def packed(**options: Any) -> Callable[..., Any]:
    # The second sequence has no queries, the third no keys.
    prefix_q, prefix_kv = torch.tensor([0, 4, 4, 6, 8]), torch.tensor([0, 5, 8, 8, 12])
    return lambda q, k, v, **more: ops.sdpa_varlen(
        q, k, v, prefix_q, prefix_kv, 4, 5, return_stats=True, **options, **more
    )


def dense(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, **more: ops.sdpa(q, k, v, return_stats=True, **options, **more)


MASK = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(1)
MASK[3] = False
FEATURES: dict[str, tuple[Callable[..., Any], Leaves]] = {
    "packed": (packed(causal=True, align="bottom_right"), packed_leaves()),
    "packed, window": (packed(window=(2, 1)), packed_leaves()),
    "packed, sink": (packed(), packed_leaves() | {"sink": normal(4, HEADS)}),
    "packed, gate": (packed(), packed_leaves() | {"gate": normal(5, 10, HEADS, WIDTH_V)}),
    "packed, soft cap and ALiBi": (packed(soft_cap=1.5, alibi=True), packed_leaves()),
    "packed, dropout": (packed(dropout_p=0.4, seed=5, offset=2), packed_leaves()),
    "stats": (dense(causal=True), dense_leaves()),
    "gate": (dense(), dense_leaves() | {"gate": normal(5, 2, HEADS, ROWS, WIDTH_V)}),
    "mask": (dense(mask=MASK), dense_leaves()),
    "mask and bias": (dense(mask=MASK), dense_leaves() | {"bias": normal(6, 1, HEADS, 1, KEYS)}),
    "lengths": (
        dense(seqlens_q=torch.tensor([5, 0]), seqlens_kv=torch.tensor([0, 6])),
        dense_leaves() | {"sink": normal(4, HEADS)},
    ),
    "everything": (
        dense(causal=True, align="bottom_right", soft_cap=2.0, alibi=True, dropout_p=0.3, seed=9),
        dense_leaves()
        | {"bias": normal(6, 2, 1, ROWS, KEYS), "sink": normal(4, HEADS)}
        | {"gate": normal(5, 2, HEADS, ROWS, WIDTH_V)},
    ),
}
L0 = ("packed", "gate")


def check(name: str) -> None:
    function, leaves = FEATURES[name]

    def call(*tensors: torch.Tensor) -> Any:
        o, stats = function(**dict(zip(leaves, tensors, strict=True)))
        # A row that sees nothing has -inf whatever its operands are.
        return o, torch.where(torch.isneginf(stats), torch.zeros_like(stats), stats)

    tensors = [leaf.clone().requires_grad_() for leaf in leaves.values()]
    assert torch.autograd.gradcheck(call, tensors, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.L0
@pytest.mark.parametrize("name", L0)
def test_a_few_features(name: str) -> None:
    check(name)


@pytest.mark.L1
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in L0])
def test_each_feature(name: str) -> None:
    check(name)
