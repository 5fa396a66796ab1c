"""Rows that a mask or a bias leaves empty: what they hold, overflow too, reaches nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright import ops

pytestmark = pytest.mark.L0

MASK = torch.tensor([[False], [True], [True]])
HIDING: dict[str, dict[str, Any]] = {
    "mask": {"mask": MASK},
    "bias": {"bias": torch.where(MASK, 0.0, -torch.inf)},
    "both": {"mask": MASK, "bias": torch.zeros(3, 2)},
    "window": {"mask": MASK, "window": (1, None)},
    "soft_cap": {"mask": MASK, "soft_cap": 2.0},
    "alibi": {"mask": MASK, "alibi": True},
    "sink": {"mask": MASK, "sink": torch.zeros(1)},
}


@pytest.mark.parametrize("held", [3e38, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", HIDING)
def test_they_give_nothing_and_take_nothing(name: str, dtype: torch.dtype, held: float) -> None:
    # q . k is inf - inf of finite 3e38 in float32.
    q, v = torch.ones(1, 1, 3, 2, dtype=dtype), torch.ones(1, 1, 2, 2, dtype=dtype)
    k = torch.tensor([[[[10.0, -10.0], [1.0, 2.0]]]], dtype=dtype)
    q[0, 0, 0] = held
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    o, stats = ops.sdpa(*leaves, return_stats=True, engine="aten", **HIDING[name])
    assert not o[0, 0, 0].any() and o[0, 0, 1:].all()
    assert stats[0, 0, 0] == (0.0 if name == "sink" else -torch.inf)
    gradients = torch.autograd.grad(o[:, :, 1:].sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][0, 0, 0].any()
