"""The launches of attention's backward: each kernel's arguments, constants, grid and scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import triton

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.attention_arguments import KernelArguments, vector_unit
from tilewright.engines.triton.attention_backward_bias import attention_backward_bias
from tilewright.engines.triton.attention_backward_config import PADDED_TO, BackwardConfig, reach
from tilewright.engines.triton.attention_backward_keys import attention_backward_keys
from tilewright.engines.triton.attention_backward_parts import (
    attention_backward_prepare,
    attention_backward_sink,
)
from tilewright.engines.triton.attention_backward_plain import (
    attention_backward_plain_keys,
    attention_backward_plain_rows,
)
from tilewright.engines.triton.attention_backward_rows import attention_backward_rows
from tilewright.engines.triton.attention_config import MIN_BLOCK, blocks, power_of_two
from tilewright.engines.triton.attention_spec import AttentionSpec, alibi_split
from tilewright.graph.tensor import Tensor
from tilewright.launch.workspace import plan_workspace

_FLOAT_BYTES = 4
_SHORT = {"q": "q", "k": "k", "v": "v", "dO": "d_o", "o": "o", "stats": "stats"}
_SHORT |= {"dQ": "d_q", "dK": "d_k", "dV": "d_v"}
_PART_ROWS, _PART_WARPS = 64, 4
_SINK_ROWS = 1024
# Compilers whose loops without a branch the assembler does not wait in.
_UNPARTED = "3.6."


def _limited(kernel: PlannedKernel, registers: int | None) -> PlannedKernel:
    """The kernel with no more registers a thread."""
    return replace(kernel, spec=replace(kernel.spec, max_registers=registers))


class BackwardLaunches:
    """The kernels of one plan as they are launched, and what they have in common."""

    def __init__(
        self,
        spec: AttentionSpec,
        slots: Mapping[int, int],
        config: BackwardConfig,
        is_aligned: bool,
    ) -> None:
        self.spec, self.slots, self.config = spec, slots, config
        self.is_aligned = is_aligned
        self.block_depth, self.block_depth_v = blocks(spec)
        self.padded_rows = triton.cdiv(spec.rows, PADDED_TO) * PADDED_TO
        count = spec.batch * spec.heads_q * self.padded_rows
        sizes = [("row statistics", count * _FLOAT_BYTES), ("row products", count * _FLOAT_BYTES)]
        self.scratch = tuple(sizes)
        self.offsets = [piece.offset_bytes for piece in plan_workspace(sizes).pieces]

    def prepare(self) -> PlannedKernel:
        """Row statistics."""
        arguments = self._rowwise(("o", "dO", "stats"))
        arguments.constant(DEPTH_V=self.spec.depth_v, BLOCK_DEPTH_V=self.block_depth_v)
        self._statistics(arguments)
        return arguments.planned(
            attention_backward_prepare, self._row_grid(self.padded_rows), _PART_WARPS, 1
        )

    def keys(self) -> PlannedKernel:
        """DK and dV."""
        spec, config = self.spec, self.config
        arguments = self._products(("dK", "dV"), config.keys_rows, config.keys_keys)
        self._statistics(arguments)
        has_tail = spec.len_kv is not None or spec.keys % config.keys_keys != 0
        masks_all = spec.has_bias or spec.has_block_mask
        arguments.constant(
            IS_EVEN=spec.len_q is None and spec.rows % config.keys_rows == 0,
            MAY_MASK=has_tail or masks_all or spec.right is not None,
            MASKS_ALL=masks_all,
            STAGES=config.keys_stages,
        )
        tiles = triton.cdiv(spec.keys, config.keys_keys)
        grid = (tiles * spec.heads_kv * spec.batch, 1, 1)
        return arguments.planned(
            attention_backward_keys, grid, config.keys_warps, config.keys_stages
        )

    def rows(self) -> PlannedKernel:
        """DQ."""
        spec, config = self.spec, self.config
        arguments = self._products(("dQ",), config.rows_rows, config.rows_keys)
        self._statistics(arguments)
        has_tail = spec.len_kv is not None or spec.keys % config.rows_keys != 0
        masks_all = spec.has_bias or spec.has_block_mask
        arguments.constant(
            MAY_MASK=has_tail or masks_all or spec.right is not None,
            MASKS_ALL=masks_all,
            STAGES=config.rows_stages,
        )
        tiles = triton.cdiv(spec.rows, config.rows_rows)
        grid = (tiles * spec.heads_q * spec.batch, 1, 1)
        return arguments.planned(
            attention_backward_rows, grid, config.rows_warps, config.rows_stages
        )

    def plain_keys(self, gradients: tuple[str, ...]) -> PlannedKernel:
        """DK and dV of plain scores, or one of them."""
        spec, config = self.spec, self.config
        rows = config.keys_rows if "dK" in gradients else config.values_rows
        arguments = self._mapped(gradients, rows, config.keys_keys)
        for port in {"dK", "dV"} - {*gradients}:
            self._no_operand(arguments, port)
        arguments.constant(
            DEPTH_V=spec.depth_v,
            BRANCHES=not triton.__version__.startswith(_UNPARTED),
            STAGES=config.keys_stages,
        )
        grid = (triton.cdiv(spec.keys, config.keys_keys) * spec.heads_kv * spec.batch, 1, 1)
        return _limited(
            arguments.planned(
                attention_backward_plain_keys, grid, config.keys_warps, config.keys_stages
            ),
            config.keys_registers,
        )

    def plain_rows(self) -> PlannedKernel:
        """DQ of plain scores."""
        spec, config = self.spec, self.config
        arguments = self._mapped(("dQ",), config.rows_rows, config.rows_keys)
        arguments.constant(HAS_TAIL=spec.keys % config.rows_keys != 0, STAGES=config.rows_stages)
        grid = (triton.cdiv(spec.rows, config.rows_rows) * spec.heads_q * spec.batch, 1, 1)
        return _limited(
            arguments.planned(
                attention_backward_plain_rows, grid, config.rows_warps, config.rows_stages
            ),
            config.rows_registers,
        )

    def sink(self) -> PlannedKernel:
        """DSink."""
        spec = self.spec
        arguments = KernelArguments(self.slots)
        for name, port in (("sink", "sink_token"), ("d_sink", "dSink_token")):
            arguments.pointer(name, spec.ports[port])
            step = spec.ports[port].stride[1] if spec.heads_q > 1 else 0
            arguments.integer(f"{name}_head", step)
        self._statistics(arguments)
        arguments.extent("padded_rows", self.padded_rows)
        arguments.constant(BATCH=spec.batch, HEADS=spec.heads_q, ROWS=_SINK_ROWS)
        return arguments.planned(attention_backward_sink, (spec.heads_q, 1, 1), _PART_WARPS, 1)

    def bias(self) -> PlannedKernel:
        """DBias."""
        spec = self.spec
        d_bias = spec.ports["dBias"]
        tile = MIN_BLOCK if spec.depth > 128 or spec.depth_v > 128 else self.config.bias_tile
        tile_rows, tile_keys = (
            min(tile, max(power_of_two(size), MIN_BLOCK)) for size in (spec.rows, spec.keys)
        )
        arguments = self._products((), tile_rows, tile_keys)
        self._statistics(arguments)
        arguments.pointer("d_bias", d_bias)
        arguments.steps("d_bias", d_bias)
        batches, heads, rows, keys = d_bias.dim
        sums_rows, sums_keys = rows == 1 != spec.rows, keys == 1 != spec.keys
        arguments.extent("bias_rows", rows)
        arguments.extent("bias_keys", keys)
        arguments.extent("bias_heads", heads)
        arguments.extent("summed_batches", spec.batch if batches == 1 else 1)
        arguments.extent("summed_heads", spec.heads_q if heads == 1 else 1)
        arguments.constant(SUMS_ROWS=sums_rows, SUMS_KEYS=sums_keys)
        tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(keys, tile_keys)
        return arguments.planned(attention_backward_bias, (tiles * batches * heads, 1, 1), 4, 1)

    def _row_grid(self, rows: int) -> tuple[int, int, int]:
        tiles = triton.cdiv(rows, _PART_ROWS)
        return (tiles * self.spec.heads_q * self.spec.batch, 1, 1)

    def _rowwise(self, ports: tuple[str, ...]) -> KernelArguments:
        """Arguments of a kernel over rows of these ports."""
        spec = self.spec
        arguments = KernelArguments(self.slots)
        for port in ports:
            self._operand(arguments, port)
        arguments.length("len_q", spec.len_q)
        arguments.extent("rows", spec.rows)
        arguments.extent("padded_rows", self.padded_rows)
        arguments.constant(HEADS=spec.heads_q, ROWS=_PART_ROWS)
        return arguments

    def _mapped(
        self, gradients: tuple[str, ...], tile_rows: int, tile_keys: int
    ) -> KernelArguments:
        """Arguments of a kernel whose operands tensor maps bring."""
        spec = self.spec
        arguments = KernelArguments(self.slots)
        for name, port, extent, depth in (
            ("q_map", "q", tile_rows, self.block_depth),
            ("k_map", "k", tile_keys, self.block_depth),
            ("v_map", "v", tile_keys, self.block_depth_v),
            ("d_o_map", "dO", tile_rows, self.block_depth_v),
        ):
            arguments.tensor_map(name, spec.ports[port], (1, 1, extent, depth))
        for port in gradients:
            self._operand(arguments, port)
        self._statistics(arguments)
        self._scale(arguments)
        for name, value in (
            ("rows", spec.rows),
            ("keys", spec.keys),
            ("line_tiles", self.padded_rows // PADDED_TO),
            ("reach", reach(spec)),
        ):
            arguments.extent(name, value)
        arguments.constant(
            HEADS_KV=spec.heads_kv,
            GROUP=spec.group,
            DEPTH=spec.depth,
            BLOCK_DEPTH=self.block_depth,
            BLOCK_DEPTH_V=self.block_depth_v,
            ROWS=tile_rows,
            KEYS=tile_keys,
            HAS_RIGHT=spec.right is not None,
        )
        return arguments

    def _products(
        self, gradients: tuple[str, ...], tile_rows: int, tile_keys: int
    ) -> KernelArguments:
        """Arguments of a kernel with the products, but for its scratch and masks."""
        spec = self.spec
        ports = spec.ports
        arguments = KernelArguments(self.slots)
        for port in ("q", "k", "v", "dO", *gradients):
            self._operand(arguments, port)
        for name, port in (
            ("bias", "bias"),
            ("block_mask", "block_mask"),
            ("drop_mask", "dropout_mask"),
        ):
            arguments.pointer(name, ports.get(port))
            arguments.steps(name, ports.get(port))
        arguments.length("len_q", spec.len_q)
        arguments.length("len_kv", spec.len_kv)
        self._scale(arguments)
        cap = spec.soft_cap
        arguments.scalar("cap_inner", None if cap is None else cap.inner, "fp32")
        arguments.scalar("cap_outer", None if cap is None else cap.outer, "fp32")
        if spec.has_drop_mask:
            arguments.scalar("keep_scale", ports["dropout_scale"], "fp32")
        else:
            arguments.number("keep_scale", 1.0 / (1.0 - spec.drop_probability))
        arguments.scalar("seed", ports.get("dropout_seed"), "i64")
        arguments.scalar("offset", ports.get("dropout_offset"), "i64")
        for name, value in (
            ("rows", spec.rows),
            ("keys", spec.keys),
            ("padded_rows", self.padded_rows),
            ("left", spec.left or 0),
            ("right", spec.right or 0),
        ):
            arguments.extent(name, value)
        arguments.constant(
            HEADS_KV=spec.heads_kv,
            GROUP=spec.group,
            DEPTH=spec.depth,
            DEPTH_V=spec.depth_v,
            BLOCK_DEPTH=self.block_depth,
            BLOCK_DEPTH_V=self.block_depth_v,
            ROWS=tile_rows,
            KEYS=tile_keys,
            CLEANS_KEYS=spec.hides_values,
            HAS_LEFT=spec.left is not None,
            HAS_RIGHT=spec.right is not None,
            BOTTOM_RIGHT=spec.bottom_right,
            HAS_SOFT_CAP=cap is not None,
            CAP_DIVIDES=cap is not None and cap.divides,
            ALIBI_SPLIT=alibi_split(spec.heads_q) if spec.alibi else 0,
            HAS_PHILOX=spec.has_philox,
            THRESHOLD=int(spec.drop_probability * 2.0**32),
        )
        return arguments

    def _operand(self, arguments: KernelArguments, port: str) -> None:
        tensor: Tensor = self.spec.ports[port]
        name = _SHORT[port]
        is_wide = self.is_aligned and port != "stats"
        unit = vector_unit(tensor.data_type) if is_wide else 1
        arguments.pointer(name, tensor, is_aligned=is_wide)
        arguments.steps(name, tensor, unit=unit)
        arguments.ragged(name, tensor, unit=unit)
        arguments.constant(**{f"{name.upper()}_UNIT": unit})
        if port == "dO":
            # q, k, v and dO have one type.
            arguments.constant(UNIT=unit)

    def _no_operand(self, arguments: KernelArguments, port: str) -> None:
        name = _SHORT[port]
        arguments.pointer(name, None)
        arguments.steps(name, None)
        arguments.constant(**{f"{name.upper()}_UNIT": 1})

    def _scale(self, arguments: KernelArguments) -> None:
        if self.spec.scale is None:
            arguments.scalar("scale", self.spec.ports["attn_scale"], "fp32")
        else:
            arguments.number("scale", self.spec.scale)

    def _statistics(self, arguments: KernelArguments) -> None:
        arguments.scratch("lse", "*fp32", self.offsets[0])
        arguments.scratch("delta", "*fp32", self.offsets[1])
