"""Run the references of a graph's operations one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tilewright.errors import BindingError, GraphError
from tilewright.oracle import formats, layout
from tilewright.oracle.registry import reference_of

__all__ = ["evaluate", "stored"]

_INTEGER_RANGES: dict[str, tuple[int, int]] = {
    "INT4": (-8, 7),
    "INT8": (-(2**7), 2**7 - 1),
    "UINT8": (0, 2**8 - 1),
    "INT32": (-(2**31), 2**31 - 1),
    "INT64": (-(2**63), 2**63 - 1),
}


def evaluate(
    graph_or_operations: Any,
    inputs: Mapping[Any, torch.Tensor],
    *,
    round_virtual: bool = False,
    round_outputs: bool = False,
) -> dict[int, torch.Tensor]:
    """What a graph computes, in float64.

    Args:
        graph_or_operations: A validated graph, or its operations in an order in which each finds
            its operands.
        inputs: Buffers by tensor uid (a tensor record is accepted as a key), as a variant pack
            holds them: storage that is read with the declared dim and stride, see
            `tilewright.oracle.layout.load`. Entries that nothing reads are ignored, outputs'
            buffers too. A pass-by-value scalar may be left out.
        round_virtual: Round virtual tensors to their data type. By default they keep float64: an
            engine that fuses need not round them, and one that does owes the difference to its
            tolerance. What an operation itself defines as rounded (block_scale_quantize, the
            8-bit P of fp8 attention) is rounded in both cases.
        round_outputs: Round results to their data type. By default a result is what an exact
            engine would round, so that half a unit in the last place suffices as tolerance.

    Returns:
        uid -> values in the declared axis order and dim, of every tensor that an operation makes,
        virtual ones included: float64; int64 where the tensor's type is an integer (truncated
        toward zero, saturated); bool where it is BOOLEAN. Results in 8- and 4-bit float types are
        held to the type's largest number even where they are not rounded. Ragged results come in
        their declared (B, H, S, D) with rows past a sequence's end as the operation defines
        them (zero, or -inf in Stats).

    Raises:
        BindingError: An operand is missing, or its buffer is too small for its declaration.
        GraphError: A reference's result does not fit the declared dim.
        NotSupportedError: An operation kind has no reference.
    """
    operations: Iterable[Any] = getattr(graph_or_operations, "operations", graph_or_operations)
    buffers = {
        key if isinstance(key, int) else key.uid: value
        for key, value in inputs.items()
        if key is not None
    }
    device = next((buffer.device for buffer in buffers.values()), torch.device("cpu"))
    made: dict[int, torch.Tensor] = {}

    def value_of(record: Any) -> torch.Tensor:
        if record.uid in made:
            return made[record.uid]
        if record.uid in buffers:
            offset = getattr(record, "ragged_offset", None)
            offsets = value_of(offset) if offset is not None else None
            return layout.load(record, buffers[record.uid], offsets)
        value = getattr(record, "value", None)
        if value is not None:
            return torch.full(tuple(record.dim), float(value), dtype=torch.float64, device=device)
        raise BindingError(
            f"tensor {record.name!r} (uid {record.uid}): no operation before it makes it and "
            "inputs has no buffer for it"
        )

    for operation in operations:
        ports: dict[str, torch.Tensor] = {}
        for port, record in operation.inputs.items():
            ports[port] = value_of(record)
            offset = getattr(record, "ragged_offset", None)
            if offset is not None:
                ports[f"{port}.ragged_offset"] = value_of(offset)
        results = reference_of(operation.kind)(operation, ports)
        for port, record in operation.outputs.items():
            if port not in results:
                raise GraphError(
                    f"operation {operation.kind} {getattr(operation, 'name', '')!r}: its "
                    f"reference gives no output {port!r} (it gives {', '.join(results)})"
                )
            rounds = round_virtual if record.is_virtual else round_outputs
            made[record.uid] = stored(record, results[port], rounds=rounds)
    return made


def stored(record: Any, values: torch.Tensor, *, rounds: bool) -> torch.Tensor:
    """`values` as a tensor of the record's data type holds them; see `evaluate`."""
    dim = tuple(record.dim)
    if tuple(values.shape) != dim:
        if values.numel() != 1 or any(extent != 1 for extent in dim):
            raise GraphError(
                f"tensor {record.name!r} (uid {record.uid}): declared dim {dim}; the reference "
                f"gives {tuple(values.shape)}"
            )
        values = values.reshape(dim)
    kind = record.data_type.name
    if kind == "BOOLEAN":
        return values != 0
    if kind in _INTEGER_RANGES:
        return _as_integer(values, *_INTEGER_RANGES[kind])
    exact = formats.to_float64(values)
    target = formats.format_of(record.data_type) if kind != "NOT_SET" else None
    if target is None:
        return exact
    if rounds:
        return formats.round_to(exact, target, saturate=True)
    if target.bits <= 8 and target.specials != "scale":
        # torch.clamp keeps NaN.
        return torch.clamp(exact, -target.max_finite, target.max_finite)
    return exact


def _as_integer(values: torch.Tensor, low: int, high: int) -> torch.Tensor:
    if not values.is_floating_point():
        return values.to(torch.int64).clamp(low, high)
    whole = torch.trunc(torch.where(torch.isnan(values), 0.0, values.to(torch.float64)))
    inside = (whole > low) & (whole < high)
    integers = torch.where(inside, whole, 0.0).to(torch.int64)
    # The bounds are set as integers: float64 cannot hold 2**63 - 1.
    integers = torch.where(whole >= high, high, integers)
    return torch.where(whole <= low, low, integers)
