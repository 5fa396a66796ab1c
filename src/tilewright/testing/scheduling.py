"""Schedulers for ``--dist=loadscope``, ``loadfile`` and ``loadgroup`` that survive dead workers.

xdist's own (3.8) put the whole scope of a dead worker back: the crashed test runs again, and again
kills a worker; a scope whose tests are all done is handed out, and its worker waits for ever; so
does a worker that is left with one test while others wait, since it starts a test only when it
knows the next one. Imported only where xdist is in use.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling, LoadGroupScheduling, LoadScopeScheduling
from xdist.workermanage import WorkerController

# A worker runs a test when it has the next one, or knows that there is none.
_ENOUGH = 2


class _KeepsAll(LoadScopeScheduling):  # type: ignore[misc]
    def remove_node(self, node: WorkerController) -> str | None:
        """Take a dead worker out; return the test that it ran, which counts as done."""
        if self.collection is None:
            # It died between its collection and the first distribution: it takes no part.
            self.registered_collections.pop(node, None)
        workload = self.assigned_work.pop(node)
        crashed = next(
            (str(test) for unit in workload.values() for test, done in unit.items() if not done),
            None,
        )
        if crashed is None:
            return None
        workload[self._scope_in(workload, crashed)][crashed] = True
        for scope, unit in reversed(list(workload.items())):
            if not all(unit.values()):
                self.workqueue[scope] = unit
                self.workqueue.move_to_end(scope, last=False)
        self._reschedule_all()
        return crashed

    def mark_test_pending(self, item: str) -> None:
        """Put one test back, to run before others."""
        scope = self._split_scope(item)
        self.workqueue.setdefault(scope, {})[item] = False
        self.workqueue.move_to_end(scope, last=False)
        self._reschedule_all()

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) < _ENOUGH:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def _assign_work_unit(self, node: WorkerController) -> None:
        # The same scope may come back to a worker that has finished an earlier part of it.
        scope, unit = next(iter(self.workqueue.items()))
        earlier = self.assigned_work.get(node, {}).get(scope, {})
        super()._assign_work_unit(node)
        self.assigned_work[node][scope] = {**earlier, **unit}

    def _reschedule_all(self) -> None:
        for node in self.nodes:
            self._reschedule(node)

    @staticmethod
    def _scope_in(workload: dict[str, dict[str, bool]], test: str) -> str:
        return next(scope for scope, unit in workload.items() if test in unit)


class _Scope(_KeepsAll):
    pass


class _File(_KeepsAll, LoadFileScheduling):  # type: ignore[misc]
    pass


class _Group(_KeepsAll, LoadGroupScheduling):  # type: ignore[misc]
    pass


_BY_MODE = {"loadscope": _Scope, "loadfile": _File, "loadgroup": _Group}


def make(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """The scheduler of ``--dist``, or None where xdist's own does."""
    kind = _BY_MODE.get(config.getvalue("dist"))
    return None if kind is None else kind(config, log)
