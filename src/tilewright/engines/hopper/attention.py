"""Attention forward on SM90: configurations, and the launch of ``attention_kernel``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triton.experimental.gluon import language as gl

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import (
    TRITON_TYPES,
    KernelPlan,
    PlannedKernel,
    operand,
    pointer_type,
    slot_numbers,
)
from tilewright.engines.hopper.attention_kernel import attention_forward
from tilewright.engines.hopper.attention_spec import AttentionSpec, read_spec
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant
from tilewright.launch.tensor_maps import tensor_map

_WARPGROUP_ROWS = 64
# Registers a thread at entry, by warpgroups of consumers: with the producer's four warps' worth
# they fill the file of 65536, and ``setmaxnreg`` shares them out anew.
_ENTRY_REGISTERS = {2: 168, 3: 128}
_TYPES = {DataType.BFLOAT16: gl.bfloat16, DataType.HALF: gl.float16}


@dataclass(frozen=True)
class AttentionConfig:
    """How a tile is cut: see the constants of ``attention_kernel``.

    ``turns``: consumers take turns on the tensor cores. ``lazy``: accumulators are rescaled only
    where the maximum grew much. ``by_cost``: causal tiles are dealt by their length.
    """

    block_n: int = 128
    warpgroups: int = 2
    stages: int = 2
    q_slots: int = 2
    turns: bool = True
    lazy: bool = True
    q_registers: bool = False
    emulated: int = 0
    repairs: bool = True
    by_cost: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return _WARPGROUP_ROWS * self.warpgroups


def padded(head_size: int) -> int:
    """The head size that the products are made with; the copies fill up with zeros."""
    return 64 if head_size <= 64 else 128 if head_size <= 128 else 256


def choose_config(spec: AttentionSpec) -> AttentionConfig:
    """What measured best; see benchmark/hopper_attention.md."""
    depth = padded(spec.depth)
    if depth == 64:
        return AttentionConfig(warpgroups=3)
    if depth == 256:
        return AttentionConfig(block_n=64, q_slots=1)
    return AttentionConfig()


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal; its knobs tell the tile."""
    spec = _only_spec(graph)
    config = choose_config(spec)
    knobs = (
        (knob_type.TILE_M, config.block_m),
        (knob_type.TILE_N, config.block_n),
        (knob_type.STAGES, config.stages),
    )
    return [Proposal(knobs, 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """One launch, a program a multiprocessor."""
    spec = _only_spec(graph)
    given = dict(knobs)
    config = choose_config(spec)
    config = replace(
        config,
        warpgroups=given.get(knob_type.TILE_M, config.block_m) // _WARPGROUP_ROWS,
        block_n=given.get(knob_type.TILE_N, config.block_n),
        stages=given.get(knob_type.STAGES, config.stages),
    )
    return plan_with(graph, spec, config, sm_count)


def plan_with(
    graph: DeclaredGraph, spec: AttentionSpec, config: AttentionConfig, sm_count: int
) -> KernelPlan:
    """The plan of one configuration."""
    slots = slot_numbers(graph)
    q, k, v, out = (spec.ports[port] for port in ("q", "k", "v", "O"))
    depth, depth_v = padded(spec.depth), padded(spec.depth_v)
    boxes = {
        "q_map": (q, (1, 1, _WARPGROUP_ROWS, depth)),
        "k_map": (k, (1, 1, config.block_n, depth)),
        "v_map": (v, (1, 1, config.block_n, depth_v)),
        "o_map": (out, (1, 1, _WARPGROUP_ROWS, depth_v)),
    }
    stats, sink = spec.ports.get("Stats"), spec.ports.get("sink_token")
    # Absent operands keep their place; q stands in, and the kernel does not look at it.
    pointers = {"stats": stats or q, "sink": sink or q, "k": k, "v": v}
    tiles = -(-spec.rows // config.block_m)
    heads = spec.batch * spec.heads_q
    integers = {
        "rows": spec.rows,
        "keys": spec.keys,
        "left": spec.left or 0,
        "right": spec.right or 0,
        "tiles": tiles,
        "heads": heads,
        "heads_q": spec.heads_q,
        "group": spec.group,
        "depth": spec.depth,
        "depth_v": spec.depth_v,
    }
    steps = (0, 0, 0) if stats is None else stats.stride[:3]
    wide = dict(zip(("stats_batch", "stats_head", "stats_row"), steps, strict=True))
    wide |= dict(zip(("k_batch", "k_head", "k_row"), k.stride[:3], strict=True))
    wide |= dict(zip(("v_batch", "v_head", "v_row"), v.stride[:3], strict=True))
    types = [(name, _map_type(tensor, box)) for name, (tensor, box) in boxes.items()]
    types += [(name, pointer_type(tensor)) for name, tensor in pointers.items()]
    types += [("scale", "fp32"), *((name, "i32") for name in integers)]
    types += [(name, "i64") for name in wide]
    arguments: list[Argument] = [
        tensor_map(tensor, slots[tensor.uid], box) for tensor, box in boxes.values()
    ]
    arguments += [operand(slots, tensor) for tensor in pointers.values()]
    arguments += [Constant(spec.scale), *(Constant(value) for value in integers.values())]
    arguments += [Constant(step) for step in wide.values()]
    kernel = KernelSpec(
        attention_forward,
        tuple(types),
        (
            ("BLOCK_N", config.block_n),
            ("DEPTH", depth),
            ("DEPTH_V", depth_v),
            ("WARPGROUPS", config.warpgroups),
            ("STAGES", config.stages),
            ("Q_SLOTS", config.q_slots),
            ("TURNS", config.turns),
            ("LAZY", config.lazy),
            ("Q_REGISTERS", config.q_registers),
            ("EMULATED", config.emulated),
            ("BY_COST", config.by_cost and _cost_grows(spec)),
            *_mask_constants(spec, config),
            ("REPAIRS", config.repairs and (spec.left is not None or spec.right is not None)),
            ("HAS_STATS", stats is not None),
            ("STATS_LOG2", spec.stats_log2 and stats is not None),
            ("HAS_SINK", sink is not None),
        ),
        warps=4,
        max_registers=_ENTRY_REGISTERS[config.warpgroups],
    )
    grid = (min(sm_count, tiles * heads), 1, 1)
    return KernelPlan((PlannedKernel(kernel, grid, tuple(arguments)),))


def _only_spec(graph: DeclaredGraph) -> AttentionSpec:
    if len(graph.operations) != 1:
        raise NotSupportedError(
            f"graph {graph.name!r} has {len(graph.operations)} operations; Hopper attention takes "
            "graphs of one"
        )
    return read_spec(graph.operations[0])


def _mask_constants(spec: AttentionSpec, config: AttentionConfig) -> tuple[tuple[str, bool], ...]:
    """Which masks exist, and whether blocks after the first can need the one on the right."""
    has_left, has_right = spec.left is not None, spec.right is not None
    is_aligned = (
        config.block_n % config.block_m == 0 and has_right and spec.right % config.block_n == 0
    )
    has_tail = spec.keys % config.block_n != 0
    return (
        ("HAS_LEFT", has_left),
        ("HAS_RIGHT", has_right),
        ("RIGHT_LOOP", has_right and not is_aligned),
        ("FIRST_MASKED", has_left or has_right or has_tail),
    )


def _cost_grows(spec: AttentionSpec) -> bool:
    """True if tiles cost more the later their rows are, as under a causal mask."""
    return spec.right is not None and spec.left is None and spec.rows <= 2 * spec.keys


def _map_type(tensor: Tensor, box: tuple[int, ...]) -> str:
    """The type of a tensor map's argument, as Gluon spells it."""
    layout = gl.NVMMASharedLayout.get_default_for([*box], _TYPES[tensor.data_type])
    return f"tensordesc<{TRITON_TYPES[tensor.data_type]}{[*box]},{layout!r}>"
