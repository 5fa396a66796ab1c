"""FP8 attention forward on SM90: configurations, and the launch of ``attention_fp8_kernel``."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import (
    KernelPlan,
    PlannedKernel,
    operand,
    slot_numbers,
)
from tilewright.engines.hopper.attention_fp8_kernel import attention_fp8_forward, clear_amax
from tilewright.engines.hopper.attention_fp8_spec import (
    MAXIMA,
    SCALES,
    AttentionFp8Spec,
    read_spec,
)
from tilewright.engines.hopper.barriers import FIRST_FREE
from tilewright.engines.hopper.bounds import length_kind
from tilewright.engines.hopper.forward_values import add_pointer, forward_values
from tilewright.engines.hopper.operand_rules import only_operation
from tilewright.engines.hopper.tile_config import (
    ENTRY_REGISTERS,
    WARPGROUP_ROWS,
    TileConfig,
    cost_grows,
    mask_constants,
    padded,
    proposal,
    with_knobs,
)
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.prepared import Constant

_SLAB = 64
# Named barriers of a program.
_BARRIERS = 16
# Keys up to which tiles under a right bound go to two consumers that are made for few blocks, and
# others to three such.
_SHORT, _SHORT_FULL = 2048, 1024
# Registers a thread of a consumer and of the producer, by warpgroups of consumers.
_CONSUMER_REGISTERS = {2: 232, 3: 160}
_PRODUCER_REGISTERS = {2: 40, 3: 32}


@dataclass(frozen=True)
class AttentionConfig(TileConfig):
    """How a tile is cut: see the constants of ``attention_fp8_kernel``.

    ``is_long``: what consumers run is made for many blocks of keys a tile.
    """

    warpgroups: int = 3
    is_long: bool = False

    @property
    def in_turns(self) -> bool:
        """True if consumers take turns at exponentials, by a named barrier each."""
        return self.warpgroups == 2 or self.is_long


def choose_config(spec: AttentionFp8Spec) -> AttentionConfig:
    """What measured best; see benchmark/hopper_fp8.md."""
    is_wide = padded(spec.depth) == 128
    is_cut = spec.right is not None
    is_short = spec.keys <= (_SHORT if is_cut else _SHORT_FULL)
    is_long = is_wide and not is_short
    has_two = is_cut and (is_wide or is_short)
    return AttentionConfig(
        warpgroups=2 if has_two else 3, stages=2 if is_wide else 3, is_long=is_long
    )


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal; its knobs tell the tile."""
    return [proposal(choose_config(read_spec(only_operation(graph))))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Zero the maxima, then one launch, a program a multiprocessor."""
    spec = read_spec(only_operation(graph))
    return plan_with(graph, spec, with_knobs(choose_config(spec), knobs), sm_count)


def plan_with(
    graph: DeclaredGraph, spec: AttentionFp8Spec, config: AttentionConfig, sm_count: int
) -> KernelPlan:
    """The plan of one configuration."""
    turns = config.warpgroups if config.in_turns else 0
    if FIRST_FREE.value + 2 * config.stages + config.q_slots + turns > _BARRIERS:
        raise NotSupportedError(
            f"{config.stages} stages take more barriers than the {_BARRIERS} that there are"
        )
    slots = slot_numbers(graph)
    ports = spec.ports
    depth, depth_v = padded(spec.depth), padded(spec.depth_v)
    widths = {
        "q": (WARPGROUP_ROWS, depth),
        "k": (config.block_n, depth),
        "v": (config.block_n, _SLAB),
        "O": (WARPGROUP_ROWS, depth_v),
    }
    tiles = -(-spec.rows // config.block_m)
    values = forward_values(spec, widths, tiles, slots)
    for name in SCALES:
        add_pointer(values, name, ports[name], slots)
    for port in MAXIMA:
        # Floats that are not negative are ordered as integers, and NaN is above them.
        values[port.lower()] = ("*i32", operand(slots, ports.get(port, ports["q"])))
    values["scale"] = ("fp32", Constant(spec.scale))
    has_maxima = tuple((f"HAS_{port.upper()}", port in ports) for port in MAXIMA)
    masks = mask_constants(spec, config)
    del masks["HAS_LEFT"]
    constants = (
        ("BLOCK_N", config.block_n),
        ("DEPTH", depth),
        ("DEPTH_V", depth_v),
        ("WARPGROUPS", config.warpgroups),
        ("IS_LONG", config.is_long),
        ("STAGES", config.stages),
        ("Q_SLOTS", config.q_slots),
        ("BY_COST", config.by_cost and cost_grows(spec)),
        *masks.items(),
        ("LENGTHS_Q", length_kind(ports, "q")),
        ("LENGTHS_KV", length_kind(ports, "kv")),
        ("HAS_STATS", "Stats" in ports),
        ("STATS_LOG2", spec.stats_log2 and "Stats" in ports),
        ("HAS_SINK", "sink_token" in ports),
        *has_maxima,
        ("CONSUMER_REGISTERS", _CONSUMER_REGISTERS[config.warpgroups]),
        ("PRODUCER_REGISTERS", _PRODUCER_REGISTERS[config.warpgroups]),
    )
    names = [name for name in attention_fp8_forward.arg_names if name in values]
    kernel = KernelSpec(
        attention_fp8_forward,
        tuple((name, values[name][0]) for name in names),
        constants,
        warps=4,
        max_registers=ENTRY_REGISTERS[config.warpgroups],
    )
    grid = (min(sm_count, tiles * spec.batch * spec.heads_q), 1, 1)
    main = PlannedKernel(kernel, grid, tuple(values[name][1] for name in names))
    if not any(given for _, given in has_maxima):
        return KernelPlan((main,))
    amaxes = [port.lower() for port in MAXIMA]
    clear = PlannedKernel(
        KernelSpec(
            clear_amax, tuple((name, values[name][0]) for name in amaxes), has_maxima, warps=1
        ),
        (1, 1, 1),
        tuple(values[name][1] for name in amaxes),
    )
    return KernelPlan((clear, main))
