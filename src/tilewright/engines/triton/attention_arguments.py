"""Collecting a kernel's arguments: types, what is bound, and what is known when it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import triton.language as tl

from tilewright.dtypes import DataType
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import (
    TRITON_TYPES,
    PlannedKernel,
    operand,
    pointer_type,
)
from tilewright.engines.triton.attention_config import pieces
from tilewright.engines.triton.attention_score_mod import MAX_GIVEN, score_function
from tilewright.engines.triton.attention_spec import AttentionSpec, Length, alibi_split
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant, HostScalar, Scratch
from tilewright.launch.tensor_maps import map_decline_reason, tensor_map

MAX_SWIZZLE_BYTES = 128
_AXES = ("batch", "head", "row", "col")
# Short names of the statistics in kernels.
_ROUNDINGS = {DataType.HALF: tl.float16, DataType.BFLOAT16: tl.bfloat16}
_SHORT = {"Stats": "stats", "score_max": "smax", "score_sum_exp": "ssum"}


@dataclass
class KernelArguments:
    """Arguments of one kernel by name, in any order; ``planned`` puts them in the kernel's.

    An absent operand is the compile-time constant None: the kernel does not look at it.
    """

    slots: Mapping[int, int]
    types: dict[str, str] = field(default_factory=dict)
    values: dict[str, Argument] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: set[str] = field(default_factory=set)

    def pointer(self, name: str, tensor: Tensor | None, *, is_aligned: bool = False) -> None:
        """A bound operand's address."""
        if tensor is None:
            self.constants[name] = None
            return
        self.types[name], self.values[name] = pointer_type(tensor), operand(self.slots, tensor)
        if is_aligned:
            self.aligned.add(name)

    def scratch(self, name: str, kind: str, offset_bytes: int | None) -> None:
        """An address in the workspace, which is aligned; ``kind`` is Triton's, as "*fp32"."""
        if offset_bytes is None:
            self.constants[name] = None
            return
        self.types[name], self.values[name] = kind, Scratch(offset_bytes)
        self.aligned.add(name)

    def integer(self, name: str, value: int, kind: str = "i64") -> None:
        """A number that the declaration fixes; 0 and 1 become part of the code.

        A step of 1 that the compiler knows is what makes wide loads possible.
        """
        if value in (0, 1):
            self.constants[name] = value
            return
        self.types[name], self.values[name] = kind, Constant(value)

    def tensor_map(self, name: str, tensor: Tensor, box: tuple[int, ...]) -> None:
        """An operand that the copy engine moves in boxes of ``box`` elements."""
        extents = ", ".join(str(extent) for extent in box)
        self.types[name] = f"tensordesc<{TRITON_TYPES[tensor.data_type]}[{extents}]>"
        # The compiler swizzles as many bytes as a row of the box has, up to 128.
        row_bytes = box[-1] * tensor.data_type.bits // 8
        swizzle_bytes = min(row_bytes, MAX_SWIZZLE_BYTES)
        self.values[name] = tensor_map(tensor, self.slots[tensor.uid], box, swizzle_bytes)

    def row_map(self, name: str, tensor: Tensor, block_m: int, width: int) -> None:
        """Rows of an operand for a compiler that moves the second half of them itself.

        The box is (1, 1, 1, block_m, width), of which the compiler brings half the rows at a time,
        the second half by half a box further along the first axis. So the first axis steps by rows
        as the fourth does, and the half that a copy brings may not pass the operand's end.
        """
        half = block_m // 2
        if tensor.dim[2] % half:
            raise ValueError(f"{tensor.dim[2]} rows are not whole copies of {half}")
        self.types[name] = (
            f"tensordesc<{TRITON_TYPES[tensor.data_type]}[1, 1, 1, {block_m}, {width}]>"
        )
        made = tensor_map(tensor, self.slots[tensor.uid], (1, 1, half, width), MAX_SWIZZLE_BYTES)
        batch, head, row, col = made.stride
        self.values[name] = replace(
            made,
            dim=(made.dim[2], made.dim[0], made.dim[1], half, made.dim[3]),
            stride=(row, batch, head, row, col),
            box=(1, 1, 1, half, made.box[3]),
        )

    def packed_row_map(self, name: str, tensor: Tensor, block_m: int) -> None:
        """Rows of a ragged operand, for a compiler that brings half of ``block_m`` at a time.

        The compiler moves along the first axis: that of rows of all sequences. The second one has
        the heads of a row, ``tensor.stride[1]`` from one to the next.
        """
        width = tensor.dim[3]
        self.types[name] = f"tensordesc<{TRITON_TYPES[tensor.data_type]}[{block_m}, {width}]>"
        box = (1, 1, block_m // 2, width)
        made = tensor_map(tensor, self.slots[tensor.uid], box, MAX_SWIZZLE_BYTES)
        _, head, row, _ = made.stride
        heads = (made.dim[1] - 1) * head + width
        self.values[name] = replace(
            made, dim=(made.dim[2], heads), stride=(row, 1), box=(block_m // 2, made.box[3])
        )

    def extent(self, name: str, value: int) -> None:
        """A count, int32, never part of the code."""
        self.types[name], self.values[name] = "i32", Constant(value)

    def divisor(self, name: str, value: int) -> None:
        """``by_name`` and ``name_shift``, with which ``quotient`` divides by a value above 0.

        ceil(2**s / d) / 2**s is off by less than d / 2**s / d, which for numbers below 2**31 stays
        below 1 / d if d <= 2**(s - 31) (Granlund and Montgomery 1994).
        """
        shift = 31 + (value - 1).bit_length()
        self.number_of(f"by_{name}", -(-(2**shift) // value))
        self.extent(f"{name}_shift", shift)

    def number_of(self, name: str, value: int) -> None:
        """A 64-bit number of elements, never part of the code."""
        self.types[name], self.values[name] = "i64", Constant(value)

    def number(self, name: str, value: float) -> None:
        """A float32 that the declaration fixes."""
        self.types[name], self.values[name] = "fp32", Constant(value)

    def scalar(self, name: str, tensor: Tensor | None, kind: str) -> None:
        """A one-element operand: a number where it is passed by value, else its address.

        ``kind`` is the number's type. ``scalar_value`` in a kernel takes both.
        """
        if tensor is not None and tensor.is_pass_by_value:
            self.types[name] = kind
            self.values[name] = HostScalar(self.slots[tensor.uid], tensor.value)
        else:
            self.pointer(name, tensor)

    def steps(self, name: str, tensor: Tensor | None, *, unit: int = 1) -> None:
        """``name``_batch, _head, _row and _col: the strides of four axes, in ``unit`` elements.

        An axis of extent 1 is not stepped, whatever its stride is.
        """
        for axis, suffix in enumerate(_AXES):
            step = 0
            if tensor is not None and tensor.dim[axis] > 1:
                step = tensor.stride[axis]
            if suffix == "col" or tensor is None:
                self.integer(f"{name}_{suffix}", step)
            else:
                # Never part of the code: one sequence or one head is no other kernel.
                self.number_of(f"{name}_{suffix}", step // unit)

    def ragged(self, name: str, tensor: Tensor | None, *, unit: int = 1) -> None:
        """``name``_offsets, _offset_step and _multiplier (in ``unit`` elements) of an operand."""
        offsets = None if tensor is None else tensor.ragged_offset
        self.pointer(f"{name}_offsets", offsets)
        self.integer(f"{name}_offset_step", 0 if offsets is None else offsets.stride[0])
        multiplier = 1 if tensor is None else tensor.ragged_offset_multiplier
        self.integer(f"{name}_multiplier", 1 if offsets is None else multiplier // unit)

    def length(self, name: str, length: Length | None) -> None:
        """``name`` and ``name``_step, and the constant NAME_IS_SUM."""
        self.pointer(name, None if length is None else length.tensor)
        self.integer(f"{name}_step", 0 if length is None else length.tensor.stride[0])
        self.constants[f"{name.upper()}_IS_SUM"] = length is not None and length.is_sum

    def constant(self, **values: Any) -> None:
        """Compile-time arguments."""
        self.constants.update(values)

    def unused(self, *names: str) -> None:
        """Numbers that were given, for a kernel that looks at none of them."""
        for name in names:
            del self.types[name], self.values[name]
            self.constants[name] = None

    def planned(
        self, function: Any, grid: tuple[int, int, int], warps: int, stages: int
    ) -> PlannedKernel:
        """The launch; every parameter of ``function`` must have been given."""
        names = function.arg_names
        given = [name for name in names if name in self.types]
        spec = KernelSpec(
            function,
            tuple((name, self.types[name]) for name in given),
            tuple((name, self.constants[name]) for name in names if name not in self.types),
            frozenset(self.aligned & set(given)),
            warps,
            stages,
        )
        return PlannedKernel(spec, grid, tuple(self.values[name] for name in given))


def vector_unit(data_type: DataType) -> int:
    """Elements of one 16-byte access."""
    return 128 // data_type.bits


def steps_in_vectors(spec: AttentionSpec, ports: tuple[str, ...]) -> bool:
    """True if a step along batch, head or row of these ports keeps a 16-byte alignment.

    Their elements must follow one another, and where they are ragged a sequence must start
    aligned, whatever its offset is.
    """
    for port in ports:
        tensor = spec.ports.get(port)
        if tensor is None:
            continue
        unit = vector_unit(tensor.data_type)
        if tensor.dim[3] > 1 and tensor.stride[3] != 1:
            return False
        axes = (1, 2) if tensor.ragged_offset is not None else (0, 1, 2)
        if any(tensor.dim[axis] > 1 and tensor.stride[axis] % unit for axis in axes):
            return False
        if tensor.ragged_offset is not None and tensor.ragged_offset_multiplier % unit:
            return False
    return True


def add_forward_operands(
    arguments: KernelArguments, spec: AttentionSpec, *, is_aligned: bool
) -> None:
    """Everything of the forward kernels that follows from the declaration alone."""
    ports = spec.ports
    unit = vector_unit(spec.data_type) if is_aligned else 1
    o_unit = vector_unit(ports["O"].data_type) if is_aligned else 1
    for name in ("q", "k", "v"):
        arguments.pointer(name, ports[name], is_aligned=is_aligned)
        arguments.steps(name, ports[name], unit=unit)
        arguments.ragged(name, ports[name], unit=unit)
    arguments.pointer("o", ports["O"], is_aligned=is_aligned)
    arguments.steps("o", ports["O"], unit=o_unit)
    arguments.ragged("o", ports["O"], unit=o_unit)
    gate = ports.get("gate")
    gate_unit = 1
    if gate is not None and is_aligned and steps_in_vectors(spec, ("gate",)):
        gate_unit = vector_unit(gate.data_type)
    arguments.pointer("gate", gate, is_aligned=gate_unit > 1)
    arguments.steps("gate", gate, unit=gate_unit)
    arguments.ragged("gate", gate, unit=gate_unit)
    for port, name in _SHORT.items():
        arguments.pointer(name, ports.get(port))
        arguments.steps(name, ports.get(port))
        arguments.ragged(name, ports.get(port))
    for name, port in (("bias", "bias"), ("drop", "dropout_mask"), ("mask", "block_mask")):
        long = {"drop": "drop_mask", "mask": "block_mask"}.get(name, name)
        arguments.pointer(long, ports.get(port))
        arguments.steps(name, ports.get(port))
    sink = ports.get("sink_token")
    arguments.pointer("sink", sink)
    arguments.integer("sink_head", 0 if sink is None or spec.heads_q == 1 else sink.stride[1])
    arguments.length("len_q", spec.len_q)
    arguments.length("len_kv", spec.len_kv)
    for side in ("k", "v"):
        table = ports.get(f"paged_attention_{side}_table")
        arguments.pointer(f"{side}_table", table)
        arguments.integer(f"{side}_table_batch", 0 if table is None else table.stride[0])
        arguments.integer(f"{side}_table_row", 0 if table is None else table.stride[2])
        arguments.ragged(f"{side}_table", table)
    if spec.scale is None:
        arguments.scalar("scale", ports["attn_scale"], "fp32")
    else:
        arguments.number("scale", spec.scale)
    cap = spec.soft_cap
    arguments.scalar("cap_inner", None if cap is None else cap.inner, "fp32")
    arguments.scalar("cap_outer", None if cap is None else cap.outer, "fp32")
    program = spec.score_program
    given = () if program is None else program.external_inputs()
    for number in range(MAX_GIVEN):
        tensor = given[number] if number < len(given) else None
        arguments.scalar(f"given_{number}", tensor, "fp32")
    arguments.scalar("drop_scale", ports.get("dropout_scale"), "fp32")
    arguments.scalar("seed", ports.get("dropout_seed"), "i64")
    arguments.scalar("offset", ports.get("dropout_offset"), "i64")
    for name, value in (
        ("batches", spec.batch),
        ("rows", spec.rows),
        ("keys", spec.keys),
        ("heads", spec.heads_q),
        ("heads_kv", spec.heads_kv),
        ("group", spec.group),
        ("left", spec.left or 0),
        ("right", spec.right or 0),
    ):
        arguments.extent(name, value)
    probability = spec.drop_probability
    changes = spec.changes_scores
    block, block_2 = pieces(spec.depth)
    block_v, block_v_2 = pieces(spec.depth_v)
    arguments.constant(
        D=spec.depth,
        DV=spec.depth_v,
        D_BLOCK=block,
        D_BLOCK_2=block_2,
        DV_BLOCK=block_v,
        DV_BLOCK_2=block_v_2,
        UNIT=unit,
        O_UNIT=o_unit,
        GATE_UNIT=gate_unit,
        GATE_O=_rounding(spec, 0),
        GATE_TYPE=_rounding(spec, 1),
        K_PAGE=ports["k"].dim[2] if spec.is_paged else 1,
        V_PAGE=ports["v"].dim[2] if spec.is_paged else 1,
        HAS_LEFT=spec.left is not None,
        HAS_RIGHT=spec.right is not None,
        BOTTOM_RIGHT=spec.bottom_right,
        ALIBI_SPLIT=alibi_split(spec.heads_q) if spec.alibi else 0,
        CAP_DIVIDES=None if cap is None else cap.divides,
        SCORE_PROGRAM=None if program is None else score_function(spec.title, program),
        THRESHOLD=int(probability * 2.0**32),
        KEEP_SCALE=1.0 / (1.0 - probability),
        # Only a positive factor may be taken out of the maximum.
        FOLDS_SCALE=not changes and spec.scale is not None and spec.scale > 0.0,
        STATS_LOG2=spec.stats_log2,
    )


def _rounding(spec: AttentionSpec, factor: int) -> tl.dtype | None:
    """What a factor of a gated O is rounded to: its data type, where that is not float32's."""
    if spec.gate_rounding is None:
        return None
    return _ROUNDINGS.get(spec.gate_rounding[factor])


def takes_tensor_maps(spec: AttentionSpec) -> bool:
    """True if keys and values can be moved by the copy engine; what is beyond them is 0."""
    if spec.is_paged or spec.is_ragged("k") or spec.is_ragged("v"):
        return False
    return all(map_decline_reason(spec.ports[port]) is None for port in ("k", "v"))
