"""Operands, graphs and subjects for the tests of detectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from tilewright import Graph


@pytest.fixture
def operands() -> dict[str, torch.Tensor]:
    """Return a (2, 6, 8) and b (2, 6, 8) in float32, drawn from a seed."""
    import torch

    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(2, 6, 8, generator=generator) for name in ("a", "b")}


@pytest.fixture
def attention() -> Callable[[], tuple[Graph, dict[str, torch.Tensor]]]:
    """Return a function that declares causal attention with Stats, and gives its operands."""

    def declare() -> tuple[Graph, dict[str, torch.Tensor]]:
        import torch

        import tilewright

        generator = torch.Generator().manual_seed(12)
        shapes = {"q": (2, 4, 5, 16), "k": (2, 2, 7, 16), "v": (2, 2, 7, 16)}
        given = {n: torch.randn(*dim, generator=generator) for n, dim in shapes.items()}
        graph = tilewright.pygraph(io_data_type=torch.float32)
        declared = [graph.tensor_like(t).set_name(name) for name, t in given.items()]
        o, stats = graph.sdpa(*declared, attn_scale=0.25, use_causal_mask=True, generate_stats=True)
        o.set_output(True).set_name("O")
        stats.set_output(True).set_name("Stats")
        return graph, given

    return declare


@pytest.fixture
def activated_product() -> Callable[[], tuple[Graph, dict[str, torch.Tensor]]]:
    """Return a function that declares relu(A B), whose product is virtual, and its operands."""

    def declare() -> tuple[Graph, dict[str, torch.Tensor]]:
        import torch

        import tilewright

        generator = torch.Generator().manual_seed(13)
        given = {
            "A": torch.randn(2, 5, 8, generator=generator),
            "B": torch.randn(2, 8, 6, generator=generator),
        }
        graph = tilewright.pygraph(io_data_type=torch.float32, intermediate_data_type=torch.float32)
        product = graph.matmul(*(graph.tensor_like(t).set_name(n) for n, t in given.items()))
        graph.relu(product).set_output(True).set_name("out")
        return graph, given

    return declare


@pytest.fixture
def cuda_operands() -> dict[str, torch.Tensor]:
    """Return a and b (2, 6, 8) on the GPU; the test is skipped where there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(14)
    return {n: torch.randn(2, 6, 8, generator=generator).cuda() for n in ("a", "b")}
