"""Normalizations of images and of samples, and fused ones, on a GPU against PyTorch and a copy.

    python benchmark/norm_layouts_gpu.py

Forward and backward of batch and instance normalization in both memory formats, AdaLN, and norms
with what rides along, in bfloat16; every result is first compared with PyTorch's. ``of_ideal`` is
the time of a copy of as many bytes as the operation has to read and write once. Writes
results/<device>/norm_layouts.csv.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from building import build_ahead, build_aligned
from results import Table
from timing import Call, device_ms

import tilewright as tw

EPSILON = 1e-3
PHASES = tw.norm_forward_phase
IMAGES = (64, 256, 56, 56)
TOKENS = (16, 4096, 1152)
ROWS = (16384, 4096)
NAMES = ("forward", "backward")


def declare() -> Any:
    return tw.Graph(io_data_type=torch.bfloat16, intermediate_data_type="float32")


def frame_of(graph: Any, operands: dict[Any, torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """(bound frame, outputs in declaration order)."""
    build_aligned(graph)
    if graph.selected_engine != "triton":
        raise SystemExit(str(graph.explain()))
    made = {
        t: torch.empty_strided(
            t.dim, t.stride, dtype=tw.torch_dtypes.to_torch(t.data_type), device="cuda"
        )
        for t in graph.outputs()
    }
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    frame = graph.bind({**operands, **made}, workspace)
    frame.launch()
    return frame, list(made.values())


def finish(outputs: Any) -> None:
    """The first result in bfloat16, what follows in float32."""
    for number, tensor in enumerate(t for t in outputs if t is not None):
        tensor.set_output(True)
        if number:
            tensor.set_data_type("float32")


def check(actual: torch.Tensor, expected: torch.Tensor, tol: float = 2**-5) -> None:
    error = (actual.double() - expected.double()).abs().max().item()
    if not error <= tol * max(1.0, expected.abs().max().item()):
        raise SystemExit(f"wrong result: error {error}")


Tensor = torch.Tensor


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, True, 0.1, EPSILON)


def batch_norm_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(batch_norm(x, w, b))


def given_norm_relu(x: Tensor, mean: Tensor, variance: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, variance, w, b, False, 0.1, EPSILON))


def instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, w, b, True, 0.1, EPSILON)


def adaptive_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPSILON) * w + b


def add_rms(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x + residual, x.shape[-1:], w, EPSILON)


def add_layer(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + residual, x.shape[-1:], w, b, EPSILON)


def gradients_of(result: Tensor, leaves: list[Tensor], g: Tensor) -> Call:
    return functools.partial(torch.autograd.grad, result, leaves, g, retain_graph=True)


class Measured:
    """Calls that are timed together, with a copy of ``x``; with no table they are run once."""

    def __init__(self, table: Table | None, subject: str, x: torch.Tensor) -> None:
        self.table, self.subject = table, subject
        self.copy = torch.empty_like(x)
        self.bytes = 2 * x.numel() * x.element_size()
        self.calls: dict[str, Call] = {"copy": lambda: self.copy.copy_(x)}
        self.moved = {"copy": self.bytes}

    def add(self, name: str, ours: Call, theirs: Call, moved: int) -> None:
        """A pair of calls, and the bytes that each has to move."""
        self.calls |= {f"tilewright {name}": ours, f"torch {name}": theirs}
        self.moved |= {f"tilewright {name}": moved, f"torch {name}": moved}

    def write(self) -> None:
        if self.table is None:
            return
        times = device_ms(self.calls)
        rate = self.bytes / times["copy"]
        for name, ms in times.items():
            peer = "torch" + name.removeprefix("tilewright") if "tilewright" in name else ""
            self.table.add(
                subject=self.subject,
                call=name,
                ms=f"{ms:.4f}",
                tb_s=f"{self.moved[name] / ms / 1e9:.3f}",
                of_ideal=f"{self.moved[name] / rate / ms:.3f}",
                speed_over_torch=f"{times[peer] / ms:.2f}" if peer else "",
            )
        self.table.write()


def images(*, is_last: bool) -> list[Tensor]:
    """Input, gradient, scale and bias of a layer."""
    x, g = (torch.randn(IMAGES, device="cuda").bfloat16() for _ in range(2))
    if is_last:
        x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    return [x, g, *(torch.rand(1, IMAGES[1], 1, 1, device="cuda") for _ in range(2))]


def image_graph(kind: str, name: str, given: Sequence[Tensor]) -> tuple[Any, list[Any]]:
    """A layer's graph and what it is declared over, as ``given``."""
    graph = declare()
    tensors = [graph.tensor_like(t) for t in given]
    if name == "backward":
        outputs = getattr(graph, f"{kind}_backward")(*tensors)
    elif name == "inference and relu":
        outputs = [graph.relu(graph.batchnorm_inference(*tensors))]
    elif kind == "batchnorm":
        outputs = graph.batchnorm(*tensors, None, None, EPSILON, None)
        if name == "forward and relu":
            outputs = [graph.relu(outputs[0]), *outputs[1:]]
    else:
        outputs = graph.instancenorm(PHASES.TRAINING, *tensors, graph.tensor_scalar(EPSILON))
    finish(outputs)
    return graph, tensors


def build_images(kind: str, is_last: bool, name: str) -> None:
    x, g, scale, bias = images(is_last=is_last)
    mean = torch.empty(x.shape[0] if kind == "instancenorm" else 1, x.shape[1], 1, 1, device="cuda")
    given = {
        "backward": (g, x, scale, mean, mean),
        "inference and relu": (x, mean, mean, scale, bias),
    }
    build_aligned(image_graph(kind, name, given.get(name, (x, scale, bias)))[0])


def measure_images(kind: str, is_last: bool, table: Table) -> None:
    x, g, scale, bias = images(is_last=is_last)
    w, b = scale.flatten(), bias.flatten()
    once = x.numel() * 2
    measured = Measured(table, f"{kind} channels {'last' if is_last else 'first'}", x)
    by_torch: Any = batch_norm if kind == "batchnorm" else instance_norm

    def run(name: str, *given: Tensor) -> tuple[Any, list[Tensor]]:
        graph, tensors = image_graph(kind, name, given)
        return frame_of(graph, dict(zip(tensors, given, strict=True)))

    frame, (y, mean, inverse) = run("forward", x, scale, bias)
    # PyTorch's instance normalization wants scale and bias in the input's type.
    own = (w, b) if kind == "batchnorm" else (w.bfloat16(), b.bfloat16())
    check(y, by_torch(x, *own))
    measured.add("forward", frame.launch, functools.partial(by_torch, x, *own), 2 * once)
    leaves = [t.detach().clone().requires_grad_() for t in (x, *own)]
    result = by_torch(*leaves)
    frame, (dx, dscale, _) = run("backward", g, x, scale, mean, inverse)
    gradients = gradients_of(result, leaves, g)
    check(dx, gradients()[0])
    check(dscale.flatten(), gradients()[1], 2**-4)
    measured.add("backward", frame.launch, gradients, 3 * once)
    if kind == "batchnorm":
        frame, (y,) = run("inference and relu", x, mean, inverse, scale, bias)
        running = mean.flatten(), (1 / inverse.square() - EPSILON).flatten()
        torch_relu = functools.partial(given_norm_relu, x, *running, w, b)
        check(y, torch_relu())
        measured.add("inference and relu", frame.launch, torch_relu, 2 * once)
        frame, (*_, y) = run("forward and relu", x, scale, bias)
        training = functools.partial(batch_norm_relu, x, w, b)
        check(y, training())
        measured.add("forward and relu", frame.launch, training, 2 * once)
    measured.write()


def measure_samples(table: Table | None) -> None:
    x, g = (torch.randn(TOKENS, device="cuda").bfloat16() for _ in range(2))
    scale, bias = (torch.randn(TOKENS[0], 1, TOKENS[2], device="cuda").bfloat16() for _ in range(2))
    once = x.numel() * 2
    measured = Measured(table, "adalayernorm", x)
    graph = declare()
    tensors = [graph.tensor_like(t) for t in (x, scale, bias)]
    outputs = graph.adalayernorm(PHASES.TRAINING, *tensors, graph.tensor_scalar(EPSILON))
    finish(outputs)
    frame, found = frame_of(graph, dict(zip(tensors, (x, scale, bias), strict=True)))
    by_torch = adaptive_norm
    check(found[0], by_torch(x, scale, bias))
    measured.add("forward", frame.launch, functools.partial(by_torch, x, scale, bias), 2 * once)
    leaves = [t.detach().clone().requires_grad_() for t in (x, scale, bias)]
    result = by_torch(*leaves)
    graph = declare()
    given = (g, x, scale, *found[1:])
    tensors = [graph.tensor_like(t) for t in given]
    finish(graph.adalayernorm_backward(*tensors))
    frame, (dx, *_) = frame_of(graph, dict(zip(tensors, given, strict=True)))
    gradients = gradients_of(result, leaves, g)
    check(dx, gradients()[0])
    measured.add("backward", frame.launch, gradients, 3 * once)
    measured.write()


def measure_fused(table: Table | None) -> None:
    x, residual = (torch.randn(ROWS, device="cuda").bfloat16() for _ in range(2))
    w, b = (torch.randn(ROWS[1], device="cuda").bfloat16() for _ in range(2))
    scale, bias = w.view(1, -1), b.view(1, -1)
    factor = torch.full((1, 1), 4.0, device="cuda")
    once = x.numel() * 2
    measured = Measured(table, f"rows of {ROWS[1]}", x)
    for kind in ("rmsnorm", "layernorm"):
        graph = declare()
        given = (x, residual, scale) + ((bias,) if kind == "layernorm" else ())
        tensors = [graph.tensor_like(t) for t in given]
        total = graph.add(tensors[0], tensors[1]).set_output(True)
        phase, epsilon = PHASES.INFERENCE, graph.tensor_scalar(EPSILON)
        shift = tensors[3] if kind == "layernorm" else None
        made = getattr(graph, kind)(
            phase, total.set_data_type("bfloat16"), tensors[2], shift, epsilon
        )
        made[0].set_output(True)
        frame, (_, y) = frame_of(graph, dict(zip(tensors, given, strict=True)))
        if kind == "rmsnorm":
            by_torch = functools.partial(add_rms, x, residual, w)
        else:
            by_torch = functools.partial(add_layer, x, residual, w, b)
        check(y, by_torch())
        measured.add(f"residual add and {kind}", frame.launch, by_torch, 4 * once)
    graph = declare()
    tensors = [graph.tensor_like(t) for t in (x, scale, factor)]
    y = graph.rmsnorm(PHASES.INFERENCE, tensors[0], tensors[1], None, graph.tensor_scalar(EPSILON))[
        0
    ]
    graph.mul(y, tensors[2]).set_output(True).set_data_type(torch.float8_e4m3fn)
    amax = graph.reduction(y, tw.reduction_mode.AMAX).set_output(True).set_dim((1, 1))
    amax.set_stride((1, 1)).set_data_type("float32")
    frame, (quantized, _) = frame_of(graph, dict(zip(tensors, (x, scale, factor), strict=True)))

    def quantize() -> Any:
        y = F.rms_norm(x, ROWS[1:], w, EPSILON)
        return (y.float() * factor).clamp(-448, 448).to(torch.float8_e4m3fn), y.abs().max()

    check(quantized.float(), quantize()[0].float(), 2**-3)
    measured.add("rmsnorm to fp8 with amax", frame.launch, quantize, once + once // 2)
    measured.write()


def main() -> None:
    names = {"batchnorm": (*NAMES, "inference and relu", "forward and relu"), "instancenorm": NAMES}
    layers = list(itertools.product(names, (False, True)))
    ahead: list[Any] = [
        functools.partial(build_images, kind, is_last, name)
        for kind, is_last in layers
        for name in names[kind]
    ]
    ahead += [functools.partial(part, None) for part in (measure_samples, measure_fused)]
    build_ahead(ahead)
    table = Table("norm_layouts", "python benchmark/norm_layouts_gpu.py")
    for kind, is_last in layers:
        measure_images(kind, is_last, table)
    measure_samples(table)
    measure_fused(table)


if __name__ == "__main__":
    main()
