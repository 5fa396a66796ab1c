"""RMSNorm and LayerNorm over the last axis, with autograd through the graph's own backward.

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * (offset + weight) + bias
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Statistics are float32 (float64 for float64 inputs); weight gradients accumulate likewise.
Sources: Zhang and Sennrich 2019 (RMSNorm), Ba, Kiros and Hinton 2016 (layer normalization).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.errors import BindingError
from tilewright.graph.enums import norm_forward_phase
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK
from tilewright.ops.arguments import (
    forbid_grad_with_out,
    require_device,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.plan_cache import operand_key, run


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of ``x`` (..., N) over its last axis.

    ``weight`` and ``bias`` are (N,), of any float type; ``offset`` is added to the weight in
    float32 (Gemma's 1 + w). With ``residual`` (x's shape) the sum x + residual is normalized and
    returned too: (y, sum).

    Raises:
        BindingError: naming the argument, what came and what is accepted.
    """
    return _norm(
        _Kind("rmsnorm", float(eps), float(offset)), x, weight, bias, residual, out, engine, stream
    )


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of ``x`` (..., N) over its last axis; arguments as for ``rms_norm``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
    """
    return _norm(
        _Kind("layernorm", float(eps), 0.0), x, weight, bias, residual, out, engine, stream
    )


class _Kind(NamedTuple):
    """What a norm's plan depends on beside its operands; ``offset`` is added to the weight."""

    operation: str
    eps: float
    offset: float


def _norm(
    kind: _Kind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    engine: str | None,
    stream: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    require_float("x", require_tensor("x", x))
    if x.dim() == 0:
        raise BindingError("x: shape () has no axis to normalize; expected (..., N)")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require_float(name, require_tensor(name, parameter, 1))
            require_shape(name, parameter, x.shape[-1:], "one entry an element of x's last axis")
            require_device(name, parameter, x.device)
    if residual is not None:
        require_tensor("residual", residual)
        require_shape("residual", residual, x.shape, "x's shape")
        require_device("residual", residual, x.device)
        x = x + residual
    forbid_grad_with_out(out, (x, weight, bias))
    if out is not None:
        require_shape("out", require_tensor("out", out), x.shape, "x's shape")
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        y = _NormFunction.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, kind, engine, stream
        )
    else:
        y = _forward(kind, x, weight, bias, out, engine, stream, want_statistics=False)[0]
    return y if residual is None else (y, x)


def _forward(
    kind: _Kind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    engine: str | None,
    stream: Any,
    *,
    want_statistics: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    y = torch.empty_like(x) if out is None else out
    scale = _scale(kind, x, weight)
    if bias is None and kind.operation == "layernorm":
        bias = torch.zeros(x.shape[-1:], dtype=scale.dtype, device=x.device)
    inputs = {"x": _rows(x), "scale": scale}
    if bias is not None:
        inputs["bias"] = bias
    outputs = {"y": _rows(y)}
    statistics = {}
    if want_statistics:
        shape = (*inputs["x"].shape[:-1], 1)
        dtype = _statistics_type(x)
        names = ("inv_variance",) if kind.operation == "rmsnorm" else ("mean", "inv_variance")
        statistics = {n: torch.empty(shape, dtype=dtype, device=x.device) for n in names}
        outputs |= statistics

    def declare(graph: DeclaredGraph) -> None:
        source, scale_, bias_ = _declare_operands(graph, inputs)
        phase = norm_forward_phase.TRAINING if want_statistics else norm_forward_phase.INFERENCE
        method = getattr(graph, kind.operation)
        made = method(
            phase, source, scale_, bias_, graph.tensor_scalar(kind.eps, _statistics_type(x))
        )
        names = ("y", "inv_variance") if len(made) == 2 else ("y", "mean", "inv_variance")
        _bind_outputs(dict(zip(names, made, strict=True)), outputs)

    key = (kind, want_statistics, *_keys(inputs), *_keys(outputs))
    run(key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    return y, statistics


class _NormFunction(torch.autograd.Function):
    """Forward in the TRAINING phase; backward by the norm's own backward operation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        kind: _Kind,
        engine: str | None,
        stream: Any,
    ) -> torch.Tensor:
        y, statistics = _forward(kind, x, weight, bias, None, engine, stream, want_statistics=True)
        ctx.save_for_backward(x, weight, *statistics.values())
        ctx.call = (kind, tuple(statistics), bias, engine, stream)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, *saved = ctx.saved_tensors
        kind, names, bias, engine, stream = ctx.call
        scale = _scale(kind, x, weight)
        inputs = {"grad": _rows(grad), "x": _rows(x), "scale": scale}
        inputs |= dict(zip(names, saved, strict=True))
        parameter_type = _statistics_type(x)
        width = x.shape[-1:]
        outputs = {
            "dx": torch.empty_like(_rows(x)),
            "dscale": torch.empty(width, dtype=parameter_type, device=x.device),
        }
        has_bias = bias is not None or kind.operation == "layernorm"
        if has_bias:
            outputs["dbias"] = torch.empty(width, dtype=parameter_type, device=x.device)

        def declare(graph: DeclaredGraph) -> None:
            source, scale_, _ = _declare_operands(graph, inputs)
            incoming = _declare(graph, "grad", inputs["grad"])
            stats = [_declare(graph, name, inputs[name]) for name in names]
            if kind.operation == "rmsnorm":
                made = graph.rmsnorm_backward(incoming, source, scale_, stats[0], has_bias)
            else:
                made = graph.layernorm_backward(incoming, source, scale_, stats[0], stats[1])
            _bind_outputs(dict(zip(("dx", "dscale", "dbias"), made, strict=True)), outputs)

        key = ("backward", kind, has_bias, *_keys(inputs), *_keys(outputs))
        run(key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
        dx = outputs["dx"].reshape(x.shape)
        dweight = None if weight is None else outputs["dscale"].to(weight.dtype)
        dbias = None if bias is None else outputs["dbias"].to(bias.dtype)
        return dx, dweight, dbias, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` with two to MAX_RANK axes; only a rank outside that is reshaped."""
    if x.dim() == 1:
        return x.unsqueeze(0)
    return x if x.dim() <= MAX_RANK else x.reshape(-1, x.shape[-1])


def _statistics_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _scale(kind: _Kind, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    compute = _statistics_type(x)
    if weight is None:
        return torch.full(
            x.shape[-1:], 1.0 + kind.offset if kind.offset else 1.0, dtype=compute, device=x.device
        )
    return weight.to(compute) + kind.offset if kind.offset else weight


def _declare(graph: DeclaredGraph, name: str, tensor: torch.Tensor) -> Any:
    return graph.tensor(tensor.shape, tensor.stride(), tensor.dtype, name=name)


def _declare_operands(graph: DeclaredGraph, inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    x = inputs["x"]
    declared = [_declare(graph, "x", x)]
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


def _keys(operands: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple((name, operand_key(tensor)) for name, tensor in operands.items())
