"""RMSNorm and LayerNorm with autograd: eager, and as operators of PyTorch for a trace.

The operators are ``tilewright::rms_norm``, ``tilewright::layer_norm`` and their backwards.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.custom import (
    in_layout_of,
    made_without_gradients,
    nothing,
    register,
    wanted_gradients,
)
from tilewright.ops.first_order import first_order
from tilewright.ops.normalization_call import (
    FUNCTIONS,
    NormKind,
    as_rows,
    norm_backward,
    norm_forward,
    statistics_type,
)


class NormFunction(torch.autograd.Function):
    """Forward in the TRAINING phase; backward by the norm's own backward operation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        kind: NormKind,
        engine: str | None,
        stream: Any,
    ) -> torch.Tensor:
        y, statistics = norm_forward(
            kind, x, weight, bias, None, engine, stream, want_statistics=True
        )
        ctx.save_for_backward(x, weight, *statistics.values())
        ctx.call = (kind, bias, engine, stream)
        return y

    @staticmethod
    @first_order("layer_norm or rms_norm")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, *saved = ctx.saved_tensors
        kind, bias, engine, stream = ctx.call
        grads = norm_backward(kind, grad, x, weight, bias, saved, engine, stream)
        return *grads, None, None, None


def _register(operation: str) -> Any:
    """``tilewright::rms_norm`` or ``layer_norm`` and its backward; returns the former.

    They return y and the statistics, and the three gradients; what is absent is an empty tensor.
    """
    names = NormKind(operation, 0.0, 0.0).statistics
    options = "float eps, float offset"
    operands = "Tensor x, Tensor? weight, Tensor? bias"

    def compute(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        eps, offset, want_statistics, engine = rest
        y, made = norm_forward(
            NormKind(operation, eps, offset),
            *(x, weight, bias, None, engine, None),
            want_statistics=want_statistics,
        )
        return y, *(made.get(name, nothing(y)) for name in names)

    def fake(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        y, kept = torch.empty_like(x), nothing(x)
        if rest[2]:
            kept = x.new_empty((*as_rows(x).shape[:-1], 1), dtype=statistics_type(x))
        return y, *(torch.empty_like(kept) for _ in names)

    def compute_backward(grad: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        *saved, eps, offset, engine = rest
        kind = NormKind(operation, eps, offset)
        dx, *parameters = norm_backward(kind, grad, x, weight, bias, saved, engine, None)
        return in_layout_of(x, dx), *(nothing(x) if d is None else d for d in parameters)

    def fake_backward(grad: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        parameters = (nothing(x) if p is None else p.new_empty(p.shape) for p in (weight, bias))
        return torch.empty_like(x), *parameters

    backward_operator = register(
        f"{FUNCTIONS[operation]}_backward",
        f"(Tensor grad, {operands}, {', '.join(f'Tensor {name}' for name in names)}, {options},"
        " str? engine) -> (Tensor, Tensor, Tensor)",
        compute_backward,
        fake_backward,
    )

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, *options, want_statistics, engine = inputs
        if not want_statistics:
            raise made_without_gradients("want_statistics")
        ctx.save_for_backward(x, weight, bias, *output[1:])
        ctx.options = (*options, engine)
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        grads = backward_operator(grad, *ctx.saved_tensors, *ctx.options)
        return *wanted_gradients(ctx, grads), None, None, None, None

    return register(
        FUNCTIONS[operation],
        f"({operands}, {options}, bool want_statistics, str? engine) -> "
        f"({', '.join(('Tensor',) * (1 + len(names)))})",
        compute,
        fake,
        setup=setup,
        backward=backward,
    )


OPERATORS = {operation: _register(operation) for operation in FUNCTIONS}
