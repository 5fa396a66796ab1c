"""How Gluon spells the type of a tensor map's argument."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from tilewright.dtypes import DataType
from tilewright.engines.compiled.planned import TRITON_TYPES
from tilewright.graph.tensor import Tensor

_TYPES = {
    DataType.BFLOAT16: gl.bfloat16,
    DataType.HALF: gl.float16,
    DataType.FP8_E4M3: gl.float8e4nv,
    DataType.FLOAT: gl.float32,
}


def map_type(tensor: Tensor, box: tuple[int, ...]) -> str:
    """The type of the map that moves an operand in boxes of ``box`` elements."""
    return box_type(tensor.data_type, box)


def box_type(data_type: DataType, box: tuple[int, ...]) -> str:
    """The type of a map that moves boxes of ``box`` elements."""
    layout = gl.NVMMASharedLayout.get_default_for([*box], _TYPES[data_type])
    return f"tensordesc<{TRITON_TYPES[data_type]}{[*box]},{layout!r}>"
