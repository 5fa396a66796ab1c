"""From torch operands to a graph's tensors, as the functions declare them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.ops.plan_cache import Operands

# Kernels that read through tensor maps need this alignment of addresses, in bytes.
_WIDEST_ALIGNMENT = 16


def alignment_of(tensor: torch.Tensor) -> int:
    """The alignment to declare for an operand, in bytes: 0 (of its elements' size) if it is wide.

    Only devices with engines that ask for more than an element's size are looked at.
    """
    if tensor.device.type != "cuda":
        return 0
    rest = tensor.data_ptr() % _WIDEST_ALIGNMENT
    return rest & -rest


def are_aligned(device: torch.device, tensors: Iterable[torch.Tensor]) -> bool:
    """True if ``alignment_of`` is 0 for each of ``tensors``, which are on ``device``."""
    return device.type != "cuda" or not any(t.data_ptr() % _WIDEST_ALIGNMENT for t in tensors)


def declare_like(graph: DeclaredGraph, name: str, tensor: torch.Tensor) -> Tensor:
    """An input tensor with the operand's dim, stride and data type."""
    return graph.tensor(tensor.shape, tensor.stride(), tensor.dtype, name=name)


def declare_all(graph: DeclaredGraph, inputs: Operands) -> dict[str, Tensor]:
    """Every operand by name; intermediates are float64 if the first one is."""
    if next(iter(inputs.values())).dtype is torch.float64:
        graph.intermediate_data_type = DataType.DOUBLE
    return {name: declare_like(graph, name, tensor) for name, tensor in inputs.items()}


def bind_output(made: Tensor | None, name: str, buffer: torch.Tensor) -> None:
    """Make ``made`` the output of this name, with the buffer's dim, stride and data type.

    Raises:
        NotSupportedError: if the graph makes no such tensor.
    """
    if made is None:
        raise NotSupportedError(f"the graph makes no {name}")
    made.set_output(True).set_name(name).set_data_type(buffer.dtype)
    made.set_dim(buffer.shape).set_stride(buffer.stride())
