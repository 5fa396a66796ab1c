"""Compiling a graph's kernels ahead of time, for targets that need not be in the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.artifact.code import KernelCode
from tilewright.engines.compiled.code_cache import kernel_code
from tilewright.engines.compiled.executable import resolve
from tilewright.engines.compiled.plan_records import record_keys, save_plan, save_proposals
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
    family = ENGINE.family(graph)
    proposals = family.propose(graph, sm_count)
    knobs = proposals[0].knobs
    plan = ENGINE.plan(graph, knobs, sm_count)
    made = []
    for kernel in _kernels(plan):
        digest, code = kernel_code(kernel.spec, compute_capability)
        made.append(AheadKernel(digest, code, bool(kernel.spec.aligned)))
    # The process that runs the plan finds it, too, and has no need of its family or of Triton.
    name = ENGINE.family_name(graph)
    keys = record_keys(ENGINE.package, name, graph, compute_capability, sm_count)
    save_proposals(keys, proposals)
    save_plan(keys, knobs, resolve(plan, compute_capability)[0])
    return made


def _kernels(plan: KernelPlan) -> Iterator[PlannedKernel]:
    yield from plan.kernels
    if plan.fallback is not None:
        yield from _kernels(plan.fallback)
