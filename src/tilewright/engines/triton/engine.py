"""The Triton engine: which family takes a graph, and how a plan of it is built."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from tilewright.engines.base import Knobs, Proposal
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph

if TYPE_CHECKING:
    from tilewright.engines.triton.planned import TritonPlan

# Kind of a graph's first operation -> the module that takes such graphs. A family module has
# propose(graph, sm_count) -> list[Proposal] and plan(graph, knobs, sm_count) -> TritonPlan, and
# imports Triton, so it is loaded only where a kernel can run.
_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("rmsnorm", "layernorm"), "normalization"),
    **dict.fromkeys(("rmsnorm_backward", "layernorm_backward"), "normalization_backward"),
}
# Multiprocessors assumed where there is no device to ask (the interpreter).
_INTERPRETED_SM_COUNT = 4
_OLDEST_TRITON = (3, 6)

_may_interpret: ContextVar[bool] = ContextVar("may_interpret", default=False)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Inside, plans on a CPU run under Triton's interpreter: slow, for tests without a GPU.

    TRITON_INTERPRET=1 must have been set before Triton was imported.

    Raises:
        NotSupportedError: if it was not.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise NotSupportedError("interpreting() needs TRITON_INTERPRET=1 before Triton's import")
    token = _may_interpret.set(True)
    try:
        yield
    finally:
        _may_interpret.reset(token)


class TritonEngine:
    """See ``tilewright.engines.base.Engine``."""

    def unusable_reason(self, device: torch.device) -> str | None:
        """Why kernels cannot run on ``device``, or None."""
        if device.type == "cpu" and not _may_interpret.get():
            return f"device {device}: compiled kernels need an NVIDIA GPU"
        try:
            import triton
        except ImportError as error:
            return f"Triton is not installed: {error}"
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < _OLDEST_TRITON:
            return f"Triton {triton.__version__} is older than 3.6"
        return None

    def propose(self, graph: DeclaredGraph, device: torch.device) -> list[Proposal]:
        """What the graph's family proposes."""
        proposals: list[Proposal] = _family(graph).propose(graph, _sm_count(device))
        return proposals

    def build(self, graph: DeclaredGraph, device: torch.device, knobs: Knobs) -> Any:
        """Compile or load the kernels of one proposal."""
        from tilewright.engines.triton.executable import CudaExecutable, InterpretedExecutable

        plan: TritonPlan = _family(graph).plan(graph, knobs, _sm_count(device))
        if device.type == "cpu":
            return InterpretedExecutable(plan, device)
        return CudaExecutable(plan, device, torch.cuda.get_device_capability(device))


def _family(graph: DeclaredGraph) -> Any:
    kind = graph.operations[0].kind
    name = _FAMILIES.get(kind)
    if name is None:
        raise NotSupportedError(f"{graph.operations[0].title()}: no Triton family has {kind}")
    return importlib.import_module(f"tilewright.engines.triton.{name}")


def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SM_COUNT
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


ENGINE = TritonEngine()
