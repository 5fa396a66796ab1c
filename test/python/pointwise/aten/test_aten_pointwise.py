"""The ATen engine's elementwise operations: every mode against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

import tilewright
from tilewright.engines.aten.pointwise import apply_pointwise
from tilewright.errors import NotSupportedError
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
POSITIVE = {"log", "rsqrt", "sqrt"}
UNARY = [mode for mode, row in POINTWISE_MODES.items() if row.arity == 1 and mode != "gen_index"]
BACKWARD = [mode for mode in POINTWISE_MODES if mode.endswith("_backward")]
BINARY = [mode for mode, row in POINTWISE_MODES.items() if row.arity == 2 and mode not in BACKWARD]
PARAMETERS = {
    "relu": {"negative_slope": 0.25, "lower_clip": -0.5, "upper_clip": 1.5},
    "leaky_relu": {"negative_slope": 0.125},
    "elu": {"elu_alpha": 0.75},
    "softplus": {"softplus_beta": 1.5},
    "swish": {"swish_beta": 0.5},
}


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _graph(mode, operands, out_type=None, out_stride=None, **parameters):
    graph = tilewright.Graph(io_data_type=operands[0].dtype)
    tensors = [graph.tensor_like(operand) for operand in operands]
    out = getattr(graph, mode)(*tensors, **parameters).set_output(True)
    if out_type is not None:
        out.set_data_type(out_type)
    if out_stride is not None:
        out.set_stride(out_stride)
    return graph, dict(zip(tensors, operands, strict=True)), out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", UNARY)
def test_unary_modes(check_graph, mode, dtype):
    x = _draw((3, 4, 5), dtype) * 2
    x = x.abs() + 0.1 if mode in POSITIVE else x
    for parameters in ({}, PARAMETERS.get(mode, {})):
        if mode == "leaky_relu" and not parameters:
            continue
        # The second output is strided with gaps, the axes in reverse order.
        for stride in (None, (1, 4, 20)):
            for source in (
                x,
                x.transpose(0, 2).contiguous().transpose(0, 2),
                x[:, :1].expand(3, 4, 5),
            ):
                graph, feeds, _ = _graph(mode, [source], out_stride=stride, **parameters)
                check_graph(graph, feeds)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", BINARY)
def test_binary_modes_broadcast(check_graph, mode, dtype):
    for first, second in (((3, 4, 5), (3, 4, 5)), ((3, 1, 5), (1, 4, 1)), ((0, 4), (1, 4))):
        a, b = _draw(first, dtype), _draw(second, dtype, seed=1)
        a = a.abs() if mode == "pow" else a
        b[..., :1] = a[..., :1].reshape(-1)[:1] if a.numel() else b[..., :1]
        graph, feeds, _ = _graph(mode, [a, b])
        check_graph(graph, feeds, factor=32)
        graph, feeds, _ = _graph(mode, [a, b], out_type=torch.float32)
        check_graph(graph, feeds, factor=32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", BACKWARD)
def test_backward_modes(check_graph, mode, dtype):
    x, grad = _draw((4, 9), dtype) * 3, _draw((4, 9), dtype, seed=1)
    for parameters in ({}, PARAMETERS.get(mode.removesuffix("_backward"), {})):
        if mode == "leaky_relu_backward" and not parameters:
            continue
        graph, feeds, _ = _graph(mode, [grad, x], **parameters)
        check_graph(graph, feeds)
        expanded = torch.ones((), dtype=dtype).expand(4, 9)
        graph, feeds, _ = _graph(mode, [expanded, x], **parameters)
        check_graph(graph, feeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", [*UNARY, *BACKWARD])
def test_infinities_and_nan_have_the_limits_of_the_formulas(check_graph, mode, dtype):
    # 64 elements: vectorized paths treat them otherwise than scalar ones do.
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0], dtype=dtype).repeat(16)
    if mode.removesuffix("_backward") == "leaky_relu":
        parameters = {"negative_slope": 0.5}
    else:
        parameters = {}
    if mode == "relu_backward":
        x = x.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
    operands = [torch.full((64,), 2.0, dtype=dtype), x] if mode in BACKWARD else [x]
    graph, feeds, _ = _graph(mode, operands, **parameters)
    check_graph(graph, feeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_slope_of_zero_keeps_infinity_out(check_graph, dtype):
    x = torch.tensor([math.inf, -math.inf, math.nan, -2.0], dtype=dtype).repeat(16)
    graph, feeds, _ = _graph("leaky_relu", [x], negative_slope=0.0)
    check_graph(graph, feeds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", UNARY)
def test_every_16_bit_number_is_rounded_once(run_guarded, mode, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    extra = {"negative_slope": 0.25} if mode == "leaky_relu" else {}
    graph, feeds, out = _graph(mode, [x], **extra)
    got = run_guarded(graph, feeds)[out]
    want = apply_pointwise(mode, [x.float()], extra).to(dtype)
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got[~torch.isnan(got)], want[~torch.isnan(want)])


@pytest.mark.parametrize("out_type", [torch.bool, torch.uint8, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["cmp_eq", "cmp_lt", "cmp_ge", "logical_and", "logical_or"])
def test_predicates_give_ones_and_zeros_of_any_type(check_graph, mode, out_type):
    a = torch.tensor([0.0, -0.0, 1.0, math.nan, 2.0])
    b = torch.tensor([0.0, 1.0, 1.0, math.nan, 0.0])
    graph, feeds, out = _graph(mode, [a, b], out_type=out_type)
    results = check_graph(graph, feeds)[out]
    assert set(results.tolist()) == {0, 1}


@pytest.mark.parametrize("mask_type", [torch.bool, torch.uint8, torch.float32])
def test_select_takes_the_first_where_the_mask_is_not_zero(check_graph, mask_type):
    mask = torch.tensor([[1, 0, 2]]).to(mask_type)
    a, b = _draw((4, 3), torch.bfloat16), _draw((4, 1), torch.bfloat16, seed=1)
    graph, feeds, out = _graph("binary_select", [a, b, mask])
    results = check_graph(graph, feeds)[out]
    assert torch.equal(results[:, 0], a[:, 0]) and torch.equal(results[:, 1], b[:, 0])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gen_index_counts_along_its_axis(check_graph, axis):
    for out_type in (torch.int32, torch.float32):
        graph, feeds, _ = _graph("gen_index", [torch.zeros(3, 4, 2)], out_type, axis=axis)
        check_graph(graph, feeds)


def test_integers_stay_exact_saturate_and_truncate(run_guarded):
    def result(mode, a, b, dtype, out_type):
        operands = [torch.tensor([value], dtype=dtype) for value in (a, b)]
        graph, feeds, out = _graph(mode, operands, out_type)
        return run_guarded(graph, feeds)[out].item()

    assert result("add", 100, 100, torch.int8, torch.int8) == 127
    assert result("sub", 0, 1, torch.uint8, torch.uint8) == 0
    assert result("mul", 2**31 - 1, 2**31 - 1, torch.int32, torch.int64) == (2**31 - 1) ** 2
    assert result("add", 2**53 + 1, 0, torch.int64, torch.int64) == 2**53 + 1
    assert result("div", -7, 2, torch.int32, torch.int32) == -3
    assert result("div", 7, 0, torch.int32, torch.int32) == 2**31 - 1
    assert result("mod", -7, 3, torch.int32, torch.int32) == -1


def test_conversions_saturate_truncate_and_keep_nan(run_guarded):
    x = torch.tensor([1e30, -1e30, math.inf, math.nan, 2.9, -2.9, 449.0])
    expected = {
        torch.int64: [2**63 - 1, -(2**63), 2**63 - 1, 0, 2, -2, 449],
        torch.int32: [2**31 - 1, -(2**31), 2**31 - 1, 0, 2, -2, 449],
        torch.int8: [127, -128, 127, 0, 2, -2, 127],
        torch.uint8: [255, 0, 255, 0, 2, 0, 255],
        torch.float8_e4m3fn: [448, -448, 448, None, 3, -3, 448],
        torch.float8_e5m2: [57344, -57344, 57344, None, 3, -3, 448],
    }
    for dtype, values in expected.items():
        graph, feeds, out = _graph("identity", [x], dtype)
        got = run_guarded(graph, feeds)[out].tolist()
        assert [None if v != v else v for v in got] == values, dtype


def test_float64_is_rounded_once_to_narrow_types(run_guarded):
    # By way of float32 each of these would first become the tie below and then the even side.
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    for dtype, position, step in ((torch.bfloat16, 0, 2.0**-7), (torch.float16, 1, 2.0**-10)):
        graph, feeds, out = _graph("identity", [x], dtype)
        assert run_guarded(graph, feeds)[out][position].item() == 1 + step
    fp8 = torch.tensor([1 + 2.0**-4 + 2.0**-40], dtype=torch.float64)
    graph, feeds, out = _graph("identity", [fp8], torch.float8_e4m3fn)
    assert run_guarded(graph, feeds)[out].item() == 1.125


def test_a_scalar_broadcasts_whatever_its_rank(check_graph):
    x = _draw((3, 5), torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        graph = tilewright.Graph(io_data_type=dtype)
        source, factor = graph.tensor_like(x.to(dtype)), graph.tensor_scalar(0.5)
        graph.mul(source, factor).set_output(True)
        check_graph(graph, {source: x.to(dtype), factor: torch.tensor(0.5)})


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_output_may_be_larger_than_what_its_operands_broadcast_to(check_graph, dtype):
    x = _draw((1, 5), dtype)
    for mode, operands in (("exp", [x]), ("mul", [x, x]), ("identity", [x]), ("swish", [x])):
        graph, feeds, out = _graph(mode, operands)
        out.set_dim((3, 5))
        assert check_graph(graph, feeds)[out].shape == (3, 5)


@pytest.mark.parametrize("mode", ["relu", "swish", "gelu", "exp"])
def test_the_output_may_be_the_input(mode):
    for dtype in (torch.float32, torch.bfloat16):
        x = _draw((6, 5), dtype)
        graph, feeds, out = _graph(mode, [x])
        graph.build()
        apart, in_place = torch.zeros_like(x), x.clone()
        graph.execute({**feeds, out: apart})
        graph.execute({**dict.fromkeys(feeds, in_place), out: in_place})
        assert torch.equal(apart, in_place)


def test_a_chain_of_virtual_tensors(check_graph):
    x, bias = _draw((4, 8), torch.bfloat16), _draw((1, 8), torch.bfloat16, seed=1)
    graph = tilewright.Graph(io_data_type=torch.bfloat16, intermediate_data_type=torch.float32)
    source, shift = graph.tensor_like(x), graph.tensor_like(bias)
    hidden = graph.gelu(graph.bias(source, shift))
    graph.cmp_gt(hidden, source).set_output(True).set_data_type(torch.bool)
    graph.mul(hidden, hidden).set_output(True)
    check_graph(graph, {source: x, shift: bias})


def test_apply_pointwise_stays_in_the_operands_type():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
    ones = apply_pointwise("cmp_eq", [a, b])
    assert ones.dtype is torch.float32 and ones.tolist() == [0.0, 1.0]
    assert apply_pointwise("relu", [a], {"upper_clip": 1.5}).tolist() == [1.0, 1.5]
    with pytest.raises(NotSupportedError, match="2 operands; it takes 1"):
        apply_pointwise("exp", [a, b])
    with pytest.raises(NotSupportedError, match="'fold'"):
        apply_pointwise("fold", [a])
