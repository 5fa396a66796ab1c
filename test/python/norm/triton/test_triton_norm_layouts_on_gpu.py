"""Normalizations on a GPU at sizes that an interpreter does not reach, and wide strides."""

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

PHASES = tw.norm_forward_phase
EPSILON = 1e-3


def declare(dtype: torch.dtype) -> Any:
    return tw.Graph(io_data_type=dtype, intermediate_data_type="float32")


def run(graph: Any, pack: dict[Any, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, in declaration order, poisoned first; what the pack has is bound as it is."""
    graph.build()
    assert graph.selected_engine == "triton", str(graph.explain())
    made = {}
    for tensor in graph.outputs():
        if tensor not in pack:
            dtype = tw.torch_dtypes.to_torch(tensor.data_type)
            made[tensor] = torch.empty_strided(
                tensor.dim, tensor.stride, dtype=dtype, device="cuda"
            )
            made[tensor].fill_(torch.nan)
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8, device="cuda")
    graph.execute({**pack, **made}, workspace)
    torch.cuda.synchronize()
    assert torch.all(workspace[size:] == 0xFF)
    return [made.get(tensor, pack.get(tensor)) for tensor in graph.outputs()]


def close(actual: torch.Tensor, expected: torch.Tensor, tol: float) -> None:
    error = (actual.double() - expected).abs().max().item()
    assert error <= tol * max(expected.abs().max().item(), 1.0), error


def images(dim: tuple[int, ...], is_last: bool) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(len(dim))
    made = [torch.randn(dim, generator=generator, device="cuda").bfloat16() for _ in range(2)]
    made[0] += 2
    return [t.to(memory_format=torch.channels_last) if is_last else t for t in made]


SIZES = [(8, 64, 56, 56), (32, 320, 7, 7), (3, 48, 100, 130)]


@pytest.mark.parametrize("kind", ["batchnorm", "instancenorm"])
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dim", SIZES, ids=str)
def test_forward_and_backward_of_images(dim: tuple[int, ...], is_last: bool, kind: str) -> None:
    x, g = images(dim, is_last)
    scale, bias = (torch.rand(1, dim[1], 1, 1, device="cuda") for _ in range(2))
    graph = declare(torch.bfloat16)
    tensors = [graph.tensor_like(t) for t in (x, scale, bias)]
    if kind == "batchnorm":
        outputs = graph.batchnorm(*tensors, None, None, EPSILON, None)[:3]
    else:
        outputs = graph.instancenorm(PHASES.TRAINING, *tensors, graph.tensor_scalar(EPSILON))
    for tensor in outputs:
        tensor.set_output(True)
    for tensor in outputs[1:]:
        tensor.set_data_type("float32")
    y, mean, inverse = run(graph, dict(zip(tensors, (x, scale, bias), strict=True)))
    leaves = [t.double().requires_grad_() for t in (x, scale, bias)]
    axes = [0, 2, 3] if kind == "batchnorm" else [2, 3]
    variance, average = torch.var_mean(leaves[0], axes, correction=0, keepdim=True)
    want = (leaves[0] - average) * torch.rsqrt(variance + EPSILON) * leaves[1] + leaves[2]
    close(y, want.detach(), 2**-8)
    close(mean, average.detach(), 1e-5)
    close(inverse, torch.rsqrt(variance + EPSILON).detach(), 1e-5)
    want.backward(g.double())
    backward = declare(torch.bfloat16)
    tensors = [backward.tensor_like(t) for t in (g, x, scale, mean, inverse)]
    outputs = getattr(backward, f"{kind}_backward")(*tensors)
    for tensor in outputs:
        tensor.set_output(True)
    for tensor in outputs[1:]:
        tensor.set_data_type("float32")
    found = run(backward, dict(zip(tensors, (g, x, scale, mean, inverse), strict=True)))
    for actual, leaf, tol in zip(found, leaves, (2**-7, 1e-4, 1e-4), strict=True):
        assert leaf.grad is not None
        close(actual, leaf.grad, tol)


@pytest.mark.parametrize("width", [1000, 4104, 16384, 30_000, 200_003])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_rows_of_any_length(kind: str, width: int) -> None:
    x = torch.randn(37, width, device="cuda").bfloat16() + 1
    scale, bias = (torch.randn(1, width, device="cuda").bfloat16() for _ in range(2))
    graph = declare(torch.bfloat16)
    tensors = [graph.tensor_like(t) for t in (x, scale, bias)]
    graph_y = getattr(graph, kind)(PHASES.INFERENCE, *tensors, graph.tensor_scalar(EPSILON))[0]
    graph_y.set_output(True)
    (y,) = run(graph, dict(zip(tensors, (x, scale, bias), strict=True)))
    shape, wide = (width,), x.double()
    if kind == "layernorm":
        want = F.layer_norm(wide, shape, scale[0].double(), bias[0].double(), EPSILON)
    else:
        want = F.rms_norm(wide, shape, scale[0].double(), EPSILON) + bias[0].double()
    close(y, want, 2**-8)


def test_residual_add_norm_quantized_with_its_amax() -> None:
    x, residual = (torch.randn(512, 4096, device="cuda").bfloat16() for _ in range(2))
    scale = torch.randn(1, 4096, device="cuda").bfloat16()
    factor = torch.full((1, 1), 100.0, device="cuda")
    graph = declare(torch.bfloat16)
    tensors = [graph.tensor_like(t) for t in (x, residual, scale, factor)]
    total = graph.add(tensors[0], tensors[1]).set_output(True).set_data_type(torch.bfloat16)
    phase, epsilon = PHASES.INFERENCE, graph.tensor_scalar(EPSILON)
    y = graph.rmsnorm(phase, total, tensors[2], None, epsilon)[0]
    graph.mul(y, tensors[3]).set_output(True).set_data_type(torch.float8_e4m3fn)
    amax = graph.reduction(y, tw.reduction_mode.AMAX).set_output(True).set_dim((1, 1))
    amax.set_stride((1, 1)).set_data_type("float32")
    pack = dict(zip(tensors, (x, residual, scale, factor), strict=True))
    found_total, quantized, largest = run(graph, pack)
    assert torch.equal(found_total, x + residual)
    want = F.rms_norm(found_total.double(), (4096,), scale[0].double(), EPSILON)
    close(largest, want.abs().max().view(1, 1), 1e-5)
    rounded = (want * 100).clamp(-448, 448).float().to(torch.float8_e4m3fn).float()
    assert (quantized.float() == rounded).float().mean().item() > 0.999
    assert quantized.float().abs().max().item() == 448.0


def test_replay_reads_operands_and_initializes_the_maximum(captured: Any) -> None:
    # L9, B16: input, scale factor and poisoned outputs changed after capture show in the replay.
    x = torch.randn(256, 1024, device="cuda").bfloat16()
    scale = torch.randn(1, 1024, device="cuda").bfloat16()
    factor = torch.ones(1, 1, device="cuda")
    graph = declare(torch.bfloat16)
    tensors = [graph.tensor_like(t) for t in (x, scale, factor)]
    epsilon = graph.tensor_scalar(EPSILON)
    y = graph.rmsnorm(PHASES.INFERENCE, tensors[0], tensors[1], None, epsilon)[0]
    result = graph.mul(y, tensors[2]).set_output(True)
    amax = graph.reduction(result, tw.reduction_mode.AMAX).set_output(True).set_dim((1, 1))
    amax.set_stride((1, 1)).set_data_type("float32")
    graph.build()
    assert graph.selected_engine == "triton"
    found, largest = torch.empty_like(x), torch.empty(1, 1, device="cuda")
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    pack = {**dict(zip(tensors, (x, scale, factor), strict=True)), result: found, amax: largest}
    frame = graph.bind(pack, workspace)
    frame.launch()
    with captured(frame.launch) as recorded:
        for number in (3.0, 0.25):
            x.normal_()
            factor.fill_(number)
            found.fill_(torch.nan)
            largest.fill_(torch.inf)
            recorded.replay()
            torch.cuda.synchronize()
            want = F.rms_norm(x.double(), (1024,), scale[0].double(), EPSILON) * number
            close(found, want, 2**-8)
            assert largest.item() == found.abs().max().item()


@pytest.mark.parametrize("kind", ["batchnorm", "instancenorm", "adalayernorm"])
def test_strides_beyond_32_bits_are_addressed(kind: str) -> None:
    # B1: the address truncated to 32 bits holds a decoy inside the allocation, on both sides.
    step = 2**32 + 16
    inner = (3, 32768, 2) if kind == "batchnorm" else (3, 64, 64)
    count = inner[0] * inner[1] * inner[2]
    try:
        x, g, y = (torch.empty(step + count, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    except torch.OutOfMemoryError:
        pytest.skip("24 GiB of device memory are not free")
    dim, strides = (2, *inner), (step, inner[1] * inner[2], inner[2], 1)
    decoy = 64 + count
    for storage in (x, g):
        storage[:decoy].fill_(777.0)
        storage.as_strided(dim, strides).normal_()
    y[:decoy].fill_(-1.0)
    views = [storage.as_strided(dim, strides) for storage in (x, g)]
    wide = views[0].double()
    scale_dim = (2, 1, *inner[1:]) if kind == "adalayernorm" else (1, 3, 1, 1)
    axes = [0, 2, 3] if kind == "batchnorm" else [2, 3]
    scale, bias = (torch.randn(scale_dim, device="cuda") for _ in range(2))
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + EPSILON)
    graph = declare(torch.bfloat16)
    tensors = [graph.tensor(dim, strides), *(graph.tensor_like(t) for t in (scale, bias))]
    if kind == "batchnorm":
        made = graph.batchnorm(*tensors, None, None, EPSILON, None)[0]
    else:
        phase = PHASES.INFERENCE
        made = getattr(graph, kind)(phase, *tensors, graph.tensor_scalar(EPSILON))[0]
    made.set_output(True).set_dim(dim).set_stride(strides)
    out = y.as_strided(dim, strides)
    run(graph, {**dict(zip(tensors, (views[0], scale, bias), strict=True)), made: out})
    close(out, (wide - mean) * inverse * scale + bias, 2**-8)
    assert torch.all(y[count:decoy] == -1.0), "nothing landed at the narrow address"
    leaf = wide.requires_grad_()
    average = leaf.mean(axes, keepdim=True)
    variance = (leaf - average).square().mean(axes, keepdim=True)
    want = (leaf - average) * torch.rsqrt(variance + EPSILON) * scale
    want.backward(views[1].double())
    backward = declare(torch.bfloat16)
    statistics = [mean.detach().float(), inverse.detach().float()]
    tensors = [backward.tensor(dim, strides), backward.tensor(dim, strides)]
    tensors += [backward.tensor_like(t) for t in (scale, *statistics)]
    outputs = getattr(backward, f"{kind}_backward")(*tensors)
    for tensor in outputs:
        tensor.set_output(True)
    for tensor in outputs[1:]:
        tensor.set_data_type("float32")
    outputs[0].set_dim(dim).set_stride(strides)
    operands = (views[1], views[0], scale, *statistics)
    run(backward, {**dict(zip(tensors, operands, strict=True)), outputs[0]: out})
    assert leaf.grad is not None
    close(out, leaf.grad, 2**-7)
    assert torch.all(y[count:decoy] == -1.0), "nothing landed at the narrow address"
