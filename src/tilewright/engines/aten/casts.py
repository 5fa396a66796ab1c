"""Operands to the type that arithmetic runs in, and results back, rounded once.

Arithmetic runs in float32, or in float64 where an operand is float64. A loader turns a bound
operand into that type; a storer rounds a result into a bound output: to nearest even, FP8 and
FP4 saturating (OCP OFP8 and MX 1.0), integers truncating toward zero and saturating. Packed
4-bit tensors arrive as flat bytes, two elements a byte, the low nibble first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import torch

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.shapes import span_elements
from tilewright.graph.tensor import Tensor as TensorRecord
from tilewright.torch_dtypes import to_torch

Loader = Callable[[torch.Tensor], torch.Tensor]
Storer = Callable[[torch.Tensor, torch.Tensor], None]

# The values of FP4_E2M1 codes 0 to 15, and between neighbours the midpoints of code 0 to 7.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_WIDE_INTEGERS = (DataType.INT32, DataType.INT64)
_INTEGER_RANGES: dict[DataType, tuple[int, int]] = {
    DataType.INT4: (-8, 7),
    DataType.INT8: (-128, 127),
    DataType.UINT8: (0, 255),
    DataType.INT32: (-(2**31), 2**31 - 1),
    DataType.INT64: (-(2**63), 2**63 - 1),
}


def compute_dtype(records: Iterable[TensorRecord]) -> torch.dtype:
    """The type that arithmetic over ``records`` runs in.

    float64 if one of them is float64, or a 32- or 64-bit integer (float32 has 24 bits);
    float32 otherwise.
    """
    for record in records:
        if record.data_type is DataType.DOUBLE or record.data_type in _WIDE_INTEGERS:
            return torch.float64
    return torch.float32


def is_plain(record: TensorRecord, dtype: torch.dtype) -> bool:
    """True if the operand of ``record`` arrives in ``dtype`` itself, unpacked."""
    return not record.data_type.is_sub_byte and to_torch(record.data_type) is dtype


def loader(record: TensorRecord, dtype: torch.dtype, device: torch.device) -> Loader:
    """A function from the bound operand of ``record`` to a tensor of ``dtype`` on ``device``.

    It returns the operand itself where nothing is to be done.
    """
    data_type = record.data_type
    if data_type is DataType.NOT_SET:
        raise NotSupportedError(f"tensor {record.label()} has no data type; one must be set")
    if data_type.is_sub_byte:
        # Made here, so that no call has to copy it to the device.
        _e2m1_table(device)
        decode = decode_e2m1 if data_type is DataType.FP4_E2M1 else _decode_int4
        return lambda operand: decode(unpack_codes(operand, record)).to(dtype)
    if record.is_pass_by_value and device.type != "cpu":
        return lambda operand: operand.to(device=device, dtype=dtype)
    if to_torch(data_type) is dtype:
        return _itself
    return lambda operand: operand.to(dtype)


def port_loader(
    records: Mapping[str, TensorRecord], dtype: torch.dtype, device: torch.device
) -> Callable[[Mapping[str, torch.Tensor], str], torch.Tensor]:
    """A function (operands, port) that loads the operand of a port, of ``records`` by port."""
    loaders = {port: loader(record, dtype, device) for port, record in records.items()}
    return lambda operands, port: loaders[port](operands[port])


def storer(record: TensorRecord) -> Storer:
    """A function (output, value) that rounds ``value`` into the bound output of ``record``.

    ``value`` may broadcast to the output and may have any type that arithmetic runs in.
    """
    data_type = record.data_type
    if data_type in (DataType.FLOAT, DataType.DOUBLE):
        return _store_wide
    if data_type in (DataType.HALF, DataType.BFLOAT16):
        return _store_narrow
    if data_type in (DataType.FP8_E4M3, DataType.FP8_E5M2):
        limit = data_type.layout.largest
        return lambda output, value: _store_narrow(output, value.clamp(-limit, limit))
    if data_type is DataType.FP8_E8M0:
        return _store_e8m0
    if data_type is DataType.BOOLEAN:
        return lambda output, value: _discard(output.copy_(value != 0))
    if data_type is DataType.NOT_SET:
        raise NotSupportedError(f"tensor {record.label()} has no data type; one must be set")
    if data_type is DataType.FP4_E2M1:
        return lambda output, value: pack_codes(output, encode_e2m1(value), record)
    low, high = _INTEGER_RANGES[data_type]
    if data_type is DataType.INT4:
        return lambda output, value: pack_codes(
            output, saturate(value, low, high).to(torch.uint8) & 15, record
        )
    return lambda output, value: _discard(output.copy_(saturate(value, low, high)))


def saturate(value: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """``value`` truncated toward zero and held to [low, high], as int64; NaN becomes 0."""
    if not value.dtype.is_floating_point:
        return value.to(torch.int64).clamp(low, high)
    wide = value.to(torch.float64)
    wide = torch.where(torch.isnan(wide), 0.0, wide)
    if high < 2**53:
        return wide.clamp(low, high).to(torch.int64)
    # 2**63 - 1 is no float64: values from 2**63 on are replaced after the conversion.
    held = wide.clamp(-(2.0**63), 2.0**63 - 1024.0).to(torch.int64)
    return torch.where(wide >= 2.0**63, high, held)


def to_narrower(value: torch.Tensor) -> torch.Tensor:
    """``value`` in at most float32, such that one more rounding to 16 or 8 bits is the only one.

    A float64 value is rounded to odd: toward zero with the last bit set if anything was lost,
    which keeps it off the midpoints of any narrower format (Boldo and Melquiond, 2008).
    """
    if value.dtype is not torch.float64:
        return value
    nearest = value.to(torch.float32)
    back = nearest.to(torch.float64)
    toward_zero = torch.where(
        back.abs() > value.abs(), torch.nextafter(nearest, torch.zeros_like(nearest)), nearest
    )
    lost = (back != value) & torch.isfinite(value)
    return torch.where(lost, (toward_zero.view(torch.int32) | 1).view(torch.float32), toward_zero)


def as_bytes(operand: torch.Tensor) -> torch.Tensor:
    """A view of a one-byte tensor as uint8."""
    return operand if operand.dtype is torch.uint8 else operand.view(torch.uint8)


def unpack_codes(operand: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """Codes 0 to 15 (uint8), of the record's dim, of the flat bytes that it is packed in.

    Element strides count nibbles: offset o is the low nibble of byte o // 2 if o is even.
    """
    return _nibbles(as_bytes(operand)).as_strided(record.dim, record.stride)


def pack_codes(operand: torch.Tensor, codes: torch.Tensor, record: TensorRecord) -> None:
    """Write codes 0 to 15 (uint8) into the flat bytes that ``record`` is packed in.

    Nibbles between and after the record's elements keep what they hold.
    """
    span = span_elements(record.dim, record.stride)
    data = as_bytes(operand)[: (span + 1) // 2]
    if span == math.prod(record.dim) and span % 2 == 0:
        nibbles = torch.empty(span, dtype=torch.uint8, device=data.device)
    else:
        nibbles = _nibbles(data)
    nibbles.as_strided(record.dim, record.stride).copy_(codes)
    data.copy_(nibbles[0::2] | (nibbles[1::2] << 4))


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), dim=-1).flatten()


def _decode_int4(codes: torch.Tensor) -> torch.Tensor:
    # Shifting the nibble up and arithmetically down again extends the sign.
    return (codes << 4).view(torch.int8) >> 4


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of FP4_E2M1 codes 0 to 15 (uint8)."""
    return _e2m1_table(codes.device)[codes.to(torch.int64)]


def encode_e2m1(value: torch.Tensor) -> torch.Tensor:
    """FP4_E2M1 codes (uint8), ties to even, saturating at 6; NaN becomes 6, zero keeps its sign."""
    magnitude = value.abs()
    code = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for lower, midpoint in enumerate(_E2M1_MIDPOINTS):
        # The midpoint itself goes to the even code: up from an odd one.
        passed = magnitude >= midpoint if lower % 2 else magnitude > midpoint
        code += passed
    code = torch.where(torch.isnan(magnitude), 7, code)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def encode_e8m0(value: torch.Tensor) -> torch.Tensor:
    """FP8_E8M0 codes (uint8) of the nearest powers of two, ties to the even code.

    Zero and values below 2**-127 give code 0, NaN and negative values 255, infinity 254.
    """
    mantissa, exponent = torch.frexp(torch.where(torch.isfinite(value), value, 1.0).abs())
    # |x| = m * 2**e with m in [0.5, 1): code e + 126 stands for 2**(e - 1), and m = 0.75 is
    # the midpoint to the next one.
    code = exponent.to(torch.int32) + 126
    code = code + ((mantissa > 0.75) | ((mantissa == 0.75) & (code % 2 == 1)))
    code = torch.where(value == 0, 0, code.clamp(0, 254))
    code = torch.where(torch.isposinf(value), 254, code)
    return torch.where(torch.isnan(value) | (value < 0), 255, code).to(torch.uint8)


@functools.cache
def _e2m1_table(device: torch.device) -> torch.Tensor:
    return torch.tensor(_E2M1_VALUES + tuple(-value for value in _E2M1_VALUES), device=device)


def _itself(operand: torch.Tensor) -> torch.Tensor:
    return operand


def _discard(_: torch.Tensor) -> None:
    return None


def _store_wide(output: torch.Tensor, value: torch.Tensor) -> None:
    output.copy_(value)


def _store_narrow(output: torch.Tensor, value: torch.Tensor) -> None:
    output.copy_(to_narrower(value))


def _store_e8m0(output: torch.Tensor, value: torch.Tensor) -> None:
    as_bytes(output).copy_(encode_e8m0(value))
