"""Which way an elementwise operation is computed, and its formulas where they turn."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import pointwise, pointwise_modes
from tilewright.engines.aten.pointwise_modes import PointwiseParameters, apply_pointwise
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

CPU, OTHER = torch.device("cpu"), torch.device("cuda")
INFINITE, NAN = math.inf, math.nan


def record(data_type="FLOAT", dim=(2, 3), by_value=False):
    return tilewright.Graph().tensor(
        dim, data_type=tilewright.data_type[data_type], is_pass_by_value=by_value
    )


def direct(mode, types, out, dims=None, out_dim=(2, 3), device=CPU, by_value=False):
    entry = pointwise_modes.mode_entry(mode)
    dims = dims or [(2, 3)] * len(types)
    records = [record(t, dim, by_value) for t, dim in zip(types, dims, strict=True)]
    return pointwise._can_write_directly(entry, records, record(out, out_dim), device)


def test_what_is_written_by_aten_itself():
    for data_type in ("FLOAT", "DOUBLE", "HALF", "BFLOAT16"):
        assert direct("add", [data_type] * 2, data_type)
        assert direct("exp", [data_type], data_type)
        for out in ("BOOLEAN", "UINT8", "INT8", "INT32", "INT64", "FLOAT", "DOUBLE", "HALF"):
            assert direct("cmp_gt", [data_type] * 2, out)
        for out in ("FP8_E4M3", "FP4_E2M1", "FP8_E8M0", "INT4"):
            assert not direct("cmp_gt", [data_type] * 2, out)
        # ATen's own 16-bit form of these rounds twice.
        for mode in ("erf", "sin", "sqrt", "softplus", "leaky_relu"):
            assert direct(mode, [data_type], data_type) == (data_type in ("FLOAT", "DOUBLE"))
    assert not direct("add", ["FLOAT", "HALF"], "FLOAT")
    assert not direct("add", ["HALF", "HALF"], "FLOAT")
    assert not direct("cmp_gt", ["FLOAT", "HALF"], "BOOLEAN")
    assert not direct("add", ["INT32", "INT32"], "INT32")
    assert not direct("abs", ["FP8_E4M3"], "FP8_E4M3")
    assert direct("add", ["FLOAT"] * 2, "FLOAT", [(2, 1), (1, 3)])
    assert direct("add", ["FLOAT"] * 2, "FLOAT", [(3,), (2, 3)])
    assert not direct("add", ["FLOAT"] * 2, "FLOAT", [(2, 1), (1, 1)])
    assert not direct("add", ["FLOAT"] * 2, "FLOAT", [(2, 2), (2, 3)])
    assert not direct("neg", ["FLOAT"], "FLOAT", [(1, 3)])
    assert direct("add", ["FLOAT"] * 2, "FLOAT", device=OTHER)
    assert direct("add", ["FLOAT"] * 2, "FLOAT", [(1, 1)] * 2, (1, 1), by_value=True)
    assert not direct("add", ["FLOAT"] * 2, "FLOAT", [(1, 1)] * 2, (1, 1), OTHER, by_value=True)


def test_which_modes_aten_rounds_once_in_16_bits():
    twice = {"erf", "sin", "sqrt", "softplus", "leaky_relu"}
    without = {"identity", "add_square", "binary_select", "gen_index"}
    predicates = {"logical_not", "logical_and", "logical_or"}
    predicates |= {"cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"}
    for name in pointwise_modes._MODES:
        entry = pointwise_modes.mode_entry(name)
        assert (entry.direct is not None) == (name not in without and "backward" not in name)
        assert entry.is_exact == (entry.direct is not None and name not in twice), name
        assert entry.is_predicate == (name in predicates)


def test_the_type_of_arithmetic():
    def found(mode, out, *types):
        return pointwise._arithmetic_dtype(mode, [record(t) for t in types], record(out))

    for mode in ("add", "max", "cmp_eq", "binary_select", "logical_not", "scale", "add_square"):
        assert found(mode, "FLOAT", "INT8", "BOOLEAN") is torch.int64
        assert found(mode, "INT32", "INT8", "FLOAT") is torch.float64
        assert found(mode, "HALF", "INT8", "FLOAT") is torch.float32
    assert found("div", "INT8", "INT8", "INT8") is torch.float32
    assert found("div", "INT8", "INT64", "INT8") is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_indices_along_every_axis(check_graph, dtype):
    x = torch.zeros(2, 3, 4)
    for axis in (0, 1, 2):
        graph = tilewright.Graph(io_data_type=dtype)
        source = graph.tensor_like(x.to(dtype))
        graph.gen_index(source, axis).set_output(True)
        check_graph(graph, {source: x.to(dtype)})
    expected = torch.arange(4).expand(2, 3, 4)
    for axis in (2, -1):
        found = apply_pointwise("gen_index", [x.to(dtype)], {"axis": axis})
        assert found.dtype is dtype and torch.equal(found, expected.to(dtype))
    first = apply_pointwise("gen_index", [x], {"axis": -3})
    assert torch.equal(first, torch.arange(2.0).view(2, 1, 1).expand(2, 3, 4))
    for axis in (3, -4, 4, -5):
        with pytest.raises(NotSupportedError, match="the input has rank 3"):
            apply_pointwise("gen_index", [x], {"axis": axis})


def relu(x, slope, low, high):
    if math.isnan(x):
        return NAN
    if x > low:
        return min(x, high)
    return low if slope == 0 else low + slope * (x - low)


VALUES = [-INFINITE, -1e5, -20.0, -2.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 50.0, 1e5]
VALUES += [INFINITE, NAN]
CLIPS = list(itertools.product((0.0, 0.25, -0.5), (0.0, -1.0, 1.5), (INFINITE, 2.0, 1.0)))


def equal(found, expected, tolerance=0.0):
    found, expected = found.double(), torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(found.isnan(), expected.isnan()), (found, expected)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("slope", "low", "high"), CLIPS)
def test_relu_and_its_gradient_at_both_clips(slope, low, high):
    parameters = {"negative_slope": slope, "lower_clip": low, "upper_clip": high}
    given = PointwiseParameters.of(parameters)
    for dtype in (torch.float32, torch.float64, torch.float16):
        values = [v for v in VALUES if dtype is not torch.float16 or abs(v) < 6e4 or v != v]
        x = torch.tensor(values, dtype=dtype)
        expected = [relu(v, slope, low, high) for v in values]
        if low <= high:
            equal(apply_pointwise("relu", [x], parameters), expected)
            out = torch.zeros_like(x)
            pointwise_modes.mode_entry("relu").direct(given)(x, out=out)
            equal(out, expected)
        gradient = torch.full_like(x, 3.0)
        expected = [
            3.0 * (slope if not v > low else float(v < high or high == INFINITE)) for v in values
        ]
        equal(apply_pointwise("relu_backward", [gradient, x], parameters), expected)


@pytest.mark.parametrize("slope", [0.0, 0.5, -0.25])
def test_leaky_relu(slope):
    x = torch.tensor([-4.0, -1.0, 0.0, 2.0])
    parameters = {"negative_slope": slope}
    equal(apply_pointwise("leaky_relu", [x], parameters), [-4 * slope, -slope, 0.0, 2.0])
    gradient = torch.full_like(x, 2.0)
    expected = [2 * slope, 2 * slope, 2 * slope, 2.0]
    equal(apply_pointwise("leaky_relu_backward", [gradient, x], parameters), expected)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


POINTS = [-600.0, -45.0, -39.0, -3.0, -0.5, 0.0, 0.25, 1.0, 4.0, 39.0, 45.0, 600.0]
CURVES = {
    "swish": lambda x, b, a: x * sigmoid(b * x),
    "softplus": lambda x, b, a: max(x, 0) + math.log1p(math.exp(-abs(b * x))) / b,
    "elu": lambda x, b, a: x if x > 0 else a * math.expm1(x),
    "swish_backward": lambda x, b, a: sigmoid(b * x) * (1 + b * x * sigmoid(-b * x)),
    "softplus_backward": lambda x, b, a: sigmoid(b * x),
    "elu_backward": lambda x, b, a: 1.0 if x > 0 else a * math.exp(x),
    "sigmoid_backward": lambda x, b, a: sigmoid(x) * sigmoid(-x),
    "tanh_backward": lambda x, b, a: 4 * sigmoid(2 * x) * sigmoid(-2 * x),
    "gelu": lambda x, b, a: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_backward": lambda x, b, a: (
        0.5 * math.erfc(-x / math.sqrt(2)) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    ),
}


@pytest.mark.parametrize("mode", CURVES)
@pytest.mark.parametrize(("beta", "alpha"), [(1.0, 1.0), (1.5, 0.75), (0.5, 2.0)])
def test_curves_by_their_formulas(mode, beta, alpha):
    parameters = {"swish_beta": beta, "softplus_beta": beta, "elu_alpha": alpha}
    x = torch.tensor(POINTS, dtype=torch.float64)
    expected = [CURVES[mode](v, beta, alpha) for v in POINTS]
    if "backward" in mode:
        gradient = torch.full_like(x, -3.0)
        expected = [-3.0 * value for value in expected]
        equal(apply_pointwise(mode, [gradient, x], parameters), expected, 1e-12)
        return
    equal(apply_pointwise(mode, [x], parameters), expected, 1e-12)
    out = torch.zeros_like(x)
    given = PointwiseParameters.of(parameters)
    pointwise_modes.mode_entry(mode).direct(given)(x.clone(), out=out)
    equal(out, expected, 1e-12)


LIMITS = {
    "swish": (0.0, INFINITE),
    "gelu": (0.0, INFINITE),
    "gelu_approx_tanh": (0.0, INFINITE),
    "elu": (-1.0, INFINITE),
    "softplus": (0.0, INFINITE),
    "swish_backward": (0.0, 1.0),
    "gelu_backward": (0.0, 1.0),
    "gelu_approx_tanh_backward": (0.0, 1.0),
    "elu_backward": (0.0, 1.0),
    "softplus_backward": (0.0, 1.0),
    "sigmoid_backward": (0.0, 0.0),
    "tanh_backward": (0.0, 0.0),
}


@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_limits_at_both_infinities(mode, dtype):
    low, high = LIMITS[mode]
    large = 3e38 if dtype is not torch.float64 else 1e300
    x = torch.tensor([-INFINITE, -large, -2e4, 2e4, large, INFINITE], dtype=dtype)
    grows = high == INFINITE
    expected = [low] * 3 + ([*x[3:].double().tolist()] if grows else [high] * 3)
    arguments = [x] if "backward" not in mode else [torch.ones_like(x), x]
    if dtype is torch.bfloat16:
        arguments = [argument.float() for argument in arguments]
    equal(apply_pointwise(mode, arguments), expected)
    entry = pointwise_modes.mode_entry(mode)
    if entry.direct is not None and (dtype is not torch.bfloat16 or entry.is_exact):
        for stride in (1, 2):
            out = torch.zeros(12, dtype=dtype)[: 6 * stride : stride]
            entry.direct(PointwiseParameters())(x.clone(), out=out)
            equal(out, expected)


def test_a_swish_of_another_beta_at_the_ends():
    x = torch.tensor([-INFINITE, INFINITE, -1e30, NAN])
    equal(apply_pointwise("swish", [x], {"swish_beta": 2.0}), [0.0, INFINITE, 0.0, NAN])


def test_operands_are_counted_and_parameters_read():
    x = torch.ones(2)
    for mode, count in (("add", 1), ("add", 3), ("neg", 2), ("binary_select", 2)):
        with pytest.raises(NotSupportedError, match="operands; it takes"):
            apply_pointwise(mode, [x] * count)
    with pytest.raises(NotSupportedError, match="the ATen engine has"):
        apply_pointwise("nothing", [x])
    given = PointwiseParameters.of(SimpleNamespace(axis=2, elu_alpha=None, swish_beta=3.0))
    assert given == PointwiseParameters(axis=2, swish_beta=3.0)
    assert PointwiseParameters.of(given) is given
    assert PointwiseParameters.of({"axis": 1}) == PointwiseParameters(axis=1)
    assert PointwiseParameters.of(None) == PointwiseParameters()
    found = apply_pointwise("cmp_gt", [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])])
    assert found.dtype is torch.float32 and found.tolist() == [0.0, 1.0]
    operation = SimpleNamespace(
        kind="pointwise", mode="add", inputs={"in0": record()}, outputs={"out": record()}
    )
    with pytest.raises(NotSupportedError, match="'in1' is absent"):
        pointwise.prepare_pointwise(operation, CPU)
