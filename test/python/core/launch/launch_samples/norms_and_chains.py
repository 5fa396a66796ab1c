"""Graphs that declare norms, rotary embedding and chains of pointwise operations."""

from __future__ import annotations

import tilewright as tw
from launch_samples.declaring import Declaring

PHASES = tw.norm_forward_phase


def rmsnorm(d: Declaring) -> None:
    dim = (d.rows, 1024)
    epsilon = d.graph.tensor_scalar(1e-6)
    y, inverse = d.graph.rmsnorm(PHASES.TRAINING, d("x", dim), d("scale", (1, 1024)), None, epsilon)
    d.out("y", y, dim)
    d.out("inverse", inverse, (d.rows, 1), "float32")


def layernorm(d: Declaring) -> None:
    dim, epsilon = (d.rows, 512), d.graph.tensor_scalar(1e-6)
    scale, bias = d("scale", (1, 512)), d("bias", (1, 512))
    y, _, _ = d.graph.layernorm(PHASES.INFERENCE, d("x", dim), scale, bias, epsilon)
    d.out("y", y, dim)


def rmsnorm_backward(d: Declaring) -> None:
    dim = (d.rows, 1024)
    operands = d("grad", dim), d("x", dim), d("scale", (1, 1024))
    inverse = d("inverse", (d.rows, 1), "float32")
    dx, dscale, _ = d.graph.rmsnorm_backward(*operands, inverse, False)
    d.out("dx", dx, dim)
    d.out("dscale", dscale, (1, 1024), "float32")


def layernorm_backward(d: Declaring) -> None:
    dim = (d.rows, 512)
    operands = d("grad", dim), d("x", dim), d("scale", (1, 512))
    statistics = d("mean", (d.rows, 1), "float32"), d("inverse", (d.rows, 1), "float32")
    made = d.graph.layernorm_backward(*operands, *statistics)
    d.out("dx", made[0], dim)
    for name, tensor in zip(("dscale", "dbias"), made[1:], strict=True):
        d.out(name, tensor, (1, 512), "float32")


def rope(d: Declaring) -> None:
    dim = (2, 4, d.rows, 64)
    out = d.graph.rope(d("x", dim), d("freqs", (1, 1, d.rows, 64), "float32"))
    d.out("y", out, dim)


def adalayernorm(d: Declaring) -> None:
    dim, affine = (2, d.rows, 512), (2, 1, 512)
    operands = d("x", dim), d("scale", affine), d("bias", affine)
    y, _, _ = d.graph.adalayernorm(PHASES.INFERENCE, *operands, d.graph.tensor_scalar(1e-6))
    d.out("y", y, dim)


def instancenorm(d: Declaring) -> None:
    dim, affine = (2, 16, 8, 32), (1, 16, 1, 1)
    operands = d("x", dim), d("scale", affine), d("bias", affine)
    y, _, _ = d.graph.instancenorm(PHASES.INFERENCE, *operands, d.graph.tensor_scalar(1e-6))
    d.out("y", y, dim)


def batchnorm_backward(d: Declaring) -> None:
    dim, one = (4, 16, 8, 32), (1, 16, 1, 1)
    operands = d("grad", dim), d("x", dim), d("scale", one, "float32")
    statistics = d("mean", one, "float32"), d("inverse", one, "float32")
    made = d.graph.batchnorm_backward(*operands, *statistics)
    d.out("dx", made[0], dim)
    for name, tensor in zip(("dscale", "dbias"), made[1:], strict=True):
        d.out(name, tensor, one, "float32")


def rope_backward(d: Declaring) -> None:
    # R / 2 angles here, R of them in ``rope``.
    dim = (2, 4, d.rows, 64)
    out = d.graph.rope_backward(d("dy", dim), d("freqs", (1, 1, d.rows, 32), "float32"))
    d.out("dx", out, dim)


def layernorm_of_long_rows(d: Declaring) -> None:
    # Rows that are cut: two kernels for their statistics, one that applies them.
    dim, one = (d.rows // 8, 40_000), (1, 40_000)
    operands = d("x", dim), d("scale", one), d("bias", one)
    y, _, _ = d.graph.layernorm(PHASES.INFERENCE, *operands, d.graph.tensor_scalar(1e-6))
    d.out("y", y, dim)


def rmsnorm_backward_of_long_rows(d: Declaring) -> None:
    # The shares of the weight's gradient are summed by a kernel of their own.
    dim, one = (d.rows, 12_288), (1, 12_288)
    inverse = d("inverse", (d.rows, 1), "float32")
    made = d.graph.rmsnorm_backward(d("grad", dim), d("x", dim), d("scale", one), inverse, False)
    d.out("dx", made[0], dim)
    d.out("dscale", made[1], one, "float32")


def norm_with_residual_and_amax(d: Declaring) -> None:
    dim = (d.rows, 1024)
    total = d.graph.add(d("x", dim), d("residual", dim))
    epsilon = d.graph.tensor_scalar(1e-6)
    y, _ = d.graph.rmsnorm(PHASES.INFERENCE, total, d("scale", (1, 1024)), None, epsilon)
    amax = d.graph.reduction(y, tw.reduction_mode.AMAX)
    d.out("total", total, dim)
    d.out("y", y, dim)
    d.out("amax", amax, (1, 1), "float32")


def batchnorm(d: Declaring) -> None:
    dim, one = (4, 16, 8, 32), (1, 16, 1, 1)
    affine = d("scale", one, "float32"), d("bias", one, "float32")
    running = d("in_mean", one, "float32"), d("in_var", one, "float32")
    made = d.graph.batchnorm(d("x", dim), *affine, *running, 1e-3, 0.1)
    d.out("y", made[0], dim)
    for name, tensor in zip(("mean", "inverse", "next_mean", "next_var"), made[1:], strict=True):
        d.out(name, tensor, one, "float32")


def batchnorm_inference(d: Declaring) -> None:
    dim, one = (4, 16, 8, 32), (1, 16, 1, 1)
    given = [d(name, one, "float32") for name in ("mean", "inverse", "scale", "bias")]
    d.out("y", d.graph.batchnorm_inference(d("x", dim), *given), dim)


def batchnorm_backward_of_long_rows(d: Declaring) -> None:
    # More of a channel than a program holds: it is cut.
    dim, one = (4, 16, 96, 96), (1, 16, 1, 1)
    operands = d("grad", dim), d("x", dim), d("scale", one, "float32")
    statistics = d("mean", one, "float32"), d("inverse", one, "float32")
    made = d.graph.batchnorm_backward(*operands, *statistics)
    d.out("dx", made[0], dim)
    for name, tensor in zip(("dscale", "dbias"), made[1:], strict=True):
        d.out(name, tensor, one, "float32")


def chain_with_row_sums(d: Declaring) -> None:
    # Results about 1, as the tolerances of the detectors expect.
    dim, one = (d.rows, 512), (d.rows, 1)
    x = d("x", dim)
    largest = d.graph.reduction(x, tw.reduction_mode.MAX).set_dim(one)
    powers = d.graph.exp(d.graph.sub(x, largest))
    average = d.graph.reduction(powers, tw.reduction_mode.AVG).set_dim(one)
    d.out("y", d.graph.div(x, average), dim)


def chain_with_column_sums(d: Declaring) -> None:
    x = d("x", (d.rows, 512))
    d.out("y", d.graph.reduction(x, tw.reduction_mode.AVG), (1, 512), "float32")


def chain_of_the_transpose(d: Declaring) -> None:
    moved = d.graph.transpose(d("x", (d.rows, 512)), permutation=[1, 0])
    d.out("y", d.graph.relu(moved), (512, d.rows))


def chain(d: Declaring) -> None:
    dim = (d.rows, 512)
    gate, up = d("gate", dim), d("up", dim)
    d.out("y", d.graph.mul(d.graph.swish(gate), d.graph.add(up, d("bias", (1, 512)))), dim)
