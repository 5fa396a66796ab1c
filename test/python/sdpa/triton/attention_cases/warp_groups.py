"""Attention by warp groups in Triton's interpreter, whatever the ranking would have taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton import attention
from tilewright.engines.triton.attention_config import ForwardConfig
from tilewright.engines.triton.attention_spec import AttentionSpec


def plan_with(make_plan: Callable[..., KernelPlan], patch: pytest.MonkeyPatch) -> list[KernelPlan]:
    """Have the engine plan by ``make_plan``, with small tiles; a list that plans are added to."""
    taken: list[KernelPlan] = []

    def plan(spec: AttentionSpec, slots: Mapping[int, int], *_: Any) -> KernelPlan:
        config = ForwardConfig(16, 16, 4, 2, programs=3)
        taken.append(make_plan(spec, slots, config, is_aligned=False))
        return taken[-1]

    patch.setattr(attention, "_plan", plan)
    return taken


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """Build on Triton and run, with a workspace that holds other bytes before."""
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    size = graph.get_workspace_size()
    graph.execute(pack, torch.full((max(size, 1),), 0xAB, dtype=torch.uint8))
