"""What only a GPU shows of Triton's rotary embedding: its tables, and strides in device memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU")

PAIRS, ROWS = 256, 2**15


def build(x: torch.Tensor, freqs: torch.Tensor, y_stride: Any = None, **attributes: Any) -> Any:
    graph = tw.Graph(io_data_type=x.dtype)
    source = graph.tensor(x.shape, x.stride(), name="x")
    angles = graph.tensor(freqs.shape, freqs.stride(), freqs.dtype, name="freqs")
    out = graph.rope(source, angles, **attributes).set_output(True).set_name("y")
    out.set_dim(x.shape).set_stride(y_stride or x.stride())
    graph.build()
    assert graph.selected_engine == "triton"
    return graph


def check_tables(patterns: torch.Tensor, call: Any) -> int:
    """How many of the cosines and sines of these bit patterns are not the nearest float32."""
    _, y, frame_freqs, frame = call
    frame_freqs.copy_(patterns.to(torch.int32).view(torch.float32).view_as(frame_freqs))
    frame.launch()
    angle = frame_freqs.double()
    wrong = 0
    for got, want in ((y[..., :PAIRS], angle.cos()), (y[..., PAIRS:], angle.sin())):
        want = want.float()
        known = ~want.isnan()
        wrong += int((got != want)[known].sum()) + int((got.isnan() == known).sum())
    return wrong


@pytest.fixture
def call() -> Any:
    """Rows of ones and zeros, which a rotation makes the cosines and sines themselves."""
    x = torch.zeros(1, 1, ROWS, 2 * PAIRS, device="cuda")
    x[..., :PAIRS] = 1.0
    y = torch.empty_like(x)
    freqs = torch.zeros(1, 1, ROWS, PAIRS, device="cuda")
    frame = build(x, freqs).bind({"x": x, "freqs": freqs, "y": y})
    return x, y, freqs, frame


@pytest.mark.L0
def test_tables_hold_the_nearest_numbers(call: Any) -> None:
    # A prime step through all 2^32 patterns: every exponent, NaN and infinities too. The nearest
    # is decided in float64 on both sides, which may differ at one angle in 2^28.
    index = torch.arange(PAIRS * ROWS, device="cuda", dtype=torch.int64)
    assert check_tables(index * 509, call) <= 1


@pytest.mark.L2
def test_tables_of_every_angle(call: Any) -> None:
    index = torch.arange(PAIRS * ROWS, device="cuda", dtype=torch.int64)
    wrong = sum(check_tables(index + start, call) for start in range(0, 2**32, PAIRS * ROWS))
    assert wrong <= 64


@pytest.mark.L0
def test_strides_beyond_32_bits_are_addressed() -> None:
    # B1: the address truncated to 32 bits holds a decoy inside the allocation, on both sides.
    step = 2**32 + 16
    try:
        storage = torch.empty(step + 128, dtype=torch.bfloat16, device="cuda")
        target = torch.empty(step + 128, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("16 GiB of device memory are not free")
    storage[:192].fill_(777.0)
    target[:192].fill_(-1.0)
    generator = torch.Generator().manual_seed(1)
    for axis in (0, 1, 2):
        dim, stride = [1, 1, 1, 128], [128, 128, 128, 1]
        dim[axis], stride[axis] = 2, step
        x, y = storage.as_strided(dim, stride), target.as_strided(dim, stride)
        x.copy_(torch.randn(dim, generator=generator))
        freqs = torch.randn(1, 1, dim[2], 64, generator=generator).cuda()
        build(x, freqs, y.stride()).execute({"x": x, "freqs": freqs, "y": y})
        apart = torch.empty(dim, dtype=torch.bfloat16, device="cuda")
        build(x, freqs, apart.stride()).execute({"x": x, "freqs": freqs, "y": apart})
        angle = torch.cat((freqs, freqs), -1).double()
        turned = torch.cat((-x[..., 64:], x[..., :64]), -1)
        want = x.double() * angle.cos() + turned.double() * angle.sin()
        assert (apart.double() - want).abs().max() <= 2**-7 * want.abs().max()
        assert torch.equal(y, apart)
        assert torch.all(target[128:192] == -1.0), "nothing landed at the narrow address"
