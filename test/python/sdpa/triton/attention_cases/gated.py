"""A case of attention with an output gate behind it, and its way through Triton's kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases.case import Case
from attention_cases.running import Declared, select_split
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton import attention, attention_config
from tilewright.engines.triton.attention_config import ForwardConfig
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.engines.triton.attention_specialized import specialized_plan
from tilewright.graph.enums import knob_type

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"


class Gated(Declared):
    """A case with a gate behind it: "full" as O, or 1 on the axes that its name leaves out.

    Alignments are promised, if nothing else is said, so that one kernel is compiled.
    """

    def __init__(self, case: Case, device: str, gate: str = "full", **options: Any) -> None:
        self.gate, self.is_swapped = gate, options.pop("is_swapped", False)
        self.kind, self.is_endless = options.pop("kind", None), options.pop("is_endless", False)
        self.kept = options.pop("kept", None)
        super().__init__(case, device, **{"start": "promised", **options})

    def output(self, name: str, tensor: Any, dim: tuple[int, int, int, int]) -> None:
        """The product in O's place."""
        if name != "O":
            super().output(name, tensor, dim)
            return
        weight = self.graph.sigmoid(self.declared_gate(dim))
        factors = (weight, tensor) if self.is_swapped else (tensor, weight)
        product = self.graph.mul(*factors)
        super().output("O", product, dim)
        if self.kept is not None:
            tensor.set_data_type(self.kept)
            weight.set_data_type(self.kept)
        if product.ragged_offset is not None:
            tensor.set_dim(dim).set_stride(product.stride)
            tensor.set_ragged_offset(product.ragged_offset)
            tensor.set_ragged_offset_multiplier(product.ragged_offset_multiplier)

    def declared_gate(self, dim: tuple[int, int, int, int]) -> Any:
        batch, heads, rows, width = dim
        if self.case.place == "ragged":
            return self.operand("gate", batch, heads, rows, width, self.len_q)
        names = ("batch", "heads", "rows", "columns")
        named = zip(names, dim, strict=True)
        dim = tuple(n if name in self.gate or self.gate == "full" else 1 for name, n in named)
        kind = getattr(torch, self.kind) if self.kind else self.dtype
        is_dense = self.case.layout == "expanded"
        gate = torch.empty(dim, dtype=kind) if is_dense else self.laid_out(dim, kind)
        gate.copy_(self.normal(*dim) * 3.0)
        if self.is_endless:
            draw = self.integers(0, 4, *dim)
            gate[draw == 0], gate[draw == 1] = torch.inf, -torch.inf
        return self.bind(gate, name="gate")


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """Run the plan with warp groups, or else the one in which keys are split, if there is one."""
    graph.deselect_engines(["hopper"])
    select_split(graph)
    for index, plan in enumerate(graph.plans):
        if knob_type.ROW_BLOCK in dict(plan.knobs):
            graph.select_plan(index)
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    size = graph.get_workspace_size()
    graph.execute(pack, torch.full((max(size, 1),), 0xAB, dtype=torch.uint8, device=DEVICE))


def run_in_warp_groups(
    case: Case, monkeypatch: pytest.MonkeyPatch, *, is_apart: bool = False
) -> None:
    """Run a small case by the kernel of warp groups, interpreted; on a GPU a larger one.

    ``is_apart``: with the gate's own kernel behind it, as over many keys.
    """
    if is_apart:
        monkeypatch.setattr(attention_config, "MOST_KEYS_BEFORE_GATE", 0)
    taken: list[KernelPlan] = []

    def plan(spec: AttentionSpec, slots: Mapping[int, int], *_: Any) -> KernelPlan:
        config = ForwardConfig(16, 16, 4, 2, programs=3)
        taken.append(specialized_plan(spec, slots, config, is_aligned=False))
        return taken[-1]

    if HAS_GPU:
        case = replace(case, rows=256, keys=256, sizes=(128, 128))
    else:
        monkeypatch.setattr(attention, "_plan", plan)
    Gated(case, DEVICE).run(execute)
    if not HAS_GPU:
        names = [kernel.spec.name for kernel in taken[0].kernels]
        assert names[0] == "attention_forward_specialized"
        assert (names[-1] == "attention_gate") is is_apart
