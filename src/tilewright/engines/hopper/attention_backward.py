"""Attention backward on SM90: which kernels a declaration gets.

Head sizes up to 128 have one pass that makes dK and dV and adds up dQ in memory, in no fixed order.
Where ``use_deterministic_algorithm`` asks for one, and for larger head sizes, dQ has a kernel of
its own, and two of seven products are made twice.
"""

from __future__ import annotations

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, slot_numbers
from tilewright.engines.hopper.attention_backward_launches import Launches
from tilewright.engines.hopper.attention_backward_spec import BackwardSpec, read_backward
from tilewright.engines.hopper.operand_rules import only_operation
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type, numeric_note
from tilewright.graph.graph import DeclaredGraph

# Rows of a tile and slots for tiles of Q, by the width of the products: where dQ is added up, and
# else.
_TILES_WITH_SUMS = {64: (128, 2), 128: (64, 2)}
_TILES = {64: (128, 2), 128: (64, 3), 256: (64, 2)}
# Slots that a step needs, and that barriers have room for where dQ is not added up.
_FEWEST_SLOTS, _MOST_SLOTS = 2, 3
# The widest products whose dQ is added up, and the least scale by which Stats are divided there.
_WIDEST_WITH_SUMS = 128
_LEAST_SCALE = 2.0**-16


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal."""
    spec = read_backward(only_operation(graph))
    notes = frozenset({numeric_note.NONDETERMINISTIC}) if has_sums(spec) else frozenset()
    knobs = ((knob_type.STAGES, tile_of(spec)[1]),)
    return [Proposal(knobs, 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}), notes)]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Row statistics, the products, dQ, and dSink where it is asked for."""
    spec, given = read_backward(only_operation(graph)), dict(knobs)
    rows, stages = tile_of(spec)
    stages = given.get(knob_type.STAGES, stages)
    most = _FEWEST_SLOTS if has_sums(spec) else _MOST_SLOTS
    if not _FEWEST_SLOTS <= stages <= most:
        raise NotSupportedError(
            f"STAGES={stages}; attention's backward takes {_FEWEST_SLOTS} to {most} here"
        )
    launches = Launches(spec, slot_numbers(graph), rows, has_sums(spec), sm_count)
    kernels = [launches.prepare(), launches.products(stages)]
    kernels.append(launches.finish() if launches.has_sums else launches.query())
    if "dSink_token" in spec.ports:
        kernels.append(launches.sinks())
    return KernelPlan(tuple(kernels), launches.workspace.scratch)


def has_sums(spec: BackwardSpec) -> bool:
    """True if dQ is added up in memory; Stats are divided by the scale there."""
    is_narrow = spec.width <= _WIDEST_WITH_SUMS
    return not spec.is_deterministic and is_narrow and abs(spec.scale) >= _LEAST_SCALE


def tile_of(spec: BackwardSpec) -> tuple[int, int]:
    """(rows of a tile, slots for tiles of Q): what measured best."""
    return (_TILES_WITH_SUMS if has_sums(spec) else _TILES)[spec.width]
