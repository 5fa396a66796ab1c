"""Products with what follows them: bias, activation, gated units, amax, block-scaled operands."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tilewright import reduction_mode, reshape_mode, tensor_reordering

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _graph(dtype):
    return tilewright.Graph(io_data_type=dtype, intermediate_data_type=torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_approx_tanh", "swish", "sigmoid"])
def test_bias_activation_and_amax(check_graph, dtype, activation):
    x, weight, bias = _draw((20, 48), dtype), _draw((48, 40), dtype, 1), _draw((1, 40), dtype, 2)
    graph = _graph(dtype)
    a, b, c = graph.tensor_like(x), graph.tensor_like(weight), graph.tensor_like(bias)
    hidden = getattr(graph, activation)(graph.bias(graph.matmul(a, b), c))
    amax = graph.reduction(hidden, reduction_mode.AMAX).set_dim((1, 1))
    amax.set_output(True).set_data_type(torch.float32)
    graph.identity(hidden).set_output(True)
    check_graph(graph, {a: x, b: weight, c: bias}, factor=32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gated_unit_of_two_halves(check_graph, dtype):
    x, weight = _draw((2, 20, 48), dtype), _draw((1, 48, 64), dtype, 1)
    graph = _graph(dtype)
    a, b = graph.tensor_like(x), graph.tensor_like(weight)
    product = graph.matmul(a, b)
    gate = graph.slice(product, [slice(None), slice(None), slice(0, 32)])
    linear = graph.slice(product, [slice(None), slice(None), slice(32, 64)])
    graph.mul(graph.swish(gate), linear).set_output(True)
    # Two factors of size 20 each multiply the product's error.
    check_graph(graph, {a: x, b: weight}, factor=128)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gated_unit_of_interleaved_blocks_of_32_columns(run_guarded, dtype):
    x, weight = _draw((20, 48), dtype), _draw((48, 128), dtype, 1)
    graph = _graph(dtype)
    a, b = graph.tensor_like(x), graph.tensor_like(weight)
    product = graph.matmul(a, b)
    blocks = graph.reshape(product, reshape_mode=reshape_mode.LOGICAL).set_dim((20, 2, 2, 32))
    gate = graph.slice(blocks, [slice(None), slice(None), slice(0, 1)])
    linear = graph.slice(blocks, [slice(None), slice(None), slice(1, 2)])
    unit = graph.mul(graph.swish(gate), linear)
    out = graph.reshape(unit, reshape_mode=reshape_mode.LOGICAL).set_dim((20, 64))
    out.set_output(True).set_data_type(torch.float32)
    result = run_guarded(graph, {a: x, b: weight})[out]
    whole = x.double() @ weight.double()
    columns = [whole[:, start : start + 32] for start in (0, 32, 64, 96)]
    silu = torch.nn.functional.silu
    expected = torch.cat((silu(columns[0]) * columns[1], silu(columns[2]) * columns[3]), 1)
    assert (result - expected).abs().max() < 128 * 2.0**-24 * expected.abs().max()


@pytest.mark.parametrize("element", ["FP8_E4M3", "FP4_E2M1"])
def test_products_of_block_scaled_operands(check_graph, element):
    scale_type = "FP8_E8M0" if element == "FP8_E4M3" else "FP8_E4M3"
    block, rows, columns, inner = 32 if element == "FP8_E4M3" else 16, 130, 24, 128
    generator = torch.Generator().manual_seed(5)

    def codes(count):
        packed = count if element == "FP8_E4M3" else count // 2
        drawn = torch.randint(0, 256, (packed,), generator=generator, dtype=torch.uint8)
        # Codes 0x7F and 0xFF are NaN in E4M3.
        return drawn & 0xBF if element == "FP8_E4M3" else drawn

    def scales(count):
        return torch.randint(118, 130, (count,), generator=generator, dtype=torch.uint8) & 0x7F

    graph = _graph(torch.bfloat16)
    tiles = tensor_reordering.F8_128x4
    a = graph.tensor((rows, inner), data_type=element)
    b = graph.tensor((inner, columns), (1, inner), data_type=element)
    tile_columns = -(-inner // block // 4) * 4
    scale_a = graph.tensor((256, tile_columns), data_type=scale_type, reordering_type=tiles)
    scale_b = graph.tensor(
        (tile_columns, 128), (1, tile_columns), data_type=scale_type, reordering_type=tiles
    )
    left = graph.block_scale_dequantize(a, scale_a, [1, block])
    right = graph.block_scale_dequantize(b, scale_b, [block, 1])
    graph.matmul(left, right).set_output(True)
    feeds = {
        a: codes(rows * inner),
        b: codes(inner * columns),
        scale_a: scales(256 * tile_columns),
        scale_b: scales(128 * tile_columns),
    }
    if scale_type == "FP8_E4M3":
        feeds[scale_a], feeds[scale_b] = feeds[scale_a] % 64, feeds[scale_b] % 64
    check_graph(graph, feeds, factor=64)
