"""Plans: ranking, names, and why an engine has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.engines.base import Engine, Knobs, Proposal, load_engine
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import walk
from tilewright.planning.devices import DeviceProperties
from tilewright.planning.rows import admit
from tilewright.planning.table import ENGINE_TABLE, EngineEntry
from tilewright.records import record


@record(frozen=True)
class Plan:
    """One way to run a graph: an engine and its knobs. (engine id, knobs) replays it."""

    engine_id: int
    engine_name: str
    knobs: Knobs
    cost: float
    behavior_notes: frozenset[behavior_note]
    numeric_notes: frozenset[numeric_note]

    @property
    def name(self) -> str:
        """The engine's name and, after a colon, the knobs: "triton:TILE_M=128,WARPS=4"."""
        if not self.knobs:
            return self.engine_name
        knobs = ",".join(f"{knob.name}={value}" for knob, value in self.knobs)
        return f"{self.engine_name}:{knobs}"


@record(frozen=True)
class EngineVerdict:
    """What became of one engine: the plans it offers, or the reason for none."""

    engine_id: int
    engine_name: str
    plan_names: tuple[str, ...]
    reason: str

    @property
    def is_taken(self) -> bool:
        """True if the engine offers a plan."""
        return bool(self.plan_names)


def propose_plans(
    graph: DeclaredGraph,
    device: DeviceProperties,
    torch_device: Any,
    table: Sequence[EngineEntry] = ENGINE_TABLE,
) -> tuple[list[Plan], list[EngineVerdict]]:
    """Ask every engine of the table; the plans come ranked, best first.

    A decline (NotSupportedError) becomes a verdict; any other exception propagates.
    """
    ranked: list[tuple[int, float, int, Plan]] = []
    verdicts = []
    for entry in table:
        try:
            proposals = _ask(entry, graph, device, torch_device)
        except NotSupportedError as decline:
            verdicts.append(EngineVerdict(entry.engine_id, entry.name, (), str(decline)))
            continue
        plans = [_as_plan(entry, proposal) for proposal in proposals]
        verdicts.append(
            EngineVerdict(entry.engine_id, entry.name, tuple(plan.name for plan in plans), "")
        )
        ranked += [(entry.priority, plan.cost, i, plan) for i, plan in enumerate(plans)]
    ranked.sort(key=lambda item: item[:3])
    return [plan for *_, plan in ranked], verdicts


def _ask(
    entry: EngineEntry, graph: DeclaredGraph, device: DeviceProperties, torch_device: Any
) -> list[Proposal]:
    if entry.module is None:
        raise NotSupportedError(f"engine {entry.name!r} is not part of this version")
    for operation in walk(graph.operations):
        reason = admit(entry.rows, operation, device)
        if reason is not None:
            raise NotSupportedError(reason)
    engine: Engine = load_engine(entry.module)
    unusable = engine.unusable_reason(torch_device)
    if unusable is not None:
        raise NotSupportedError(unusable)
    return engine.propose(graph, torch_device)


def _as_plan(entry: EngineEntry, proposal: Proposal) -> Plan:
    return Plan(
        entry.engine_id,
        entry.name,
        proposal.knobs,
        proposal.cost,
        proposal.behavior_notes,
        proposal.numeric_notes,
    )
