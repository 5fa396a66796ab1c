"""The first call of a built plan may be inside of a capture, with addresses of any alignment."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

ROWS = 8


def norm(width: int) -> Any:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    x, scale = graph.tensor((ROWS, width), name="x"), graph.tensor((1, width), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, x, scale, None, graph.tensor_scalar(1e-6))
    y.set_output(True).set_name("y")
    graph.build()
    assert graph.selected_engine == "triton"
    return graph


def shifted(values: torch.Tensor, skip: int) -> torch.Tensor:
    """A copy ``skip`` elements behind an aligned address."""
    storage = torch.empty(values.numel() + skip, dtype=values.dtype, device="cuda")
    return storage[skip:].view(values.shape).copy_(values)


@pytest.mark.parametrize("way", ["execute", "frame"])
@pytest.mark.parametrize("skip", [0, 1], ids=["aligned", "odd"])
def test_the_first_call_is_captured(way: str, skip: int) -> None:
    # L2, L9: no module is loaded within a call, so a capture that begins with it holds. A width of
    # its own for each: the process has none of the kernels.
    width = 384 + 128 * (2 * skip + (way == "frame"))
    graph = norm(width)
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(ROWS, width, generator=generator, device="cuda").bfloat16()
    pack = {"x": x, "scale": torch.ones(1, width, device="cuda").bfloat16()}
    pack = {name: shifted(t, skip) for name, t in pack.items()}
    pack["y"] = shifted(torch.full_like(x, torch.nan), skip)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(recorded):
            if way == "execute":
                graph.execute(pack)
            else:
                graph.bind(pack).launch()
        recorded.replay()
        torch.cuda.synchronize()
    finally:
        recorded.reset()
    expected = F.rms_norm(x.double(), (width,), None, 1e-6)
    assert (pack["y"].double() - expected).abs().max() <= 2**-8 * expected.abs().max()
