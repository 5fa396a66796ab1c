"""Compiling a graph's kernels ahead of time, for targets that need not be in the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.artifact.code import KernelCode
from tilewright.engines.base import Knobs
from tilewright.engines.compiled.code_cache import kernel_code
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.engines.triton.engine import ENGINE
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph


@dataclass(frozen=True)
class AheadKernel:
    """One kernel that is in the store now, if there is a store. ``digest`` is its key's."""

    digest: str
    code: KernelCode
    is_aligned: bool


def best_knobs(graph: DeclaredGraph, sm_count: int) -> Knobs:
    """The knobs of the plan that a device with ``sm_count`` multiprocessors would get.

    Raises:
        NotSupportedError: if no kernel family takes the graph.
    """
    knobs: Knobs = ENGINE.family(graph).propose(graph, sm_count)[0].knobs
    return knobs


def compile_ahead(
    graph: DeclaredGraph, compute_capability: tuple[int, int], sm_count: int
) -> list[AheadKernel]:
    """Compile, or find, every kernel of a graph's first plan, and of the plan behind it.

    ``graph`` is validated. ``sm_count`` is the target's number of multiprocessors: plans that
    spread rows over programs specialize on it.

    Raises:
        NotSupportedError: if no kernel family takes the graph, or kernels are interpreted here.
        LaunchError: if the compiler is needed and forbidden.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise NotSupportedError("TRITON_INTERPRET=1: kernels are interpreted, none is compiled")
    plan: KernelPlan = ENGINE.family(graph).plan(graph, best_knobs(graph, sm_count), sm_count)
    made = []
    for kernel in _kernels(plan):
        digest, code = kernel_code(kernel.spec, compute_capability)
        made.append(AheadKernel(digest, code, bool(kernel.spec.aligned)))
    return made


def _kernels(plan: KernelPlan) -> Iterator[PlannedKernel]:
    yield from plan.kernels
    if plan.fallback is not None:
        yield from _kernels(plan.fallback)
