"""Calls under a default device of torch that is another than their operands'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu")


def number_of_a_graph() -> torch.Tensor:
    graph = tw.Graph(io_data_type="FLOAT", handle=tw.create_handle("cpu"))
    x, y = draw(3, 4), torch.empty(3, 4, device="cpu")
    left = graph.tensor_like(x)
    right = graph.add(graph.relu(left), graph.tensor_scalar(2.5)).set_output(True)
    graph.build()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cpu")
    graph.execute({left: x, right: y}, workspace)
    return y


def gradients(**options: Any) -> tuple[torch.Tensor, ...]:
    operands = [draw(2, 2, 5, 8).requires_grad_() for _ in range(3)]
    return torch.autograd.grad(ops.sdpa(*operands, **options).square().sum(), operands)


SEED: dict[str, Any] = {"dropout_p": 0.5, "seed": 3}
LENGTHS = torch.tensor([5, 3], device="cpu")
CALLS: dict[str, Callable[[], Any]] = {
    "a graph's number": number_of_a_graph,
    "dropout": lambda: gradients(**SEED),
    "lengths": lambda: gradients(seqlens_kv=LENGTHS, causal=True),
    "a window over lengths": lambda: gradients(seqlens_q=LENGTHS, window=(2, 0)),
    "soft cap": lambda: gradients(soft_cap=2.0),
    "norm": lambda: ops.rms_norm(draw(3, 8), draw(8), offset=1.0, residual=draw(3, 8)),
    "states": lambda: ops.merge_states(draw(3, 8), draw(3), draw(3, 8), draw(3), engine="aten"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_default_device_takes_no_part(call: Callable[[], Any]) -> None:
    expected = tree_leaves(call())
    ops.clear_plan_cache()
    with torch.device("meta"):
        found = tree_leaves(call())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_seed_is_drawn_on_the_cpu() -> None:
    q = draw(1, 2, 64, 8)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        with torch.device("meta"):
            results.append(ops.sdpa(q, q, q, dropout_p=0.5))
    assert torch.equal(*results)
