"""Attention backward in Triton: dQ, dK, dV, and dBias and dSink where they are asked for.

Kernels in order: row statistics (``attention_backward_parts``), dK and dV a block of keys a program
(``attention_backward_keys``), dQ a block of rows a program (``attention_backward_rows``), and what
else is wanted; their arguments and grids are in ``attention_backward_launches``. On SM90 plain
scores have kernels of their own for the products (``attention_backward_plain``). All sums are in
registers, in a fixed order, so results repeat bit for bit whether or not
``use_deterministic_algorithm`` asks for it. Source: FlashAttention-2 (Dao 2023).

Two of the seven products are made twice. Adding dQ up in memory by atomics would save them, and
measured slower on an H200 (332 against 404 TFLOP/s at head size 128): the products of one program
then wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, slot_numbers
from tilewright.engines.triton.attention_arguments import steps_in_vectors
from tilewright.engines.triton.attention_backward_config import (
    PADDED_TO,
    BackwardConfig,
    choose_config,
    general_config,
    takes_maps,
)
from tilewright.engines.triton.attention_backward_launches import BackwardLaunches
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
from tilewright.engines.triton.rows import only_operation
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note
from tilewright.graph.graph import DeclaredGraph

_GRADIENTS = ("dQ", "dK", "dV")


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal, with the tile of the kernel over keys as knobs."""
    knobs = choose_config(_read(graph), sm_count).knobs()
    return [Proposal(knobs, 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """All kernels; aligned operands get wide loads, with a general plan behind them."""
    spec = _read(graph)
    config = choose_config(spec, sm_count).with_knobs(dict(knobs))
    if config.keys_rows > PADDED_TO:
        raise NotSupportedError(
            f"{spec.title}: knob TILE_M is {config.keys_rows}; the kernels take up to {PADDED_TO}"
        )
    if config.has_maps and not takes_maps(spec, config):
        config = general_config(spec, sm_count).with_knobs(dict(knobs))
    slots = slot_numbers(graph)
    ports = ("q", "k", "v", "o", "dO", *_GRADIENTS)
    # What is there for a pointer that happens to be odd need not be quick to run.
    plain = general_config(spec, sm_count) if config.has_maps else config
    general = _plan(spec, slots, plain, is_aligned=False)
    if not steps_in_vectors(spec, ports):
        return general
    aligned = _plan(spec, slots, config, is_aligned=True)
    return KernelPlan(
        aligned.kernels,
        aligned.scratch,
        tuple(slots[spec.ports[port].uid] for port in ports),
        general,
    )


def _read(graph: DeclaredGraph) -> AttentionSpec:
    operation: Any = only_operation(graph, "attention")
    spec = read_spec(operation)
    if operation.score_mod_bprop is not None:
        raise NotSupportedError(
            f"{spec.title}: score_mod_bprop is given; the kernels differentiate soft caps alone"
        )
    if not spec.batch:
        raise NotSupportedError(f"{spec.title}: no sequence; the kernels take at least one")
    for port in _GRADIENTS:
        if port not in spec.ports:
            raise NotSupportedError(
                f"{spec.title}: tensor {operation.outputs[port].label()} ({port}) is virtual; the "
                "kernels store it"
            )
    return spec


def _plan(
    spec: AttentionSpec, slots: Mapping[int, int], config: BackwardConfig, *, is_aligned: bool
) -> KernelPlan:
    launches = BackwardLaunches(spec, slots, config, is_aligned)
    kernels = []
    if spec.rows:
        kernels.append(launches.prepare())
    if spec.keys:
        if not config.has_maps:
            kernels.append(launches.keys())
        elif config.values_rows:
            kernels += [launches.plain_keys(("dK",)), launches.plain_keys(("dV",))]
        else:
            kernels.append(launches.plain_keys(("dK", "dV")))
    if spec.rows:
        kernels.append(launches.plain_rows() if config.has_maps else launches.rows())
    if "dSink_token" in spec.ports:
        kernels.append(launches.sink())
    if "dBias" in spec.ports and all(spec.ports["dBias"].dim):
        kernels.append(launches.bias())
    return KernelPlan(tuple(kernels), launches.scratch)
