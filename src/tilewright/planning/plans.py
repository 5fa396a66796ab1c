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


class RankedPlans(Sequence[Plan]):
    """The plans of a graph, best first; an engine is asked once a plan of its rank is wanted.

    Most graphs run the first plan, and never need what the engines behind it would offer. A
    decline (NotSupportedError) becomes a verdict; any other exception propagates.
    """

    def __init__(
        self,
        graph: DeclaredGraph,
        device: DeviceProperties,
        torch_device: Any,
        table: Sequence[EngineEntry],
    ) -> None:
        self._asked = graph, device, torch_device
        self._table = table
        # The last is asked next.
        self._ranks = sorted({entry.priority for entry in table}, reverse=True)
        self._plans: list[Plan] = []
        self._verdicts: dict[int, EngineVerdict] = {}

    def __len__(self) -> int:
        """How many plans there are; asks every engine."""
        while self._ask_next():
            pass
        return len(self._plans)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __getitem__(self, index: Any) -> Any:
        """The plan at an index of 0 or more; asks no more engines than it takes to tell."""
        if isinstance(index, slice) or index < 0:
            return self._plans[index] if len(self) else [][index]
        while index >= len(self._plans) and self._ask_next():
            pass
        return self._plans[index]

    def verdicts(self) -> list[EngineVerdict]:
        """What became of each engine, in the table's order; asks every engine."""
        len(self)
        return [self._verdicts[entry.engine_id] for entry in self._table]

    def _ask_next(self) -> bool:
        """Ask the engines of the next rank; False if none is left."""
        if not self._ranks:
            return False
        ranked: list[tuple[float, int, Plan]] = []
        for entry in self._table:
            if entry.priority != self._ranks[-1]:
                continue
            try:
                proposals = _ask(entry, *self._asked)
            except NotSupportedError as decline:
                self._verdicts[entry.engine_id] = EngineVerdict(
                    entry.engine_id, entry.name, (), str(decline)
                )
                continue
            plans = [_as_plan(entry, proposal) for proposal in proposals]
            self._verdicts[entry.engine_id] = EngineVerdict(
                entry.engine_id, entry.name, tuple(plan.name for plan in plans), ""
            )
            ranked += [(plan.cost, i, plan) for i, plan in enumerate(plans)]
        self._ranks.pop()
        ranked.sort(key=lambda item: item[:2])
        self._plans += [plan for *_, plan in ranked]
        return True


def propose_plans(
    graph: DeclaredGraph,
    device: DeviceProperties,
    torch_device: Any,
    table: Sequence[EngineEntry] = ENGINE_TABLE,
) -> RankedPlans:
    """The ranked plans of a validated graph; the engines are asked down to the first plan."""
    ranked = RankedPlans(graph, device, torch_device, table)
    next(iter(ranked), None)
    return ranked


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
    if unusable is None:
        return engine.propose(graph, torch_device)
    if device.type == "cuda" and torch_device.type != "cuda":
        return engine.propose_elsewhere(graph, device.sm_count)
    raise NotSupportedError(unusable)


def _as_plan(entry: EngineEntry, proposal: Proposal) -> Plan:
    return Plan(
        entry.engine_id,
        entry.name,
        proposal.knobs,
        proposal.cost,
        proposal.behavior_notes,
        proposal.numeric_notes,
    )
