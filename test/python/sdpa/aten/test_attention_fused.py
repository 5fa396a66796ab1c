"""Which calls go to ATen's fused attention, and which come back from it."""

from __future__ import annotations

import math

import pytest
import torch

import tilewright
from tilewright.engines.aten import attention_fused

pytestmark = pytest.mark.L0


def draw(seed: int, *shapes: tuple[int, ...]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def forward_and_backward(bench, q, k, v, rule, extra=None, given=(), **options):
    """Run both, compare both with the reference; q, k and v may differ in type."""
    operands = {"q": q, "k": k, "v": v, **(extra or {})}
    options["attn_scale"] = rule.scale
    found = bench.run("sdpa", operands, generate_stats=True, **options)
    expected = bench.reference(q, k, v, rule)
    bench.close("O", found["O"], expected["O"], 5e-6)
    bench.close("Stats", found["Stats"], expected["Stats"], 5e-6)
    (d_o,) = draw(99, expected["O"].shape)
    operands.update(o=expected["O"].float(), stats=expected["Stats"].float(), dO=d_o)
    found = bench.run("sdpa_backward", operands, given=given, **options)
    gradients = bench.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        bench.close(port, value, gradients[port].view(value.shape), 5e-6)


def test_plain_causal_and_biased_calls_are_fused(bench, calls):
    q, k, v = draw(1, (2, 4, 9, 8), *[(2, 2, 9, 8)] * 2)
    (bias,) = draw(2, (1, 4, 9, 9))
    forward_and_backward(bench, q, k, v, bench.Rule(scale=0.3))
    forward_and_backward(bench, q, k, v, bench.Rule(scale=0.3, right=0), use_causal_mask=True)
    square = bench.Rule(scale=0.3, right=0, bottom_right=True)
    forward_and_backward(bench, q, k, v, square, use_causal_mask_bottom_right=True)
    forward_and_backward(bench, q, k, v, bench.Rule(scale=0.3, bias=bias), extra={"bias": bias})
    assert calls == {"forward": 4, "backward": 4}


@pytest.mark.parametrize("port", ["q", "k", "v"])
@pytest.mark.parametrize("row", [0, 1])
def test_rows_that_share_storage_are_read_as_they_are(check_graph, calls, port, row):
    # ATen's function hands the row stride to a BLAS, which takes none below the row's length.
    dim = (2, 2, 5, 8)
    operands = dict(zip("qkv", draw(1, *[dim] * 3), strict=True))
    operands[port] = operands[port].as_strided(dim, (80, 40, row, 1))
    graph = tilewright.Graph(io_data_type=torch.float32)
    tensors = {name: graph.tensor_like(value) for name, value in operands.items()}
    for output in graph.sdpa(**tensors, attn_scale=0.3, generate_stats=True):
        output.set_output(True)
    check_graph(graph, {tensors[name]: value for name, value in operands.items()}, factor=16)
    assert calls == {"forward": 1, "backward": 0}


def test_a_single_query_may_have_any_row_stride(bench, calls):
    q, k, v = draw(2, (2, 2, 1, 8), *[(2, 2, 9, 8)] * 2)
    forward_and_backward(bench, q.as_strided(q.shape, (16, 8, 0, 1)), k, v, bench.Rule(scale=0.3))
    assert calls == {"forward": 1, "backward": 1}


def test_other_masks_widths_and_outputs_are_not(bench, calls):
    q, k, v = draw(3, (2, 4, 9, 8), *[(2, 2, 11, 8)] * 2)
    sink, wide = draw(4, (1, 4, 1, 1), (2, 2, 11, 12))
    rule = bench.Rule
    bottom_right = rule(scale=0.3, right=0, bottom_right=True)
    forward_and_backward(bench, q, k, v, bottom_right, use_causal_mask_bottom_right=True)
    window = {"use_causal_mask": True, "sliding_window_length": 3}
    forward_and_backward(bench, q, k, v, rule(scale=0.3, right=0, left=3), **window)
    banded = rule(scale=0.3, right=1)
    forward_and_backward(bench, q, k, v, banded, diagonal_band_right_bound=1)
    forward_and_backward(bench, q, k, wide, rule(scale=0.3))
    sunk = rule(scale=0.3, sink=sink.flatten())
    forward_and_backward(bench, q, k, v, sunk, extra={"sink_token": sink})
    bench.run("sdpa", {"q": q, "k": k, "v": v}, given=("score_max",))
    assert calls == {"forward": 0, "backward": 0}


def test_a_bias_gradient_is_not(bench, calls):
    q, k, v = draw(5, (2, 4, 9, 8), *[(2, 2, 9, 8)] * 2)
    (bias,) = draw(6, (1, 4, 9, 9))
    rule = bench.Rule(scale=0.3, bias=bias)
    forward_and_backward(bench, q, k, v, rule, extra={"bias": bias}, given=("dBias",))
    assert calls == {"forward": 1, "backward": 0}


def test_what_is_not_finite_is_computed_again(bench, calls):
    """The fused function would spread a NaN in a hidden value; the result shows it did not."""
    q, k, v = draw(7, (1, 2, 6, 8), *[(1, 2, 6, 8)] * 2)
    v[0, 0, 5, 0] = math.nan
    found = bench.run("sdpa", {"q": q, "k": k, "v": v}, use_causal_mask=True)
    assert calls["forward"] == 1
    assert torch.isnan(found["O"]).nonzero().tolist() == [[0, 0, 5, 0]]


def test_rows_without_a_key_are_computed_again(bench, calls):
    """The fused function gives them Stats 0."""
    q, k, v = draw(8, (1, 2, 6, 8), *[(1, 2, 6, 8)] * 2)
    bias = torch.zeros(1, 1, 6, 6)
    bias[..., 2, :] = -math.inf
    rule = bench.Rule(scale=0.3, bias=bias)
    forward_and_backward(bench, q, k, v, rule, extra={"bias": bias})
    assert calls["forward"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_goes_to_the_fused_function_as_float32(bench, monkeypatch, dtype):
    seen = []

    def spy(q, k, v, *args, **kwargs):
        seen.append({q.dtype, k.dtype, v.dtype})
        return function(q, k, v, *args, **kwargs)

    function = attention_fused._flash
    monkeypatch.setattr(attention_fused, "_flash", spy)
    q, k, v = (x.to(dtype) for x in draw(9, *[(1, 2, 6, 8)] * 3))
    bench.run("sdpa", {"q": q, "k": k, "v": v}, outputs={"O": dtype})
    assert seen == [{torch.float32}]
