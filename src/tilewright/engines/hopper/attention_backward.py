"""Attention backward on SM90: the launches of its kernels.

Head sizes up to 128 have one pass that makes dK and dV and adds up dQ in memory, in no fixed order.
Where ``use_deterministic_algorithm`` asks for one, and for larger head sizes, dQ has a kernel of
its own, and two of seven products are made twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import (
    KernelPlan,
    PlannedKernel,
    pointer_type,
    slot_numbers,
)
from tilewright.engines.hopper.attention_backward_arguments import Arguments
from tilewright.engines.hopper.attention_backward_balance import (
    Division,
    divide,
    heads_together,
    undivided,
)
from tilewright.engines.hopper.attention_backward_kernel import attention_backward
from tilewright.engines.hopper.attention_backward_query import attention_backward_query
from tilewright.engines.hopper.attention_backward_rows import (
    finish_rows,
    finish_sinks,
    prepare_rows,
)
from tilewright.engines.hopper.attention_backward_spec import BackwardSpec, read_backward
from tilewright.engines.hopper.attention_backward_wide import attention_backward_wide
from tilewright.engines.hopper.bounds import length_kind
from tilewright.engines.hopper.map_types import box_type, map_type
from tilewright.engines.hopper.operand_rules import only_operation
from tilewright.engines.hopper.tile_config import padded
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.prepared import Constant, Scratch
from tilewright.launch.tensor_maps import scratch_map, tensor_map
from tilewright.launch.workspace import plan_workspace

# Keys of a program, and rows that a program before or behind the products has; see
# ``attention_backward_kernel``.
_BLOCK_KEYS, _BLOCK_ROWS = 128, 64
# Rows of dQ that a consumer adds up at a time.
_PIECE_ROWS = 64
# Rows are padded to this in the workspace.
_PADDED_TO = 128
# Rows of a tile and slots for tiles of Q, by the width of the products: where dQ is added up, and
# else.
_TILES_WITH_SUMS = {64: (128, 2), 128: (64, 2)}
_TILES = {64: (128, 2), 128: (64, 3), 256: (64, 2)}
# Slots that a step needs, and that barriers have room for where dQ is not added up; slots for
# tiles of dO.
_FEWEST_SLOTS, _MOST_SLOTS, _SLOTS_O = 2, 3, 2
# Of the kernel of dQ: rows of a program, and by the width of the products keys of a block, slots
# for blocks of K and of V.
_QUERY_ROWS = 128
_QUERY_TILES = {64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 2, 1)}
# The widest products whose dQ is added up, and whose dK and dV are made by the same consumers.
_WIDEST_WITH_SUMS, _WIDEST_TOGETHER = 128, 128
# What programs that run at the same time read and add to should stay in L2.
_L2_BYTES = 50 * 2**20
_ENTRY_REGISTERS = 168
_PART_WARPS = 4
_SINK_ROWS = 1024
# What only a pass with sums has in the workspace.
_SUMS = ("sums", "lse_parts", "delta_parts")
_ITEM_BYTES, _FLOAT_BYTES, _COUNT_BYTES = 2, 4, 4
# Numbers of a line of the boxes in which dQ's sums are moved.
_LINE = 32
# Columns of row statistics in parts, and the least scale by which they are divided.
_PARTS = 16
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
    call = _Call(spec, slot_numbers(graph), rows, sm_count)
    kernels = [call.prepare(), call.products(stages)]
    kernels.append(call.finish() if call.has_sums else call.query())
    if "dSink_token" in call.spec.ports:
        kernels.append(call.sinks())
    return KernelPlan(tuple(kernels), call.scratch)


def width_of(spec: BackwardSpec) -> int:
    """The width of the products: that of the wider head size."""
    return max(padded(spec.depth), padded(spec.depth_v))


def has_sums(spec: BackwardSpec) -> bool:
    """True if dQ is added up in memory; Stats are divided by the scale there."""
    is_narrow = width_of(spec) <= _WIDEST_WITH_SUMS
    return not spec.is_deterministic and is_narrow and abs(spec.scale) >= _LEAST_SCALE


def tile_of(spec: BackwardSpec) -> tuple[int, int]:
    """(rows of a tile, slots for tiles of Q): what measured best."""
    return (_TILES_WITH_SUMS if has_sums(spec) else _TILES)[width_of(spec)]


class _Call:
    """What the launches of one plan have in common."""

    def __init__(
        self, spec: BackwardSpec, slots: Mapping[int, int], tile_rows: int, sm_count: int
    ) -> None:
        self.spec, self.slots, self.tile_rows = spec, slots, tile_rows
        self.sm_count = sm_count
        self.depth, self.depth_v = padded(spec.depth), padded(spec.depth_v)
        self.is_wide = width_of(spec) > _WIDEST_TOGETHER
        if self.is_wide:
            self.depth = self.depth_v = width_of(spec)
        self.has_sums = has_sums(spec)
        # Columns of dQ that a consumer makes: all of half of the rows, or half.
        self.columns = self.depth if tile_rows == _BLOCK_KEYS else self.depth // 2
        self.lines = spec.batch * spec.heads_q
        self.padded_rows = -(-spec.rows // _PADDED_TO) * _PADDED_TO
        count = self.lines * self.padded_rows * _FLOAT_BYTES
        sizes = [("row statistics", count), ("row products", count)]
        if self.has_sums:
            parts = count // _FLOAT_BYTES * _PARTS * _ITEM_BYTES
            sizes += [("sums of dQ", count * self.depth)]
            sizes += [("parts of Stats", parts), ("parts of Delta", parts)]
        self.division = self._divide()
        has_shares = self.division.shares > 1
        if has_shares:
            numbers = self.division.sharing * _BLOCK_KEYS * (self.depth + self.depth_v)
            sizes += [("shares of dK and dV", numbers * _FLOAT_BYTES)]
            sizes += [("arrivals", 2 * self.division.sharing * _COUNT_BYTES)]
        self.scratch = tuple(sizes)
        self.offsets = [piece.offset_bytes for piece in plan_workspace(sizes).pieces]
        self.shares_at, self.arrivals_at = self.offsets[-2:] if has_shares else (0, 0)

    def _divide(self) -> Division:
        """Programs a block of keys: more than one where all blocks see the same rows."""
        spec = self.spec
        blocks = -(-spec.keys // _BLOCK_KEYS) * spec.heads_kv * spec.batch
        if not self.has_sums or spec.is_banded or spec.has_lengths:
            return undivided(blocks)
        return divide(blocks, -(-spec.rows // self.tile_rows), spec.group, self.sm_count)

    def _rows_seen(self, block_keys: int) -> list[int]:
        """Tiles of rows that each block of keys sees, as long as sequences are declared."""
        spec, found = self.spec, []
        for first in range(0, spec.keys, block_keys):
            low, end = 0, spec.rows
            if spec.right is not None:
                low = max(first - spec.right, 0) // self.tile_rows
            if spec.left is not None:
                last = min(first + block_keys, spec.keys) - 1
                end = min(end, max(last + spec.left, 0))
            found.append(max(-(-end // self.tile_rows) - low, 1) * spec.group)
        return found

    def _keys_seen(self, block: int) -> list[int]:
        """Blocks of keys that each program of dQ sees, from the last rows on."""
        spec, found = self.spec, []
        for first in reversed(range(0, spec.rows, _QUERY_ROWS)):
            low, end = 0, spec.keys
            if spec.left is not None:
                low = max(first - spec.left + 1, 0) // block
            if spec.right is not None:
                end = min(end, first + _QUERY_ROWS + spec.right)
            found.append(max(-(-end // block) - low, 1))
        return found

    def prepare(self) -> PlannedKernel:
        """Row statistics, and zeros in dQ's sums."""
        spec, arguments = self.spec, Arguments(self.slots)
        ports = {"o": spec.ports["o"], "d_o": spec.ports["dO"], "stats": spec.ports["stats"]}
        for name, tensor in ports.items():
            arguments.pointer(name, tensor, is_aligned=name != "stats")
        self._workspace(arguments)
        # Without sums the first array keeps their places; nobody looks.
        at = dict(zip(_SUMS, self.offsets[2:5] or [0, 0, 0], strict=True))
        arguments.add("sums", "*fp32", Scratch(at["sums"]), is_aligned=True)
        for name in ("lse_parts", "delta_parts"):
            kind = pointer_type(spec.ports["q"])
            arguments.add(name, kind, Scratch(at[name]), is_aligned=True)
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.lengths("q", spec.lengths_q, spec.ports["q"])
        for name, tensor in ports.items():
            arguments.starts(name, tensor)
        arguments.counts(rows=spec.rows, padded_rows=self.padded_rows, heads=spec.heads_q)
        for name, tensor in ports.items():
            arguments.steps(name, tensor)
        arguments.add("arrivals", "*i32", Scratch(self.arrivals_at), is_aligned=True)
        arguments.counts(arrivals_count=2 * self.division.sharing)
        constants = {
            "SHARES": self.division.shares > 1,
            "WIDTH": spec.depth_v,
            "BLOCK_WIDTH": self.depth_v,
        }
        constants["DEPTH"] = self.depth if self.has_sums else 0
        constants |= self._sequences_q()
        return arguments.kernel(prepare_rows, self._row_blocks(), constants, _PART_WARPS)

    def products(self, stages: int) -> PlannedKernel:
        """DK and dV, and dQ's sums."""
        spec, arguments = self.spec, Arguments(self.slots)
        block_keys = _BLOCK_KEYS // 2 if self.is_wide else _BLOCK_KEYS
        self._maps(arguments, self.tile_rows, _BLOCK_KEYS // 2)
        for name, port in (("d_k", "dK"), ("d_v", "dV")):
            arguments.pointer(name, spec.ports[port], is_aligned=True)
        self._workspace(arguments)
        if not self.is_wide:
            self._sums(arguments)
        self._sequences(arguments, ("d_k", "d_v"))
        group_bytes = (self.depth + self.depth_v) * _ITEM_BYTES
        if self.has_sums:
            group_bytes += self.depth * _FLOAT_BYTES
        group_bytes *= spec.group * self.padded_rows
        together = self._together(group_bytes)
        if spec.is_banded:
            together = self._balanced(together, self._rows_seen(block_keys))
        self._problem(arguments, together=together)
        arguments.steps("d_k", spec.ports["dK"])
        arguments.steps("d_v", spec.ports["dV"])
        if not self.is_wide:
            arguments.add("held_shares", "*fp32", Scratch(self.shares_at), is_aligned=True)
            arguments.add("arrivals", "*i32", Scratch(self.arrivals_at), is_aligned=True)
            arguments.counts(whole=self.division.whole, shares=self.division.shares)
        constants = {
            "DEPTH": self.depth,
            "DEPTH_V": self.depth_v,
            "WIDTH": spec.depth,
            "WIDTH_V": spec.depth_v,
            "ROWS": self.tile_rows,
        }
        constants |= self._masks(block_keys)
        has_lengths = spec.lengths_q is not None
        is_cut = spec.is_banded and spec.rows % self.tile_rows != 0
        constants["HAS_END"] = has_lengths or is_cut
        kernel = attention_backward_wide
        if not self.is_wide:
            constants |= {
                "SHARES": self.division.shares > 1,
                "STAGES": stages,
                "STAGES_O": _SLOTS_O,
                "MAKES_D_Q": self.has_sums,
            }
            kernel = attention_backward
        programs = self.division.programs
        if self.is_wide:
            programs = -(-spec.keys // block_keys) * spec.heads_kv * spec.batch
        return arguments.kernel(kernel, programs, constants, 4, _ENTRY_REGISTERS)

    def query(self) -> PlannedKernel:
        """DQ in a fixed order."""
        spec, arguments = self.spec, Arguments(self.slots)
        block, stages, stages_v = _QUERY_TILES[width_of(spec)]
        self._maps(arguments, _QUERY_ROWS // 2, block)
        arguments.pointer("d_q", spec.ports["dQ"], is_aligned=True)
        self._workspace(arguments)
        self._sequences(arguments, ("d_q",))
        head_bytes = spec.keys * (self.depth + self.depth_v) * _ITEM_BYTES
        together = self._together(head_bytes)
        if spec.is_banded:
            programs = [seen for seen in self._keys_seen(block) for _ in range(spec.group)]
            together = self._balanced(together, programs)
        together *= spec.group
        self._problem(arguments, together=together)
        arguments.steps("d_q", spec.ports["dQ"])
        constants = {
            "DEPTH": self.depth,
            "DEPTH_V": self.depth_v,
            "WIDTH": spec.depth,
            "BLOCK": block,
            "STAGES": stages,
            "STAGES_V": stages_v,
        }
        constants |= self._masks(block)
        programs = -(-spec.rows // _QUERY_ROWS) * self.lines
        return arguments.kernel(attention_backward_query, programs, constants, 4, _ENTRY_REGISTERS)

    def finish(self) -> PlannedKernel:
        """DQ from its sums."""
        spec, arguments = self.spec, Arguments(self.slots)
        d_q = spec.ports["dQ"]
        arguments.add("sums", "*fp32", Scratch(self.offsets[2]), is_aligned=True)
        arguments.pointer("d_q", d_q, is_aligned=True)
        arguments.lengths("q", spec.lengths_q, spec.ports["q"])
        arguments.starts("d_q", d_q)
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.counts(rows=spec.rows, padded_rows=self.padded_rows, heads=spec.heads_q)
        arguments.steps("d_q", d_q)
        constants = {"DEPTH": self.depth, "WIDTH": spec.depth, "COLUMNS": self.columns}
        constants |= self._sequences_q()
        return arguments.kernel(finish_rows, self._row_blocks(), constants, _PART_WARPS)

    def _row_blocks(self) -> int:
        return self.lines * (self.padded_rows // _BLOCK_ROWS)

    def _sequences_q(self) -> dict[str, int | bool]:
        return {"LENGTHS_Q": length_kind(self.spec.ports, "q"), "RAGGED_Q": self.spec.ragged_q}

    def _maps(self, arguments: Arguments, rows: int, keys: int) -> None:
        """Tensor maps that move tiles of ``rows`` rows and ``keys`` keys."""
        for name, port, extent, depth in (
            ("q_map", "q", rows, self.depth),
            ("k_map", "k", keys, self.depth),
            ("v_map", "v", keys, self.depth_v),
            ("d_o_map", "dO", rows, self.depth_v),
        ):
            tensor, box = self.spec.ports[port], (1, 1, extent, depth)
            value = tensor_map(tensor, self.slots[tensor.uid], box)
            arguments.add(name, map_type(tensor, box), value)

    def _sequences(self, arguments: Arguments, gradients: tuple[str, ...]) -> None:
        """Lengths of sequences, and where they start in what a kernel reads and stores."""
        spec = self.spec
        arguments.lengths("q", spec.lengths_q, spec.ports["q"])
        arguments.lengths("kv", spec.lengths_kv, spec.ports["q"])
        ports = {"d_o": "dO", "d_q": "dQ", "d_k": "dK", "d_v": "dV"}
        for name in ("q", "d_o", "k", "v", *gradients):
            arguments.starts(name, spec.ports[ports.get(name, name)], in_rows=True)

    def _problem(self, arguments: Arguments, together: int) -> None:
        spec = self.spec
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.counts(
            rows=spec.rows,
            keys=spec.keys,
            padded_rows=self.padded_rows,
            left=spec.left or 0,
            right=spec.right or 0,
            heads_kv=spec.heads_kv,
            group=spec.group,
            together=together,
        )

    def _masks(self, block_keys: int) -> dict[str, int | bool]:
        spec = self.spec
        return self._sequences_q() | {
            "HAS_LEFT": spec.left is not None,
            "HAS_RIGHT": spec.right is not None,
            "BOTTOM_RIGHT": spec.shifts,
            # With the branch of masks the assembler keeps addresses out of local memory, even
            # where it is never taken; a kernel with sums of dQ is quicker without.
            "HAS_TAIL": not self.has_sums
            or spec.keys % block_keys != 0
            or spec.lengths_kv is not None,
            "LENGTHS_KV": length_kind(spec.ports, "kv"),
            "RAGGED_KV": spec.ragged_kv,
        }

    def _together(self, head_bytes: int) -> int:
        """Key heads whose programs take turns: as many as L2 holds what they read and add to."""
        return min(max(_L2_BYTES // head_bytes, 1), self.spec.heads_kv * self.spec.batch)

    def _balanced(self, most: int, lengths: list[int]) -> int:
        """At most so many key heads, and such that all programs end together."""
        heads = self.spec.heads_kv * self.spec.batch
        return heads_together(most, heads, lengths, self.sm_count)

    def sinks(self) -> PlannedKernel:
        """DSink."""
        spec, arguments = self.spec, Arguments(self.slots)
        d_sink = spec.ports["dSink_token"]
        arguments.pointer("sink", spec.ports["sink_token"])
        self._workspace(arguments)
        arguments.pointer("d_sink", d_sink)
        arguments.counts(padded_rows=self.padded_rows, batches=spec.batch, heads=spec.heads_q)
        step = d_sink.stride[1] if spec.heads_q > 1 else 0
        arguments.add("d_sink_head", "i64", Constant(step))
        return arguments.kernel(finish_sinks, spec.heads_q, {"ROWS": _SINK_ROWS}, _PART_WARPS)

    def _workspace(self, arguments: Arguments) -> None:
        for name, offset in zip(("lse", "delta"), self.offsets, strict=False):
            arguments.add(name, "*fp32", Scratch(offset), is_aligned=True)

    def _sums(self, arguments: Arguments) -> None:
        """DQ's sums and the parts of row statistics as the copy engine has them."""
        if not self.has_sums:
            for name in _SUMS:
                arguments.add(name, "*fp32", Scratch(0), is_aligned=True)
            return
        rows, kind = self.lines * self.padded_rows, self.spec.ports["q"].data_type
        box = (_PIECE_ROWS * self.columns // _LINE, _LINE)
        given = [(DataType.FLOAT, (rows * self.depth // _LINE, _LINE), box, _LINE * _FLOAT_BYTES)]
        given += [(kind, (rows, _PARTS), (self.tile_rows, _PARTS), _PARTS * _ITEM_BYTES)] * 2
        for name, offset, (held, dim, box, swizzle) in zip(
            _SUMS, self.offsets[2:5], given, strict=True
        ):
            value = scratch_map(name, held, offset, dim, box, swizzle)
            arguments.add(name, box_type(held, box), value)
