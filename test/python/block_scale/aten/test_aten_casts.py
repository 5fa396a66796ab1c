"""Loads and stores of every data type, by value: rounding, saturation, packing."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

import tilewright
from tilewright.dtypes import DataType
from tilewright.engines.aten import casts
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")


def record(dim, stride=None, data_type="FLOAT"):
    stride = stride or torch.empty(dim, device="meta").stride()
    return tilewright.Graph().tensor(dim, stride, DataType[data_type])


def store(values, data_type, dtype=torch.float64):
    """``values`` stored as one dense row of ``data_type``, loaded again as float64."""
    target = record((len(values),), data_type=data_type)
    value = torch.tensor(values, dtype=dtype)
    if target.data_type.is_sub_byte:
        output = torch.zeros((len(values) + 1) // 2, dtype=torch.uint8)
    else:
        output = torch.zeros(len(values), dtype=tilewright.torch_dtypes.to_torch(target.data_type))
    casts.storer(target)(output, value)
    return casts.loader(target, torch.float64, CPU)(output).tolist()


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        ("INT4", [7, -8, 3, -3, 0, 0, 7, -8, -1, 7]),
        ("INT8", [127, -128, 3, -3, 0, 0, 127, -128, -1, 127]),
        ("UINT8", [255, 0, 3, 0, 0, 0, 255, 0, 0, 127]),
        ("INT32", [2**31 - 1, -(2**31), 3, -3, 0, 0, 2**31 - 1, -(2**31), -1, 127]),
        ("BOOLEAN", [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]),
    ],
)
def test_integers_truncate_and_saturate(data_type, expected):
    values = [1e10, -1e10, 3.9, -3.9, -0.9, 0.0, math.inf, -math.inf, -1.0, 127.99]
    assert store(values, data_type) == expected
    assert store([math.nan], data_type) == [data_type == "BOOLEAN"]


def test_the_ends_of_the_widest_integers():
    def saturated(values, low, high):
        return casts.saturate(torch.tensor(values, dtype=torch.float64), low, high).tolist()

    low, high = -(2**63), 2**63 - 1
    ends = [2.0**63, 2.0**63 - 1024, 2.0**63 - 2048, -(2.0**63), -(2.0**64), math.inf, 2.0**62]
    expected = [high, 2**63 - 1024, 2**63 - 2048, low, low, high, 2**62]
    assert saturated(ends, low, high) == expected
    assert saturated([-(2.0**53) - 2, math.nan], low, high) == [-(2**53) - 2, 0]
    whole = torch.tensor([high, low, 300, -300])
    assert casts.saturate(whole, -128, 127).tolist() == [127, -128, 127, -128]
    assert casts.saturate(whole, low, high).tolist() == whole.tolist()
    low, high = -(2**31), 2**31 - 1
    ends = [2.0**31 - 1, 2.0**31, -(2.0**31), -(2.0**31) - 1]
    assert saturated(ends, low, high) == [high, high, low, low]


def to_odd(value: float) -> float:
    """The float32 toward zero of ``value``, its last bit set if it is not ``value``."""
    if math.isnan(value) or math.isinf(value) or value == 0:
        return value
    spacing = Fraction(2) ** (max(math.frexp(value)[1], -125) - 24)
    count = int(Fraction(abs(value)) / spacing)
    if count * spacing != abs(Fraction(value)):
        count |= 1
    return math.copysign(float(count * spacing), value)


def test_wide_values_are_rounded_to_odd():
    steps = (0, 1, 2, 3, 2**22 + 1, 2**23 - 1)
    parts = (0.0, 2.0**-28, 0.25, 0.5, 0.75, 1 - 2.0**-28)
    values = [
        sign * (2**23 + step + part) * 2.0**exponent
        for sign, step, part, exponent in itertools.product(
            (1, -1), steps, parts, (-172, -150, -140, -23, 0, 100)
        )
    ]
    values += [0.0, 1e300, -1e300]
    wide = torch.tensor(values, dtype=torch.float64)
    found = casts.to_narrower(wide)
    assert found.dtype is torch.float32
    largest = torch.finfo(torch.float32).max
    expected = [min(max(to_odd(value), -largest), largest) for value in values]
    assert found.tolist() == expected
    for special in (math.inf, -math.inf):
        assert casts.to_narrower(torch.tensor([special], dtype=torch.float64)).item() == special
    assert casts.to_narrower(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()
    narrow = torch.tensor([1.5])
    assert casts.to_narrower(narrow) is narrow


@pytest.mark.parametrize("data_type", ["HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2"])
def test_a_wide_value_beside_a_midpoint_is_rounded_once(data_type):
    bits = {"HALF": 10, "BFLOAT16": 7, "FP8_E4M3": 3, "FP8_E5M2": 2}[data_type]
    step = 2.0**-bits
    low, middle, high = 1.0 + step, 1.0 + 1.5 * step, 1.0 + 2 * step
    tiny = 2.0**-40
    # The midpoint goes up to the even neighbour here, and down from between 1 and 1 + step.
    values = [middle - tiny, middle, middle + tiny, 1 + step / 2, 1 + step / 2 + tiny]
    values += [middle - 2.0**-23 - tiny, middle - 2.0**-23 + tiny]
    assert store(values, data_type) == [low, high, high, 1.0, low, low, low]
    assert store([-value for value in values], data_type) == [
        -value for value in (low, high, high, 1.0, low, low, low)
    ]


def test_eight_bit_floats_saturate():
    for data_type, largest in (("FP8_E4M3", 448.0), ("FP8_E5M2", 57344.0)):
        for dtype in (torch.float32, torch.float64):
            assert store([1e6, -1e6, math.inf, largest * 1.01], data_type, dtype) == [
                largest,
                -largest,
                largest,
                largest,
            ]
        assert math.isnan(store([math.nan], data_type)[0])


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_four_bit_floats_round_to_even_codes():
    for index, (low, high) in enumerate(itertools.pairwise(E2M1)):
        middle = (low + high) / 2
        even = low if index % 2 == 0 else high
        values = [middle - 1e-6, middle, middle + 1e-6, low, high]
        assert store(values, "FP4_E2M1") == [low, even, high, low, high]
        assert store([-v for v in values], "FP4_E2M1") == [-low, -even, -high, -low, -high]
    assert store([6.01, 1e9, math.inf, math.nan, -math.inf], "FP4_E2M1") == [6, 6, 6, 6, -6]
    codes = casts.encode_e2m1(torch.tensor([-0.0, 0.0, -0.1, -6.0, 0.3]))
    assert codes.tolist() == [8, 0, 8, 15, 1]
    assert casts.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [
        *E2M1,
        *(-value for value in E2M1),
    ]


def test_powers_of_two_are_rounded_to_even_codes():
    values, expected = [], []
    for exponent in (-127, -126, -125, -2, -1, 0, 1, 2, 63, 125, 126):
        for part in (1.0, 1.25, 1.5 - 2.0**-20, 1.5, 1.5 + 2.0**-20, 1.75):
            values.append(part * 2.0**exponent)
            code = exponent + 127
            up = part > 1.5 or (part == 1.5 and code % 2 == 1)
            expected.append(code + up)
    found = casts.encode_e8m0(torch.tensor(values, dtype=torch.float64))
    assert found.dtype is torch.uint8 and found.tolist() == expected
    special = [0.0, -0.0, 2.0**-128, 2.0**-140, 2.0**127, 1.9 * 2.0**127, 2.0**300, math.inf]
    special += [-1.0, -math.inf, math.nan, -(2.0**-200)]
    found = casts.encode_e8m0(torch.tensor(special, dtype=torch.float64)).tolist()
    assert found == [0, 0, 0, 0, 254, 254, 254, 254, 255, 255, 255, 255]


# Dims and strides in elements: dense, odd, permuted, with gaps, and a row of odd length.
PACKED = [
    ((4,), (1,)),
    ((5,), (1,)),
    ((2, 3), (3, 1)),
    ((3, 3), (3, 1)),
    ((3, 4), (1, 3)),
    ((2, 3), (5, 1)),
    ((3, 2), (5, 2)),
    ((2, 2, 2), (1, 8, 3)),
    ((1, 1), (1, 1)),
]


@pytest.mark.parametrize(("dim", "stride"), PACKED)
def test_nibbles_are_placed_by_strides_and_others_kept(dim, stride):
    target = record(dim, stride, "INT4")
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, dim, generator=generator, dtype=torch.uint8)
    before = torch.randint(0, 256, (20,), generator=generator, dtype=torch.uint8)
    output = before.clone()
    casts.pack_codes(output, codes, target)
    nibbles = [nibble for byte in before.tolist() for nibble in (byte & 15, byte >> 4)]
    places = {}
    for index in itertools.product(*(range(extent) for extent in dim)):
        place = sum(i * step for i, step in zip(index, stride, strict=True))
        nibbles[place] = places[index] = int(codes[index])
    expected = [low + 16 * high for low, high in zip(nibbles[0::2], nibbles[1::2], strict=True)]
    assert output.tolist() == expected
    found = casts.unpack_codes(output, target)
    assert all(found[index] == code for index, code in places.items())
    loaded = casts.loader(target, torch.float32, CPU)(output.view(torch.int8))
    assert all(loaded[index] == code - 16 * (code > 7) for index, code in places.items())


def test_the_type_of_arithmetic():
    wide = {"DOUBLE", "INT32", "INT64"}
    for data_type in ("FLOAT", "HALF", "BFLOAT16", "INT8", "UINT8", "BOOLEAN", "DOUBLE", *wide):
        expected = torch.float64 if data_type in wide else torch.float32
        assert casts.compute_dtype([record((1,), data_type=data_type)]) is expected
        both = [record((1,)), record((1,), data_type=data_type)]
        assert casts.compute_dtype(both) is expected
    assert casts.is_plain(record((1,)), torch.float32)
    assert not casts.is_plain(record((1,)), torch.float64)
    assert not casts.is_plain(record((2,), data_type="FP4_E2M1"), torch.uint8)


def test_a_type_must_be_set():
    unset = record((1,), data_type="NOT_SET")
    with pytest.raises(NotSupportedError, match="no data type"):
        casts.loader(unset, torch.float32, CPU)
    with pytest.raises(NotSupportedError, match="no data type"):
        casts.storer(unset)


def test_only_a_scalar_of_the_host_is_moved_to_the_device():
    scalar = tilewright.Graph().tensor((1,), data_type="FLOAT", is_pass_by_value=True)
    given, meta = torch.ones(1), torch.device("meta")
    assert casts.loader(scalar, torch.float64, meta)(given).device == meta
    assert casts.loader(scalar, torch.float32, CPU)(given) is given
    assert casts.loader(record((1,)), torch.float32, meta)(given) is given
