"""Data types with their bit layouts. No torch here: see ``tilewright.torch_dtypes``."""

from __future__ import annotations

import enum
from typing import NamedTuple


class BitLayout(NamedTuple):
    """How one element is stored.

    ``bits`` is the storage width; ``exponent_bits`` and ``mantissa_bits`` are zero for
    integers. ``largest`` is the largest finite value.
    """

    bits: int
    kind: str
    exponent_bits: int
    mantissa_bits: int
    largest: float


class DataType(enum.Enum):
    """Element types of cuDNN's public graph vocabulary.

    FP8 types follow the OCP 8-bit floating point specification, FP8_E8M0 and FP4_E2M1 the
    OCP Microscaling (MX) specification 1.0.
    """

    FLOAT = "float32"
    DOUBLE = "float64"
    HALF = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    BOOLEAN = "bool"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0 = "fp8_e8m0"
    FP4_E2M1 = "fp4_e2m1"
    INT4 = "int4"
    NOT_SET = "not_set"

    @property
    def layout(self) -> BitLayout:
        """The bit layout; NOT_SET has none and raises KeyError."""
        return _LAYOUTS[self]

    @property
    def bits(self) -> int:
        """Storage width of one element, in bits."""
        return _LAYOUTS[self].bits

    @property
    def is_floating(self) -> bool:
        """True for the floating types, the 8-bit and 4-bit ones included."""
        return self is not DataType.NOT_SET and _LAYOUTS[self].kind == "float"

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers; BOOLEAN is not one."""
        return self is not DataType.NOT_SET and _LAYOUTS[self].kind == "int"

    @property
    def is_sub_byte(self) -> bool:
        """True for types that are packed several to a byte."""
        return self is not DataType.NOT_SET and _LAYOUTS[self].bits < 8

    def span_bytes(self, elements: int) -> int:
        """Bytes that ``elements`` neighbouring elements take, rounded up."""
        return (elements * self.bits + 7) // 8


_LAYOUTS: dict[DataType, BitLayout] = {
    DataType.FLOAT: BitLayout(32, "float", 8, 23, 3.4028234663852886e38),
    DataType.DOUBLE: BitLayout(64, "float", 11, 52, 1.7976931348623157e308),
    DataType.HALF: BitLayout(16, "float", 5, 10, 65504.0),
    DataType.BFLOAT16: BitLayout(16, "float", 8, 7, 3.3895313892515355e38),
    DataType.INT8: BitLayout(8, "int", 0, 0, 127),
    DataType.INT32: BitLayout(32, "int", 0, 0, 2**31 - 1),
    DataType.INT64: BitLayout(64, "int", 0, 0, 2**63 - 1),
    DataType.UINT8: BitLayout(8, "int", 0, 0, 255),
    DataType.BOOLEAN: BitLayout(8, "bool", 0, 0, 1),
    DataType.FP8_E4M3: BitLayout(8, "float", 4, 3, 448.0),
    DataType.FP8_E5M2: BitLayout(8, "float", 5, 2, 57344.0),
    DataType.FP8_E8M0: BitLayout(8, "float", 8, 0, 2.0**127),
    DataType.FP4_E2M1: BitLayout(4, "float", 2, 1, 6.0),
    DataType.INT4: BitLayout(4, "int", 0, 0, 7),
}


def as_data_type(value: object) -> DataType:
    """The DataType that ``value`` means.

    Accepts a DataType, its name in either spelling ("FLOAT", "float32"), a torch dtype
    (recognized by its printed name, so torch is not imported) or None for NOT_SET.

    Raises:
        TypeError: for anything else, naming what came and what is accepted.
    """
    if isinstance(value, DataType):
        return value
    if value is None:
        return DataType.NOT_SET
    text = value if isinstance(value, str) else str(value)
    found = _BY_NAME.get(text.removeprefix("torch."))
    if found is None:
        accepted = ", ".join(member.name for member in DataType)
        raise TypeError(
            f"data type: got {value!r}; accepted are {accepted}, a torch dtype of those, or None"
        )
    return found


_BY_NAME: dict[str, DataType] = {
    **{member.name: member for member in DataType},
    **{member.value: member for member in DataType},
    "float": DataType.FLOAT,
    "double": DataType.DOUBLE,
    "half": DataType.HALF,
    "float8_e4m3fn": DataType.FP8_E4M3,
    "float8_e5m2": DataType.FP8_E5M2,
    "float8_e8m0fnu": DataType.FP8_E8M0,
    "float4_e2m1fn_x2": DataType.FP4_E2M1,
}
