"""A built plan: an executable, the binder that feeds it, and the frames it makes."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.engines.base import Engine, Executable, Launchable, load_engine
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.binder import Binder, VariantPack
from tilewright.launch.context import outside_modes
from tilewright.launch.direct import DirectCalls
from tilewright.launch.slots import in_place_pairs, make_slots
from tilewright.planning.plans import Plan
from tilewright.planning.table import engine_by_id


class BuiltPlan:
    """Immutable once made; concurrent calls share it and no mutable state (L10)."""

    def __init__(self, graph: DeclaredGraph, plan: Plan, device: torch.device) -> None:
        entry = engine_by_id(plan.engine_id)
        if entry is None or entry.module is None:
            raise NotSupportedError(f"engine {plan.engine_name!r} is not part of this version")
        engine: Engine = load_engine(entry.module)
        self.plan = plan
        self.device = device
        with outside_modes():
            self.executable: Executable = engine.build(graph, device, plan.knobs)
            self.workspace_bytes = self.executable.workspace.size_bytes
            slots = make_slots(graph)
            self.binder = Binder(
                slots,
                device,
                in_place=in_place_pairs(graph, slots),
                virtual_uids={t.uid: t.label() for t in graph.virtual_tensors()},
                workspace_bytes=self.workspace_bytes,
                workspace_alignment_bytes=getattr(self.executable, "workspace_alignment_bytes", 1),
                needs_views=self.executable.needs_views,
            )
            # An executable of prepared kernels has a short way for plain calls.
            make = getattr(self.executable, "direct_calls", None)
            self._direct: DirectCalls | None = None if make is None else make(self.binder)
            self._bound_frame: Any = getattr(self.executable, "bound_frame", None)

    def bind(self, pack: VariantPack, workspace: Any = None, handle: Any = None) -> Launchable:
        """Check a call and bind it; nothing is written before ``Frame.launch``.

        Launches that are given no stream go to the handle's.

        Raises:
            BindingError: if an operand or the workspace does not fit.
        """
        if self._direct is not None:
            bound = self._direct.bind(pack, workspace)
            if bound is not None:
                made: Launchable = self._bound_frame(bound, self.plan.name, (pack, workspace))
                made.handle = handle
                return made
        binding = self.binder.bind(pack, workspace)
        made = self.executable.frame(binding, workspace, self.plan.name, (pack, workspace))
        made.handle = handle
        return made

    def populate_cuda_graph(self, pack: VariantPack, workspace: Any, cuda_graph: Any) -> None:
        """Add a checked call's kernels to a CUDA graph; see ``Graph.populate_cuda_graph``."""
        populate = self._graph_method("populate", "populate_cuda_graph")
        handle = _graph_handle(cuda_graph)
        populate(self.binder.bind(pack, workspace), workspace, handle)

    def update_cuda_graph(
        self, pack: VariantPack, workspace: Any, cuda_graph: Any, instance: int | None
    ) -> None:
        """Rebind a populated CUDA graph; see ``Graph.update_cuda_graph``."""
        update = self._graph_method("update", "update_cuda_graph")
        handle = _graph_handle(cuda_graph)
        update(self.binder.bind(pack, workspace), workspace, handle, instance)

    def _graph_method(self, name: str, asked: str) -> Any:
        method = getattr(self.executable, name, None)
        if method is None:
            raise NotSupportedError(
                f"{asked}: plan {self.plan.name!r} is not made of prepared kernels; capture "
                "execute() with torch.cuda.graph instead"
            )
        return method

    def execute(self, pack: VariantPack, workspace: Any = None, stream: Any = None) -> None:
        """Check a call and run it at once.

        Raises:
            BindingError: if an operand or the workspace does not fit; nothing was written then.
        """
        direct = self._direct
        if direct is not None and (
            direct.current(pack, workspace, stream) or direct.other(pack, workspace, stream)
        ):
            return
        self.executable.execute(self.binder.bind(pack, workspace), workspace, stream)


def _graph_handle(cuda_graph: Any) -> int:
    # Few programs build CUDA graphs themselves; the others need not load it.
    from tilewright.launch.cuda_graphs import graph_handle

    return graph_handle(cuda_graph)
