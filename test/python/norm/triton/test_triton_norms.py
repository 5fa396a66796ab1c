"""Triton's RMSNorm and LayerNorm: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import normalization_backward
from tilewright.engines.triton.engine import ENGINE

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
PHASES = tw.norm_forward_phase


def declare(
    kind: str, x: torch.Tensor, *, has_bias: bool, training: bool, y_stride: Any = None
) -> Any:
    graph = tw.Graph(
        io_data_type=x.dtype,
        intermediate_data_type="float32",
        handle=tw.create_handle(DEVICE),
    )
    source = graph.tensor(x.shape, x.stride(), name="x")
    ones = (1,) * (x.dim() - 1)
    scale = graph.tensor((*ones, x.shape[-1]), name="scale")
    bias = graph.tensor((*ones, x.shape[-1]), name="bias") if has_bias else None
    phase = PHASES.TRAINING if training else PHASES.INFERENCE
    made = getattr(graph, kind)(phase, source, scale, bias, graph.tensor_scalar(1e-5))
    made[0].set_output(True).set_name("y")
    if y_stride is not None:
        made[0].set_dim(x.shape).set_stride(y_stride)
    for tensor, name in zip(made[1:], ("mean", "inverse")[3 - len(made) :], strict=True):
        if tensor is not None:
            tensor.set_output(True).set_name(name).set_data_type("float32")
    return graph


def expected(kind: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
    x, w = x.double().cpu(), w.double().cpu()
    mean = x.mean(-1, keepdim=True) if kind == "layernorm" else torch.zeros(1)
    centred = x - mean
    inverse = 1 / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    y = centred * inverse * w
    return y if b is None else y + b.double().cpu(), mean, inverse


SHAPES = [(1, 1), (5, 7), (3, 5, 33), (2, 3, 2, 64), (9, 129), (4, 1024)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def cases(*axes: Any) -> list[Any]:
    """Every combination; one in five of them, in which each value occurs, is of L0."""
    return [
        pytest.param(*values, marks=pytest.mark.L1 if number % 5 else pytest.mark.L0)
        for number, values in enumerate(itertools.product(*axes))
    ]


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "training"),
    cases(SHAPES, DTYPES, ["rmsnorm", "layernorm"], [False, True]),
    ids=str,
)
def test_values_and_statistics(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, training: bool
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    has_bias = kind == "layernorm" or shape[-1] % 2 == 1
    x, w, b = (
        torch.randn(s, generator=generator).to(dtype).to(DEVICE)
        for s in (shape, shape[-1:], shape[-1:])
    )
    graph = declare(kind, x, has_bias=has_bias, training=training)
    graph.build()
    assert graph.selected_engine == "triton"
    pack = {"x": x, "scale": w, "y": torch.full_like(x, torch.nan)}
    if has_bias:
        pack["bias"] = b
    for tensor in graph.outputs():
        if tensor.name != "y":
            pack[tensor.name] = torch.full(tensor.dim, torch.nan, device=DEVICE)
    graph.execute(pack)
    y, mean, inverse = expected(kind, x, w, b if has_bias else None)
    bound = TOLERANCE[dtype] * max(y.abs().max().item(), 1.0)
    assert (pack["y"].double().cpu() - y).abs().max().item() <= bound
    if training:
        assert torch.allclose(pack["inverse"].double().cpu(), inverse, rtol=1e-5)
        if kind == "layernorm":
            assert torch.allclose(pack["mean"].double().cpu(), mean, atol=1e-5)


@pytest.mark.L0
def test_strided_rows_and_untouched_gaps() -> None:
    # Rows step along two axes, elements by two; gaps between the outputs keep their bytes.
    generator = torch.Generator().manual_seed(3)
    storage = torch.randn(4, 3, 40, generator=generator).to(DEVICE)
    x = storage[:, :2, :34:2]
    y = torch.full((4, 2, 30), 7.0, device=DEVICE)
    w = torch.randn(17, generator=generator).to(DEVICE)
    graph = declare("rmsnorm", x, has_bias=False, training=False, y_stride=y[..., :17].stride())
    graph.build()
    assert graph.selected_engine == "triton"
    graph.execute({"x": x, "scale": w, "y": y[..., :17]})
    reference = expected("rmsnorm", x, w, None)[0]
    assert torch.allclose(y[..., :17].double().cpu(), reference, atol=1e-5)
    assert torch.equal(y[..., 17:], torch.full((4, 2, 13), 7.0, device=DEVICE))


@pytest.mark.L0
def test_a_misaligned_operand_takes_the_general_kernel() -> None:
    generator = torch.Generator().manual_seed(4)
    storage = torch.randn(2 * 64 + 1, generator=generator).to(DEVICE)
    w = torch.randn(64, generator=generator).to(DEVICE)
    graph = declare("rmsnorm", storage[1:].view(2, 64), has_bias=False, training=False)
    graph.build()
    for start in (0, 1):
        x = storage[start : start + 128].view(2, 64)
        y = torch.empty(2, 64, device=DEVICE)
        graph.execute({"x": x, "scale": w, "y": y})
        assert torch.allclose(y.double().cpu(), expected("rmsnorm", x, w, None)[0], atol=1e-5)


@pytest.mark.L0
@pytest.mark.parametrize("alignment", [0, 8, 16, 32])
def test_a_plan_stands_behind_unless_the_declaration_promises_its_alignment(alignment: int) -> None:
    for lacks in ("nothing", "x", "y"):
        graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        values = {name: 0 if name == lacks else alignment for name in ("x", "scale", "y")}
        x = graph.tensor((4, 64), alignment_value=values["x"])
        scale = graph.tensor((1, 64), alignment_value=values["scale"])
        epsilon = graph.tensor_scalar(1e-6)
        y, _ = graph.rmsnorm(PHASES.INFERENCE, x, scale, None, epsilon)
        y.set_output(True).alignment_value = values["y"]
        graph.validate()
        plan = ENGINE.plan(graph, (), 132)
        is_promised = lacks == "nothing" and alignment >= 16
        assert (plan.fallback is None) == is_promised and bool(plan.needs_aligned) != is_promised
        assert plan.kernels[0].spec.aligned


@pytest.mark.L0
def test_epsilon_is_read_at_each_call() -> None:
    x = torch.ones(2, 8, device=DEVICE)
    w = torch.ones(8, device=DEVICE)
    graph = declare("rmsnorm", x, has_bias=False, training=False)
    graph.build()
    epsilon = next(t for t in graph.inputs() if t.is_pass_by_value)
    y = torch.empty(2, 8, device=DEVICE)
    for value in (3.0, 8.0):
        graph.execute({"x": x, "scale": w, "y": y, epsilon: torch.full((1, 1, 1, 1), value)})
        assert torch.allclose(y.cpu(), torch.full((2, 8), (1 + value) ** -0.5))


def backward_graph(kind: str, tensors: dict[str, torch.Tensor], *, has_dbias: bool) -> Any:
    x, w = tensors["x"], tensors["w"]
    graph = tw.Graph(
        io_data_type=x.dtype, intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
    )
    declared = {n: graph.tensor(t.shape, t.stride(), t.dtype, name=n) for n, t in tensors.items()}
    declared["w"].set_dim((*(1,) * (x.dim() - 1), w.shape[0])).set_stride((1,) * x.dim())
    g, x_, w_, inverse = (declared[name] for name in ("g", "x", "w", "inverse"))
    if kind == "layernorm":
        made = graph.layernorm_backward(g, x_, w_, declared["mean"], inverse)
    else:
        made = graph.rmsnorm_backward(g, x_, w_, inverse, has_dbias)
    for name, tensor in zip(("dx", "dscale", "dbias"), made, strict=True):
        if tensor is not None:
            tensor.set_output(True).set_name(name)
            tensor.set_data_type(x.dtype if name == "dx" else "float32")
    return graph


# The last one has more rows than the programs take at once.
BACKWARD_SHAPES = [(1, 1), (7, 33), (3, 5, 64), (150, 129)]


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "is_expanded"),
    cases(BACKWARD_SHAPES, DTYPES, ["rmsnorm", "layernorm"], [False, True]),
    ids=str,
)
def test_backward(shape: tuple[int, ...], dtype: torch.dtype, kind: str, is_expanded: bool) -> None:
    # An expanded gradient (stride 0) is what sum() sends; more rows than programs are walked.
    generator = torch.Generator().manual_seed(len(shape))
    x, w = (torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[-1:]))
    g = torch.randn(shape, generator=generator).to(dtype)
    if is_expanded:
        g = g.flatten()[:1].view((1,) * len(shape)).expand(shape)
    has_dbias = kind == "layernorm" or shape[-1] % 2 == 1
    wide = [t.double().requires_grad_() for t in (x, w, torch.zeros(shape[-1]))]
    y, mean, inverse = expected(kind, *wide)
    y.backward(g.double())
    tensors = {"g": g, "x": x, "w": w, "inverse": inverse.detach().float()}
    if kind == "layernorm":
        tensors["mean"] = mean.detach().float()
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    graph = backward_graph(kind, tensors, has_dbias=has_dbias)
    graph.build()
    assert graph.selected_engine == "triton"
    outputs = {"dx": torch.full_like(x, torch.nan, device=DEVICE)}
    names = ("dscale", "dbias") if has_dbias else ("dscale",)
    outputs |= {name: torch.full(shape[-1:], torch.nan, device=DEVICE) for name in names}
    workspace = torch.full((graph.get_workspace_size() + 64,), 0xAB, dtype=torch.uint8)
    workspace = workspace.to(DEVICE)
    graph.execute({**tensors, **outputs}, workspace)
    assert torch.all(workspace[-64:] == 0xAB), "nothing beyond the stated workspace is touched"
    first = {name: tensor.clone() for name, tensor in outputs.items()}
    graph.execute({**tensors, **outputs}, workspace)
    for (name, tensor), reference in zip(outputs.items(), wide, strict=False):
        assert torch.equal(tensor, first[name]), "the sums are in a fixed order"
        wanted = reference.grad
        tol = TOLERANCE[dtype] if name == "dx" else 1e-5
        bound = tol * max(wanted.abs().max().item(), 1.0)
        assert (tensor.double().cpu() - wanted).abs().max().item() <= bound, name


@pytest.mark.L0
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_backward_of_rows_too_wide_for_accumulators(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalization_backward, "_MAX_FUSED_WIDTH", 16)
    monkeypatch.setattr(normalization_backward, "_SPLITS", 3)
    test_backward((70, 33), torch.bfloat16, kind, False)


@pytest.mark.L0
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_programs_that_walk_rows_and_read_ahead(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With four multiprocessors assumed, 21 rows are more than two at a time, and odd.
    config = normalization_backward.BackwardConfig(2, 4, 1, True)
    monkeypatch.setattr(normalization_backward, "choose_config", lambda width: config)
    test_backward((21, 33), torch.float32, kind, False)


@pytest.mark.L0
def test_a_decline_names_the_tensor_and_the_rule() -> None:
    graph = tw.Graph(
        io_data_type="float32", intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
    )
    g, x = graph.tensor((1, 65537)), graph.tensor((1, 65537))
    made = graph.rmsnorm_backward(g, x, graph.tensor((1, 65537)), graph.tensor((1, 1)), False)
    for tensor in made[:2]:
        tensor.set_output(True)
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert graph.selected_engine == "aten" and "1 to 65536" in verdict.reason
