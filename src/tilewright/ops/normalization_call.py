"""RMSNorm and LayerNorm as plans that are run: the forward, and the graph's own backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.graph.enums import norm_forward_phase
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK, Tensor
from tilewright.ops.declaring import declare_like
from tilewright.ops.plan_cache import PlanKey, kept_key, operands_key, run, run_again
from tilewright.ops.repeats import Repeats

# The operation of the graph -> the public function.
FUNCTIONS = {"rmsnorm": "rms_norm", "layernorm": "layer_norm"}
_PLAIN_CALLS: dict[str, Repeats[PlanKey]] = {name: Repeats() for name in FUNCTIONS.values()}


class NormKind(NamedTuple):
    """What a norm's plan depends on beside its operands; ``offset`` is added to the weight."""

    operation: str
    eps: float
    offset: float

    @property
    def function(self) -> str:
        """The name of the public function."""
        return FUNCTIONS[self.operation]

    @property
    def statistics(self) -> tuple[str, ...]:
        """What the TRAINING phase keeps for the backward."""
        return ("inv_variance",) if self.operation == "rmsnorm" else ("mean", "inv_variance")


def repeated(
    function: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor | None:
    """The result of a plain call like an earlier one, or None."""
    if weight is None:
        return None
    key = _PLAIN_CALLS[function].find((x, weight, bias), (eps,))
    if key is None:
        return None
    y = torch.empty_like(x)
    pack = {"x": x, "y": y, "scale": weight}
    if bias is not None:
        pack["bias"] = bias
    return y if run_again(key, pack) else None


def _remember(
    kind: NormKind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    key: Hashable,
) -> None:
    if weight is None or not 2 <= x.dim() <= MAX_RANK:
        return
    plan_key = kept_key(kind.function, key, None, x.device)
    if plan_key is not None:
        _PLAIN_CALLS[kind.function].keep((x, weight, bias), (kind.eps,), plan_key)


def norm_forward(
    kind: NormKind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    engine: str | None,
    stream: Any,
    *,
    want_statistics: bool,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """y and the statistics; of the sum with ``residual``, which is kept in ``total``, if given."""
    y = torch.empty_like(x) if out is None else out
    scale = _scale(kind, x, weight)
    inputs = {"x": as_rows(x), "scale": scale}
    if bias is not None:
        inputs["bias"] = bias
    outputs = {"y": as_rows(y)}
    if residual is not None and total is not None:
        inputs["residual"], outputs["total"] = as_rows(residual), as_rows(total)
    statistics = {}
    if want_statistics:
        shape = (*inputs["x"].shape[:-1], 1)
        dtype = statistics_type(x)
        statistics = {
            name: torch.empty(shape, dtype=dtype, device=x.device) for name in kind.statistics
        }
        outputs |= statistics

    def declare(graph: DeclaredGraph) -> None:
        source, scale_, bias_ = _declare_operands(graph, inputs)
        phase = norm_forward_phase.TRAINING if want_statistics else norm_forward_phase.INFERENCE
        method = getattr(graph, kind.operation)
        named = {}
        if "residual" in inputs:
            source = graph.add(source, declare_like(graph, "residual", inputs["residual"]))
            named["total"] = source
        made = method(
            phase, source, scale_, bias_, graph.tensor_scalar(kind.eps, statistics_type(x))
        )
        named |= dict(zip(("y", *kind.statistics), made, strict=True))
        _bind_outputs(named, outputs)

    key = (kind, want_statistics, operands_key(inputs), operands_key(outputs))
    run(kind.function, key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    is_plain = residual is None and out is None and stream is None and engine is None
    if is_plain and not want_statistics and not kind.offset:
        _remember(kind, x, weight, bias, key)
    if x.dim() > MAX_RANK:
        # The rows may be a copy.
        y.copy_(outputs["y"].reshape(y.shape))
    return y, statistics


def norm_backward(
    kind: NormKind,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    engine: str | None,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, weight and bias; None for a parameter that is absent."""
    inputs = {"grad": as_rows(grad), "x": as_rows(x), "scale": _scale(kind, x, weight)}
    inputs |= dict(zip(kind.statistics, saved, strict=True))
    parameter_type = statistics_type(x)
    width = x.shape[-1:]
    outputs = {
        "dx": torch.empty_like(inputs["x"]),
        "dscale": torch.empty(width, dtype=parameter_type, device=x.device),
    }
    has_bias = bias is not None or kind.operation == "layernorm"
    if has_bias:
        outputs["dbias"] = torch.empty(width, dtype=parameter_type, device=x.device)

    def declare(graph: DeclaredGraph) -> None:
        source, scale, _ = _declare_operands(graph, inputs)
        incoming = declare_like(graph, "grad", inputs["grad"])
        stats = [declare_like(graph, name, inputs[name]) for name in kind.statistics]
        if kind.operation == "rmsnorm":
            made = graph.rmsnorm_backward(incoming, source, scale, stats[0], has_bias)
        else:
            made = graph.layernorm_backward(incoming, source, scale, stats[0], stats[1])
        _bind_outputs(dict(zip(("dx", "dscale", "dbias"), made, strict=True)), outputs)

    run(
        f"{kind.function}_backward",
        (kind, operands_key(inputs), operands_key(outputs)),
        declare,
        inputs,
        outputs,
        device=x.device,
        engine=engine,
        stream=stream,
    )
    dx = outputs["dx"].reshape(x.shape)
    dweight = None if weight is None else outputs["dscale"].to(weight.dtype)
    dbias = None if bias is None else outputs["dbias"].to(bias.dtype)
    return dx, dweight, dbias


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` with two to MAX_RANK axes; only a rank outside that is reshaped."""
    if x.dim() == 1:
        return x.unsqueeze(0)
    return x if x.dim() <= MAX_RANK else x.reshape(-1, x.shape[-1])


def statistics_type(x: torch.Tensor) -> torch.dtype:
    """The type that statistics and gradients of weights are made in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _scale(kind: NormKind, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    compute = statistics_type(x)
    if weight is None:
        return torch.full(
            x.shape[-1:], 1.0 + kind.offset if kind.offset else 1.0, dtype=compute, device=x.device
        )
    return weight.to(compute) + kind.offset if kind.offset else weight


def _declare_operands(graph: DeclaredGraph, inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    x = inputs["x"]
    declared: list[Tensor | None] = [declare_like(graph, "x", x)]
    for name in ("scale", "bias"):
        vector = inputs.get(name)
        if vector is None:
            declared.append(None)
            continue
        dim = (1,) * (x.dim() - 1) + tuple(vector.shape)
        stride = (vector.stride(0) * vector.shape[0],) * (x.dim() - 1) + tuple(vector.stride())
        declared.append(graph.tensor(dim, stride, vector.dtype, name=name))
    return tuple(declared)


def _bind_outputs(made: dict[str, Any], outputs: dict[str, torch.Tensor]) -> None:
    """Give the graph's outputs the names, layouts and types of the buffers."""
    for name, buffer in outputs.items():
        tensor = made[name]
        vector = name in ("dscale", "dbias")
        tensor.set_output(True).set_name(name).set_data_type(buffer.dtype)
        if not vector:
            tensor.set_dim(buffer.shape).set_stride(buffer.stride())
