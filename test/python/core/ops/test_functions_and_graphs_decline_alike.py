"""A function and a graph of the same layout are taken, or declined, by the same engines."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.errors import NotSupportedError
from tilewright.ops import rms_norm
from tilewright.ops.plan_cache import cached_explanations, clear_plan_cache

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted_functions")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE)


# One of them at least is declined by the Triton engine: its rows step along four axes.
LAYOUTS = {
    "compact": lambda: draw(3, 4, 16),
    "rows with gaps": lambda: draw(3, 4, 24)[..., :16],
    "every second element": lambda: draw(3, 4, 32)[..., ::2],
    "one row for all": lambda: draw(1, 1, 16).expand(3, 4, 16),
    "axes in another order": lambda: draw(2, 3, 2, 3, 16).permute(3, 1, 0, 2, 4),
    "reversed axes with gaps": lambda: draw(3, 5, 3, 5, 20)[:, ::2, :, ::2, :16].permute(
        2, 1, 3, 0, 4
    ),
}


def rms_graph(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> Any:
    graph = tw.Graph(intermediate_data_type="float32", handle=tw.create_handle(DEVICE))
    source = graph.tensor(x.shape, x.stride(), x.dtype, name="x")
    ones = (1,) * (x.dim() - 1)
    scale = graph.tensor((*ones, x.shape[-1]), data_type=weight.dtype, name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    made, _ = graph.rmsnorm(phase, source, scale, None, graph.tensor_scalar(1e-6))
    made.set_output(True).set_name("y").set_data_type(y.dtype)
    made.set_dim(y.shape).set_stride(y.stride())
    graph.build()
    return graph


def of_engine(explanation: Any, name: str) -> Any:
    return next(verdict for verdict in explanation.verdicts if verdict.engine_name == name)


def test_a_layout_is_declined_alike() -> None:
    # G5: what planning admits for a graph is what a function's own choice comes to.
    declined = set()
    for layout, make in LAYOUTS.items():
        x, weight = make(), draw(16)
        y = torch.empty_like(x)
        of_graph = rms_graph(x, weight, y).explain()
        clear_plan_cache()
        rms_norm(x, weight, out=y)
        (of_function,) = cached_explanations()
        assert of_function.selected is not None and of_graph.selected is not None
        assert of_function.selected.name == of_graph.selected.name, layout
        for verdict in of_graph.verdicts:
            name = verdict.engine_name
            other = of_engine(of_function, name)
            assert (other.is_taken, other.reason) == (verdict.is_taken, verdict.reason), layout
            if verdict.is_taken:
                result = rms_norm(x, weight, engine=name)
                assert torch.allclose(result, y, atol=1e-5), (layout, name)
            else:
                declined.add((layout, name))
                with pytest.raises(NotSupportedError) as refusal:
                    rms_norm(x, weight, engine=name)
                assert verdict.reason in str(refusal.value), (layout, name)
    taken_and_declined = {name for _, name in declined}
    assert "triton" in taken_and_declined, "no layout here shows a decline of an engine that can"
