"""The ATen engine's convolutions and their gradients against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import tilewright

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EXTENTS = (9, 8, 7)
FILTER = (3, 2, 3)
# pre_padding, post_padding, stride, dilation on each of up to three axes.
GEOMETRIES = {
    "same": ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "strided": ((1, 0, 2), (1, 0, 2), (2, 2, 2), (1, 1, 1)),
    "one-sided": ((2, 1, 2), (0, 1, 3), (1, 2, 1), (1, 1, 1)),
    "dilated": ((2, 1, 2), (1, 2, 3), (2, 2, 2), (2, 2, 2)),
    "bare": ((0, 0, 0), (0, 0, 0), (1, 1, 1), (1, 1, 1)),
}


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _arguments(geometry, spatial):
    pre, post, stride, dilation = (part[:spatial] for part in GEOMETRIES[geometry])
    return {"pre_padding": pre, "post_padding": post, "stride": stride, "dilation": dilation}


def _result_extents(geometry, spatial):
    pre, post, stride, dilation = (part[:spatial] for part in GEOMETRIES[geometry])
    return tuple(
        (EXTENTS[i] + pre[i] + post[i] - dilation[i] * (FILTER[i] - 1) - 1) // stride[i] + 1
        for i in range(spatial)
    )


def _check_three(check_graph, image, weight, loss, arguments):
    """All three directions of one geometry."""
    dtype = image.dtype
    graph = tilewright.Graph(io_data_type=dtype)
    x, w = graph.tensor_like(image), graph.tensor_like(weight)
    graph.conv_fprop(x, w, **arguments).set_output(True)
    check_graph(graph, {x: image, w: weight}, factor=64)

    graph = tilewright.Graph(io_data_type=dtype)
    dy, w = graph.tensor_like(loss), graph.tensor_like(weight)
    graph.conv_dgrad(dy, w, **arguments).set_dim(image.shape).set_output(True)
    check_graph(graph, {dy: loss, w: weight}, factor=64)

    graph = tilewright.Graph(io_data_type=dtype)
    x, dy = graph.tensor_like(image), graph.tensor_like(loss)
    graph.conv_wgrad(x, dy, **arguments).set_dim(weight.shape).set_output(True)
    check_graph(graph, {x: image, dy: loss}, factor=256)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_every_direction_matches_the_oracle(check_graph, dtype, geometry, spatial):
    image = _draw((2, 4, *EXTENTS[:spatial]), dtype)
    weight = _draw((6, 4, *FILTER[:spatial]), dtype, seed=1)
    loss = _draw((2, 6, *_result_extents(geometry, spatial)), dtype, seed=2)
    _check_three(check_graph, image, weight, loss, _arguments(geometry, spatial))


@pytest.mark.parametrize("filter_channels", [1, 2])
def test_grouped_and_depthwise(check_graph, filter_channels):
    image = _draw((2, 4, 9, 8), torch.float32)
    weight = _draw((8, filter_channels, 3, 2), torch.float32, seed=1)
    loss = _draw((2, 8, *_result_extents("one-sided", 2)), torch.float32, seed=2)
    _check_three(check_graph, image, weight, loss, _arguments("one-sided", 2))


def test_channels_last_and_sliced_images(check_graph):
    image = _draw((2, 4, 9, 8), torch.float32).to(memory_format=torch.channels_last)
    weight = _draw((6, 4, 3, 2), torch.float32, seed=1).to(memory_format=torch.channels_last)
    loss = _draw((2, 6, *_result_extents("strided", 2)), torch.float32, seed=2)
    loss = loss.to(memory_format=torch.channels_last)
    _check_three(check_graph, image, weight, loss, _arguments("strided", 2))
    wide = _draw((2, 8, 9, 16), torch.float32)[:, ::2, :, ::2]
    _check_three(check_graph, wide, weight, loss, _arguments("strided", 2))


def test_an_omitted_output_stride_follows_a_channels_last_image(run_guarded):
    image = _draw((2, 4, 9, 8), torch.float32).to(memory_format=torch.channels_last)
    weight = _draw((6, 4, 3, 2), torch.float32, seed=1)
    graph = tilewright.Graph(io_data_type=torch.float32)
    x, w = graph.tensor_like(image), graph.tensor_like(weight)
    out = graph.conv_fprop(x, w, padding=(1, 1)).set_output(True)
    run_guarded(graph, {x: image, w: weight})
    assert out.get_stride()[1] == 1


def test_an_empty_batch_gives_an_empty_result_and_a_filter_gradient_of_zeros(check_graph):
    image, weight = torch.zeros(0, 4, 9, 8), _draw((6, 4, 3, 2), torch.float32)
    loss = torch.zeros(0, 6, *_result_extents("same", 2))
    _check_three(check_graph, image, weight, loss, _arguments("same", 2))


def test_a_dgrad_covers_image_elements_that_no_filter_position_reads(check_graph):
    # Stride 3 over an extent of 9 with a filter of 1 reads every third element only.
    weight, loss = _draw((2, 3, 1), torch.float32), _draw((1, 2, 3), torch.float32, seed=1)
    graph = tilewright.Graph(io_data_type=torch.float32)
    dy, w = graph.tensor_like(loss), graph.tensor_like(weight)
    out = graph.conv_dgrad(dy, w, stride=(3,)).set_dim((1, 3, 9)).set_output(True)
    result = check_graph(graph, {dy: loss, w: weight})[out]
    assert (result[:, :, 1::3] == 0).all() and (result[:, :, 2::3] == 0).all()


def test_fp8_operands(check_graph):
    image = _draw((2, 4, 9, 8), torch.float32).to(torch.float8_e4m3fn)
    weight = _draw((6, 4, 3, 2), torch.float32, seed=1).to(torch.float8_e4m3fn)
    graph = tilewright.Graph(io_data_type=torch.float32)
    x, w = graph.tensor_like(image), graph.tensor_like(weight)
    graph.conv_fprop(x, w, padding=(1, 1)).set_output(True).set_data_type(torch.float32)
    check_graph(graph, {x: image, w: weight}, factor=64)
