"""Exact ties: made exactly, rounded to even by the engine, missed by an approximate reciprocal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright
from tilewright.oracle import block_scale, formats
from tilewright.testing import data
from tilewright.testing.data.ties import midpoints

pytestmark = pytest.mark.L0

ELEMENTS = ["FP4_E2M1", "FP8_E4M3", "FP8_E5M2"]
# Scales that are no powers of two: their reciprocals are rounded.
SCALES = ["FP8_E4M3", "FLOAT"]

Quantizer = Callable[[torch.Tensor, str, str, int], tuple[torch.Tensor, torch.Tensor]]


def _case(element: str, scale: str, seed: int = 0, **parameters: Any) -> data.DataCase:
    generator = torch.Generator().manual_seed(seed)
    return data.block_scale_ties(
        generator, element_type=element, scale_type=scale, block_size=16, **parameters
    )


def engine(
    x: torch.Tensor, element: str, scale: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as a plan of the library makes them."""
    graph = tilewright.Graph(io_data_type=x.dtype)
    source = graph.tensor_like(x)
    y, scales = graph.block_scale_quantize(source, block)
    y.set_output(True).set_data_type(element)
    scales.set_output(True).set_data_type(scale)
    graph.build()
    scale_type = torch.float32 if scale == "FLOAT" else torch.float8_e4m3fn
    made = torch.empty((x.shape[0], x.shape[1] // block), dtype=scale_type)
    packed = element == "FP4_E2M1"
    codes = torch.empty(x.numel() // (2 if packed else 1), dtype=torch.uint8)
    eight = {"FP8_E4M3": torch.float8_e4m3fn, "FP8_E5M2": torch.float8_e5m2}
    elements = codes if packed else codes.view(eight[element]).reshape(x.shape)
    graph.execute({source: x, y: elements, scales: made}, torch.empty(graph.get_workspace_size()))
    found = formats.unpack_nibbles(codes) if packed else codes.to(torch.int64)
    return found.reshape(x.shape), formats.to_float64(made)


def _by_reciprocal(reciprocal: Callable[[torch.Tensor], torch.Tensor]) -> Quantizer:
    """A quantizer right in everything but this: it multiplies by the scale's reciprocal."""

    def quantize(
        x: torch.Tensor, element: str, scale: str, block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.reshape(x.shape[0], -1, block)
        scales = block_scale.block_scales(blocks.abs().amax(-1).double(), element, scale)
        quotient = blocks * reciprocal(scales.float()).unsqueeze(-1)
        return formats.encode(quotient.double(), element).reshape(x.shape), scales

    return quantize


def _one_step_off(scales: torch.Tensor) -> torch.Tensor:
    """A reciprocal with the error of one unit in the last place that fast hardware ones have."""
    return torch.nextafter(1.0 / scales, torch.tensor(float("inf")))


rounded_reciprocal = _by_reciprocal(lambda scales: 1.0 / scales)
approximate_reciprocal = _by_reciprocal(_one_step_off)


def _wrong(quantizer: Quantizer, element: str, scale: str) -> int:
    """How many codes of a tie case a quantizer gets wrong; its scales must be right."""
    case = _case(element, scale)
    codes, scales = quantizer(case["x"], element, scale, 16)
    assert torch.equal(scales, case["expected_scales"].double())
    return int((codes != case["expected_codes"].long()).sum())


@pytest.mark.parametrize("scale", [*SCALES, "FP8_E8M0"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_ties_are_exact_and_signed_and_the_reference_rounds_them_to_even(
    element: str, scale: str
) -> None:
    case = _case(element, scale)
    x, codes, scales = case["x"].double(), case["expected_codes"].long(), case["expected_scales"]
    found = block_scale.quantize(case["x"], element, scale, block_size=16)
    assert torch.equal(found.scales, scales.double())
    assert torch.equal(formats.encode(found.elements, element), codes)
    # The quotient is a midpoint or the largest number, exactly; both signs occur.
    quotient = (x.reshape(8, 8, 16) / scales.double().unsqueeze(-1)).reshape(-1)
    middle, _ = midpoints(element)
    top = formats.FORMATS[element].max_finite
    assert torch.isin(quotient.abs(), torch.cat([middle, middle.new_tensor([top])])).all()
    assert (quotient > 0).any()
    assert (quotient < 0).any()
    assert int((quotient.abs() == top).sum()) == 64
    assert bool((codes % 2 == 0)[quotient.reshape(codes.shape).abs() != top].all())
    mantissa, _ = torch.frexp(scales)
    assert bool((mantissa == 0.5).all()) == (scale == "FP8_E8M0")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_the_engine_rounds_every_tie_to_even(element: str, scale: str) -> None:
    assert _wrong(engine, element, scale) == 0


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("twin", [rounded_reciprocal, approximate_reciprocal])
def test_a_reciprocal_fails(twin: Quantizer, element: str, scale: str) -> None:
    assert _wrong(twin, element, scale) > 10


@pytest.mark.parametrize("element", ELEMENTS)
def test_random_data_does_not_see_the_reciprocal(element: str) -> None:
    """Why ties are needed: on random numbers the broken twin gives the very same codes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 128, generator=generator)
    right = engine(x, element, "FLOAT", 16)[0]
    broken = approximate_reciprocal(x, element, "FLOAT", 16)[0]
    assert len(right.unique()) > 8
    assert torch.equal(right, broken)


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_midpoint_of_a_format(element: str) -> None:
    case = data.format_ties(torch.Generator().manual_seed(1), element_type=element, copies=1)
    x, codes = case["x"], case["expected_codes"].long()
    numbers = {"FP4_E2M1": 8, "FP8_E4M3": 127, "FP8_E5M2": 124}[element]
    assert x.shape == (1, 2 * (numbers - 1))
    assert len(x.unique()) == x.numel()
    assert (codes % 2 == 0).all()
    assert torch.equal(formats.encode(x.double(), element), codes)
    # Some neighbouring code is exactly as far away.
    away = (x.double() - formats.decode(codes, element)).abs()
    others = [formats.decode(codes + step, element) for step in (-1, 1)]
    assert torch.stack([(other - x.double()).abs() == away for other in others]).any(0).all()
    dtype = {"FP8_E4M3": torch.float8_e4m3fn, "FP8_E5M2": torch.float8_e5m2}.get(element)
    if dtype is not None:
        assert torch.equal(x.to(dtype).view(torch.uint8).long(), codes)
        graph = tilewright.Graph(io_data_type=torch.float32)
        source = graph.tensor_like(x)
        out = graph.identity(source).set_output(True).set_data_type(element)
        graph.build()
        made = torch.empty(x.shape, dtype=dtype)
        graph.execute({source: x, out: made}, torch.empty(graph.get_workspace_size()))
        assert torch.equal(made.view(torch.uint8).long(), codes)


def test_rounding_half_away_fails() -> None:
    """The other classic: adding one half and cutting off."""
    middle, even = midpoints("FP4_E2M1")
    away = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    assert middle.tolist() == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert even.tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert int((away != even).sum()) == 4


def test_types_that_cannot_hold_the_ties_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold ties"):
        _case("FP8_E4M3", "FLOAT", dtype=torch.bfloat16)
    assert _case("FP4_E2M1", "FP8_E4M3", dtype=torch.bfloat16)["x"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="scale_type"):
        _case("FP4_E2M1", "HALF")
