"""An engine of compiled kernels: which family takes a graph, and how a plan of it is built."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import field
from typing import Any

import torch

from tilewright.engines.base import Knobs, Proposal
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.records import record

# Kinds that a family takes along with its own operation; alone they are a chain of their own.
CHAIN_KINDS = frozenset({"pointwise", "reduction", "reshape", "transpose", "slice"})
# Multiprocessors assumed where there is no device to ask (the interpreter).
_INTERPRETED_SM_COUNT = 4

Version = tuple[int, int]
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


@record(frozen=True)
class CompiledEngine:
    """See ``tilewright.engines.base.Engine``.

    ``families`` maps the kind of a graph's principal operation to the module (in ``package``)
    that takes such graphs; the kind "chain" stands for graphs of CHAIN_KINDS alone. A family
    module has ``propose(graph, sm_count) -> list[Proposal]`` and
    ``plan(graph, knobs, sm_count) -> KernelPlan``. It imports Triton, so it is loaded only where
    a kernel can run. ``oldest`` and ``newest`` are the Triton versions taken, both included.
    """

    package: str
    families: Mapping[str, str] = field(default_factory=dict)
    oldest: Version = (3, 6)
    newest: Version | None = None
    can_interpret: bool = True

    def unusable_reason(self, device: torch.device) -> str | None:
        """Why kernels cannot run on ``device``, or None."""
        if device.type == "cpu" and not (self.can_interpret and _may_interpret.get()):
            return f"device {device}: compiled kernels need an NVIDIA GPU"
        try:
            import triton
        except ImportError as error:
            return f"Triton is not installed: {error}"
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < self.oldest:
            return f"Triton {triton.__version__} is older than {_text(self.oldest)}"
        if self.newest is not None and version > self.newest:
            return f"Triton {triton.__version__} is newer than {_text(self.newest)}"
        return None

    def propose(self, graph: DeclaredGraph, device: torch.device) -> list[Proposal]:
        """What the graph's family proposes."""
        proposals: list[Proposal] = self.family(graph).propose(graph, _sm_count(device))
        return proposals

    def build(self, graph: DeclaredGraph, device: torch.device, knobs: Knobs) -> Any:
        """Compile or load the kernels of one proposal."""
        from tilewright.engines.compiled.executable import CudaExecutable, InterpretedExecutable

        plan = self.family(graph).plan(graph, knobs, _sm_count(device))
        if device.type == "cpu":
            return InterpretedExecutable(plan, device)
        return CudaExecutable(plan, device, torch.cuda.get_device_capability(device))

    def family(self, graph: DeclaredGraph) -> Any:
        """The module that takes the graph.

        Raises:
            NotSupportedError: if there is none, or the graph has several principal operations.
        """
        principal = [item for item in graph.operations if item.kind not in CHAIN_KINDS]
        if len(principal) > 1:
            raise NotSupportedError(
                f"{principal[1].title()}: a graph with {principal[0].kind} and "
                f"{principal[1].kind} is no single kernel"
            )
        kind = principal[0].kind if principal else "chain"
        name = self.families.get(kind)
        if name is None:
            first = principal[0] if principal else graph.operations[0]
            package = self.package.rpartition(".")[2]
            raise NotSupportedError(f"{first.title()}: no {package} family has {first.kind}")
        return importlib.import_module(f"{self.package}.{name}")


def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SM_COUNT
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _text(version: Version) -> str:
    return ".".join(str(part) for part in version)
