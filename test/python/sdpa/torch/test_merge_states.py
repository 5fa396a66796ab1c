"""Merging attention over parts of the keys: values, gradients, and parts that are empty."""

from __future__ import annotations

import math

import pytest
import torch
from dense_attention import draw

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0


def test_merging_states() -> None:
    # Field report 8 and 3.1 of FlashAttention: two halves of the keys give the whole.
    generator = torch.Generator().manual_seed(17)
    q, k, v = (draw(generator, 1, 2, 4, 8).requires_grad_() for _ in range(3))
    parts = [
        ops.sdpa(q, k[:, :, s], v[:, :, s], return_stats=True) for s in (slice(0, 1), slice(1, 4))
    ]
    o, stats = ops.merge_states(*parts[0], *parts[1])
    whole, whole_stats = ops.sdpa(q, k, v, return_stats=True)
    torch.testing.assert_close(o, whole)
    torch.testing.assert_close(stats, whole_stats)
    grads = torch.autograd.grad(o.square().sum() + stats.sum(), (q, k, v))
    whole_grads = torch.autograd.grad(whole.square().sum() + whole_stats.sum(), (q, k, v))
    for grad, expected in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(grad, expected)
    empty = torch.full((1, 2, 4, 8), math.nan), torch.full((1, 2, 4), -math.inf)
    o, stats = ops.merge_states(*empty, *empty)
    assert torch.count_nonzero(o) == 0 and torch.isneginf(stats).all()
    o, stats = ops.merge_states(*empty, *(t.detach() for t in parts[1]))
    assert torch.equal(o, parts[1][0]) and torch.equal(stats, parts[1][1])


def test_merging_two_empty_states_has_zero_gradients() -> None:
    empty = [torch.full((2,), -torch.inf, requires_grad=True) for _ in range(2)]
    parts = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    o, stats = ops.merge_states(parts[0], empty[0], parts[1], empty[1])
    assert torch.equal(o, torch.zeros(2, 3)) and torch.equal(stats, torch.full((2,), -torch.inf))
    (o.sum() + stats.exp().sum()).backward()
    for tensor in (*empty, *parts):
        assert tensor.grad is not None and torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_the_gradients_of_an_empty_state_that_holds_nan_are_zero() -> None:
    nothing = torch.full((1, 3), torch.nan, requires_grad=True)
    empty = torch.full((1,), -torch.inf, requires_grad=True)
    o, stats = torch.ones(1, 3, requires_grad=True), torch.zeros(1, requires_grad=True)
    joined, total = ops.merge_states(nothing, empty, o, stats)
    assert torch.equal(joined, o) and torch.equal(total, stats)
    (joined.sum() + total.sum()).backward()
    for tensor, expected in ((nothing, 0.0), (empty, 0.0), (o, 1.0), (stats, 1.0)):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.full_like(tensor, expected))


def test_a_state_without_an_axis_of_values_is_refused() -> None:
    number = torch.tensor(1.0)
    with pytest.raises(tw.BindingError, match=r"o1: shape \(\); expected \(\.\.\., D\)"):
        ops.merge_states(number, number, number, number)
