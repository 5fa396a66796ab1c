"""Attention forward on SM90: configurations, and the launch of ``attention_kernel``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import (
    KernelPlan,
    PlannedKernel,
    slot_numbers,
)
from tilewright.engines.hopper.attention_kernel import attention_forward
from tilewright.engines.hopper.attention_order import SORT_WARPS, order_bytes, order_tiles
from tilewright.engines.hopper.attention_spec import AttentionSpec, read_spec
from tilewright.engines.hopper.bounds import length_kind
from tilewright.engines.hopper.forward_values import Values, add_pointer, forward_values
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
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Constant, HostScalar, Scratch

# Packed tiles are ordered if there are this many for a multiprocessor, or more, and not too many to
# sort in a moment.
_ORDERED_FROM, _ORDERED_TO = 32, 65536
# Columns of V that lie together in shared memory.
_PANEL = 64
# Keys of a head's last tile from which maxima are taken late under a band.
_LATE_FROM = 768


@dataclass(frozen=True)
class AttentionConfig(TileConfig):
    """How a tile is cut: see the constants of ``attention_kernel``.

    ``turns``: consumers take turns on the tensor cores. ``out_parts``: O has room of its own in
    shared memory, and leaves in so many parts; 0, and it leaves through Q's. ``early``: a tile's
    first exponentials are made beside the last product of the tile before. ``ahead``: with one slot
    of Q, a tile's first scores are started before O of the tile before leaves. ``prescale``: the
    accumulator is scaled under the product with K, not at the end of a step. ``lazy``: a maximum
    that grows by less than 2^8 stays, and only warps that have to scale the accumulator. ``late``:
    see ``attention_late``; it is lazy, too.
    """

    turns: bool = True
    out_parts: int = 1
    early: bool = False
    prescale: bool = False
    lazy: bool = False
    ahead: bool = False
    late: bool = False


def padded_in_slabs(head_size: int) -> tuple[int, int]:
    """(width of Q and K, slabs): 96 and 192 are three slabs of columns, others are one."""
    for width in (96, 192):
        if width * 2 // 3 < head_size <= width:
            return width, 3
    return padded(head_size), 1


def choose_config(spec: AttentionSpec) -> AttentionConfig:
    """What measured best; see benchmark/hopper_attention.md."""
    depth, _ = padded_in_slabs(spec.depth)
    late = _is_late(spec)
    if depth == 64 and not spec.is_banded and _fits_three(spec.rows):
        if spec.has_lengths:
            return AttentionConfig(warpgroups=3)
        return AttentionConfig(block_n=64, warpgroups=3, stages=3, prescale=True, late=True)
    if depth == 64:
        return AttentionConfig(stages=3, early=True, prescale=late and spec.is_banded, late=late)
    if depth == 192 and padded(spec.depth_v) <= 128:
        return AttentionConfig(q_slots=1, out_parts=0, lazy=True)
    if depth >= 192:
        return AttentionConfig(
            block_n=64, q_slots=1, out_parts=2, turns=False, ahead=True, lazy=True
        )
    return AttentionConfig(early=spec.is_banded, prescale=True, lazy=not late, late=late)


def _is_late(spec: AttentionSpec) -> bool:
    """True if maxima are taken late at heads of up to 128.

    Where tiles are short, what they begin and end with counts, and then there is more of it.
    """
    if spec.right is None:
        return spec.left is None
    seen = spec.keys if spec.shifts else min(spec.keys, spec.rows + spec.right)
    return spec.left is None and seen >= _LATE_FROM


def _fits_three(rows: int) -> bool:
    """True if tiles of three warpgroups' rows waste little of their last one."""
    height = 3 * WARPGROUP_ROWS
    return -(-rows // height) * height <= 1.08 * rows


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal; its knobs tell the tile."""
    return [proposal(choose_config(read_spec(only_operation(graph))))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """One launch, a program a multiprocessor."""
    spec = read_spec(only_operation(graph))
    return plan_with(graph, spec, with_knobs(choose_config(spec), knobs), sm_count)


def plan_with(
    graph: DeclaredGraph, spec: AttentionSpec, config: AttentionConfig, sm_count: int
) -> KernelPlan:
    """The plan of one configuration."""
    slots = slot_numbers(graph)
    ports = spec.ports
    (depth, slabs), depth_v = padded_in_slabs(spec.depth), padded(spec.depth_v)
    k_box = v_box = config.block_n
    panel = depth_v
    if spec.is_paged:
        # Boxes that lie in one page, and in one stripe of columns in shared memory.
        k_box, v_box = (math.gcd(ports[port].dim[2], config.block_n) for port in "kv")
        if k_box == 1 and depth == 96:
            # Copies go to multiples of 128 bytes, and a row of a third of 96 columns has 64.
            depth, slabs = 128, 1
        slabs, panel = max(slabs, depth // _PANEL), _PANEL
    widths = {
        "q": (WARPGROUP_ROWS, depth // slabs),
        "k": (k_box, depth // slabs),
        "v": (v_box, panel),
        "O": (WARPGROUP_ROWS, depth_v // max(config.out_parts, 1)),
    }
    tiles = -(-spec.rows // config.block_m)
    values = forward_values(spec, widths, tiles, slots)
    constants = _add_pages(values, spec, slots) | _add_scores(values, spec, slots)
    order = _order_kernel(spec, config, tiles, values, sm_count)
    if order is not None:
        values["order"] = ("*i32", Scratch(0))
    else:
        constants["order"] = None
    masks = mask_constants(spec, config)
    by_cost = config.by_cost and not spec.ragged_q and cost_grows(spec)
    names = [name for name in attention_forward.arg_names if name in values]
    kernel = KernelSpec(
        attention_forward,
        tuple((name, values[name][0]) for name in names),
        (
            ("BLOCK_N", config.block_n),
            ("DEPTH", depth),
            ("DEPTH_V", depth_v),
            ("SLABS", slabs),
            ("WARPGROUPS", config.warpgroups),
            ("STAGES", config.stages),
            ("Q_SLOTS", config.q_slots),
            ("TURNS", config.turns),
            ("BY_COST", by_cost),
            ("K_BOX", k_box),
            ("V_BOX", v_box),
            ("OUT_PARTS", config.out_parts),
            ("EARLY", config.early),
            ("WORDS", config.warpgroups == 3 or masks["RIGHT_LOOP"] or masks["HAS_LEFT"]),
            ("PRESCALE", config.prescale),
            ("LAZY", config.lazy),
            ("AHEAD", config.ahead),
            ("LATE", config.late),
            *masks.items(),
            ("LENGTHS_Q", length_kind(ports, "q")),
            ("LENGTHS_KV", length_kind(ports, "kv")),
            # DENSE, PACKED or ORDERED of the kernel.
            ("RAGGED_Q", 2 if order is not None else int(spec.ragged_q)),
            ("RAGGED_KV", spec.ragged_kv),
            ("HAS_STATS", "Stats" in ports),
            ("STATS_LOG2", spec.stats_log2 and "Stats" in ports),
            ("HAS_SINK", "sink_token" in ports),
            *constants.items(),
        ),
        warps=4,
        max_registers=ENTRY_REGISTERS[config.warpgroups],
    )
    grid = (min(sm_count, tiles * spec.batch * spec.heads_q), 1, 1)
    main = PlannedKernel(kernel, grid, tuple(values[name][1] for name in names))
    if order is None:
        return KernelPlan((main,))
    return KernelPlan((order, main), (("order", order_bytes(spec.batch, tiles, spec.heads_q)),))


def _add_pages(
    values: Values, spec: AttentionSpec, slots: Mapping[int, int]
) -> dict[str, int | bool | None]:
    """The page tables; returns the constants that go with them."""
    names = ("table", "table_batch", "table_entry", "page")
    if not spec.is_paged:
        return {"PAGED": False} | {f"{side}_{name}": None for side in "kv" for name in names}
    for side in "kv":
        table = spec.ports[f"paged_attention_{side}_table"]
        add_pointer(values, f"{side}_table", table, slots)
        values[f"{side}_table_batch"] = ("i64", Constant(table.stride[0]))
        values[f"{side}_table_entry"] = ("i64", Constant(table.stride[2]))
        values[f"{side}_page"] = ("i32", Constant(spec.ports[side].dim[2]))
    return {"PAGED": True}


def _add_scores(
    values: Values, spec: AttentionSpec, slots: Mapping[int, int]
) -> dict[str, int | bool | None]:
    """The scale and a cap; returns the constants that go with them."""
    cap = spec.soft_cap
    if spec.scale is None:
        _add_number(values, "scale", spec.ports["attn_scale"], slots)
    else:
        values["scale"] = ("fp32", Constant(spec.scale))
    constants: dict[str, int | bool | None] = {}
    for name, tensor in (
        ("cap_inner", None if cap is None else cap.inner),
        ("cap_outer", None if cap is None else cap.outer),
    ):
        if tensor is None:
            constants[name] = None
        else:
            _add_number(values, name, tensor, slots)
    # PLAIN, SCALED or CAPPED of the kernel.
    constants["SCORES"] = 2 if cap is not None else 0 if spec.folds_scale else 1
    constants["CAP_DIVIDES"] = cap is not None and cap.divides
    return constants


def _add_number(values: Values, name: str, tensor: Tensor, slots: Mapping[int, int]) -> None:
    """A one-element operand: a number where it is passed by value, else its address."""
    if tensor.is_pass_by_value:
        values[name] = ("fp32", HostScalar(slots[tensor.uid], tensor.value))
    else:
        add_pointer(values, name, tensor, slots)


def _order_kernel(
    spec: AttentionSpec, config: AttentionConfig, tiles: int, values: Values, sm_count: int
) -> PlannedKernel | None:
    """The kernel that orders the tiles of packed sequences, where there are enough of them."""
    entries = spec.batch * tiles
    pays = entries * spec.heads_q >= _ORDERED_FROM * sm_count and entries <= _ORDERED_TO
    if not spec.ragged_q or not pays:
        return None
    given = {"order": ("*i32", Scratch(0)), "batch": ("i32", Constant(spec.batch)), **values}
    names = [name for name in order_tiles.arg_names if name in given]
    kernel = KernelSpec(
        order_tiles,
        tuple((name, given[name][0]) for name in names),
        (
            ("LENGTHS_Q", length_kind(spec.ports, "q")),
            ("LENGTHS_KV", length_kind(spec.ports, "kv")),
            ("HAS_LEFT", spec.left is not None),
            ("HAS_RIGHT", spec.right is not None),
            ("BOTTOM_RIGHT", spec.shifts),
            ("BLOCK_M", config.block_m),
        ),
        warps=SORT_WARPS,
    )
    return PlannedKernel(kernel, (1, 1, 1), tuple(given[name][1] for name in names))
