"""RMSNorm and LayerNorm over the last axis, with autograd through the graph's own backward.

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * (offset + weight) + bias
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Statistics are float32 (float64 for float64 inputs); weight gradients accumulate likewise.
Sources: Zhang and Sennrich 2019 (RMSNorm), Ba, Kiros and Hinton 2016 (layer normalization).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.errors import BindingError
from tilewright.graph.enums import norm_forward_phase
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK, Tensor
from tilewright.ops.arguments import (
    require_device,
    require_epsilon,
    require_float,
    require_number,
    require_out,
    require_shape,
    require_tensor,
)
from tilewright.ops.custom import forbid_stream, in_layout_of, is_traced, nothing, register
from tilewright.ops.declaring import declare_like
from tilewright.ops.first_order import first_order
from tilewright.ops.plan_cache import operands_key, run, run_again
from tilewright.ops.streams import on_its_stream
from tilewright.ops.transforms import apply


@on_its_stream
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
    is_usual = type(offset) is float and not offset and engine is None
    if is_usual and residual is None and out is None and stream is None:
        y = _again("rmsnorm", x, weight, bias, eps)
        if y is not None:
            return y
    return _norm(
        _Kind("rmsnorm", require_epsilon(eps), require_number("offset", offset)),
        x,
        weight,
        bias,
        residual,
        out,
        engine,
        stream,
    )


@on_its_stream
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
    if residual is None and out is None and stream is None and engine is None:
        y = _again("layernorm", x, weight, bias, eps)
        if y is not None:
            return y
    return _norm(
        _Kind("layernorm", require_epsilon(eps), 0.0),
        x,
        weight,
        bias,
        residual,
        out,
        engine,
        stream,
    )


class _Kind(NamedTuple):
    """What a norm's plan depends on beside its operands; ``offset`` is added to the weight."""

    operation: str
    eps: float
    offset: float

    @property
    def function(self) -> str:
        """The name of the public function."""
        return _FUNCTIONS[self.operation]

    @property
    def statistics(self) -> tuple[str, ...]:
        """What the TRAINING phase keeps for the backward."""
        return ("inv_variance",) if self.operation == "rmsnorm" else ("mean", "inv_variance")


_FUNCTIONS = {"rmsnorm": "rms_norm", "layernorm": "layer_norm"}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
# What a plain call was given -> the key of its plan. Of a call that finds itself here all was
# checked before, which takes longer on the host than everything else that it does.
_checked: dict[Hashable, Hashable] = {}
_MAX_CHECKED = 1024


def _again(
    operation: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor | None:
    """The result of a call like an earlier one that needed no gradient, or None."""
    facts = _facts(operation, x, weight, bias, eps)
    key = None if facts is None else _checked.get(facts)
    if key is None:
        return None
    y = torch.empty_like(x)
    pack = {"x": x, "y": y}
    if weight is not None:
        pack["scale"] = weight
    if bias is not None:
        pack["bias"] = bias
    return y if run_again(_FUNCTIONS[operation], key, pack, x.device) else None


def _facts(
    operation: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Hashable:
    """All that the checks and the plan of a plain call depend on; None if it is no such call."""
    if weight is None or type(eps) is not float:
        return None
    if type(x) not in _PLAIN or type(weight) not in _PLAIN:
        return None
    if is_traced(x, weight, bias) or not 2 <= x.dim() <= MAX_RANK:
        return None
    found: list[Any] = [operation, eps]
    needs_grad = torch.is_grad_enabled()
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if tensor.layout is not torch.strided or (needs_grad and tensor.requires_grad):
            return None
        found += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(found)


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
    added = residual
    if residual is not None and not _sums_in_graph(x, residual, weight, bias, out):
        x, added = x + residual, None
    require_out(out, x.shape, "x's shape", (x, weight, bias))
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    if is_traced(x, weight, bias, out):
        forbid_stream(stream)
        operator = _OPERATORS[kind.operation]
        y = operator(x, weight, bias, kind.eps, kind.offset, needs_grad, engine)[0]
        y = y if out is None else out.copy_(y)
    elif needs_grad:
        y = apply(kind.function, _NormFunction, x, weight, bias, kind, engine, stream)
    else:
        total = None if added is None else torch.empty_like(x)
        y = _forward(
            *(kind, x, weight, bias, out, engine, stream),
            want_statistics=False,
            residual=added,
            total=total,
        )[0]
        x = x if total is None else total
    return y if residual is None else (y, x)


def _sums_in_graph(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> bool:
    """True if the norm's own graph adds the residual: one kernel where an engine fuses them.

    Not where gradients are kept or a call is traced: there the sum is an operation of its own.
    """
    tensors = (x, residual, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if needs_grad or is_traced(*tensors, out):
        return False
    return residual.dtype is x.dtype and x.dim() <= MAX_RANK


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
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """y and the statistics; of the sum with ``residual``, which is kept in ``total``, if given."""
    y = torch.empty_like(x) if out is None else out
    scale = _scale(kind, x, weight)
    inputs = {"x": _rows(x), "scale": scale}
    if bias is not None:
        inputs["bias"] = bias
    outputs = {"y": _rows(y)}
    if residual is not None and total is not None:
        inputs["residual"], outputs["total"] = _rows(residual), _rows(total)
    statistics = {}
    if want_statistics:
        shape = (*inputs["x"].shape[:-1], 1)
        dtype = _statistics_type(x)
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
            phase, source, scale_, bias_, graph.tensor_scalar(kind.eps, _statistics_type(x))
        )
        named |= dict(zip(("y", *kind.statistics), made, strict=True))
        _bind_outputs(named, outputs)

    key = (kind, want_statistics, operands_key(inputs), operands_key(outputs))
    is_plain = residual is None and out is None and stream is None and engine is None
    if is_plain and not want_statistics and not kind.offset and len(_checked) < _MAX_CHECKED:
        facts = _facts(kind.operation, x, weight, bias, kind.eps)
        if facts is not None:
            _checked[facts] = key
    run(kind.function, key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    if x.dim() > MAX_RANK:
        # The rows may be a copy.
        y.copy_(outputs["y"].reshape(y.shape))
    return y, statistics


def _backward(
    kind: _Kind,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    engine: str | None,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, weight and bias; None for a parameter that is absent."""
    inputs = {"grad": _rows(grad), "x": _rows(x), "scale": _scale(kind, x, weight)}
    inputs |= dict(zip(kind.statistics, saved, strict=True))
    parameter_type = _statistics_type(x)
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
        ctx.call = (kind, bias, engine, stream)
        return y

    @staticmethod
    @first_order("layer_norm or rms_norm")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, *saved = ctx.saved_tensors
        kind, bias, engine, stream = ctx.call
        grads = _backward(kind, grad, x, weight, bias, saved, engine, stream)
        return *grads, None, None, None


def _register(operation: str) -> Any:
    """``tilewright::rms_norm`` or ``layer_norm`` and its backward; returns the former.

    They return y and the statistics, and the three gradients; what is absent is an empty tensor.
    """
    names = _Kind(operation, 0.0, 0.0).statistics
    options = "float eps, float offset"
    operands = "Tensor x, Tensor? weight, Tensor? bias"

    def compute(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        eps, offset, want_statistics, engine = rest
        y, made = _forward(
            _Kind(operation, eps, offset),
            *(x, weight, bias, None, engine, None),
            want_statistics=want_statistics,
        )
        return y, *(made.get(name, nothing(y)) for name in names)

    def fake(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        y, kept = torch.empty_like(x), nothing(x)
        if rest[2]:
            kept = x.new_empty((*_rows(x).shape[:-1], 1), dtype=_statistics_type(x))
        return y, *(torch.empty_like(kept) for _ in names)

    def compute_backward(grad: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        *saved, eps, offset, engine = rest
        kind = _Kind(operation, eps, offset)
        dx, *parameters = _backward(kind, grad, x, weight, bias, saved, engine, None)
        return in_layout_of(x, dx), *(nothing(x) if d is None else d for d in parameters)

    def fake_backward(grad: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        parameters = (nothing(x) if p is None else p.new_empty(p.shape) for p in (weight, bias))
        return torch.empty_like(x), *parameters

    backward_operator = register(
        f"{_FUNCTIONS[operation]}_backward",
        f"(Tensor grad, {operands}, {', '.join(f'Tensor {name}' for name in names)}, {options},"
        " str? engine) -> (Tensor, Tensor, Tensor)",
        compute_backward,
        fake_backward,
    )

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, *options, want_statistics, engine = inputs
        if not want_statistics:
            raise BindingError(
                "want_statistics: False where an operand requires grad; must be True"
            )
        ctx.save_for_backward(x, weight, bias, *output[1:])
        ctx.options = (*options, engine)
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        grads = backward_operator(grad, *ctx.saved_tensors, *ctx.options)
        kept = (d if needs else None for d, needs in zip(grads, ctx.needs_input_grad, strict=False))
        return *kept, None, None, None, None

    return register(
        _FUNCTIONS[operation],
        f"({operands}, {options}, bool want_statistics, str? engine) -> "
        f"({', '.join(('Tensor',) * (1 + len(names)))})",
        compute,
        fake,
        setup=setup,
        backward=backward,
    )


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


_OPERATORS = {operation: _register(operation) for operation in _FUNCTIONS}
