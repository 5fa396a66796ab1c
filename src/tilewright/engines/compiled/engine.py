"""An engine of compiled kernels: which family takes a graph, and how a plan of it is built."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import field
from typing import TYPE_CHECKING, Any

import torch

from tilewright.artifact.environment import installed_version
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled import plan_records
from tilewright.engines.compiled.resolved import Codes, ResolvedPlan
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.records import record

if TYPE_CHECKING:
    from tilewright.engines.compiled.planned import KernelPlan

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
        # The version is read and not imported: a plan from the store needs no Triton.
        stated = installed_version("triton")
        if not stated:
            return "Triton is not installed"
        version = tuple(int(part) for part in stated.split(".")[:2])
        if version < self.oldest:
            return f"Triton {stated} is older than {_text(self.oldest)}"
        if self.newest is not None and version > self.newest:
            return f"Triton {stated} is newer than {_text(self.newest)}"
        return None

    def propose(self, graph: DeclaredGraph, device: torch.device) -> list[Proposal]:
        """What the graph's family proposes, or is known to have proposed."""
        name = self.family_name(graph)
        keys = self._record_keys(graph, name, device)
        if keys is None:
            return self._ask(name, graph, _sm_count(device))
        known = None if self._is_loaded(name) else plan_records.load_proposals(keys)
        if known is not None:
            return known
        try:
            proposals = self._ask(name, graph, _sm_count(device))
        except NotSupportedError as decline:
            plan_records.save_decline(keys, str(decline))
            raise
        plan_records.save_proposals(keys, proposals)
        return proposals

    def propose_elsewhere(self, graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
        """What the graph's family proposes for a GPU that is not here; nothing is stored."""
        unusable = self.unusable_reason(torch.device("cuda"))
        if unusable is not None:
            raise NotSupportedError(unusable)
        if sm_count < 1:
            raise NotSupportedError(
                f"device_property: sm_count is {sm_count}; expected the multiprocessors of the "
                "device, which is not here to be asked"
            )
        return self._ask(self.family_name(graph), graph, sm_count)

    def build(self, graph: DeclaredGraph, device: torch.device, knobs: Knobs) -> Any:
        """Load the kernels of one proposal as they are known, or compile them."""
        name = self.family_name(graph)
        if device.type == "cpu":
            unusable = self.unusable_reason(device)
            if unusable is not None:
                raise NotSupportedError(unusable)
            from tilewright.engines.compiled.interpreted import InterpretedExecutable

            return InterpretedExecutable(self.plan(graph, knobs, _sm_count(device)), device)
        from tilewright.engines.compiled import executable

        keys = self._record_keys(graph, name, device)
        known = None
        if keys is not None and not self._is_loaded(name):
            known = plan_records.load_plan(keys, knobs)

        def resolved() -> tuple[ResolvedPlan, Codes]:
            target = torch.cuda.get_device_capability(device)
            return executable.resolve(self.plan(graph, knobs, _sm_count(device)), target)

        codes = None
        if known is not None:
            codes = executable.stored_codes(known, lambda: resolved()[1])
        if known is None or codes is None:
            known, codes = resolved()
            if keys is not None:
                plan_records.save_plan(keys, knobs, known)
        return executable.CudaExecutable(known, device, codes)

    def family_name(self, graph: DeclaredGraph) -> str:
        """The name of the module that takes the graph.

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
        return name

    def family(self, graph: DeclaredGraph) -> Any:
        """The module that takes the graph.

        Raises:
            NotSupportedError: as ``family_name``, or if Triton cannot be imported.
        """
        return self._module(self.family_name(graph))

    def _module(self, name: str) -> Any:
        try:
            return importlib.import_module(f"{self.package}.{name}")
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "triton":
                raise
            raise NotSupportedError(f"Triton cannot be imported: {error}") from error

    def _is_loaded(self, name: str) -> bool:
        """True if asking the family costs no import."""
        return f"{self.package}.{name}" in sys.modules

    def _ask(self, name: str, graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
        proposals: list[Proposal] = self._module(name).propose(graph, sm_count)
        return proposals

    def plan(self, graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
        """What one proposal of the graph's family launches."""
        from tilewright.engines.compiled.planned import without_unreached

        return without_unreached(self.family(graph).plan(graph, knobs, sm_count), graph)

    def _record_keys(
        self, graph: DeclaredGraph, name: str, device: torch.device
    ) -> plan_records.RecordKeys | None:
        """The keys of what the store may know of the graph; None where nothing is stored."""
        if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
            return None
        target = torch.cuda.get_device_capability(device)
        return plan_records.record_keys(self.package, name, graph, target, _sm_count(device))


def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SM_COUNT
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _text(version: Version) -> str:
    return ".".join(str(part) for part in version)
