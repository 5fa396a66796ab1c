"""Running statistics step by step, empty batches, and what is declined."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import batchnorm
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")
STATISTICS = ("mean", "inv_variance", "next_running_mean", "next_running_var")


def record(dim, data_type="FLOAT"):
    return tilewright.Graph().tensor(dim, data_type=tilewright.data_type[data_type])


def channel(dim):
    return (1, dim[1]) + (1,) * (len(dim) - 2)


def operation(x, inputs=(), outputs=(), kind="batchnorm", **dims):
    """A training with float32 records of these ports; ``dims`` replaces some."""
    scalars = {"epsilon": (1,) * len(x), "momentum": (1,) * len(x)}
    found = []
    for ports in (("input", "scale", "bias", "epsilon", *inputs), ("Y", *outputs)):
        full = {
            port: x if port in ("input", "Y") else scalars.get(port, channel(x)) for port in ports
        }
        found.append({port: record(dims.get(port, dim)) for port, dim in full.items()})
    return SimpleNamespace(kind=kind, inputs=found[0], outputs=found[1])


RUNNING = ("in_running_mean", "in_running_var", "momentum")


def buffers(records, value):
    return {port: torch.full(tensor.dim, value) for port, tensor in records.items()}


@pytest.mark.parametrize("rate", [0.0, 0.125, 0.5, 0.75, 1.0])
def test_a_step(rate):
    old, new = torch.tensor([1.0, -2.0, 4.0]), torch.tensor([3.0, 0.5, -4.0])
    expected = (1 - rate) * old + rate * new
    assert torch.allclose(batchnorm._stepped(old, new, rate), expected)
    out = torch.zeros(3)
    assert batchnorm._stepped(old, new, rate, out) is out and torch.allclose(out, expected)
    # An infinite statistic makes an infinite one, and no NaN.
    if rate in (0.125, 0.5, 0.75):
        assert (
            batchnorm._stepped(old, torch.tensor([math.inf] * 3), rate).tolist() == [math.inf] * 3
        )


@pytest.mark.parametrize("x", [(3, 2, 4), (2, 5), (1, 2, 1, 1), (1, 3, 2)])
@pytest.mark.parametrize("rate", [0.25, 0.75])
@pytest.mark.parametrize("outputs", [STATISTICS, STATISTICS[2:], STATISTICS[:1], STATISTICS[1:2]])
def test_statistics_of_a_batch(x, rate, outputs):
    running = RUNNING if "next_running_mean" in outputs else ()
    op = operation(x, running, outputs)
    kernel = batchnorm.prepare_batchnorm(op, CPU)
    generator = torch.Generator().manual_seed(1)
    given = {
        port: torch.randn(tensor.dim, generator=generator) for port, tensor in op.inputs.items()
    }
    given["epsilon"].fill_(0.5)
    if running:
        given["momentum"].fill_(rate)
        given["in_running_var"].abs_()
    found = buffers(op.outputs, 99.0)
    kernel(given, found)
    axes = [axis for axis in range(len(x)) if axis != 1]
    wide = {port: value.double() for port, value in given.items()}
    mean = wide["input"].mean(axes, keepdim=True)
    squares = (wide["input"] - mean).square().sum(axes, keepdim=True)
    count = math.prod(x) // x[1]
    inverse = (squares / count + 0.5).rsqrt()
    expected = {
        "mean": mean,
        "inv_variance": inverse,
        "Y": (wide["input"] - mean) * inverse * wide["scale"] + wide["bias"],
    }
    if running:
        unbiased = squares / max(count - 1, 1)
        expected["next_running_mean"] = (1 - rate) * wide["in_running_mean"] + rate * mean
        expected["next_running_var"] = (1 - rate) * wide["in_running_var"] + rate * unbiased
    for port, value in found.items():
        assert torch.allclose(value.double(), expected[port], atol=1e-5), port


@pytest.mark.parametrize("x", [(0, 3, 4), (2, 3, 0), (2, 0, 4)])
@pytest.mark.parametrize("outputs", [STATISTICS, STATISTICS[:2]])
def test_statistics_over_nothing_are_no_numbers(x, outputs):
    running = RUNNING if "next_running_mean" in outputs else ()
    op = operation(x, running, outputs)
    found = buffers(op.outputs, 5.0)
    batchnorm.prepare_batchnorm(op, CPU)(buffers(op.inputs, 0.5), found)
    for port in outputs:
        assert found[port].isnan().all() and found[port].shape == channel(x)


@pytest.mark.parametrize("x", [(0, 3, 4), (2, 3, 0)])
def test_gradients_over_nothing_are_zero(x):
    op = operation(x, kind="batchnorm_backward")
    op.inputs = {port: op.inputs[port] for port in ("input", "scale")}
    op.inputs |= {"grad": record(x), "mean": record(channel(x)), "inv_variance": record(channel(x))}
    op.outputs = {"DX": record(x), "DScale": record(channel(x)), "DBias": record(channel(x))}
    found = buffers(op.outputs, 5.0)
    batchnorm.prepare_batchnorm_backward(op, CPU)(buffers(op.inputs, 1.0), found)
    for port in ("DScale", "DBias"):
        assert torch.equal(found[port], torch.zeros(channel(x)))


def test_running_statistics_need_their_inputs():
    for count in range(3):
        for inputs in itertools.combinations(RUNNING, count):
            op = operation((2, 3, 4), inputs, ("next_running_mean",))
            with pytest.raises(NotSupportedError, match="need in_running_mean"):
                batchnorm.prepare_batchnorm(op, CPU)
    op = operation((2, 3, 4), RUNNING, ("mean",))
    batchnorm.prepare_batchnorm(op, CPU)


def test_dims_and_peers_that_are_declined():
    x = (2, 3, 4)
    batchnorm.prepare_batchnorm(operation(x), CPU)
    batchnorm.prepare_batchnorm(operation((2, 3)), CPU)
    for changed in (
        {"Y": (2, 3, 5)},
        {"scale": (1, 2, 1)},
        {"bias": (1, 3)},
        {"bias": (1, 3, 4)},
        {"scale": (3, 1, 1)},
    ):
        with pytest.raises(NotSupportedError, match="expected"):
            batchnorm.prepare_batchnorm(operation(x, **changed), CPU)
    for port in STATISTICS[:2]:
        with pytest.raises(NotSupportedError, match="expected"):
            batchnorm.prepare_batchnorm(operation(x, (), (port,), **{port: (1, 3, 2)}), CPU)
    with pytest.raises(NotSupportedError, match="takes N, C"):
        batchnorm.prepare_batchnorm(operation(x, input=(3,), Y=(3,)), CPU)
    op = operation(x)
    op.peer_stats = [1]
    with pytest.raises(NotSupportedError, match="peer_stats is given"):
        batchnorm.prepare_batchnorm(op, CPU)
    op = operation(x, ("peer_stats_0",))
    with pytest.raises(NotSupportedError, match="peer_stats is given"):
        batchnorm.prepare_batchnorm(op, CPU)


def test_operands_laid_out_alike():
    x = torch.arange(24.0).view(2, 3, 4)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    for grad, given in ((x, x + 1), (turned, turned + 1)):
        found = batchnorm._laid_out_alike(grad, given)
        assert found[0] is grad and found[1] is given
    gaps = torch.zeros(2, 3, 8)[..., ::2]
    for grad, given in ((x, turned), (turned, x), (x, gaps), (gaps, x), (x[:1].expand(2, 3, 4), x)):
        found = batchnorm._laid_out_alike(grad, given)
        assert found[0].stride() == found[1].stride()
        assert torch.equal(found[0], grad) and torch.equal(found[1], given)
