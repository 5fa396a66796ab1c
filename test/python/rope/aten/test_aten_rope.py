"""The ATen engine's rotary embedding: exact tables, in place, and the adjoint."""

from __future__ import annotations

import math

import pytest
import torch

import tilewright

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _rope(x, freqs, *, backward=False, **attributes):
    graph = tilewright.Graph(io_data_type=x.dtype)
    source, angles = graph.tensor_like(x), graph.tensor_like(freqs)
    method = graph.rope_backward if backward else graph.rope
    out = method(source, angles, **attributes).set_output(True)
    return graph, {source: x, angles: freqs}, out


def _exact(x, freqs, rotated, scale=1.0):
    """The formula in float32 with correctly rounded cosines and sines, one rounding a step."""
    half = rotated // 2
    angle = freqs.float().double()
    if angle.shape[-1] == half:
        angle = torch.cat((angle, angle), -1)
    cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
    low, high = x.float()[..., :half], x.float()[..., half:rotated]
    parts = (
        low * cos[..., :half] - high * sin[..., :half],
        high * cos[..., half:] + low * sin[..., half:],
        x.float()[..., rotated:],
    )
    value = torch.cat(parts, -1)
    return (value if scale == 1.0 else value * scale).to(x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("angles", [(1, 5, 8), (2, 5, 4), (2, 1, 8)])
@pytest.mark.parametrize("scale", [1.0, 0.375])
def test_forward_and_adjoint_match_the_oracle(check_graph, dtype, angles, scale):
    batch, length, extent = angles
    x = _draw((2, 3, 5, 8), dtype)
    freqs = _draw((batch, 1, length, extent), torch.float32, seed=1) * 50
    for backward in (False, True):
        graph, feeds, _ = _rope(x, freqs, backward=backward, output_scale=scale)
        check_graph(graph, feeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotated", [4, 6, 8])
def test_results_equal_the_formula_bit_for_bit(run_guarded, dtype, rotated):
    x = _draw((2, 3, 5, 8), dtype)
    freqs = _draw((2, 1, 5, rotated // 2), torch.float32, seed=1) * 1e6
    graph, feeds, out = _rope(x, freqs, rope_dim=rotated, output_scale=0.7)
    assert torch.equal(run_guarded(graph, feeds)[out], _exact(x, freqs, rotated, 0.7))


def test_large_angles_signed_zeros_and_non_finite_values(run_guarded):
    angles = [0.0, -0.0, 1e30, 3.4028235e38, 2.0**100, math.pi, 22.0, 1e-45]
    freqs = torch.tensor(angles).reshape(1, 1, 1, 8)
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5e-45]
    x = torch.tensor(values * 2).reshape(1, 1, 1, 16)
    graph, feeds, out = _rope(x, freqs)
    got, want = run_guarded(graph, feeds)[out], _exact(x, freqs, 16)
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    known = ~torch.isnan(want)
    assert torch.equal(got[known].view(torch.int32), want[known].view(torch.int32))


def test_an_angle_in_another_type_is_rounded_to_float32_first(run_guarded):
    x = _draw((1, 1, 4, 8), torch.float32)
    freqs = _draw((1, 1, 4, 4), torch.float64, seed=1) * 1e5
    graph, feeds, out = _rope(x, freqs)
    assert torch.equal(run_guarded(graph, feeds)[out], _exact(x, freqs, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [6, 8])
def test_the_input_may_be_rotated_in_place(dtype, rotated):
    x = _draw((2, 3, 5, 8), dtype)
    freqs = _draw((1, 1, 5, rotated), torch.float32, seed=1)
    for backward in (False, True):
        graph, feeds, out = _rope(x, freqs, backward=backward, rope_dim=rotated)
        graph.build()
        apart, in_place = torch.zeros_like(x), x.clone()
        graph.execute({**feeds, out: apart})
        source = next(iter(feeds))
        graph.execute({**feeds, source: in_place, out: in_place})
        assert torch.equal(apart, in_place)
        assert not torch.equal(apart, x)


def test_queries_and_fewer_keys_rotate_by_tables_with_a_batch(run_guarded):
    # Two query heads, one key head: keys rotate too, each sequence by its own angles.
    freqs = _draw((2, 1, 5, 4), torch.float32, seed=1)
    for heads in (2, 1):
        x = _draw((2, heads, 5, 8), torch.float32, seed=heads)
        graph, feeds, out = _rope(x, freqs)
        assert torch.equal(run_guarded(graph, feeds)[out], _exact(x, freqs, 8))


def test_the_adjoint_has_the_inner_product_of_the_forward(run_guarded):
    x, dy = _draw((2, 3, 5, 8), torch.float64), _draw((2, 3, 5, 8), torch.float64, seed=3)
    # Unequal halves: the transposed rotation is not that by the negative angle.
    freqs = _draw((2, 1, 5, 6), torch.float32, seed=1)
    graph, feeds, out = _rope(x, freqs, rope_dim=6, output_scale=0.5)
    y = run_guarded(graph, feeds)[out]
    graph, feeds, out = _rope(dy, freqs, backward=True, rope_dim=6, output_scale=0.5)
    dx = run_guarded(graph, feeds)[out]
    assert abs((y * dy).sum() - (x * dx).sum()).item() < 1e-12


def test_sequence_major_buffers(check_graph):
    x = _draw((2, 5, 3, 8), torch.bfloat16).transpose(1, 2)
    graph, feeds, _ = _rope(x, _draw((1, 1, 5, 8), torch.float32, seed=1))
    check_graph(graph, feeds)
