"""Which way an attention call goes: eager, with autograd, or as an operator of a trace.

What all forms of attention have is checked here: sink, gate, dropout's counters and ``out``.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.arguments import (
    FLOAT_TYPES,
    require_device,
    require_flag,
    require_float,
    require_out,
    require_shape,
    require_tensor,
)
from tilewright.ops.attention_arguments import counter, draw_seed, require_head_size
from tilewright.ops.attention_call import attention_forward
from tilewright.ops.attention_custom import attend_by_operator
from tilewright.ops.attention_gradients import AttentionFunction
from tilewright.ops.attention_records import AttentionOptions, Call
from tilewright.ops.attention_repeat import Arguments
from tilewright.ops.custom import (
    is_traced,
    needs_gradient,
    require_operator_arguments,
    serves_gradients,
)
from tilewright.ops.gating import gated
from tilewright.ops.transforms import apply


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    operands: dict[str, torch.Tensor],
    *,
    sink: torch.Tensor | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor,
    gate: torch.Tensor | None,
    return_stats: bool,
    out: torch.Tensor | None,
    engine: str | None,
    stream: Any,
    arguments: Arguments | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """O, or (O, Stats), of q, k and v that are checked; ``operands`` are bias, lengths and tables.

    ``arguments`` are what the function was given, where a call like it may be a repeated one.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    return_stats = require_flag("return_stats", return_stats)
    heads = q.shape[1]
    require_head_size("v", v.shape[-1])
    shape = (*q.shape[:-1], v.shape[-1])
    if sink is not None:
        require_float("sink", require_tensor("sink", sink, 1))
        require_shape("sink", sink, (heads,), "one sink a query head")
        require_device("sink", sink, q.device)
        sink = sink.contiguous().view(1, heads, 1, 1)
        operands["sink"] = sink
    if gate is not None:
        require_float("gate", require_tensor("gate", gate))
        require_shape("gate", gate, shape, "O's shape")
        require_device("gate", gate, q.device)
    if options.dropout_p:
        operands["seed"] = draw_seed(q.device) if seed is None else counter("seed", seed)
        operands["offset"] = counter("offset", offset)
    bias = operands.get("bias")
    differentiable = (q, k, v, bias, sink)
    # There is no scale here that 8 bits would need.
    require_out(out, shape, "(.., Sq, Dv) of q and v", (*differentiable, gate), FLOAT_TYPES)
    call = Call(options, {"q": q, "k": k, "v": v, **operands}, engine, stream)
    o: torch.Tensor
    stats: torch.Tensor | None
    needs_grad = needs_gradient(*differentiable)
    if is_traced(*call.operands.values(), out):
        require_operator_arguments(engine, stream)
        want_stats = return_stats or serves_gradients(*differentiable)
        o, stats = attend_by_operator(call, want_stats=want_stats)
        if out is not None and gate is None:
            o = out.copy_(o)
    elif needs_grad:
        o, stats = apply("sdpa", AttentionFunction, q, k, v, bias, sink, call)
    elif gate is None or needs_gradient(gate) or is_traced(gate) or _share_storage(gate, out):
        # The gate may be the very buffer of ``out``, and is then read after O is written.
        o, stats = attention_forward(call, out if gate is None else None, want_stats=return_stats)
        if gate is None and arguments is not None:
            arguments.remember(call, o, stats)
    else:
        o, stats = attention_forward(call, out, want_stats=return_stats, gate=gate)
        gate = None
    if gate is not None:
        o = gated(o, gate, out)
    if not return_stats or stats is None:
        return o
    return o, stats if call.is_packed else stats.squeeze(-1)


def _share_storage(gate: torch.Tensor, out: torch.Tensor | None) -> bool:
    if out is None:
        return False
    return gate.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
