"""ops.quantize and ops.dequantize against a search over every code, block by block."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.errors import BindingError, NotSupportedError

pytestmark = pytest.mark.L0

# Element type (None: E2M1), its largest exponent, its largest number, the default block.
FORMATS: dict[str, tuple[Any, int, float, int]] = {
    "mxfp8_e4m3": (torch.float8_e4m3fn, 8, 448.0, 32),
    "mxfp8_e5m2": (torch.float8_e5m2, 15, 57344.0, 32),
    "mxfp4": (None, 2, 6.0, 32),
    "nvfp4": (None, 2, 6.0, 16),
}


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-9, 9, shape, generator=generator).double())
    return (x * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)


@functools.cache
def values_of(dtype: torch.dtype | None) -> list[float]:
    """The magnitudes of a format's finite codes, in the order of the codes."""
    if dtype is None:
        return [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    decoded = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return decoded[torch.isfinite(decoded)].tolist()


def nearest(value: float, dtype: torch.dtype | None) -> float:
    """The nearest number of the format: of two equally near ones that of the even code."""
    values, magnitude = values_of(dtype), abs(value)
    upper = bisect.bisect_left(values, magnitude)
    if upper == len(values):
        return math.copysign(values[-1], value)
    code = upper
    if upper and values[upper] != magnitude:
        down, up = magnitude - values[upper - 1], values[upper] - magnitude
        if down < up or (down == up and (upper - 1) % 2 == 0):
            code = upper - 1
    return math.copysign(values[code], value)


def expected_of(x: torch.Tensor, format: str, axis: int, block: int) -> tuple[Any, Any]:
    """(elements, scales) as float64 of their values."""
    dtype, emax, largest, _ = FORMATS[format]
    rows = x.double().movedim(axis, -1)
    count = -(-rows.shape[-1] // block)
    elements = torch.zeros(rows.shape, dtype=torch.float64)
    scales = torch.zeros((*rows.shape[:-1], count), dtype=torch.float64)
    for index in itertools.product(*(range(n) for n in rows.shape[:-1])):
        for c in range(count):
            part = rows[index][c * block : (c + 1) * block].tolist()
            amax = max(abs(value) for value in part)
            if format == "nvfp4":
                scale = nearest(amax / largest, torch.float8_e4m3fn)
            else:
                scale = 2.0 ** (math.floor(math.log2(amax)) - emax) if amax else 2.0**-127
            scales[index][c] = scale
            found = [nearest(v / scale, dtype) if scale else 0.0 for v in part]
            elements[index][c * block : c * block + len(part)] = torch.tensor(found).double()
    return elements.movedim(-1, axis), scales.movedim(-1, axis)


def decoded(elements: torch.Tensor) -> torch.Tensor:
    """The values of elements in float64; bytes are two E2M1 codes, the low half first."""
    if elements.dtype is not torch.uint8:
        return elements.double()
    table = torch.tensor([*values_of(None), *(-v for v in values_of(None))], dtype=torch.float64)
    codes = torch.stack((elements & 15, elements >> 4), -1).flatten(-2)
    return table[codes.long()]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_and_scales(format: str, axis: int, dtype: torch.dtype) -> None:
    block = FORMATS[format][3]
    x = draw(1, *((3, 70) if axis else (70, 4)), dtype=dtype)
    if axis == 1:
        x = x.t().contiguous().t()
    elements, scales = ops.quantize(x, format, axis=axis)
    wanted, wanted_scales = expected_of(x, format, axis, block)
    assert elements.is_contiguous() and scales.is_contiguous()
    assert torch.equal(scales.double(), wanted_scales)
    assert torch.equal(decoded(elements), wanted)
    spread = wanted_scales.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    back = ops.dequantize(elements, scales, format, axis=axis, dtype=torch.float64)
    assert torch.equal(back, wanted * spread)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_exact_ties_round_to_even(format: str) -> None:
    # The first element makes the scale 1 (nvfp4: 0.75, no power of two).
    dtype, emax, largest, block = FORMATS[format]
    scale = 0.75 if format == "nvfp4" else 1.0
    values = values_of(dtype)
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)][: block // 2 - 1]
    row = [largest if format == "nvfp4" else 2.0**emax, *ties, *(-t for t in ties)]
    x = torch.tensor(row).double().unsqueeze(0) * scale
    if x.shape[1] % 2:
        x = torch.cat((x, x[:, -1:]), 1)
    elements, scales = ops.quantize(x, format)
    assert scales.double().tolist() == [[scale]]
    expected = [nearest(value / scale, dtype) for value in x[0].tolist()]
    assert decoded(elements)[0].tolist() == expected


def test_tiles_hold_the_plain_scales() -> None:
    # Row r and column c of a tile at (r % 32) * 16 + (r // 32) * 4 + c.
    x = draw(2, 2, 130, 160)
    for axis in (2, 1):
        plain_elements, plain = ops.quantize(x, "mxfp8_e4m3", axis=axis)
        elements, tiled = ops.quantize(x, "mxfp8_e4m3", axis=axis, scale_layout="128x4")
        assert torch.equal(elements.view(torch.uint8), plain_elements.view(torch.uint8))
        rows_first = plain if axis == 2 else plain.transpose(1, 2)
        batches, rows, columns = rows_first.shape
        height, width = -(-rows // 128) * 128, -(-columns // 4) * 4
        assert tiled.shape == ((2, height, width) if axis == 2 else (2, width, height))
        flat = tiled.view(torch.uint8).as_strided((2 * height * width,), (1,)).tolist()
        codes = rows_first.view(torch.uint8)
        found = [0] * len(flat)
        for b, r, c in itertools.product(range(batches), range(rows), range(columns)):
            tile = (r // 128) * (width // 4) + c // 4
            inside = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            found[b * height * width + tile * 512 + inside] = int(codes[b, r, c])
        assert flat == found
        back = ops.dequantize(elements, tiled, "mxfp8_e4m3", axis=axis, scale_layout="128x4")
        assert torch.equal(back, ops.dequantize(plain_elements, plain, "mxfp8_e4m3", axis=axis))


def test_edges() -> None:
    # Field report 15: zeros, an amax near 1e-37, saturation.
    zeros, scales = ops.quantize(torch.zeros(1, 32), "mxfp8_e4m3")
    assert (zeros.double() == 0).all() and int(scales.view(torch.uint8)) == 0
    assert (ops.dequantize(zeros, scales, "mxfp8_e4m3") == 0).all()
    for format in FORMATS:
        tiny = torch.full((1, 32), 1e-37)
        back = ops.dequantize(*ops.quantize(tiny, format), format)
        assert torch.isfinite(back).all() and (back <= tiny * 1.25).all()
    full = torch.full((1, 32), 1.9999)
    elements, scales = ops.quantize(full, "mxfp8_e4m3")
    assert (elements.double() == 448).all() and scales.double().tolist() == [[2.0**-8]]


def test_a_block_of_another_size_and_empty_tensors() -> None:
    x = draw(3, 4, 24)
    elements, scales = ops.quantize(x, "mxfp8_e5m2", block=8)
    wanted, wanted_scales = expected_of(x, "mxfp8_e5m2", -1, 8)
    assert torch.equal(decoded(elements), wanted)
    assert torch.equal(scales.double(), wanted_scales)
    elements, scales = ops.quantize(torch.empty(0, 32), "mxfp4")
    assert elements.shape == (0, 16) and scales.shape == (0, 1)
    assert ops.dequantize(elements, scales, "mxfp4").shape == (0, 32)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("scale_layout", ["plain", "128x4"])
def test_operators(format: str, scale_layout: str) -> None:
    x = draw(4, 5, 64)
    operators = torch.ops.tilewright
    block = FORMATS[format][3]
    made = operators.quantize(x, format, 1, block, scale_layout, None)
    for operator, arguments in (
        (operators.quantize, (x, format, 1, block, scale_layout, None)),
        (operators.dequantize, (*made, format, 1, block, scale_layout, torch.bfloat16, None)),
    ):
        # test_schema multiplies what it compares, which PyTorch cannot do with FP8.
        utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        outcome = torch.library.opcheck(operator.default, arguments, test_utils=utilities)
        assert set(outcome.values()) == {"SUCCESS"}


def test_compiled() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        elements, scales = ops.quantize(x, "nvfp4", scale_layout="128x4")
        return ops.dequantize(elements, scales, "nvfp4", scale_layout="128x4")

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 130):
        x = draw(rows, rows, 64)
        assert torch.equal(compiled(x), call(x))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: ops.quantize(x, "int8"), "format: got 'int8'"),
        (lambda x: ops.quantize(x, "mxfp4", axis=2), "axis: got 2"),
        (lambda x: ops.quantize(x[None], "mxfp4", axis=0, scale_layout="128x4"), "axis: got 0"),
        (lambda x: ops.quantize(x, "mxfp4", scale_layout="tiled"), "scale_layout: got 'tiled'"),
        (lambda x: ops.quantize(x, "mxfp4", block=0), "block: got 0"),
        (lambda x: ops.quantize(x, "mxfp4", block=2.5), "block: got 2.5"),
        (lambda x: ops.quantize(x[:, :7], "nvfp4"), "x: shape"),
        (lambda x: ops.quantize(x.int(), "nvfp4"), "x: data type"),
        (lambda x: ops.dequantize(x, x, "mxfp4"), "elements: data type"),
        (
            lambda x: ops.dequantize(ops.quantize(x, "mxfp4")[0], x, "mxfp4"),
            "scales: data type",
        ),
        (
            lambda x: ops.dequantize(*ops.quantize(x, "mxfp4", block=8), "mxfp4"),
            "scales: shape",
        ),
        (
            lambda x: ops.dequantize(*ops.quantize(x, "mxfp4"), "mxfp4", dtype=torch.int8),
            "dtype: got",
        ),
    ],
)
def test_refusals_name_the_argument(call: Any, named: str) -> None:
    with pytest.raises(BindingError, match=named):
        call(torch.ones(2, 64))


def test_no_gradient_is_promised() -> None:
    with pytest.raises(NotSupportedError, match="x requires grad"):
        ops.quantize(torch.ones(2, 32, requires_grad=True), "mxfp4")
