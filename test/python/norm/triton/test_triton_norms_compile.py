"""Every normalization kernel compiles for four targets, with no GPU, in one child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

COMPILE = """
import re
import sys
import torch
import tilewright as tw
from tilewright.engines.triton import group_backward, normalization, normalization_backward

SM_COUNT = 4
training = tw.norm_forward_phase.TRAINING


def forward(kind, dim, scale_dim, dtype):
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    x, scale, bias = graph.tensor(dim), graph.tensor(scale_dim), graph.tensor(scale_dim)
    if kind == "batchnorm":
        old = [graph.tensor(scale_dim, data_type="float32") for _ in range(2)]
        return graph, graph.batchnorm(x, scale, bias, *old, 1e-3, 0.1)
    if kind == "batchnorm_inference":
        mean, inverse = (graph.tensor(scale_dim, data_type="float32") for _ in range(2))
        return graph, [graph.batchnorm_inference(x, mean, inverse, scale, bias)]
    made = getattr(graph, kind)(training, x, scale, bias, graph.tensor_scalar(1e-5))
    return graph, made


def backward(kind, dim, scale_dim, statistics_dim, dtype):
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    grad, x, scale = graph.tensor(dim), graph.tensor(dim), graph.tensor(scale_dim)
    mean, inverse = (graph.tensor(statistics_dim, data_type="float32") for _ in range(2))
    if kind == "rmsnorm":
        return graph, graph.rmsnorm_backward(grad, x, scale, inverse, True)
    return graph, getattr(graph, f"{kind}_backward")(grad, x, scale, mean, inverse)


def fused(fp8):
    # A sum before the norm, and after it an activation, a scale and the largest magnitude.
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    x, residual, scale = graph.tensor((8, 256)), graph.tensor((8, 256)), graph.tensor((1, 256))
    total = graph.add(x, residual)
    y = graph.rmsnorm(training, total, scale, None, graph.tensor_scalar(1e-5))[0]
    active = graph.swish(y)
    result = graph.mul(active, graph.tensor((1, 1), data_type="float32"))
    amax = graph.reduction(active, tw.reduction_mode.AMAX).set_dim((1, 1)).set_stride((1, 1))
    if fp8:
        result.set_data_type("FP8_E4M3")
    return graph, [total, result, amax.set_data_type("float32")]


image, channel = (2, 8, 128, 128), (1, 8, 1, 1)
cases = [
    (normalization, forward("layernorm", (8, 1024), (1, 1024), "bfloat16")),
    (normalization, forward("rmsnorm", (8, 1024), (1, 1024), "float32")),
    (normalization, forward("adalayernorm", (2, 8, 256), (2, 1, 256), "bfloat16")),
    (normalization, forward("instancenorm", (2, 8, 4, 8), channel, "bfloat16")),
    (normalization, forward("batchnorm", (2, 8, 4, 8), channel, "float16")),
    (normalization, forward("batchnorm", (1, 7, 40000), (1, 7, 1), "bfloat16")),
    (normalization, forward("batchnorm_inference", image, channel, "bfloat16")),
    (normalization_backward, backward("layernorm", (8, 1024), (1, 1024), (8, 1), "bfloat16")),
    (normalization_backward, backward("rmsnorm", (8, 16384), (1, 16384), (8, 1), "float32")),
    (normalization_backward, backward("adalayernorm", (2, 8, 64), (2, 1, 64), (2, 8, 1), "half")),
    (group_backward, backward("instancenorm", (2, 8, 4, 8), channel, (2, 8, 1, 1), "bfloat16")),
    (normalization, fused(False)),
    (normalization, fused(True)),
    (group_backward, backward("batchnorm", image, channel, channel, "bfloat16")),
]
done = set()
for module, (graph, made) in cases:
    for tensor in made:
        tensor.set_output(True)
    graph.validate()
    chosen = module.plan(graph, (), SM_COUNT)
    # The general kernels differ in what the compiler knows of addresses: one target of each.
    # FP8_E4M3 is converted from sm_90 on.
    is_fp8 = any(tensor.data_type.name == "FP8_E4M3" for tensor in made)
    plans = [(chosen, TARGETS[is_fp8:]), (chosen.fallback, TARGETS[1:2])]
    for plan, targets in plans if "all" in sys.argv else plans[:1]:
        for kernel in plan.kernels:
            name = re.sub("_[0-9a-f]{16}$", " fused", kernel.spec.name)
            if "all" not in sys.argv and (name, is_fp8) in done:
                continue
            done.add((name, is_fp8))
            for target in targets:
                told.append(facts_of(kernel, target) | {"kernel": name})
"""

KERNELS = {
    "norm_forward",
    "norm_forward fused",
    "norm_maximum",
    "norm_parts",
    "norm_join",
    "norm_apply",
    "norm_backward",
    "norm_backward_shares",
    "sum_shares",
    "group_backward",
    "group_parts",
    "group_sums",
    "group_dx",
}


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("each", marks=pytest.mark.L0),
        pytest.param("all", marks=pytest.mark.L1),
    ],
)
def test_every_kernel_compiles_for_four_targets_and_is_called_as_compiled(
    which: str, compiled_facts: Callable[..., list[dict[str, Any]]]
) -> None:
    found = {(facts["kernel"], facts["target"]) for facts in compiled_facts(COMPILE, which)}
    assert found == {(name, t) for name in KERNELS for t in ((8, 0), (9, 0), (10, 0), (12, 0))}
