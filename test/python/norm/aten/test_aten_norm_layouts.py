"""Which axes a normalization runs over, its sums, and both ways that it is computed."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright import norm_forward_phase
from tilewright.engines.aten import normalization
from tilewright.engines.aten.normalization import (
    Layout,
    layout_of,
    require_dim,
    statistics_dim,
)
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0


def record(*dim):
    return tilewright.Graph().tensor(dim, data_type="FLOAT")


X = (2, 3, 4, 5)
# kind, input, scale: axes, are they the last, is the scale inside.
LAYOUTS = [
    ("layernorm", X, (1, 1, 1, 5), (3,), True, True),
    ("layernorm", X, (1, 1, 4, 5), (2, 3), True, True),
    ("layernorm", X, (1, 3, 4, 5), (1, 2, 3), True, True),
    ("layernorm", X, (2, 3, 4, 5), (0, 1, 2, 3), True, True),
    ("layernorm", X, (1, 3, 1, 1), (1,), False, True),
    ("layernorm", X, (1, 3, 1, 5), (1, 3), False, True),
    ("layernorm", X, (2, 1, 1, 1), (0,), False, True),
    ("layernorm", X, (1, 1, 1, 1), (3,), True, False),
    ("layernorm", (2, 3, 4, 1), (1, 1, 1, 1), (3,), True, True),
    ("layernorm", (2, 3, 0), (1, 1, 1), (2,), True, False),
    ("layernorm", (2, 3, 0), (1, 1, 0), (2,), True, True),
    ("rmsnorm_backward", X, (1, 1, 4, 1), (2,), False, True),
    ("instancenorm", X, (1, 3, 1, 1), (2, 3), True, False),
    ("instancenorm", (2, 1, 4, 5), (1, 1, 1, 1), (2, 3), True, False),
    ("instancenorm", (2, 3, 1, 1), (1, 3, 1, 1), (2, 3), True, False),
    ("adalayernorm", X, (2, 1, 1, 5), (3,), True, False),
    ("adalayernorm_backward", X, (2, 1, 4, 5), (2, 3), True, False),
    ("adalayernorm", X, (2, 3, 1, 1), (1,), False, False),
    ("adalayernorm", X, (1, 1, 1, 5), (3,), True, True),
]


@pytest.mark.parametrize(("kind", "x", "scale", "axes", "are_last", "inside"), LAYOUTS)
def test_layouts(kind, x, scale, axes, are_last, inside):
    found = layout_of(kind, record(*x), record(*scale))
    shape = tuple(x[axis] for axis in axes)
    assert found == Layout(axes, shape, math.prod(shape), are_last, inside)
    expected = tuple(1 if axis in axes else extent for axis, extent in enumerate(x))
    assert statistics_dim(record(*x), found) == expected


@pytest.mark.parametrize("scale", [(5,), (1, 1, 5), (1, 1, 1, 4), (1, 1, 5, 1), (2, 2, 1, 1)])
def test_a_scale_that_does_not_broadcast_is_declined(scale):
    with pytest.raises(NotSupportedError, match="expected 1 or the extent"):
        layout_of("layernorm", record(*X), record(*scale))


def test_a_required_dim():
    require_dim(None, (1, 2), "x")
    require_dim(record(1, 2), [1, 2], "x")
    for dim in ((1, 3), (2,), (0, 2)):
        with pytest.raises(NotSupportedError, match="expected"):
            require_dim(record(*dim), (1, 2), "x")


def test_sums_of_squares_over_any_axes():
    x = torch.randn(X, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for count in (1, 2, 3, 4):
        for axes in itertools.combinations(range(4), count):
            found = normalization._sum_of_squares(x, axes)
            assert torch.allclose(found, x.square().sum(axes, keepdim=True), rtol=1e-12)


def forward(kind, x, scale, bias, epsilon, phase=norm_forward_phase.TRAINING):
    graph = tilewright.Graph(io_data_type=x.dtype)
    feeds = {}

    def given(buffer):
        tensor = graph.tensor_like(buffer)
        feeds[tensor] = buffer
        return tensor

    arguments = [given(x), given(scale)]
    if bias is not None or kind != "rmsnorm":
        arguments.append(given(bias))
    small = graph.tensor_scalar(epsilon, torch.float32)
    if kind == "rmsnorm":
        bias_tensor = arguments[2] if bias is not None else None
        results = graph.rmsnorm(phase, arguments[0], arguments[1], bias=bias_tensor, epsilon=small)
    else:
        results = getattr(graph, kind)(phase, *arguments, small)
    for result in results:
        if result is not None:
            result.set_output(True)
    return graph, feeds


# Ways: ATen's function on small tensors, and composing; results as wide as the arithmetic or not.
@pytest.mark.parametrize("in_place_from", [1 << 16, 0], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "instancenorm", "adalayernorm"])
@pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])
def test_every_way_and_axis(check_graph, monkeypatch, in_place_from, dtype, kind, phase):
    monkeypatch.setattr(normalization, "_IN_PLACE_FROM", in_place_from)
    generator = torch.Generator().manual_seed(2)
    scales = {
        "instancenorm": [(1, 3, 1, 1)],
        "adalayernorm": [(2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 1, 1)],
    }.get(kind, [(1, 1, 1, 5), (1, 3, 4, 5), (1, 3, 1, 1), (1, 3, 1, 5)])
    for dim, has_bias in itertools.product(scales, (True, False)):
        if kind != "rmsnorm" and not has_bias:
            continue
        x = (3 * torch.randn(X, generator=generator) + 1).to(dtype)
        scale, bias = (torch.randn(dim, generator=generator).to(dtype) for _ in range(2))
        graph, feeds = forward(
            kind, x, scale, bias if has_bias else None, 0.25, norm_forward_phase[phase]
        )
        check_graph(graph, feeds, factor=16)


@pytest.mark.parametrize("ports", [(), ("mean",), ("inv_variance",), ("mean", "inv_variance")])
@pytest.mark.parametrize("count", [6, 0])
def test_only_the_declared_statistics_are_saved(ports, count):
    operation = SimpleNamespace(outputs={port: record(2, 1) for port in ports})
    save = normalization._statistics_saver(operation, Layout((1,), (count,), count, True, True))
    if not ports:
        assert save is None
        return
    outputs = {port: torch.zeros(2, 1) for port in ports}
    save(outputs, torch.full((2, 1), 3.0), torch.full((2, 1), 4.0))
    for port, value in outputs.items():
        expected = {"mean": 3.0, "inv_variance": 4.0}[port] if count else math.nan
        assert torch.equal(value.nan_to_num(9.0), torch.full((2, 1), expected).nan_to_num(9.0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("by_value", [True, False])
def test_a_scalar_is_read_where_the_host_need_not_wait(device, by_value):
    scalar = tilewright.Graph().tensor((1,), data_type="FLOAT", is_pass_by_value=by_value)
    operation = SimpleNamespace(kind="layernorm", inputs={"epsilon": scalar})
    device = torch.device(device)
    if device.type == "cpu" or by_value:
        read = normalization.scalar_reader(operation, "epsilon", device)
        assert read({"epsilon": torch.tensor([0.5])}) == 0.5
    else:
        with pytest.raises(NotSupportedError, match="must be passed by value"):
            normalization.scalar_reader(operation, "epsilon", device)
    with pytest.raises(NotSupportedError, match="'momentum' is absent"):
        normalization.scalar_reader(operation, "momentum", device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_cpu_looks_at_its_means(device):
    x = torch.tensor([[1.0, 2.0, 4.0], [1.0, math.inf, 2.0]])
    inputs = {"input": x, "scale": torch.ones(1, 3), "epsilon": torch.tensor([0.5])}
    outputs = {"Y": torch.zeros(2, 3), "mean": torch.zeros(2, 1)}
    records = {port: record(*value.shape) for port, value in (inputs | outputs).items()}
    operation = SimpleNamespace(
        kind="layernorm",
        inputs={port: records[port] for port in ("input", "scale")}
        | {"epsilon": tilewright.Graph().tensor((1,), is_pass_by_value=True)},
        outputs={port: records[port] for port in outputs},
    )
    normalization.prepare_layernorm(operation, torch.device(device))(inputs, outputs)
    # What ATen gives on a CPU is no number; the host may put it right there alone.
    assert outputs["mean"][0].item() == pytest.approx(7 / 3)
    assert outputs["mean"][1].item() == math.inf or device == "cuda"
    assert outputs["mean"][1].isnan().item() or device == "cpu"
