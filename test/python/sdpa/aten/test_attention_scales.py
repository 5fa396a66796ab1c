"""Block scales of 8-bit attention by position, and stores that scale and report a maximum."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from tilewright import tensor_reordering
from tilewright.dtypes import DataType
from tilewright.engines.aten.attention_compose import _scaled
from tilewright.engines.aten.attention_fp8 import rounding_to
from tilewright.engines.aten.attention_mxfp8 import _reader, _scale_reader
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

SEQUENCE, DEPTH = 2, 3
TILED = tensor_reordering.F8_128x4


def record(dim, stride=None, reordering=tensor_reordering.NONE, ragged=None):
    stride = stride or torch.empty(dim, device="meta").stride()
    return SimpleNamespace(dim=dim, stride=stride, reordering_type=reordering, ragged_offset=ragged)


def operation(port, operand, scale):
    return SimpleNamespace(
        inputs={port: operand, f"descale_{port}": scale}, title=lambda: "sdpa_mxfp8"
    )


def draw(*dim, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, dim, generator=generator).float().exp2()


def place(row, column, columns):
    """Where F8_128x4 holds the scale of a row and a block column of a plane."""
    inner = row % 128
    tile = (row // 128) * (columns // 4) + column // 4
    return tile * 512 + (inner % 32) * 16 + (inner // 32) * 4 + column % 4


@pytest.mark.parametrize("axis", [SEQUENCE, DEPTH])
def test_each_element_has_the_scale_of_its_block(axis):
    batch, heads, rows, depth = 2, 3, 70, 40
    dim = [batch, heads, rows, depth]
    dim[axis] = -(-dim[axis] // 32)
    # As stored: one more of each extent than is used.
    stored = [extent + (place > 1) for place, extent in enumerate(dim)]
    scale = draw(*stored)
    values = torch.randn((batch, heads, rows, depth), generator=torch.Generator().manual_seed(2))
    op = operation("q", record(tuple(values.shape)), record(tuple(stored)))
    given = {"q": values.half(), "descale_q": scale.to(torch.float8_e8m0fnu), "other": 5}
    found = _reader(op, {"q": axis})(given)
    assert found["other"] == 5 and found["descale_q"] is given["descale_q"]
    assert found["q"].dtype is torch.float32
    for b, h in itertools.product(range(batch), range(heads)):
        for s, d in itertools.product(range(0, rows, 3), range(depth)):
            block = (s // 32, d) if axis == SEQUENCE else (s, d // 32)
            expected = values[b, h, s, d].half().float() * scale[(b, h, *block)]
            assert found["q"][b, h, s, d] == expected


@pytest.mark.parametrize("axis", [SEQUENCE, DEPTH])
@pytest.mark.parametrize("inner", ["rows", "columns"])
def test_tiled_scales_by_position(axis, inner):
    rows, columns, batch, heads = 256, 8, 2, 1
    raw = draw(batch * heads * rows * columns).to(torch.float8_e8m0fnu)
    dim = (batch, heads, columns, rows) if axis == SEQUENCE else (batch, heads, rows, columns)
    # Whichever of the two is declared with stride 1, the tiles lie the same way.
    across = (1, columns) if inner == "columns" else (rows, 1)
    steps = across if axis == SEQUENCE else across[::-1]
    stride = (heads * rows * columns, rows * columns, *steps)
    op = operation("q", record((batch, heads, 1, 1)), record(dim, stride, TILED))
    found = _scale_reader(op, "q", axis)(raw.as_strided(dim, stride))
    assert found.shape == dim
    plane = raw.float().view(batch, heads, rows * columns)
    for b, r, c in itertools.product(range(batch), range(0, rows, 7), range(columns)):
        index = (c, r) if axis == SEQUENCE else (r, c)
        assert found[(b, 0, *index)] == plane[b, 0, place(r, c, columns)]


def test_scales_that_are_declined():
    def read(dim, stride=None, axis=DEPTH, ragged=None, reordering=TILED):
        operand = record((1, 1, 1, 1), ragged=ragged)
        return _scale_reader(operation("q", operand, record(dim, stride, reordering)), "q", axis)

    read((1, 2, 128, 4))
    read((1, 2, 4, 128), axis=SEQUENCE)
    read((1, 2, 128, 4), (1024, 512, 1, 128))
    for dim, axis in (
        ((1, 2, 64, 4), DEPTH),
        ((1, 2, 128, 6), DEPTH),
        ((1, 2, 128, 4), SEQUENCE),
        ((1, 2, 4, 64), SEQUENCE),
    ):
        with pytest.raises(NotSupportedError, match="must be a multiple of"):
            read(dim, axis=axis)
    for stride in ((1024, 512, 8, 1), (1024, 512, 4, 2), (1024, 512, 1, 256), (1024, 512, 2, 256)):
        with pytest.raises(NotSupportedError, match="without a gap"):
            read((1, 2, 128, 4), stride)
    with pytest.raises(NotSupportedError, match="q is ragged"):
        read((1, 2, 128, 4), ragged=object())
    # Plain scales may have any extents and strides.
    read((1, 2, 5, 3), (99, 50, 7, 2), reordering=tensor_reordering.NONE)


def test_a_store_that_scales_and_reports():
    def store(output, values):
        output.copy_(values)

    values = torch.tensor([1.0, -3.0, 2.0])
    assert _scaled(store, 1.0, None) is store
    for factor in (2.0, 0.5, torch.tensor(1.0), torch.tensor(4.0)):
        out = torch.zeros(3)
        _scaled(store, factor, None)(out, values)
        assert torch.equal(out, values * factor)
    amax, out = torch.tensor(0.5), torch.zeros(3)
    scaled = _scaled(store, 1.0, amax)
    scaled(out, values)
    assert torch.equal(out, values) and amax == 3.0
    scaled(out, values / 2)
    assert amax == 3.0
    _scaled(store, 10.0, amax)(out, values * 2)
    # The maximum is of what is not scaled yet.
    assert amax == 6.0 and torch.equal(out, values * 20)
    scaled(torch.zeros(0), torch.zeros(0))
    assert amax == 6.0


@pytest.mark.parametrize(("name", "largest"), [("FP8_E4M3", 448.0), ("FP8_E5M2", 57344.0)])
def test_rounding_saturates_and_keeps_what_is_no_number(name, largest):
    values = torch.tensor([1e9, -1e9, math.inf, -math.inf, 1.0, 1.0625, 1.1875, math.nan])
    found = rounding_to(DataType[name])(values)
    assert found.dtype is torch.float32 and math.isnan(found[-1])
    fine = [1.0, 1.0, 1.25]
    assert found[:-1].tolist() == [largest, -largest, largest, -largest, *fine]
