"""How a sample declares its operands, some with strides and values that a test or it chooses."""

from __future__ import annotations

from typing import Any

import torch

import tilewright as tw
from tilewright.graph.tensor import packed_strides


class Declaring:
    """Declares the operands of one sample; ``strides`` are those that a test chooses, by name.

    ``rows`` is an extent that plans of the family take without compiling anew, if there is one.
    """

    def __init__(self, strides: dict[str, Any] | None = None, rows: int = 64) -> None:
        self.graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        self.rows = rows
        # Engines that a sample is not for.
        self.barred: tuple[str, ...] = ()
        self.strides = strides or {}
        self.values: dict[str, torch.Tensor] = {}
        # Operands that several others refer to.
        self.shared: dict[str, Any] = {}

    def __call__(self, name: str, dim: tuple[int, ...], data_type: Any = None) -> Any:
        return self.graph.tensor(dim, self.strides.get(name, ()), data_type, name=name)

    def given(self, name: str, values: torch.Tensor) -> Any:
        """An input whose values a sample chooses: lengths, offsets, tables."""
        self.values[name] = values
        return self(name, tuple(values.shape), values.dtype)

    def out(self, name: str, tensor: Any, dim: tuple[int, ...], data_type: Any = None) -> None:
        # Packed unless a test says otherwise: a result would follow the strides of its operand.
        stride = self.strides.get(name, packed_strides(dim))
        tensor.set_output(True).set_name(name).set_dim(dim).set_stride(stride)
        if data_type is not None:
            tensor.set_data_type(data_type)
