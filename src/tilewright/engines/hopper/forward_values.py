"""Arguments of attention forward's kernels by name, as those for 16 bits and for 8 have them."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.engines.compiled.planned import operand, pointer_type
from tilewright.engines.hopper.declared import Declared
from tilewright.engines.hopper.map_types import map_type
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant
from tilewright.launch.tensor_maps import tensor_map

# Type and argument, by name; a kernel takes those that it names.
Values = dict[str, tuple[str, Argument]]


def forward_values(
    spec: Declared, boxes: Mapping[str, tuple[int, int]], tiles: int, slots: Mapping[int, int]
) -> Values:
    """Maps that move ``boxes`` of rows and columns, operands, lengths, sink, and extents.

    ``boxes`` is by port; ``tiles`` is how many tiles a head's rows make.
    """
    ports = spec.ports
    values: Values = {}
    for port, box in boxes.items():
        # A row of a box is swizzled as a whole, or in pieces of 128 bytes.
        swizzle_bytes = min(128, box[1] * ports[port].data_type.bits // 8)
        made = tensor_map(ports[port], slots[ports[port].uid], (1, 1, *box), swizzle_bytes)
        values[f"{port.lower()}_map"] = (map_type(ports[port], (1, 1, *box)), made)
    # Absent operands keep their place; q stands in, and the kernel does not look at it.
    for port in ("q", "k", "v", "O", "Stats"):
        _add_operand(values, port.lower(), ports.get(port), ports["q"], slots)
    add_pointer(values, "sink", ports.get("sink_token") or ports["q"], slots)
    lengths = {"lengths_q": spec.lengths_q, "lengths_kv": spec.lengths_kv}
    for name, tensor in lengths.items():
        add_pointer(values, name, ports["q"] if tensor is None else tensor, slots)
        values[f"{name}_step"] = ("i64", Constant(0 if tensor is None else tensor.stride[0]))
    integers = {
        "rows": spec.rows,
        "keys": spec.keys,
        "depth": spec.depth,
        "depth_v": spec.depth_v,
        "left": spec.left or 0,
        "right": spec.right or 0,
        "tiles": tiles,
        "heads": spec.batch * spec.heads_q,
        "heads_q": spec.heads_q,
        "group": spec.group,
    }
    return values | {name: ("i32", Constant(value)) for name, value in integers.items()}


def add_pointer(values: Values, name: str, tensor: Tensor, slots: Mapping[int, int]) -> None:
    """Where a bound tensor is."""
    values[name] = (pointer_type(tensor), operand(slots, tensor))


def _add_operand(
    values: Values, name: str, tensor: Tensor | None, stand_in: Tensor, slots: Mapping[int, int]
) -> None:
    """An operand's pointer, steps, and where its sequences start."""
    given = stand_in if tensor is None else tensor
    add_pointer(values, f"{name}_pointer", given, slots)
    for axis, suffix in enumerate(("batch", "head", "row")):
        values[f"{name}_{suffix}"] = ("i64", Constant(given.stride[axis]))
    starts = None if tensor is None else tensor.ragged_offset
    add_pointer(values, f"{name}_starts", given if starts is None else starts, slots)
    values[f"{name}_starts_step"] = ("i64", Constant(0 if starts is None else starts.stride[0]))
    # Starts count rows; those of Stats, which no tensor map moves, elements.
    unit = given.ragged_offset_multiplier
    if name != "stats":
        unit //= max(given.stride[2], 1)
    values[f"{name}_unit"] = ("i64", Constant(0 if starts is None else unit))
