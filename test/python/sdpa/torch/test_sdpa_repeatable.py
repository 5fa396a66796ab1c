"""PyTorch's global wish for deterministic algorithms reaches attention's backward."""

from __future__ import annotations

import pytest
import torch

from tilewright import ops
from tilewright.ops import plan_cache

pytestmark = pytest.mark.L0


@pytest.fixture(autouse=True)
def flag() -> object:
    ops.clear_plan_cache()
    yield
    torch.use_deterministic_algorithms(False)
    ops.clear_plan_cache()


def flags() -> list[bool]:
    """What each planned backward declares, in order."""
    graphs = [kept.graph for kept in plan_cache._plans.values()]
    operations = [operation for graph in graphs for operation in graph.operations]
    return [op.use_deterministic_algorithm for op in operations if op.kind == "sdpa_backward"]


def test_the_global_flag_asks_for_repeatable_gradients() -> None:
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    for is_wanted in (True, False):
        torch.use_deterministic_algorithms(is_wanted)
        ops.sdpa(q, q, q).sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    prefix = torch.tensor([0, 4])
    ops.sdpa_varlen(*[q[0].transpose(0, 1)] * 3, prefix, prefix, 4, 4).sum().backward()
    assert flags() == [True, False, True]
