"""The plan cache of the functions: one built plan for each distinct declaration.

A key holds everything that a plan depends on: the operation, its options, the engine, and the
shape, stride, data type and device of every operand. Threads may share the cache.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from tilewright.errors import BindingError, NotSupportedError
from tilewright.launch.context import device_and_stream
from tilewright.launch.handles import Handle, as_stream_pointer
from tilewright.ops.custom import require_engine
from tilewright.ops.transforms import forbid_tangents, is_transformed, refusal
from tilewright.ops.workspaces import keep_workspace, take_workspace
from tilewright.planning.built import BuiltPlan
from tilewright.planning.explain import Explanation
from tilewright.planning.graph import Graph

Operands = Mapping[str, torch.Tensor]
# Writes what a graph leaves alone of its outputs, and returns what takes that back.
Fill = Callable[[], Callable[[], Any]]

_CAPACITY = 1024
_lock = threading.Lock()


class PlanKey:
    """The operation, its options and operands, the engine and the device; hashed only once."""

    __slots__ = ("_hash", "_parts", "device", "operation")

    def __init__(
        self, operation: str, key: Hashable, engine: str | None, device: torch.device
    ) -> None:
        self.operation, self.device = operation, device
        self._parts = (operation, key, engine, device)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanKey) and self._parts == other._parts


class _Kept(NamedTuple):
    key: PlanKey
    graph: Graph
    built: BuiltPlan


_plans: collections.OrderedDict[PlanKey, _Kept] = collections.OrderedDict()
_together: collections.OrderedDict[Hashable, bool] = collections.OrderedDict()


def operands_key(operands: Operands) -> Hashable:
    """What a plan depends on of operands by name."""
    # From a list: a generator takes twice the time, and this is done at each call.
    return tuple([(name, t.shape, t.stride(), t.dtype, t.device) for name, t in operands.items()])


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child is forked with one thread; the lock may have been held by another.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def clear_plan_cache() -> None:
    """Forget every plan."""
    with _lock:
        _plans.clear()
        _together.clear()


def plan_count() -> int:
    """How many plans are kept."""
    with _lock:
        return len(_plans)


def cached_explanations() -> list[Explanation]:
    """For every kept plan, which engine runs it and why the others declined.

    ``graph_name`` of each is the operation that its plan serves: "sdpa", "sdpa_backward",
    "layer_norm", "linear" and so on.
    """
    with _lock:
        graphs = [kept.graph for kept in _plans.values()]
    return [graph.explain() for graph in graphs]


def run(
    operation: str,
    key: Hashable,
    declare: Callable[[Graph], Any],
    inputs: Operands,
    outputs: Operands,
    *,
    device: torch.device,
    engine: str | None = None,
    stream: Any = None,
    fill: Fill | None = None,
) -> str:
    """Run the graph that ``declare`` declares, by tensor name; returns the plan's name.

    ``operation`` says what the graph computes, and names it. ``declare`` is called once a key. The
    workspace is allocated here, on the stream that the work goes to. ``fill`` is called once every
    operand is accepted.

    Raises:
        NotSupportedError: if no engine, or not the wanted one, takes the graph, a torch.func
            transform is under way, or an operand has a tangent.
        BindingError: if an operand does not fit.
    """
    built = _plan(operation, key, declare, device, engine)
    _run_built(operation, built, {**inputs, **outputs}, device, stream, fill)
    return built.plan.name


def takes_together(
    operation: str,
    key: Hashable,
    whole: Callable[[Graph], Any],
    part: Callable[[Graph], Any],
    device: torch.device,
    engine: str | None,
) -> bool:
    """True if the engine of kernels that runs the graph ``part`` takes ``whole`` in one plan too.

    Both are declared, and planned, but not built, once for each ``key`` of ``whole``.
    """
    key = (operation, key, engine, device)
    with _lock:
        known = _together.get(key)
    if known is None:
        first, second = (_engine_of(operation, graph, device, engine) for graph in (part, whole))
        known = first == second and first not in (None, "aten")
        with _lock:
            _together[key] = known
            if len(_together) > _CAPACITY:
                _together.popitem(last=False)
    return known


def kept_key(
    operation: str, key: Hashable, engine: str | None, device: torch.device
) -> PlanKey | None:
    """The key under which the plan of a call is kept, for ``run_again``; None if it is not."""
    with _lock:
        kept = _plans.get(PlanKey(operation, key, engine, device))
    return None if kept is None else kept.key


def run_again(key: PlanKey, pack: Operands, fill: Fill | None = None) -> bool:
    """As ``run`` with an earlier call's key; False if its plan is not kept, or refuses an operand.

    For callers that know by other means that the operands are what that call's were. A refusal is
    theirs to tell: the plan does not know what the function calls its arguments.
    """
    with _lock:
        kept = _plans.get(key)
        if kept is None:
            return False
        _plans.move_to_end(key)
    try:
        _run_built(key.operation, kept.built, pack, key.device, None, fill)
    except BindingError:
        return False
    return True


def _run_built(
    operation: str,
    built: BuiltPlan,
    pack: Operands,
    device: torch.device,
    stream: Any,
    fill: Fill | None,
) -> None:
    forbid_tangents(operation, pack.values())
    try:
        if stream is None:
            _execute(built, pack, fill)
        else:
            with device_and_stream(device, as_stream_pointer(stream)):
                _execute(built, pack, fill)
    except (RuntimeError, BindingError) as error:
        if not is_transformed():
            raise
        raise refusal(operation) from error


def _execute(built: BuiltPlan, pack: Operands, fill: Fill | None) -> None:
    workspace = take_workspace(built)
    if fill is None:
        built.execute(pack, workspace)
    else:
        frame = built.bind(pack, workspace)
        take_back = fill()
        try:
            frame.launch()
        except BindingError:
            take_back()
            raise
    keep_workspace(workspace)


def _plan(
    operation: str,
    key: Hashable,
    declare: Callable[[Graph], Any],
    device: torch.device,
    engine: str | None,
) -> BuiltPlan:
    require_engine(engine)
    plan_key = PlanKey(operation, key, engine, device)
    with _lock:
        kept = _plans.get(plan_key)
        if kept is not None:
            _plans.move_to_end(plan_key)
            return kept.built
    # Built outside the lock: two threads may build the same plan, and the first one's is kept.
    graph = Graph(name=operation, handle=Handle(device), intermediate_data_type="float32")
    declare(graph)
    graph.create_execution_plans()
    if engine is not None:
        _select_engine(graph, engine)
    graph.build_plans()
    built = graph._active_plan()
    with _lock:
        built = _plans.setdefault(plan_key, _Kept(plan_key, graph, built)).built
        if len(_plans) > _CAPACITY:
            _plans.popitem(last=False)
    return built


def _engine_of(
    operation: str, declare: Callable[[Graph], Any], device: torch.device, engine: str | None
) -> str | None:
    """The engine of the first plan, or ``engine`` if it has one; None if there is none."""
    graph = Graph(name=operation, handle=Handle(device), intermediate_data_type="float32")
    try:
        declare(graph)
        graph.create_execution_plans()
    except NotSupportedError:
        return None
    names = (plan.engine_name for plan in graph._require_plans())
    return next((name for name in names if engine in (None, name)), None)


def _select_engine(graph: Graph, engine: str) -> None:
    for index, plan in enumerate(graph.plans):
        if plan.engine_name == engine:
            graph.select_plan(index)
            return
    raise NotSupportedError(f"engine={engine!r} has no plan for this call\n{graph.explain()}")
