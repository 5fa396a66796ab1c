"""What of a graph goes along when it is copied or pickled, and what it starts without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.planning.calling import CallableGraph

if TYPE_CHECKING:
    from tilewright.planning.graph import Graph


class CopyableGraph(CallableGraph):
    """Adds copies and pickles, which hold the declaration and no plans."""

    # Graphs for other shapes, by override.
    _overridden: dict[Any, Graph]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: the declaration, which is planned anew where it is used.

        Plans and kernels stay with this process. ``serialize`` also holds the selected plan.
        """
        planned = ("_plans", "_barred", "_built", "_selected", "_active", "_overridden")
        state = super().__getstate__() | {"kernel_cache": None}
        return {name: value for name, value in state.items() if name not in planned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._plan_nothing()

    def _plan_nothing(self) -> None:
        self._plans = None
        self._barred = {}
        self._built = {}
        self._selected = None
        self._active = None
        self._overridden = {}
