"""The engine contract: what planning asks of an engine, and what it gets back.

An engine is a module-level object that satisfies ``Engine``. Planning reads its capability rows
without importing it; only ``propose`` and ``build`` need its code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.graph.enums import behavior_note, knob_type, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.workspace import WorkspacePlan
from tilewright.records import record

if TYPE_CHECKING:
    from typing import Protocol

    import torch

    from tilewright.launch.binder import Binding
else:
    # Nobody asks at run time, and making one takes long.
    Protocol = object

Knobs = tuple[tuple[knob_type, int], ...]


@record(frozen=True)
class Proposal:
    """One way in which an engine would run a graph. Any knobs compute the same function.

    ``cost`` orders proposals: an estimate in microseconds, lower first.
    """

    knobs: Knobs = ()
    cost: float = 0.0
    behavior_notes: frozenset[behavior_note] = frozenset()
    numeric_notes: frozenset[numeric_note] = frozenset()


class Launchable(Protocol):
    """A frame: one call's bound operands and the work on them."""

    plan_name: str
    # The graph's handle, set once the frame is made.
    handle: Any

    def launch(self, stream: Any = None) -> None:
        """Run on ``stream``, default the handle's, else the device's current one."""


class Executable(Protocol):
    """A built plan. Immutable: concurrent calls share it and nothing else."""

    workspace: WorkspacePlan
    # False if only addresses are used, so that the binder makes no torch views.
    needs_views: bool

    def frame(self, binding: Binding, workspace: Any, plan_name: str, keep: Any) -> Launchable:
        """One call on bound operands (slot order: inputs, then outputs).

        ``keep`` holds the caller's buffers, which live as long as the frame.
        """

    def execute(self, binding: Binding, workspace: Any, stream: Any) -> None:
        """``frame(...).launch(stream)`` without the frame."""


class Engine(Protocol):
    """Code that can run a class of graphs."""

    def unusable_reason(self, device: torch.device) -> str | None:
        """Why nothing can run on ``device`` (no compiler, wrong architecture), or None."""

    def propose(self, graph: DeclaredGraph, device: torch.device) -> list[Proposal]:
        """Ranked ways to run a validated graph, best first.

        Raises:
            NotSupportedError: naming the tensor and the rule.
        """

    def propose_elsewhere(self, graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
        """As ``propose``, for a GPU of ``sm_count`` multiprocessors that is not here.

        Asked of engines that cannot run here, and only they have it; ``build`` declines what it
        proposes.
        """

    def build(self, graph: DeclaredGraph, device: torch.device, knobs: Knobs) -> Executable:
        """Build one proposal.

        Raises:
            NotSupportedError: naming the tensor and the rule.
        """


def load_engine(module: str) -> Any:
    """The ``ENGINE`` object of an engine's module."""
    import importlib

    return importlib.import_module(module).ENGINE
