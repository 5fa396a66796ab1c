"""A norm of four operands, its plan, and buffers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewright as tw
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.launch.prepared import Constant, HostScalar, Operand

ROWS, WIDTH = 4, 16


def norm_graph(stride: Any = ()) -> Any:
    """Four operands: x, scale, y and a scalar that the plan has a value for."""
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = graph.tensor((ROWS, WIDTH), stride, name="x")
    scale = graph.tensor((1, WIDTH), name="scale")
    epsilon = graph.tensor_scalar(0.25).set_name("epsilon")
    y, _ = graph.rmsnorm(tw.norm_forward_phase.INFERENCE, x, scale, None, epsilon)
    y.set_output(True).set_name("y").set_dim((ROWS, WIDTH))
    if stride:
        y.set_stride(stride)
    graph.validate()
    return graph


def slots(graph: Any) -> dict[str, int]:
    return {t.name: i for i, t in enumerate([*graph.inputs(), *graph.outputs()])}


def norm_plan(
    make_kernel: Callable[..., Any], graph: Any, number: int = 1, **options: Any
) -> KernelPlan:
    at = slots(graph)
    arguments = [
        ("*fp32", Operand(at["x"])),
        ("i32", Constant(7)),
        ("*fp32", Operand(at["y"], 8)),
        ("fp32", HostScalar(at["epsilon"], 0.25)),
        ("*fp32", Operand(at["scale"])),
        ("i64", Constant(-3)),
    ]
    return KernelPlan((make_kernel(number, arguments),), **options)


def operands() -> dict[str, torch.Tensor]:
    shapes = {"x": (ROWS, WIDTH), "scale": (1, WIDTH), "y": (ROWS, WIDTH)}
    return {name: aligned(torch.rand(shape)) for name, shape in shapes.items()}


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy at a multiple of 16 bytes, with room around it."""
    storage = torch.zeros(values.numel() + 64)
    skip = -storage.data_ptr() % 64 // 4
    return storage[skip : skip + values.numel()].view(values.shape).copy_(values)


def fresh(stride: Any) -> dict[str, torch.Tensor]:
    """Operands laid out as declared."""
    made = operands()
    if stride:
        storage = aligned(torch.zeros(2, ROWS * stride[0] + 8))
        for name, row in zip(("x", "y"), storage, strict=True):
            made[name] = row.as_strided((ROWS, WIDTH), stride, row.storage_offset())
    return made


def outcome(fake: Any, run: Callable[[], Any]) -> Any:
    """What was launched, or the refusal."""
    fake.take()
    try:
        run()
    except tw.TilewrightError as error:
        assert fake.take() == [], "a refused call launches nothing"
        return type(error).__name__, str(error)
    return fake.take()
