"""The ATen engine's batch normalization against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import tilewright
import tilewright.oracle
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EPSILON, MOMENTUM = 1e-3, 0.125
SHAPES = [(4, 6, 5, 3), (7, 6), (2, 6, 3, 2, 2), (1, 6, 1, 1)]


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def _channels(x, seed):
    return _draw((1, x.shape[1]) + (1,) * (x.dim() - 2), _wide(x.dtype), seed)


def _training(x, with_running=True, peer_stats=()):
    graph = tilewright.Graph(io_data_type=x.dtype)
    buffers = [x, *(_channels(x, seed) for seed in range(1, 5))]
    tensors = [graph.tensor_like(buffer) for buffer in buffers]
    feeds = dict(zip(tensors, buffers, strict=True))
    if not with_running:
        del feeds[tensors[3]], feeds[tensors[4]]
        tensors[3:] = [None, None]
    epsilon, momentum = graph.tensor_scalar(EPSILON), graph.tensor_scalar(MOMENTUM)
    feeds[epsilon] = torch.tensor(EPSILON)
    if with_running:
        feeds[momentum] = torch.tensor(MOMENTUM)
    peers = [graph.tensor_like(buffer) for buffer in peer_stats]
    outputs = graph.batchnorm(
        *tensors, epsilon, momentum if with_running else None, peer_stats=peers
    )
    for index, output in enumerate(outputs):
        if output is not None:
            output.set_output(True).set_data_type(x.dtype if index == 0 else _wide(x.dtype))
    return graph, feeds, outputs


def _backward(grad, x, mean, inverse):
    graph = tilewright.Graph(io_data_type=x.dtype)
    buffers = [grad, x, _channels(x, 1), mean, inverse]
    tensors = [graph.tensor_like(buffer) for buffer in buffers]
    outputs = graph.batchnorm_backward(*tensors)
    for index, output in enumerate(outputs):
        output.set_output(True).set_data_type(x.dtype if index == 0 else _wide(x.dtype))
    return graph, dict(zip(tensors, buffers, strict=True)), outputs


def _inputs(shape, dtype):
    x = _draw(shape, dtype) + 2
    yield x
    if x.dim() == 4:
        yield x.to(memory_format=torch.channels_last)
        yield _draw((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_training_and_its_running_statistics(check_graph, dtype, shape):
    for x in _inputs(shape, dtype):
        graph, feeds, _ = _training(x)
        check_graph(graph, feeds, factor=32)


def test_without_running_statistics(check_graph):
    graph, feeds, outputs = _training(_draw((4, 6, 5), torch.float32), with_running=False)
    assert outputs[3:] == [None, None]
    check_graph(graph, feeds, factor=32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_inference(check_graph, dtype, shape):
    for x in _inputs(shape, dtype):
        graph = tilewright.Graph(io_data_type=x.dtype)
        buffers = [x, *(_channels(x, seed) for seed in range(1, 5))]
        tensors = [graph.tensor_like(buffer) for buffer in buffers]
        graph.batchnorm_inference(*tensors).set_output(True)
        check_graph(graph, dict(zip(tensors, buffers, strict=True)), factor=32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(check_graph, dtype, shape):
    for x in _inputs(shape, dtype):
        axes = [axis for axis in range(x.dim()) if axis != 1]
        mean = x.double().mean(axes, keepdim=True)
        inverse = ((x.double() - mean).square().mean(axes, keepdim=True) + EPSILON).rsqrt()
        mean, inverse = mean.to(_wide(dtype)), inverse.to(_wide(dtype))
        for grad in (_draw(shape, dtype, seed=7), torch.ones((), dtype=dtype).expand(shape)):
            graph, feeds, _ = _backward(grad, x, mean, inverse)
            # With one element a channel, x - mean is 0 and inverse is near 32.
            check_graph(graph, feeds, factor=256)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3, 3)])
@pytest.mark.parametrize("port", ["scale", "mean", "inv_variance"])
def test_backward_takes_channels_of_any_strides(check_graph, shape, port):
    x = _draw(shape, torch.float32)
    x = x.to(memory_format=torch.channels_last) if shape[2:] else x
    graph = tilewright.Graph(io_data_type=x.dtype)
    values = {name: _channels(x, seed).abs() for seed, name in enumerate(("scale", "inv_variance"))}
    values = {"grad": x.flip(0), "input": x, "mean": _channels(x, 3), **values}
    values[port] = torch.stack((values[port], torch.full_like(values[port], 1e9)), -1)[..., 0]
    tensors = {name: graph.tensor_like(value) for name, value in values.items()}
    for output in graph.batchnorm_backward(**tensors):
        output.set_output(True)
    feeds = {tensors[name]: value for name, value in values.items()}
    check_graph(graph, feeds, factor=64)


@pytest.mark.parametrize(
    "strides",
    [((231, 7, 1, 1), (231, 1, 33, 231)), ((0, 7, 1, 1), (231, 1, 33, 231)), ((231, 7, 1, 0),) * 2],
)
def test_backward_takes_operands_of_two_layouts(check_graph, strides):
    # Both layouts are dense, and with extents of 1 also say channels last.
    dim = (1, 33, 7, 1)
    x, grad = (_draw(231, torch.float32, seed).as_strided(dim, strides[seed]) for seed in (0, 1))
    mean = x.mean((0, 2, 3), keepdim=True)
    graph, feeds, _ = _backward(grad, x, mean, torch.ones_like(mean))
    check_graph(graph, feeds, factor=64)


def test_no_channels_have_no_statistics(run_guarded):
    x = torch.zeros(13, 0, 4)
    graph, feeds, _ = _training(x)
    run_guarded(graph, feeds)
    results = tilewright.oracle.evaluate(graph, feeds)
    assert all(value.numel() == 0 for value in results.values())


@pytest.mark.parametrize("momentum", [0.25, 0.75, 1.0])
def test_an_infinite_mean_makes_the_running_one_infinite(momentum):
    x = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]])
    channel = torch.ones(1, 2)
    graph = tilewright.Graph(io_data_type=torch.float32)
    tensors = [graph.tensor_like(part) for part in (x, channel, channel, channel, channel)]
    made = graph.batchnorm(*tensors, EPSILON, momentum)
    for output in made:
        output.set_output(True)
    graph.build()
    results = [torch.empty(tuple(output.get_dim())) for output in made]
    pack = dict(zip(tensors, [x, *[channel.clone() for _ in range(4)]], strict=True))
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
    graph.execute(pack | dict(zip(made, results, strict=True)), workspace)
    assert results[3].tolist() == [[1.0 + 0.5 * momentum, -torch.inf]]


def test_running_statistics_may_be_updated_in_place():
    x = _draw((4, 6, 5), torch.float32) + 2
    graph, feeds, outputs = _training(x)
    graph.build()
    apart = {output: torch.zeros(output.dim) for output in outputs}
    graph.execute({**feeds, **apart})
    tensors = list(feeds)
    in_place = {output: torch.zeros(output.dim) for output in outputs}
    running = [feeds[tensors[3]].clone(), feeds[tensors[4]].clone()]
    in_place[outputs[3]], in_place[outputs[4]] = running
    graph.execute({**feeds, tensors[3]: running[0], tensors[4]: running[1], **in_place})
    for output in outputs:
        assert torch.equal(apart[output], in_place[output])


def test_an_empty_batch_has_no_statistics_and_gradients_of_zero(run_guarded):
    x = torch.zeros(0, 6, 2)
    graph, feeds, outputs = _training(x)
    results = run_guarded(graph, feeds)
    for output in outputs[1:]:
        assert torch.isnan(results[output]).all()
    statistic = torch.zeros(1, 6, 1)
    graph, feeds, outputs = _backward(x, x, statistic, statistic)
    results = run_guarded(graph, feeds)
    assert (results[outputs[1]] == 0).all() and (results[outputs[2]] == 0).all()


def test_statistics_of_peers_are_declined():
    x = _draw((4, 6, 5), torch.float32)
    graph, _, _ = _training(x, peer_stats=[torch.zeros(2, 24, 1, 1)])
    with pytest.raises(NotSupportedError, match="peer_stats"):
        graph.build()
