"""A product, and an engine of two plans, for the tests of planning."""

from __future__ import annotations

import types
from typing import Any

import torch

import tilewright as tw
from tilewright.engines.base import Proposal
from tilewright.launch.workspace import plan_workspace

CPU_ONLY = tw.DeviceProperties("cpu", None, "cpu")


def product(**keywords: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32", **keywords)
    a, b = graph.tensor((4, 6), name="a", uid=1), graph.tensor((6, 5), name="b", uid=2)
    graph.matmul(a, b).set_output(True).set_name("c").set_uid(3)
    return graph, {"a": torch.rand(4, 6), "b": torch.rand(6, 5), "c": torch.empty(4, 5)}


class StubEngine:
    """Offers two plans of one knob; counts what it runs."""

    def __init__(self, workspace_bytes: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.workspace_bytes = workspace_bytes

    def unusable_reason(self, device: Any) -> str | None:
        return None

    def propose(self, graph: Any, device: Any) -> list[Proposal]:
        notes = frozenset({tw.behavior_note.RUNTIME_COMPILATION})
        return [
            Proposal(((tw.knob_type.TILE_M, 64),), 5.0, notes),
            Proposal(((tw.knob_type.TILE_M, 128),), 3.0, notes),
        ]

    def build(self, graph: Any, device: Any, knobs: Any) -> Any:
        def frame(binding: Any, workspace: Any, plan_name: str, keep: Any) -> Any:
            return types.SimpleNamespace(
                plan_name=plan_name, launch=lambda stream=None: self.launched.append(knobs)
            )

        def execute(binding: Any, workspace: Any, stream: Any) -> None:
            self.launched.append(knobs)

        workspace = plan_workspace([("scratch", self.workspace_bytes)])
        return types.SimpleNamespace(
            needs_views=False, workspace=workspace, frame=frame, execute=execute
        )
