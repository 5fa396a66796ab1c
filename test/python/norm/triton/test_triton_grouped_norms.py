"""Triton's normalizations of every kind and layout against the oracle: whole rows and cut ones.

Interpreted without a GPU, compiled with one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import group_backward, norm_cut, normalization, normalization_split
from tilewright.oracle import assert_close, evaluate
from tilewright.oracle.tolerances import default_tolerance

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
PHASES = tw.norm_forward_phase

# name -> (kind, dim of the input, order of its axes in memory, outermost first, dim of the scale)
LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "adaptive": ("adalayernorm", (3, 5, 33), (0, 1, 2), (3, 1, 33)),
    "adaptive, tokens outermost": ("adalayernorm", (3, 8, 16), (1, 0, 2), (3, 1, 16)),
    "adaptive, one token a sample": ("adalayernorm", (4, 1, 16), (0, 1, 2), (4, 1, 16)),
    "adaptive, one sample": ("adalayernorm", (1, 4, 16), (0, 1, 2), (1, 1, 16)),
    "instance": ("instancenorm", (2, 3, 4, 5), (0, 1, 2, 3), (1, 3, 1, 1)),
    "instance, channels last": ("instancenorm", (2, 3, 4, 5), (0, 2, 3, 1), (1, 3, 1, 1)),
    "instance, channels outermost": ("instancenorm", (2, 3, 7), (1, 0, 2), (1, 3, 1)),
    "batch": ("batchnorm", (4, 3, 2, 5), (0, 1, 2, 3), (1, 3, 1, 1)),
    "batch, channels last": ("batchnorm", (4, 3, 2, 5), (0, 2, 3, 1), (1, 3, 1, 1)),
    "batch of vectors": ("batchnorm", (9, 6), (0, 1), (1, 6)),
    "batch, one channel": ("batchnorm", (4, 1, 8), (0, 1, 2), (1, 1, 1)),
    "layer of two axes": ("layernorm", (4, 3, 10), (0, 1, 2), (1, 3, 10)),
    "layer over channels": ("layernorm", (2, 6, 4, 4), (0, 1, 2, 3), (1, 6, 1, 1)),
    "rms over the outer axis": ("rmsnorm", (5, 7), (0, 1), (5, 1)),
}
DTYPES = [torch.float32, torch.bfloat16]


# Every layout with whole rows and with cut ones; every other of these is of L0.
CASES = [
    pytest.param(
        layout, mode, marks=pytest.mark.L0 if (number + is_cut) % 2 == 0 else pytest.mark.L1
    )
    for number, layout in enumerate(sorted(LAYOUTS))
    for is_cut, mode in enumerate(("whole", "cut"))
]


@pytest.fixture
def rows(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole rows, or rows cut into parts of several small tiles however short they are."""
    if request.param == "cut":
        monkeypatch.setattr(normalization, "is_split", lambda problem: True)
        monkeypatch.setattr(norm_cut, "TILE_ELEMENTS", 16)
        monkeypatch.setattr(normalization_split, "_MAX_SPLITS", 2)
        monkeypatch.setattr(group_backward, "MAX_WIDTH", 0)
        monkeypatch.setattr(group_backward, "_MAX_SPLITS", 2)
    return str(request.param)


def laid_out(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values in memory with the axes in ``order``, outermost first."""
    back = [order.index(axis) for axis in range(len(order))]
    return values.permute(order).contiguous().permute(back).to(DEVICE)


def run(graph: Any, pack: dict[Any, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Build, run twice over poisoned outputs, compare with the oracle; the outputs by uid."""
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    made = {}
    for tensor in graph.outputs():
        if tensor not in pack:
            size = 1 + sum((n - 1) * s for n, s in zip(tensor.dim, tensor.stride, strict=True))
            dtype = tw.torch_dtypes.to_torch(tensor.data_type)
            buffer = torch.full((size,), torch.nan, device=DEVICE, dtype=torch.float32).to(dtype)
            made[tensor.uid] = buffer.as_strided(tensor.dim, tensor.stride)
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
    expected = evaluate(graph, {t.uid: b.cpu() for t, b in pack.items()})
    graph.execute({**pack, **made}, workspace)
    assert torch.all(workspace[size:] == 0xFF), "nothing beyond the stated workspace is touched"
    for tensor in graph.outputs():
        found = made.get(tensor.uid, pack.get(tensor))
        # Sums of float32 products carry the roundings of their terms.
        tolerance = default_tolerance(tensor.data_type)
        assert_close(found.cpu(), expected[tensor.uid], tol=tolerance, name=tensor.name)
    first = {uid: buffer.clone() for uid, buffer in made.items()}
    graph.execute({**pack, **made}, workspace)
    for uid, buffer in made.items():
        assert torch.equal(buffer, first[uid]), "the sums are in a fixed order"
    return made


def declare(dtype: torch.dtype) -> Any:
    return tw.Graph(
        io_data_type=dtype, intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
    )


def drawn(layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs away from 0, so that a mean that is not subtracted shows, by port."""
    _, dim, order, scale_dim = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(len(layout))
    x, grad = (torch.randn(dim, generator=generator) for _ in range(2))
    scale, bias = (torch.randn(scale_dim, generator=generator) for _ in range(2))
    operands = {"x": laid_out((x + 3).to(dtype), order), "grad": laid_out(grad.to(dtype), order)}
    return operands | {"scale": scale.to(DEVICE), "bias": bias.to(DEVICE)}


@pytest.mark.parametrize(("layout", "rows"), CASES, indirect=["rows"])
def test_forward(layout: str, rows: str) -> None:
    dtype = DTYPES[len(layout) % 2]
    kind, _, _, scale_dim = LAYOUTS[layout]
    operands = drawn(layout, dtype)
    graph = declare(dtype)
    x, scale, bias = (graph.tensor_like(operands[name]) for name in ("x", "scale", "bias"))
    pack = {x: operands["x"], scale: operands["scale"], bias: operands["bias"]}
    if kind == "batchnorm":
        running = [torch.rand(scale_dim).to(DEVICE) for _ in range(2)]
        old = [graph.tensor_like(buffer) for buffer in running]
        made = graph.batchnorm(x, scale, bias, *old, epsilon=1e-3, momentum=0.125)
        pack |= dict(zip(old, running, strict=True))
    else:
        made = getattr(graph, kind)(PHASES.TRAINING, x, scale, bias, graph.tensor_scalar(1e-3))
    for tensor in made:
        tensor.set_output(True)
    for tensor in made[1:]:
        tensor.set_data_type("float32")
    found = run(graph, pack)
    assert found[made[0].uid].stride() == operands["x"].stride()


@pytest.mark.parametrize(("layout", "rows"), CASES, indirect=["rows"])
def test_backward(layout: str, rows: str) -> None:
    dtype = DTYPES[len(layout) % 2]
    kind, _, _, scale_dim = LAYOUTS[layout]
    operands = drawn(layout, dtype)
    wide = operands["x"].double()
    axes = [a for a, n in enumerate(scale_dim) if n != 1 and (a or "ada" not in kind)]
    if kind == "instancenorm":
        axes = list(range(2, wide.dim()))
    if kind == "batchnorm":
        axes = [axis for axis in range(wide.dim()) if axis != 1]
    mean = wide.mean(axes, keepdim=True)
    centred = wide if kind == "rmsnorm" else wide - mean
    inverse = torch.rsqrt(centred.square().mean(axes, keepdim=True) + 1e-3)
    names = ["grad", "x", "scale"] + ([] if kind == "rmsnorm" else ["mean"]) + ["inverse"]
    operands |= {"mean": mean.float(), "inverse": inverse.float()}
    graph = declare(dtype)
    tensors = {name: graph.tensor_like(operands[name]) for name in names}
    extra = {"has_dbias": True} if kind == "rmsnorm" else {}
    made = getattr(graph, f"{kind}_backward")(*tensors.values(), **extra)
    for tensor in made:
        tensor.set_output(True)
    for tensor in made[1:]:
        tensor.set_data_type("float32")
    run(graph, {tensor: operands[name] for name, tensor in tensors.items()})


@pytest.mark.L0
@pytest.mark.parametrize("layout", ["batch", "batch, channels last"])
def test_running_statistics_in_place_and_inference(layout: str) -> None:
    operands = drawn(layout, torch.float32)
    graph = declare(torch.float32)
    x, scale, bias = (graph.tensor_like(operands[name]) for name in ("x", "scale", "bias"))
    running = [torch.rand(scale.dim, device=DEVICE) for _ in range(2)]
    old = [graph.tensor_like(buffer) for buffer in running]
    made = graph.batchnorm(x, scale, bias, *old, epsilon=1e-3, momentum=0.25)
    for tensor in made:
        tensor.set_output(True)
    graph.build()
    pack = {x: operands["x"], scale: operands["scale"], bias: operands["bias"]}
    buffers = [torch.empty(t.dim, device=DEVICE).as_strided(t.dim, t.stride) for t in made[:3]]
    expected = [buffer.flatten().clone() for buffer in running]
    variance, mean = torch.var_mean(operands["x"], [0, 2, 3])
    pack |= dict(zip(old, running, strict=True)) | dict(
        zip(made, [*buffers, *running], strict=True)
    )
    graph.execute(pack, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=DEVICE))
    for found, before, statistic in zip(running, expected, (mean, variance), strict=True):
        assert torch.allclose(found.flatten(), 0.75 * before + 0.25 * statistic, atol=1e-6)
    inference = declare(torch.float32)
    given = [operands["x"], running[0], buffers[2], operands["scale"], operands["bias"]]
    tensors = [inference.tensor_like(buffer) for buffer in given]
    inference.batchnorm_inference(*tensors).set_output(True)
    run(inference, dict(zip(tensors, given, strict=True)))


@pytest.mark.L0
@pytest.mark.parametrize("rows", ["whole", "cut"], indirect=True)
def test_a_mean_far_from_zero_loses_no_digits(rows: str) -> None:
    # The deviation is 1/4096 of the mean: squares about 0 would cancel to nothing.
    generator = torch.Generator().manual_seed(6)
    x = (4096 + torch.randn(2, 2, 200, generator=generator)).to(DEVICE)
    graph = declare(torch.float32)
    source, scale = graph.tensor_like(x), graph.tensor((1, 2, 1))
    made = graph.instancenorm(PHASES.TRAINING, source, scale, None, graph.tensor_scalar(1e-9))
    for tensor in made:
        tensor.set_output(True)
    graph.build()
    assert graph.selected_engine == "triton"
    y, mean, inverse = (torch.empty(t.dim, device=DEVICE) for t in made)
    pack = {source: x, scale: torch.ones(1, 2, 1, device=DEVICE)}
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=DEVICE)
    graph.execute({**pack, **dict(zip(made, (y, mean, inverse), strict=True))}, workspace)
    wide = x.double()
    deviation = wide.std(-1, correction=0, keepdim=True)
    assert torch.allclose(1 / inverse.double(), deviation, rtol=1e-4)


DECLINES: list[tuple[str, Any, str]] = [
    ("peers", lambda g, x, s: g.batchnorm(x, s, s, None, None, 1e-3, None, [s])[0], "peer_stats_0"),
    (
        "epsilon on the device",
        lambda g, x, s: g.instancenorm(PHASES.INFERENCE, x, s, s, g.tensor((1, 1, 1, 1)))[0],
        "passed by value",
    ),
    (
        "three axes of columns",
        lambda g, x, s: g.instancenorm(
            PHASES.INFERENCE,
            g.tensor((2, 3, 2, 2, 2), (999, 333, 100, 30, 7)),
            g.tensor((1, 3, 1, 1, 1)),
            None,
            g.tensor_scalar(1e-3),
        )[0],
        "columns along at most two axes",
    ),
    (
        "nothing to sum",
        lambda g, x, s: g.batchnorm_backward(*[g.tensor((0, 3, 2, 2))] * 2, s, s, s)[0],
        "no sums of no element",
    ),
]


@pytest.mark.L0
@pytest.mark.parametrize(
    ("make", "reason"), [row[1:] for row in DECLINES], ids=[row[0] for row in DECLINES]
)
def test_a_decline_names_the_tensor_and_the_rule(make: Any, reason: str) -> None:
    graph = declare(torch.float32)
    x, scale = graph.tensor((2, 3, 2, 2)), graph.tensor((1, 3, 1, 1))
    make(graph, x, scale).set_output(True)
    for operation in graph.operations:
        for tensor in operation.outputs.values():
            tensor.set_output(True)
    graph.validate()
    graph.create_execution_plans()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert reason in verdict.reason
