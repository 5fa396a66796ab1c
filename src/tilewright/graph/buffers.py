"""What a caller's array object tells about itself, without importing its library."""

from __future__ import annotations

from typing import Any

from tilewright.dtypes import DataType, as_data_type
from tilewright.errors import GraphError
from tilewright.graph.tensor import Scalar, packed_strides
from tilewright.records import record


@record(frozen=True)
class BufferDescription:
    """Shape and strides in elements; ``value`` is set for a one-element CPU tensor."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    data_type: DataType
    is_scalar: bool
    value: Scalar | None


def describe_buffer(source: Any) -> BufferDescription:
    """Describe a torch tensor, a numpy array, or anything with ``shape`` and ``dtype``.

    Raises:
        GraphError: if ``source`` tells no shape or has a type outside the vocabulary.
    """
    layout = str(getattr(source, "layout", ""))
    is_nested = getattr(source, "is_nested", False)
    if is_nested or (layout.startswith("torch.") and layout != "torch.strided"):
        kind = "a nested tensor" if is_nested else f"layout {layout}"
        raise GraphError(f"tensor_like: {kind}; expected a tensor of one shape with strides")
    shape = getattr(source, "shape", None)
    dtype = getattr(source, "dtype", None)
    if shape is None or dtype is None:
        raise GraphError(
            f"tensor_like: got {type(source).__name__}; expected a graph tensor, a torch tensor, "
            "or an array with shape and dtype"
        )
    try:
        data_type = as_data_type(str(dtype))
    except TypeError as error:
        raise GraphError(f"tensor_like: {error}") from error
    dim = tuple(int(extent) for extent in shape)
    stride = _strides_in_elements(source, dim)
    is_scalar = _element_count(dim) == 1 and _is_on_cpu(source)
    value: Scalar | None = None
    if is_scalar and hasattr(source, "item") and data_type.bits >= 8:
        value = source.item()
    return BufferDescription(dim or (1,), stride or (1,), data_type, is_scalar, value)


def _strides_in_elements(source: Any, dim: tuple[int, ...]) -> tuple[int, ...]:
    if callable(getattr(source, "stride", None)):
        return tuple(source.stride())
    byte_strides = getattr(source, "strides", None)
    if byte_strides is None:
        return packed_strides(dim)
    if any(step % source.itemsize for step in byte_strides):
        raise GraphError(
            f"tensor_like: strides {tuple(byte_strides)} in bytes; expected multiples of the "
            f"{source.itemsize} bytes of an element"
        )
    return tuple(step // source.itemsize for step in byte_strides)


def _is_on_cpu(source: Any) -> bool:
    device = getattr(source, "device", "cpu")
    return getattr(device, "type", str(device)).startswith("cpu")


def _element_count(dim: tuple[int, ...]) -> int:
    count = 1
    for extent in dim:
        count *= extent
    return count
