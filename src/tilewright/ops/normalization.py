"""RMSNorm and LayerNorm over the last axis, with autograd through the graph's own backward.

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * (offset + weight) + bias
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Statistics are float32 (float64 for float64 inputs); weight gradients accumulate likewise.
Sources: Zhang and Sennrich 2019 (RMSNorm), Ba, Kiros and Hinton 2016 (layer normalization).
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.graph.tensor import MAX_RANK
from tilewright.ops.arguments import (
    require_device,
    require_epsilon,
    require_float,
    require_number,
    require_out,
    require_parameters,
    require_shape,
    require_tensor,
)
from tilewright.ops.custom import (
    is_traced,
    needs_gradient,
    require_operator_arguments,
    serves_gradients,
    store,
)
from tilewright.ops.normalization_call import NormKind, norm_forward, repeated
from tilewright.ops.normalization_custom import OPERATORS, NormFunction
from tilewright.ops.streams import widened
from tilewright.ops.transforms import apply


@widened("x", "weight", "bias", "residual")
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
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * (offset + weight) + bias.

    Args:
        x: (..., N), any strides and float type.
        weight: (N,), of any float type; 1 if None.
        bias: (N,), of any float type; 0 if None.
        eps: added to the mean square, from 0 up.
        offset: added to the weight in float32: the Gemma family stores w - 1.
        residual: x's shape; x + residual is normalized, and returned too.
        out: x's shape, written in place of a new tensor.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        y in x's shape and dtype, or (y, x + residual). Statistics are float32, float64 for
        float64. Differentiable in x, residual, weight and bias.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    is_usual = type(offset) is float and not offset and engine is None
    if is_usual and residual is None and out is None and stream is None:
        y = repeated("rms_norm", x, weight, bias, eps)
        if y is not None:
            return y
    return _norm(
        NormKind("rmsnorm", require_epsilon(eps), require_number("offset", offset)),
        x,
        weight,
        bias,
        residual,
        out,
        engine,
        stream,
    )


@widened("x", "weight", "bias", "residual")
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
    """LayerNorm over the last axis: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    ``x`` is (..., N), ``weight`` and ``bias`` (N,); ``var`` is the biased variance. Arguments,
    result and dtypes are those of ``rms_norm``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.

    Source: Ba, Kiros and Hinton 2016 (arXiv:1607.06450).
    """
    if residual is None and out is None and stream is None and engine is None:
        y = repeated("layer_norm", x, weight, bias, eps)
        if y is not None:
            return y
    return _norm(
        NormKind("layernorm", require_epsilon(eps), 0.0),
        x,
        weight,
        bias,
        residual,
        out,
        engine,
        stream,
    )


def _norm(
    kind: NormKind,
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
    require_parameters(x, x.shape[-1:], "one entry an element of x's last axis", weight, bias)
    if residual is not None:
        require_tensor("residual", residual)
        require_shape("residual", residual, x.shape, "x's shape")
        require_device("residual", residual, x.device)
    added = residual
    if residual is not None and not _sums_in_graph(x, residual, weight, bias, out):
        x, added = x + residual, None
    require_out(out, x.shape, "x's shape", (x, weight, bias))
    needs_grad = needs_gradient(x, weight, bias)
    if is_traced(x, weight, bias, out):
        require_operator_arguments(engine, stream)
        operator = OPERATORS[kind.operation]
        wants = serves_gradients(x, weight, bias)
        y = operator(x, weight, bias, kind.eps, kind.offset, wants, engine)[0]
        y = y if out is None else store(out, y)
    elif needs_grad:
        y = apply(kind.function, NormFunction, x, weight, bias, kind, engine, stream)
    else:
        total = None if added is None else torch.empty_like(x)
        y = norm_forward(
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
    if needs_gradient(*tensors) or is_traced(*tensors, out):
        return False
    return residual.dtype is x.dtype and x.dim() <= MAX_RANK
