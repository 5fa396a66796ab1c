"""C = A B over the last two axes; leading axes broadcast where one of them is 1.

Products accumulate in float32 (float64 for float64 and integer operands) and are rounded once.
Operands of type float32 or float64 go straight to ``torch.matmul(out=)``. 16-bit operands do so
where the library accumulates in float32 and rounds once: on CUDA devices, and on CPUs in
bfloat16 with hardware support; other CPU products convert first, which is also many times
faster there than ATen's own float16 product.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.shapes import broadcast_dims
from tilewright.graph.tensor import Tensor as TensorRecord

# Below this extent of M or N, ATen's bfloat16 product on CPUs leaves the fast path.
_NATIVE_BFLOAT16_EXTENT = 16


@implements_dense("matmul")
def prepare_matmul(operation: Any, device: torch.device) -> Kernel:
    """The product of A (..., M, K) and B (..., K, N) into C (..., M, N)."""
    a, b, c = operation.inputs["A"], operation.inputs["B"], operation.outputs["C"]
    for record in (a, b, c):
        if len(record.dim) < 2:
            raise NotSupportedError(
                f"tensor {record.label()} has dim {record.dim}; a matmul takes rank 2 or more"
            )
    batch = broadcast_dims(a.dim[:-2], b.dim[:-2])
    product = None if batch is None else (*batch, a.dim[-2], b.dim[-1])
    if product != c.dim or a.dim[-1] != b.dim[-2]:
        raise NotSupportedError(
            f"tensor {c.label()} has dim {c.dim}; the product of {a.label()} {a.dim} and "
            f"{b.label()} {b.dim} does not have it"
        )
    if set(operation.inputs) - {"A", "B"}:
        extra = sorted(set(operation.inputs) - {"A", "B"})
        raise NotSupportedError(f"matmul input {extra[0]!r}: the ATen engine takes A and B alone")
    if _runs_in_its_own_type(a, b, c, device):

        def run_directly(inputs: Operands, outputs: Operands) -> None:
            torch.matmul(inputs["A"], inputs["B"], out=outputs["C"])

        return run_directly
    dtype = product_dtype(a, b, c)
    load_a, load_b = casts.loader(a, dtype, device), casts.loader(b, dtype, device)
    if casts.is_plain(c, dtype):

        def run_loaded(inputs: Operands, outputs: Operands) -> None:
            torch.matmul(load_a(inputs["A"]), load_b(inputs["B"]), out=outputs["C"])

        return run_loaded
    store = casts.storer(c)

    def run(inputs: Operands, outputs: Operands) -> None:
        store(outputs["C"], torch.matmul(load_a(inputs["A"]), load_b(inputs["B"])))

    return run


def product_dtype(*records: TensorRecord) -> torch.dtype:
    """The type that products accumulate in: float64 also for integers, whose sums stay exact."""
    if any(record.data_type.is_integer for record in records):
        return torch.float64
    return casts.compute_dtype(records)


def _runs_in_its_own_type(
    a: TensorRecord, b: TensorRecord, c: TensorRecord, device: torch.device
) -> bool:
    data_type = a.data_type
    if not data_type is b.data_type is c.data_type:
        return False
    if data_type in (DataType.FLOAT, DataType.DOUBLE):
        return True
    if device.type != "cpu":
        return data_type in (DataType.HALF, DataType.BFLOAT16)
    return (
        data_type is DataType.BFLOAT16
        and min(c.dim[-2:]) >= _NATIVE_BFLOAT16_EXTENT
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
