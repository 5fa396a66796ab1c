"""DataType to torch dtype and back. Importing this module imports torch."""

from __future__ import annotations

import torch

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError

_TO_TORCH: dict[DataType, torch.dtype] = {
    DataType.FLOAT: torch.float32,
    DataType.DOUBLE: torch.float64,
    DataType.HALF: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.INT8: torch.int8,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.UINT8: torch.uint8,
    DataType.BOOLEAN: torch.bool,
    DataType.FP8_E4M3: torch.float8_e4m3fn,
    DataType.FP8_E5M2: torch.float8_e5m2,
    DataType.FP8_E8M0: torch.float8_e8m0fnu,
}
_FROM_TORCH = {torch_type: data_type for data_type, torch_type in _TO_TORCH.items()}


def to_torch(data_type: DataType) -> torch.dtype:
    """The torch dtype of ``data_type``; packed 4-bit types are stored as uint8.

    Raises:
        NotSupportedError: for NOT_SET.
    """
    if data_type.is_sub_byte:
        return torch.uint8
    found = _TO_TORCH.get(data_type)
    if found is None:
        raise NotSupportedError(f"data type {data_type.name} has no torch counterpart")
    return found


def from_torch(dtype: torch.dtype) -> DataType:
    """The DataType of a torch dtype.

    Raises:
        NotSupportedError: if the vocabulary has no such type (complex, int16, ...).
    """
    found = _FROM_TORCH.get(dtype)
    if found is None:
        accepted = ", ".join(str(known) for known in _FROM_TORCH)
        raise NotSupportedError(f"torch dtype {dtype} is not in the vocabulary: {accepted}")
    return found
