"""Graphs of generated kernels: drawn operands, a run on them, and what the oracle says."""

from __future__ import annotations

import os
from typing import Any

import torch

import tilewright as tw
from tilewright.engines.triton import pointwise
from tilewright.oracle import default_tolerance, evaluate

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
MODES = tw.reduction_mode


def new_graph(dtype: Any = "float32") -> Any:
    return tw.Graph(
        io_data_type=dtype, intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
    )


def draw(dim: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def run(
    graph: Any, feeds: dict[Any, torch.Tensor], *, kernels: int = 1, compares: bool = True
) -> dict[Any, torch.Tensor]:
    """Outputs of the Triton engine's plan (CPU tensors by graph tensor), once they are right.

    Right is within the default tolerance of the type, element by element, relative to the
    element; gaps between elements keep what they held.
    """
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert graph.selected_engine == "triton", verdict.reason
    assert len(pointwise.plan(graph, (), 4).kernels) == kernels
    feeds = {tensor: place(value, tensor.stride) for tensor, value in feeds.items()}
    pack: dict[Any, torch.Tensor] = {
        tensor: value if tensor.is_pass_by_value else on_device(value)
        for tensor, value in feeds.items()
    }
    raws = {}
    for tensor in graph.outputs():
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.dim, tensor.stride, strict=True))
        dtype = tw.torch_dtypes.to_torch(tensor.data_type)
        raw = torch.full((span * dtype.itemsize,), 0x5A, dtype=torch.uint8, device=DEVICE)
        raws[tensor] = raw
        pack[tensor] = raw.view(dtype).as_strided(tensor.dim, tensor.stride)
    workspace = torch.full((graph.get_workspace_size() + 64,), 0xAB, dtype=torch.uint8)
    workspace = workspace.to(DEVICE)
    graph.execute(pack, workspace)
    assert torch.all(workspace[-64:] == 0xAB), "nothing beyond the stated workspace is touched"
    expected = evaluate(graph, feeds) if compares else {}
    results = {}
    for tensor, raw in raws.items():
        got = results[tensor] = pack[tensor].cpu().clone()
        if compares:
            compare(tensor, got, expected[tensor.uid])
        pack[tensor].copy_(torch.zeros_like(pack[tensor]))
        flat = raw.view(got.dtype).view(torch.uint8).cpu()
        elements = torch.zeros(flat.numel() // got.element_size(), dtype=torch.bool)
        elements.as_strided(tensor.dim, tensor.stride).fill_(True)
        gaps = flat.view(-1, got.element_size())[~elements]
        assert torch.all(gaps == 0x5A), f"{tensor}: a gap was written"
    return results


def place(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with this stride."""
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, stride, strict=True))
    buffer = torch.zeros(span, dtype=value.dtype).as_strided(value.shape, stride)
    shown = tuple(slice(1) if s == 0 else slice(None) for s in stride)
    buffer[shown] = value[shown]
    return buffer


def on_device(value: torch.Tensor) -> torch.Tensor:
    """A copy of what is placed, with its stride."""
    flat = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,))
    return flat.to(DEVICE).as_strided(value.shape, value.stride())


def compare(tensor: Any, got: torch.Tensor, want: torch.Tensor) -> None:
    want = want.double()
    tolerance = default_tolerance(tensor.data_type)
    if tensor.data_type.is_floating:
        limit = tensor.data_type.layout.largest
        is_fp8 = tensor.data_type.bits == 8
        rounded = (want.clamp(-limit, limit) if is_fp8 else want).to(got.dtype).double()
    else:
        rounded = want
    got = got.double()
    off = (got - rounded).abs() > tolerance * rounded.abs().clamp(min=1.0)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    wrong = torch.where(rounded.isfinite() & got.isfinite(), off, ~same)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{tensor}: {int(wrong.sum())} wrong, at {where}: {got[where]}, not {rounded[where]}"
        )
