"""Choosing among the plans of a graph: listing, naming, barring, selecting."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.planning.devices import DeviceProperties
from tilewright.planning.plans import Plan, RankedPlans
from tilewright.planning.table import ENGINE_TABLE, engine_by_id, engine_by_name

if TYPE_CHECKING:
    from tilewright.planning.built import BuiltPlan
    from tilewright.planning.explain import Explanation


class PlanSelection(DeclaredGraph):
    """The plan list of a graph, and everything that picks from it."""

    handle: Any
    _plans: RankedPlans | None
    _barred: dict[int, str]
    _built: dict[int, BuiltPlan]
    _selected: int | None
    _active: BuiltPlan | None

    def create_execution_plans(self) -> None:
        """Rank the plans; see ``Graph``."""
        raise NotImplementedError

    def build_plans(self) -> None:
        """Build the selected plan; see ``Graph``."""
        raise NotImplementedError

    def _torch_device(self) -> Any:
        raise NotImplementedError

    def _device_properties(self) -> DeviceProperties:
        raise NotImplementedError

    def _stream(self, handle: Any) -> Any:
        raise NotImplementedError

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The ranked plans, best first, barred ones included."""
        return tuple(self._require_plans())

    @property
    def selected_engine(self) -> str:
        """The name of the engine that runs the graph.

        Raises:
            NotSupportedError: if no engine takes the graph.
        """
        return self._active_plan().plan.engine_name

    def get_execution_plan_count(self) -> int:
        """How many plans there are."""
        return len(self._require_plans())

    def get_plan_name_at_index(self, index: int) -> str:
        """The plan's name: the engine's, and the knobs.

        Raises:
            NotSupportedError: if there is no such plan, here and for the other methods with an
                index.
        """
        return self._plan(index).name

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[knob_type, int]]:
        """(engine id, knobs), which ``create_execution_plan`` replays."""
        plan = self._plan(index)
        return plan.engine_id, dict(plan.knobs)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of workspace that plan ``index`` needs; builds it."""
        self.build_plan_at_index(index)
        return self._built[index].workspace_bytes

    def get_autotune_workspace_size(self) -> int:
        """Bytes of workspace that ``autotune`` needs, the most of any open plan; builds them."""
        self._require_plans()
        return max((self._built[i].workspace_bytes for i in self._build_open()), default=0)

    def build_plan_at_index(self, index: int) -> None:
        """Build plan ``index``.

        Raises:
            NotSupportedError: if it is barred, or there is no such plan.
        """
        plan = self._plan(index)
        if index in self._barred:
            raise NotSupportedError(f"plan {plan.name!r} is barred: {self._barred[index]}")
        if index not in self._built:
            from tilewright.planning.built import BuiltPlan

            self._built[index] = BuiltPlan(self, plan, self._torch_device())

    def execute_plan_at_index(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        index: int = 0,
        handle: Any = None,
    ) -> None:
        """Execute plan ``index`` in place of the selected one; see ``execute``.

        Raises:
            NotSupportedError: if it is barred, or there is no such plan.
            BindingError: if an operand does not fit; nothing was written then.
        """
        self.build_plan_at_index(index)
        self._built[index].execute(variant_pack, workspace, self._stream(handle))

    def create_execution_plan(self, engine: int, knobs: Mapping[Any, int] | None = None) -> None:
        """Make (engine id, knobs) the only open plan.

        A knob is a ``knob_type``, its number, or either as text: what JSON makes of a record.

        Raises:
            NotSupportedError: if no such plan is proposed, with the engine's reason, no knob has
                that name, or a knob's value is no integer.
        """
        if self._plans is None:
            self.create_execution_plans()
        wanted = _as_knobs(knobs)
        for index, plan in enumerate(self._require_plans()):
            if plan.engine_id == engine and dict(plan.knobs) == wanted:
                self.select_plan(index)
                return
        entry = engine_by_id(engine)
        known = ", ".join(f"{e.engine_id} ({e.name})" for e in ENGINE_TABLE)
        if entry is None:
            raise NotSupportedError(f"no engine has id {engine}; known are {known}")
        verdicts = [] if self._plans is None else self._plans.verdicts()
        reason = next((v.reason for v in verdicts if v.engine_id == engine), "")
        raise NotSupportedError(
            f"engine {entry.name!r} has no plan with knobs "
            f"{{{', '.join(f'{knob.name}: {value}' for knob, value in wanted.items())}}}"
            + (f": {reason}" if reason else "")
        )

    def select_plan(self, plan: int | str | Plan) -> None:
        """Choose the plan to run, by index, by name, or as an entry of ``plans``.

        Raises:
            NotSupportedError: if there is no such plan, or it is barred.
        """
        index = self._index_of(plan)
        if index in self._barred:
            raise NotSupportedError(
                f"plan {self._plan(index).name!r} is barred: {self._barred[index]}"
            )
        self._selected = index
        self._active = self._built.get(index)

    def deselect_engines(self, names: Iterable[str]) -> None:
        """Bar every plan of the named engines.

        Raises:
            NotSupportedError: if the table has no engine of a name.
        """
        for name in names:
            if engine_by_name(name) is None:
                known = ", ".join(entry.name for entry in ENGINE_TABLE)
                raise NotSupportedError(f"no engine is named {name!r}; known are {known}")
            self._bar(
                lambda plan, name=name: plan.engine_name == name, f"engine {name!r} deselected"
            )

    def deselect_workspace_greater_than(self, size_bytes: int) -> None:
        """Bar every plan that needs more than ``size_bytes`` of workspace; builds the plans."""
        for index in self._build_open():
            needed = self._built[index].workspace_bytes
            if needed > size_bytes:
                self._bar_index(index, f"needs {needed} bytes of workspace, over {size_bytes}")

    def select_behavior_notes(self, notes: Iterable[behavior_note]) -> None:
        """Bar every plan that lacks one of ``notes``."""
        wanted = frozenset(notes)
        self._bar(lambda plan: not wanted <= plan.behavior_notes, f"lacks one of {_names(wanted)}")

    def deselect_behavior_notes(self, notes: Iterable[behavior_note]) -> None:
        """Bar every plan that has one of ``notes``."""
        barred = frozenset(notes)
        self._bar(lambda plan: bool(barred & plan.behavior_notes), f"has one of {_names(barred)}")

    def select_numeric_notes(self, notes: Iterable[numeric_note]) -> None:
        """Bar every plan that lacks one of ``notes``."""
        wanted = frozenset(notes)
        self._bar(lambda plan: not wanted <= plan.numeric_notes, f"lacks one of {_names(wanted)}")

    def deselect_numeric_notes(self, notes: Iterable[numeric_note]) -> None:
        """Bar every plan that has one of ``notes``."""
        barred = frozenset(notes)
        self._bar(lambda plan: bool(barred & plan.numeric_notes), f"has one of {_names(barred)}")

    def get_behavior_notes(self) -> list[behavior_note]:
        """The selected plan's behavior notes."""
        return sorted(self._active_plan().plan.behavior_notes, key=lambda note: note.name)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        """Plan ``index``'s behavior notes."""
        return sorted(self._plan(index).behavior_notes, key=lambda note: note.name)

    def get_engine_count(self) -> int:
        """How many engines the table has."""
        return len(ENGINE_TABLE)

    def get_knobs_for_engine(self, engine: int) -> list[knob_type]:
        """The knobs that the engine's plans of this graph set."""
        plans = [plan for plan in self._require_plans() if plan.engine_id == engine]
        return sorted({knob for plan in plans for knob, _ in plan.knobs})

    def explain(self) -> Explanation:
        """Why each engine took or declined the graph, what is barred, and what runs."""
        from tilewright.planning.explain import Explanation

        plans = self._require_plans()
        indices = self._open_indices()
        chosen = self._selected if self._selected is not None else next(iter(indices), None)
        return Explanation(
            self.name,
            str(self._device_properties()),
            tuple(self._plans.verdicts() if self._plans is not None else ()),
            tuple((plans[index].name, reason) for index, reason in sorted(self._barred.items())),
            None if chosen is None else plans[chosen],
        )

    def autotune(self, variant_pack: Mapping[Any, Any], workspace: Any = None) -> dict[str, Any]:
        """Time every open plan on these buffers and select the fastest.

        ``workspace`` has to hold any of the plans: ``get_autotune_workspace_size()`` bytes.
        Returns a record that ``create_execution_plan(record["engine"], record["knobs"])``
        replays, with the median microseconds of each plan. Outputs are overwritten.

        Raises:
            BindingError: if an operand does not suit a plan, or the workspace is too small for one,
                before anything runs.
        """
        from tilewright.planning.autotune import autotune

        return autotune(self, variant_pack, workspace)

    def _require_plans(self) -> Sequence[Plan]:
        if self._plans is None:
            self.create_execution_plans()
        return () if self._plans is None else self._plans

    def _active_plan(self) -> BuiltPlan:
        if self._active is None:
            self.build_plans()
        if self._active is None:
            raise NotSupportedError(f"graph {self.name!r} has no built plan")
        return self._active

    def _plan(self, index: int) -> Plan:
        plans = self._require_plans()
        if isinstance(index, int) and index >= 0:
            try:
                return plans[index]
            except IndexError:
                pass
        raise NotSupportedError(f"no plan has index {index!r}; there are {len(plans)}")

    def _index_of(self, plan: int | str | Plan) -> int:
        plans = self._require_plans()
        for index, candidate in enumerate(plans):
            if plan in (index, candidate.name, candidate):
                return index
        names = ", ".join(candidate.name for candidate in plans) or "none"
        raise NotSupportedError(f"no plan {plan!r}; there are: {names}")

    def _first_open(self) -> int | None:
        """The index of the best plan that is not barred; asks no engine behind it."""
        indices = (i for i, _ in enumerate(self._require_plans()) if i not in self._barred)
        return next(indices, None)

    def _build_first(self) -> int | None:
        """Build the best plan that is not barred and return its index; None if there is none."""
        while (index := self._first_open()) is not None:
            if self._is_built(index):
                return index
        return None

    def _build_open(self) -> list[int]:
        """Build every plan that is not barred, and return their indices."""
        return [index for index in self._open_indices() if self._is_built(index)]

    def _is_built(self, index: int) -> bool:
        """Build a plan if it can be; else bar it, so that the next best runs.

        What an engine offers it knows of the declaration. A compiler or a driver may still decline.
        """
        try:
            self.build_plan_at_index(index)
        except NotSupportedError as decline:
            if index == self._selected:
                raise
            self._bar_index(index, f"cannot be built: {decline}")
            return False
        return True

    def _open_indices(self) -> list[int]:
        return [i for i in range(len(self._require_plans())) if i not in self._barred]

    def _bar(self, condition: Any, reason: str) -> None:
        for index in self._open_indices():
            if condition(self._plan(index)):
                self._bar_index(index, reason)

    def _bar_index(self, index: int, reason: str) -> None:
        self._barred[index] = reason
        if self._selected == index:
            self._selected, self._active = None, None


def _names(notes: Iterable[Any]) -> str:
    return ", ".join(sorted(note.name for note in notes))


def _as_knobs(knobs: Any) -> dict[knob_type, int]:
    if not isinstance(knobs or {}, Mapping):
        raise NotSupportedError(f"knobs: got {knobs!r}; expected a mapping from knobs to integers")
    found = {}
    for name, value in (knobs or {}).items():
        knob = _as_knob(name)
        try:
            found[knob] = int(value) if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError) as error:
            raise NotSupportedError(
                f"knob {knob.name}: got {value!r}; expected an integer"
            ) from error
    return found


def _as_knob(knob: Any) -> knob_type:
    try:
        if isinstance(knob, str) and not knob.isdecimal():
            return knob_type[knob]
        return knob_type(int(knob))
    except (KeyError, ValueError, TypeError) as error:
        known = ", ".join(each.name for each in knob_type)
        raise NotSupportedError(f"no knob is named {knob!r}; known are {known}") from error
