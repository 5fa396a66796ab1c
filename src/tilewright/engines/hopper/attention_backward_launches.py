"""Attention backward on SM90: the launches of its kernels."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.dtypes import DataType
from tilewright.engines.compiled.planned import PlannedKernel, pointer_type
from tilewright.engines.hopper.attention_backward_arguments import Arguments
from tilewright.engines.hopper.attention_backward_balance import (
    Division,
    divide,
    heads_together,
    keys_seen,
    rows_seen,
    undivided,
)
from tilewright.engines.hopper.attention_backward_kernel import attention_backward
from tilewright.engines.hopper.attention_backward_query import attention_backward_query
from tilewright.engines.hopper.attention_backward_rows import (
    finish_rows,
    finish_sinks,
    prepare_rows,
)
from tilewright.engines.hopper.attention_backward_spec import BackwardSpec
from tilewright.engines.hopper.attention_backward_wide import attention_backward_wide
from tilewright.engines.hopper.attention_backward_workspace import FLOAT_BYTES, PARTS, lay_out
from tilewright.engines.hopper.bounds import length_kind
from tilewright.engines.hopper.map_types import box_type, map_type
from tilewright.engines.hopper.tile_config import padded
from tilewright.launch.prepared import Constant, Scratch
from tilewright.launch.tensor_maps import scratch_map, tensor_map

# Keys of a program, and rows that a program before or behind the products has; see
# ``attention_backward_kernel``.
_BLOCK_KEYS, _BLOCK_ROWS = 128, 64
# Rows of dQ that a consumer adds up at a time.
_PIECE_ROWS = 64
# Rows are padded to this in the workspace.
_PADDED_TO = 128
# Slots for tiles of dO.
_SLOTS_O = 2
# Of the kernel of dQ: rows of a program, and by the width of the products keys of a block, slots
# for blocks of K and of V.
_QUERY_ROWS = 128
_QUERY_TILES = {64: (64, 4, 3), 128: (64, 4, 3), 256: (64, 2, 1)}
# The widest products whose dK and dV are made by the same consumers.
_WIDEST_TOGETHER = 128
# What programs that run at the same time read and add to should stay in L2.
_L2_BYTES = 50 * 2**20
_ENTRY_REGISTERS = 168
_PART_WARPS = 4
_SINK_ROWS = 1024
# What only a pass with sums has in the workspace.
_SUMS = ("sums", "lse_parts", "delta_parts")
_ITEM_BYTES = 2
# Numbers of a line of the boxes in which dQ's sums are moved.
_LINE = 32


class Launches:
    """What the launches of one plan have in common, and each of them."""

    def __init__(
        self,
        spec: BackwardSpec,
        slots: Mapping[int, int],
        tile_rows: int,
        has_sums: bool,
        sm_count: int,
    ) -> None:
        self.spec, self.slots, self.tile_rows = spec, slots, tile_rows
        self.has_sums, self.sm_count = has_sums, sm_count
        self.depth, self.depth_v = padded(spec.depth), padded(spec.depth_v)
        self.is_wide = spec.width > _WIDEST_TOGETHER
        if self.is_wide:
            self.depth = self.depth_v = spec.width
        self.lines, self.heads = spec.batch * spec.heads_q, spec.batch * spec.heads_kv
        self.padded_rows = -(-spec.rows // _PADDED_TO) * _PADDED_TO
        self.block_keys = _BLOCK_KEYS // 2 if self.is_wide else _BLOCK_KEYS
        self.division = self._divide()
        self.together = self._heads_together()
        self.workspace = lay_out(
            self.lines * self.padded_rows,
            self.depth,
            self.depth_v,
            has_sums=has_sums,
            sharing=self.division.sharing,
            keys=_BLOCK_KEYS,
        )

    def _divide(self) -> Division:
        """Programs a block of keys: more than one where all blocks see the same rows."""
        spec = self.spec
        blocks = -(-spec.keys // self.block_keys) * self.heads
        if not self.has_sums or spec.is_banded or spec.has_lengths:
            return undivided(blocks)
        return divide(blocks, -(-spec.rows // self.tile_rows), spec.group, self.sm_count)

    def _heads_together(self) -> int:
        """Key heads whose programs of keys take turns."""
        group_bytes = (self.depth + self.depth_v) * _ITEM_BYTES
        if self.has_sums:
            group_bytes += self.depth * FLOAT_BYTES
        together = self._in_l2(group_bytes * self.spec.group * self.padded_rows)
        if self.spec.is_banded:
            seen = rows_seen(self.spec, self.tile_rows, self.block_keys)
            together = heads_together(together, self.heads, seen, self.sm_count)
        return together

    def _in_l2(self, head_bytes: int) -> int:
        """Key heads whose programs take turns: as many as L2 holds what they read and add to."""
        return min(max(_L2_BYTES // head_bytes, 1), self.heads)

    def prepare(self) -> PlannedKernel:
        """Row statistics, and zeros in dQ's sums."""
        spec, arguments = self.spec, Arguments(self.slots)
        ports = {"o": spec.ports["o"], "d_o": spec.ports["dO"], "stats": spec.ports["stats"]}
        for name, tensor in ports.items():
            arguments.pointer(name, tensor, is_aligned=name != "stats")
        self._statistics(arguments)
        kinds = ("*fp32", *[pointer_type(spec.ports["q"])] * 2)
        for name, kind in zip(_SUMS, kinds, strict=True):
            arguments.add(name, kind, Scratch(self.workspace.at(name)), is_aligned=True)
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.lengths("q", spec.lengths_q, spec.ports["q"])
        for name, tensor in ports.items():
            arguments.starts(name, tensor)
        arguments.counts(rows=spec.rows, padded_rows=self.padded_rows, heads=spec.heads_q)
        for name, tensor in ports.items():
            arguments.steps(name, tensor)
        arguments.add("arrivals", "*i32", Scratch(self.workspace.at("arrivals")), is_aligned=True)
        arguments.counts(arrivals_count=2 * self.division.sharing)
        constants = {
            "SHARES": self.division.shares > 1,
            "WIDTH": spec.depth_v,
            "BLOCK_WIDTH": self.depth_v,
            "DEPTH": self.depth if self.has_sums else 0,
        }
        constants |= self._sequences_q()
        return arguments.kernel(prepare_rows, self._row_blocks(), constants, _PART_WARPS)

    def products(self, stages: int) -> PlannedKernel:
        """DK and dV, and dQ's sums."""
        spec, arguments = self.spec, Arguments(self.slots)
        self._maps(arguments, self.tile_rows, _BLOCK_KEYS // 2)
        if not self.is_wide:
            for name, port, depth in (
                ("d_k_map", "dK", self.depth),
                ("d_v_map", "dV", self.depth_v),
            ):
                self._map(arguments, name, port, _BLOCK_KEYS // 2, depth)
        for name, port in (("d_k", "dK"), ("d_v", "dV")):
            arguments.pointer(name, spec.ports[port], is_aligned=True)
        self._statistics(arguments)
        if not self.is_wide:
            self._sums(arguments)
        self._sequences(arguments, ("d_k", "d_v"))
        self._problem(arguments, together=self.together)
        arguments.steps("d_k", spec.ports["dK"])
        arguments.steps("d_v", spec.ports["dV"])
        constants = {
            "DEPTH": self.depth,
            "DEPTH_V": self.depth_v,
            "WIDTH": spec.depth,
            "WIDTH_V": spec.depth_v,
            "ROWS": self.tile_rows,
        }
        constants |= self._masks(self.block_keys)
        has_lengths = spec.lengths_q is not None
        is_cut = spec.is_banded and spec.rows % self.tile_rows != 0
        constants["HAS_END"] = has_lengths or is_cut
        kernel = attention_backward_wide
        if not self.is_wide:
            self._shares(arguments)
            constants |= {
                "SHARES": self.division.shares > 1,
                "STAGES": stages,
                "STAGES_O": _SLOTS_O,
                "MAKES_D_Q": self.has_sums,
            }
            kernel = attention_backward
        return arguments.kernel(kernel, self.division.programs, constants, 4, _ENTRY_REGISTERS)

    def query(self) -> PlannedKernel:
        """DQ in a fixed order."""
        spec, arguments = self.spec, Arguments(self.slots)
        block, stages, stages_v = _QUERY_TILES[spec.width]
        self._maps(arguments, _QUERY_ROWS // 2, block)
        arguments.pointer("d_q", spec.ports["dQ"], is_aligned=True)
        self._statistics(arguments)
        self._sequences(arguments, ("d_q",))
        together = self._in_l2(spec.keys * (self.depth + self.depth_v) * _ITEM_BYTES)
        if spec.is_banded:
            seen = keys_seen(spec, _QUERY_ROWS, block)
            programs = [keys for keys in seen for _ in range(spec.group)]
            together = heads_together(together, self.heads, programs, self.sm_count)
        self._problem(arguments, together=together * spec.group)
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
        programs_of_line = -(-spec.rows // _QUERY_ROWS)
        return arguments.kernel(
            attention_backward_query, programs_of_line * self.lines, constants, 4, _ENTRY_REGISTERS
        )

    def finish(self) -> PlannedKernel:
        """DQ from its sums."""
        spec, arguments = self.spec, Arguments(self.slots)
        d_q = spec.ports["dQ"]
        arguments.add("sums", "*fp32", Scratch(self.workspace.at("sums")), is_aligned=True)
        arguments.pointer("d_q", d_q, is_aligned=True)
        arguments.lengths("q", spec.lengths_q, spec.ports["q"])
        arguments.starts("d_q", d_q)
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.counts(rows=spec.rows, padded_rows=self.padded_rows, heads=spec.heads_q)
        arguments.steps("d_q", d_q)
        constants = {"DEPTH": self.depth, "WIDTH": spec.depth} | self._sequences_q()
        return arguments.kernel(finish_rows, self._row_blocks(), constants, _PART_WARPS)

    def sinks(self) -> PlannedKernel:
        """DSink."""
        spec, arguments = self.spec, Arguments(self.slots)
        d_sink = spec.ports["dSink_token"]
        arguments.pointer("sink", spec.ports["sink_token"])
        self._statistics(arguments)
        arguments.pointer("d_sink", d_sink)
        arguments.counts(padded_rows=self.padded_rows, batches=spec.batch, heads=spec.heads_q)
        step = d_sink.stride[1] if spec.heads_q > 1 else 0
        arguments.add("d_sink_head", "i64", Constant(step))
        return arguments.kernel(finish_sinks, spec.heads_q, {"ROWS": _SINK_ROWS}, _PART_WARPS)

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
            self._map(arguments, name, port, extent, depth)

    def _map(self, arguments: Arguments, name: str, port: str, extent: int, depth: int) -> None:
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

    def _statistics(self, arguments: Arguments) -> None:
        for name in ("lse", "delta"):
            arguments.add(name, "*fp32", Scratch(self.workspace.at(name)), is_aligned=True)

    def _sums(self, arguments: Arguments) -> None:
        """DQ's sums and the parts of row statistics as the copy engine has them."""
        if not self.has_sums:
            for name in _SUMS:
                arguments.add(name, "*fp32", Scratch(0), is_aligned=True)
            return
        rows, kind = self.lines * self.padded_rows, self.spec.ports["q"].data_type
        # Columns of dQ that a consumer makes: all of half of the rows, or half.
        columns = self.depth if self.tile_rows == _BLOCK_KEYS else self.depth // 2
        box = (_PIECE_ROWS * columns // _LINE, _LINE)
        given = [(DataType.FLOAT, (rows * self.depth // _LINE, _LINE), box, _LINE * FLOAT_BYTES)]
        given += [(kind, (rows, PARTS), (self.tile_rows, PARTS), PARTS * _ITEM_BYTES)] * 2
        for name, (held, dim, box, swizzle) in zip(_SUMS, given, strict=True):
            value = scratch_map(name, held, self.workspace.at(name), dim, box, swizzle)
            arguments.add(name, box_type(held, box), value)

    def _shares(self, arguments: Arguments) -> None:
        """What programs that share keys meet in, and which they are."""
        at = self.workspace.at("shares"), self.workspace.at("arrivals")
        arguments.add("held_shares", "*fp32", Scratch(at[0]), is_aligned=True)
        arguments.add("arrivals", "*i32", Scratch(at[1]), is_aligned=True)
        arguments.counts(whole=self.division.whole, shares=self.division.shares)
