"""The ATen engine's layer, instance, adaptive and RMS normalizations against the oracle."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tilewright import norm_forward_phase
from tilewright.engines.aten import normalization

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KINDS = ["layernorm", "rmsnorm", "instancenorm", "adalayernorm"]
EPSILON = 1e-3


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def _case(kind, dtype, scale_type):
    """An input away from zero mean, scale and bias."""
    scale_dim = {
        "layernorm": (1, 1, 1, 33),
        "rmsnorm": (1, 1, 1, 33),
        "instancenorm": (1, 6, 1, 1),
        "adalayernorm": (3, 1, 1, 33),
    }[kind]
    x = _draw((3, 6, 5, 33), dtype) * 2 + 3
    return x, _draw(scale_dim, scale_type, seed=1), _draw(scale_dim, scale_type, seed=2)


def _forward(kind, x, scale, bias, phase=norm_forward_phase.TRAINING):
    graph = tilewright.Graph(io_data_type=x.dtype, intermediate_data_type=_wide(x.dtype))
    feeds = {graph.tensor_like(x): x, graph.tensor_like(scale): scale}
    source, weight = feeds
    shift = None
    if bias is not None:
        shift = graph.tensor_like(bias)
        feeds[shift] = bias
    epsilon = graph.tensor_scalar(EPSILON)
    outputs = getattr(graph, kind)(phase, source, weight, shift, epsilon)
    for index, output in enumerate(outputs):
        if output is not None:
            output.set_output(True).set_data_type(x.dtype if index == 0 else _wide(x.dtype))
    feeds[epsilon] = torch.tensor(EPSILON)
    return graph, feeds, outputs


def _backward(kind, grad, x, scale, mean, inverse, has_dbias=True):
    graph = tilewright.Graph(io_data_type=x.dtype)
    buffers = {"grad": grad, "input": x, "scale": scale}
    if kind != "rmsnorm":
        buffers["mean"] = mean
    buffers["inv_variance"] = inverse
    tensors = {name: graph.tensor_like(buffer, name=name) for name, buffer in buffers.items()}
    extra = {"has_dbias": has_dbias} if kind == "rmsnorm" else {}
    outputs = getattr(graph, f"{kind}_backward")(**tensors, **extra)
    for index, output in enumerate(outputs):
        if output is not None:
            output.set_output(True).set_data_type(x.dtype if index == 0 else scale.dtype)
    return graph, {tensors[name]: buffer for name, buffer in buffers.items()}, outputs


def _statistics(kind, x, scale):
    """Mean and inverse deviation, as a forward would have saved them."""
    axes = [axis for axis, extent in enumerate(scale.shape) if extent != 1]
    axes = [2, 3] if kind == "instancenorm" else [a for a in axes if a or kind != "adalayernorm"]
    wide = x.double()
    mean = wide.mean(axes, keepdim=True)
    power = wide.square() if kind == "rmsnorm" else (wide - mean).square()
    inverse = (power.mean(axes, keepdim=True) + EPSILON).rsqrt()
    return mean.to(_wide(x.dtype)), inverse.to(_wide(x.dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_statistics_match_the_oracle(check_graph, kind, dtype):
    for scale_type in {dtype, _wide(dtype)}:
        x, scale, bias = _case(kind, dtype, scale_type)
        graph, feeds, _ = _forward(kind, x, scale, bias)
        check_graph(graph, feeds, factor=16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_inference_phase_saves_nothing(check_graph, kind, dtype):
    x, scale, bias = _case(kind, dtype, dtype)
    graph, feeds, outputs = _forward(kind, x, scale, bias, norm_forward_phase.INFERENCE)
    results = check_graph(graph, feeds, factor=16)
    assert list(results) == [outputs[0]] and outputs[1:].count(None) == len(outputs) - 1


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_axes_that_are_not_last_and_several_axes(check_graph, kind):
    x = _draw((2, 6, 4, 5), torch.float32) + 1
    for scale_dim in ((1, 6, 1, 1), (1, 6, 4, 5), (1, 1, 4, 1), (2, 1, 1, 5)):
        for buffer in (x, x.to(memory_format=torch.channels_last)):
            scale = _draw(scale_dim, torch.float32, seed=1)
            graph, feeds, _ = _forward(kind, buffer, scale, scale)
            check_graph(graph, feeds, factor=16)
            grad = _draw(x.shape, torch.float32, seed=4)
            mean, inverse = _statistics(kind, buffer, scale)
            graph, feeds, _ = _backward(kind, grad, buffer, scale, mean, inverse)
            check_graph(graph, feeds, factor=32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["dense", "expanded", "sliced"])
def test_backward_takes_gradients_of_any_strides(check_graph, kind, dtype, style):
    x, scale, _ = _case(kind, dtype, dtype)
    if style == "dense":
        grad = _draw(x.shape, dtype, seed=4)
    elif style == "expanded":
        grad = torch.ones((), dtype=dtype).expand(x.shape)
    else:
        grad = _draw((*x.shape[:-1], 2 * x.shape[-1]), dtype, seed=4)[..., ::2]
    mean, inverse = _statistics(kind, x, scale)
    graph, feeds, _ = _backward(kind, grad, x, scale, mean, inverse)
    check_graph(graph, feeds, factor=64)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_takes_statistics_of_any_strides(check_graph, kind):
    x, scale, _ = _case(kind, torch.float32, torch.float32)
    mean, inverse = (
        torch.stack((part, torch.full_like(part, 1e9)), -1)[..., 0]
        for part in _statistics(kind, x, scale)
    )
    graph, feeds, _ = _backward(kind, x.flip(0), x, scale, mean, inverse)
    check_graph(graph, feeds, factor=64)


def test_instancenorm_of_one_channel(check_graph):
    x, scale = _draw((3, 1, 5, 4), torch.float32) + 1, torch.full((1, 1, 1, 1), 1.5)
    graph, feeds, _ = _forward("instancenorm", x, scale, scale)
    check_graph(graph, feeds, factor=16)
    mean, inverse = _statistics("instancenorm", x, scale)
    graph, feeds, _ = _backward("instancenorm", x.flip(0), x, scale, mean, inverse)
    check_graph(graph, feeds, factor=64)


def test_rmsnorm_of_bfloat16_with_a_float32_weight_sums_its_gradient_in_float32(check_graph):
    # In bfloat16 a sum of 2048 terms stops growing at 256 times a term.
    x, scale = _draw((2, 1024, 256), torch.bfloat16), _draw((1, 1, 256), torch.float32, seed=1)
    _, inverse = _statistics("rmsnorm", x, scale)
    ones = torch.ones((), dtype=torch.bfloat16).expand(x.shape)
    every_other = _draw((2, 1024, 512), torch.bfloat16, seed=2)[..., ::2]
    for grad in (ones, every_other):
        graph, feeds, outputs = _backward("rmsnorm", grad, x, scale, None, inverse)
        results = check_graph(graph, feeds, factor=64)
        assert results[outputs[1]].dtype is torch.float32


def test_rmsnorm_backward_without_a_bias(check_graph):
    x, scale, _ = _case("rmsnorm", torch.float32, torch.float32)
    _, inverse = _statistics("rmsnorm", x, scale)
    graph, feeds, outputs = _backward("rmsnorm", x, x, scale, None, inverse, has_dbias=False)
    assert outputs[2] is None
    check_graph(graph, feeds, factor=64)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_output_and_weight_gradients_of_zero(run_guarded, kind):
    batch = 0 if kind == "adalayernorm" else 1
    scale = torch.ones((1, 6, 1, 1) if kind == "instancenorm" else (batch, 1, 1, 4))
    x = torch.zeros(0, 6, 5, 4)
    graph, feeds, _ = _forward(kind, x, scale, scale)
    run_guarded(graph, feeds)
    statistic = torch.zeros((0, 6, 1, 1) if kind == "instancenorm" else (0, 6, 5, 1))
    graph, feeds, outputs = _backward(kind, x, x, scale, statistic, statistic)
    results = run_guarded(graph, feeds)
    assert (results[outputs[1]] == 0).all() and (results[outputs[2]] == 0).all()


def test_a_mean_far_from_zero_does_not_cancel_the_variance(check_graph):
    x = _draw((4, 257), torch.float32) + 1000
    scale = torch.ones(1, 257)
    graph, feeds, _ = _forward("layernorm", x, scale, scale)
    # The input itself has an error of 2**-14 in a deviation of 1.
    check_graph(graph, feeds, factor=2.0**12)


def test_epsilon_is_read_at_each_call():
    x, scale = torch.zeros(2, 8), torch.ones(1, 8)
    graph, feeds, outputs = _forward("rmsnorm", x, scale, None)
    graph.build()
    epsilon = next(t for t in feeds if t.get_is_pass_by_value())
    for value in (0.25, 4.0):
        inverse, y = torch.zeros(2, 1), torch.zeros(2, 8)
        graph.execute({**feeds, epsilon: torch.tensor(value), outputs[0]: y, outputs[1]: inverse})
        assert inverse.flatten().tolist() == [value**-0.5] * 2


def test_a_quantized_output_saturates(check_graph):
    x, scale, bias = _case("layernorm", torch.float32, torch.float32)
    graph, feeds, outputs = _forward("layernorm", x, scale * 1000, bias)
    outputs[0].set_data_type(torch.float8_e4m3fn)
    results = check_graph(graph, feeds, factor=16)
    assert results[outputs[0]].float().abs().max() == 448


def test_a_residual_before_and_a_block_scaled_quantization_after(check_graph):
    x, residual = _draw((6, 64), torch.bfloat16), _draw((6, 64), torch.bfloat16, seed=1)
    scale = _draw((1, 64), torch.float32, seed=2)
    graph = tilewright.Graph(io_data_type=torch.bfloat16, intermediate_data_type=torch.float32)
    buffers = (x, residual, scale)
    tensors = [graph.tensor_like(buffer) for buffer in buffers]
    summed = graph.add(tensors[0], tensors[1]).set_output(True).set_data_type(torch.float32)
    epsilon = graph.tensor_scalar(EPSILON)
    y = graph.rmsnorm(norm_forward_phase.INFERENCE, summed, tensors[2], None, epsilon)[0]
    elements, scales = graph.block_scale_quantize(y, 32)
    elements.set_output(True).set_data_type("FP8_E4M3")
    scales.set_output(True).set_data_type("FP8_E8M0")
    feeds = dict(zip(tensors, buffers, strict=True)) | {epsilon: torch.tensor(EPSILON)}
    check_graph(graph, feeds, factor=16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_input_of_a_narrow_output_is_left_as_it_is(check_graph, kind):
    x, scale, bias = _case(kind, torch.float32, torch.float32)
    for out_type in (torch.bfloat16, torch.float8_e4m3fn):
        graph, feeds, outputs = _forward(kind, x, scale, bias)
        outputs[0].set_data_type(out_type)
        check_graph(graph, feeds, factor=16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_large_inputs_take_the_path_without_large_temporaries(check_graph, kind, dtype):
    x = _draw((512, 160), dtype) + 1
    scale, bias = _draw((1, 160), dtype, seed=1), _draw((1, 160), dtype, seed=2)
    assert x.numel() >= normalization._IN_PLACE_FROM
    graph, feeds, _ = _forward(kind, x, scale, bias)
    check_graph(graph, feeds, factor=16)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_the_mean_of_a_row_with_an_infinity_is_infinite(value: float) -> None:
    # ATen's running formula makes NaN of it; the sum is what the operation is defined by.
    graph = tilewright.Graph(io_data_type="float32", handle=tilewright.create_handle("cpu"))
    x, scale, bias = graph.tensor((2, 4)), graph.tensor((1, 4)), graph.tensor((1, 4))
    phase = tilewright.norm_forward_phase.TRAINING
    y, mean, inverse = graph.layernorm(phase, x, scale, bias, graph.tensor_scalar(1e-5))
    for tensor in (y, mean, inverse):
        tensor.set_output(True)
    graph.build()
    rows = torch.ones(2, 4)
    rows[0, 2] = value
    made = {y: torch.empty(2, 4), mean: torch.empty(2, 1), inverse: torch.empty(2, 1)}
    graph.execute({x: rows, scale: torch.ones(1, 4), bias: torch.zeros(1, 4), **made})
    assert made[mean].flatten().tolist() == [value, 1.0]
    assert torch.isnan(made[inverse][0]) and torch.isnan(made[y][0]).all()
    assert torch.equal(made[y][1], torch.zeros(4))
