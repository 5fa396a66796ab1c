"""The oracle's number formats: every code, ties, saturation, against hand-written values."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.oracle import formats

pytestmark = pytest.mark.L0

_TORCH_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "FP8_E4M3": torch.float8_e4m3fn,
    "FP8_E5M2": torch.float8_e5m2,
}


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, with NaN equal to NaN and zeros of one sign."""
    both_nan = torch.isnan(actual) & torch.isnan(expected)
    equal = (actual == expected) & (torch.signbit(actual) == torch.signbit(expected))
    return bool((both_nan | equal).all())


def test_e2m1_has_the_sixteen_values_of_the_specification() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor(positive + [-value for value in positive], dtype=torch.float64)
    assert _same(formats.decode(torch.arange(16), "FP4_E2M1"), expected)


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("FP8_E4M3", 0x7E, 448.0),
        ("FP8_E4M3", 0x08, 2.0**-6),
        ("FP8_E4M3", 0x01, 2.0**-9),
        ("FP8_E4M3", 0x38, 1.0),
        ("FP8_E4M3", 0xB9, -1.125),
        ("FP8_E5M2", 0x7B, 57344.0),
        ("FP8_E5M2", 0x7C, math.inf),
        ("FP8_E5M2", 0xFC, -math.inf),
        ("FP8_E5M2", 0x01, 2.0**-16),
        ("FP8_E8M0", 0, 2.0**-127),
        ("FP8_E8M0", 127, 1.0),
        ("FP8_E8M0", 254, 2.0**127),
    ],
)
def test_a_code_has_its_value(name: str, code: int, value: float) -> None:
    assert formats.decode(torch.tensor([code]), name).item() == value


@pytest.mark.parametrize(
    ("name", "code"),
    [("FP8_E4M3", 0x7F), ("FP8_E4M3", 0xFF), ("FP8_E5M2", 0x7D), ("FP8_E8M0", 255)],
)
def test_nan_codes_are_nan(name: str, code: int) -> None:
    assert torch.isnan(formats.decode(torch.tensor([code]), name)).all()


@pytest.mark.parametrize("name", ["FP8_E4M3", "FP8_E5M2", "FP8_E8M0"])
def test_every_8_bit_code_survives_and_agrees_with_torch(name: str) -> None:
    codes = torch.arange(256)
    values = formats.decode(codes, name)
    types = {**_TORCH_TYPES, "FP8_E8M0": torch.float8_e8m0fnu}
    theirs = codes.to(torch.uint8).view(types[name]).to(torch.float32).to(torch.float64)
    assert _same(values, theirs)
    numbers = ~torch.isnan(values)
    assert torch.equal(formats.encode(values, name, saturate=False)[numbers], codes[numbers])


@pytest.mark.parametrize("name", sorted(_TORCH_TYPES))
def test_rounding_agrees_with_torch_where_torch_rounds_once(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-30, 17, (20000,), generator=generator).to(torch.float64)
    values = torch.randn(20000, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    # Halfway points of the 8-bit types need few bits; float32 holds them all.
    values = values.to(torch.float32).to(torch.float64)
    halves = torch.arange(-4096, 4096, dtype=torch.float64) / 2.0**12
    values = torch.cat((values, halves, halves * 2.0**15))
    top = formats.FORMATS[name].max_finite
    values = values[values.abs() <= top]
    theirs = values.to(torch.float32).to(_TORCH_TYPES[name]).to(torch.float64)
    assert _same(formats.round_to(values, name), theirs)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_e2m1_ties_go_to_even(value: float, rounded: float) -> None:
    both = torch.tensor([value, -value], dtype=torch.float64)
    expected = torch.tensor([rounded, -rounded], dtype=torch.float64)
    assert _same(formats.round_to(both, "FP4_E2M1"), expected)
    below, above = math.nextafter(value, 0.0), math.nextafter(value, 9.0)
    assert formats.round_to(torch.tensor([below]).double(), "FP4_E2M1") <= rounded
    low, high = (
        formats.round_to(torch.tensor([x], dtype=torch.float64), "FP4_E2M1").item()
        for x in (below, above)
    )
    assert low < high


@pytest.mark.parametrize(
    ("name", "value", "rounded"),
    [
        # Between 1 and 1.125: code 0x38 is even. Between 1.125 and 1.25: 0x3A is even.
        ("FP8_E4M3", 1.0625, 1.0),
        ("FP8_E4M3", 1.1875, 1.25),
        ("FP8_E4M3", 2.0**-10, 0.0),
        ("FP8_E4M3", 3 * 2.0**-10, 2.0**-8),
        ("FP8_E4M3", 432.0, 416.0 + 32.0),
        ("FP8_E4M3", 400.0, 384.0),
        ("FP8_E5M2", 1.125, 1.0),
        ("FP8_E5M2", 1.375, 1.5),
        ("FP8_E5M2", 2.0**-17, 0.0),
        ("BFLOAT16", 1.0 + 2.0**-8, 1.0),
        ("HALF", 1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),
    ],
)
def test_ties_go_to_even(name: str, value: float, rounded: float) -> None:
    given = torch.tensor([value, -value], dtype=torch.float64)
    assert formats.round_to(given, name).tolist() == [rounded, -rounded]


def test_saturation_and_overflow() -> None:
    given = torch.tensor([448.0, 463.0, 464.0, 1e30, math.inf, -math.inf], dtype=torch.float64)
    held = formats.round_to(given, "FP8_E4M3").tolist()
    assert held == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
    loose = formats.round_to(given, "FP8_E4M3", saturate=False)
    # 464 is halfway to 480, which is the NaN code, and 448 has the even code.
    assert loose.tolist()[:2] == [448.0, 448.0]
    assert torch.isnan(loose[3:]).all()
    given = torch.tensor([61439.0, 61440.0, -math.inf], dtype=torch.float64)
    assert formats.round_to(given, "FP8_E5M2").tolist() == [57344.0, 57344.0, -57344.0]
    assert formats.round_to(given, "FP8_E5M2", saturate=False).tolist() == [
        57344.0,
        math.inf,
        -math.inf,
    ]
    assert formats.round_to(torch.tensor([1e9, -7.0]), "FP4_E2M1").tolist() == [6.0, -6.0]
    assert formats.round_to(torch.tensor([65520.0]), "HALF").item() == math.inf


def test_nan_stays_nan_and_zero_keeps_its_sign() -> None:
    given = torch.tensor([math.nan, -0.0, 0.0], dtype=torch.float64)
    for name in ("FP8_E4M3", "FP8_E5M2", "HALF", "BFLOAT16", "FLOAT"):
        rounded = formats.round_to(given, name)
        assert torch.isnan(rounded[0])
        assert torch.signbit(rounded).tolist()[1:] == [True, False]
        assert formats.encode(given, name)[1:].tolist() == [1 << formats.FORMATS[name].bits - 1, 0]


def test_e8m0_rounds_to_the_nearest_power_of_two() -> None:
    given = torch.tensor([1.0, 1.4, 1.6, 3.0, 1.5, 0.0, 1e-45, -1.0, math.inf], dtype=torch.float64)
    # Of the ties, 3 lies between codes 128 and 129, 1.5 between 127 and 128: both go to 128.
    assert formats.encode(given, "FP8_E8M0").tolist() == [127, 127, 128, 128, 128, 0, 0, 255, 254]


def test_powers_and_logarithms_are_exact() -> None:
    exponents = torch.arange(-1074, 1024)
    powers = formats.power_of_two(exponents)
    assert powers.tolist() == [math.ldexp(1.0, e) for e in range(-1074, 1024)]
    assert torch.equal(formats.floor_log2(powers), exponents)
    just_below = torch.nextafter(powers[1000:], torch.zeros(1, dtype=torch.float64))
    assert torch.equal(formats.floor_log2(just_below), exponents[1000:] - 1)


def test_nibbles_pack_low_first() -> None:
    assert formats.pack_nibbles(torch.tensor([[1, 2, 15, 0]])).tolist() == [[0x21, 0x0F]]
    assert formats.unpack_nibbles(torch.tensor([[0x21, 0x0F]])).tolist() == [[1, 2, 15, 0]]
    with pytest.raises(ValueError, match="even"):
        formats.pack_nibbles(torch.tensor([1]))


def test_format_of_reads_names_records_and_torch_types() -> None:
    from tilewright.dtypes import DataType

    assert formats.format_of(DataType.FP8_E4M3) is formats.FORMATS["FP8_E4M3"]
    assert formats.format_of(torch.bfloat16) is formats.FORMATS["BFLOAT16"]
    assert formats.format_of(torch.int32) is None
    assert formats.format_of(DataType.BOOLEAN) is None
    for name, entry in formats.FORMATS.items():
        assert DataType[name].bits == entry.bits
        assert DataType[name].layout.largest == entry.max_finite
    assert [formats.FORMATS[n].max_exponent for n in ("FP8_E4M3", "FP8_E5M2", "FP4_E2M1")] == [
        8,
        15,
        2,
    ]
