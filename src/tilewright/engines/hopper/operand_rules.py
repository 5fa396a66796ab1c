"""What attention's Hopper kernels ask of operands, forward and backward, in 16 bits and 8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewright.engines.hopper.bounds import LENGTHS
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor


def only_operation(graph: DeclaredGraph) -> Operation:
    """The operation of a graph of one.

    Raises:
        NotSupportedError: for a graph of more.
    """
    if len(graph.operations) != 1:
        raise NotSupportedError(
            f"graph {graph.name!r} has {len(graph.operations)} operations; Hopper attention takes "
            "graphs of one"
        )
    return graph.operations[0]


def require_same_raggedness(ports: Mapping[str, Tensor], partners: Mapping[str, str]) -> None:
    """Each port is ragged if its partner is, and what is ragged has lengths.

    Raises:
        NotSupportedError: naming the tensors.
    """
    for port, partner in partners.items():
        tensor, other = ports.get(port), ports[partner]
        if tensor is None:
            continue
        if (tensor.ragged_offset is None) != (other.ragged_offset is None):
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) and {other.label()} ({partner}): the kernels "
                "take both ragged, or neither"
            )
    for port, names in (("q", LENGTHS["q"]), ("k", LENGTHS["kv"])):
        if ports[port].ragged_offset is not None and not any(name in ports for name in names):
            raise NotSupportedError(
                f"tensor {ports[port].label()} ({port}) is ragged; the kernels need {names[0]}"
            )


def require_whole_rows(ports: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Sequences of ragged tensors start at whole rows.

    Raises:
        NotSupportedError: naming the tensor.
    """
    for port in names:
        tensor = ports.get(port)
        if tensor is None or tensor.ragged_offset is None:
            continue
        row = tensor.stride[2]
        if row < 1 or tensor.ragged_offset_multiplier % row:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) has ragged_offset_multiplier "
                f"{tensor.ragged_offset_multiplier} and stride {tensor.stride}; the kernels take "
                "offsets that count whole rows: a multiple of the stride along them"
            )


def require_packed_sink(ports: Mapping[str, Tensor]) -> None:
    """A sink of several heads has them one after another.

    Raises:
        NotSupportedError: naming the tensor.
    """
    sink = ports.get("sink_token")
    if sink is not None and sink.dim[1] > 1 and sink.stride[1] != 1:
        raise NotSupportedError(
            f"tensor {sink.label()} (sink_token) has stride {sink.stride}; the kernels take 1 "
            "along the heads"
        )
