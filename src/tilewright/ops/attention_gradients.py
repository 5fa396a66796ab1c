"""Attention's autograd: gradients of a loss on O, and on Stats as well."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.ops.attention_call import attention_backward, attention_forward
from tilewright.ops.attention_declaring import stepped
from tilewright.ops.attention_records import Call
from tilewright.ops.first_order import first_order

# Columns beside those of v, of which two are used: head sizes stay multiples of eight.
_EXTRA = 8


class AttentionFunction(torch.autograd.Function):
    """O and Stats with gradients for q, k, v, bias and sink."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, stats = attention_forward(call, None, want_stats=True)
        if stats is None:
            raise NotSupportedError("attention for training makes Stats")
        ctx.set_materialize_grads(False)
        # All operands, so that lengths and seeds that change before the backward are found out.
        others = {n: t for n, t in call.operands.items() if n not in ("q", "k", "v")}
        ctx.save_for_backward(o, stats, q, k, v, *others.values())
        ctx.call = (call.options, ("q", "k", "v", *others), call.engine, call.stream)
        return o, stats

    @staticmethod
    @first_order("sdpa")
    def backward(
        ctx: Any, do: torch.Tensor | None, dstats: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if do is None and dstats is None:
            return (None,) * 6
        o, stats, *saved = ctx.saved_tensors
        options, names, engine, stream = ctx.call
        grads = attention_gradients(
            Call(options, dict(zip(names, saved, strict=True)), engine, stream),
            o,
            stats,
            do,
            dstats,
            want_dbias=bool(ctx.needs_input_grad[3]),
            want_dsink=bool(ctx.needs_input_grad[4]),
        )
        return grads["dq"], grads["dk"], grads["dv"], grads.get("dbias"), grads.get("dsink"), None


def attention_gradients(
    call: Call,
    o: torch.Tensor,
    stats: torch.Tensor,
    do: torch.Tensor | None,
    dstats: torch.Tensor | None,
    *,
    want_dbias: bool,
    want_dsink: bool,
) -> dict[str, torch.Tensor]:
    """dq, dk, dv, and dbias, dsink if wanted, of a loss on O and on Stats; one of them is given."""
    do = torch.zeros_like(o) if do is None else stepped(do)
    if dstats is None:
        return attention_backward(call, o, stats, do, want_dbias=want_dbias, want_dsink=want_dsink)
    alone, sink_of_alone = _of_the_sink_alone(call, stats, dstats)
    # dStats is a column of dO there, and 16 bits would round it, or overflow.
    wide, o, do = _with_stats_gradient(_widened(call), _widen(o), _widen(do), stats, dstats, alone)
    width = call.operands["v"].shape[-1]
    try:
        grads = attention_backward(wide, o, stats, do, want_dbias=want_dbias, want_dsink=want_dsink)
    except NotSupportedError as error:
        raise NotSupportedError(
            f"a loss on Stats takes the backward in float32 and with {_EXTRA} more columns of v, "
            f"which has {width}: {error}"
        ) from error
    grads["dv"] = grads["dv"][..., :width]
    if want_dsink and sink_of_alone is not None:
        grads["dsink"] = grads["dsink"] + sink_of_alone
    return {name: grad.to(call.operands[name[1:]].dtype) for name, grad in grads.items()}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _widened(call: Call) -> Call:
    """The same call on float32 operands where they are 16-bit; lengths and tables stay."""
    operands = {name: _widen(tensor) for name, tensor in call.operands.items()}
    return Call(call.options, operands, call.engine, call.stream)


def _with_stats_gradient(
    call: Call,
    o: torch.Tensor,
    do: torch.Tensor,
    stats: torch.Tensor,
    dstats: torch.Tensor,
    alone: torch.Tensor,
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Fold a gradient of Stats into the operands of the backward operation.

    d Stats / d S is P, and d Stats / d sink is exp(sink - Stats): each is what multiplies -Delta,
    in dS = P * (M dO V^T - Delta) with the dropout factor M, and in dsink. So dStats is taken from
    Delta = rowsum(dO * O) by one more column: O gets 1, dO gets -dStats, V gets 0.

    Of rows that see the sink ``alone``, engines take no Delta: what is left of their P comes by a
    second column, in which O gets 0, dO gets dStats and V gets 1, and which dropout would drop.
    """
    v = call.operands["v"]
    sees = ~(alone | torch.isneginf(stats))

    def grown(part: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
        """The part with more columns, of which these are the first, in the layout of Stats."""
        extra = torch.zeros((*part.shape[:-1], _EXTRA), dtype=part.dtype, device=part.device)
        for number, column in enumerate(columns):
            if call.is_packed and not call.options.stats_token_major:
                column = column.transpose(0, 1)
            column = column if call.is_packed else column.squeeze(-1)
            extra[..., number] = column.to(part.dtype)
        return torch.cat((part, extra), dim=-1)

    wide_v = grown(v)
    if not call.options.dropout_p:
        wide_v[..., v.shape[-1] + 1] = 1
    nothing = torch.zeros_like(dstats)
    wide = Call(call.options, {**call.operands, "v": wide_v}, call.engine, call.stream)
    wide_do = grown(do, torch.where(sees, -dstats, nothing), torch.where(alone, dstats, nothing))
    return wide, grown(o, sees), wide_do


def _of_the_sink_alone(
    call: Call, stats: torch.Tensor, dstats: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which rows see the sink and nothing that counts beside it, and dsink of their dStats.

    Of a row without keys the backward operation has no dsink, as O is 0 there.
    """
    sink = call.operands.get("sink")
    if sink is None:
        return torch.zeros_like(stats, dtype=torch.bool), None
    # Heads on axis 0 of what is packed head-major, on axis 1 otherwise.
    head_axis = 0 if call.is_packed and not call.options.stats_token_major else 1
    shape = [1] * stats.dim()
    shape[head_axis] = -1
    share = torch.exp(sink.to(stats.dtype).view(shape) - stats)
    # Rows of no sequence hold -inf and have no share.
    alone = (share >= 1 - 4 * torch.finfo(stats.dtype).eps) & ~torch.isneginf(stats)
    of_alone = torch.where(alone, share * dstats, torch.zeros_like(dstats))
    return alone, of_alone.transpose(0, head_axis).flatten(1).sum(1).view(sink.shape)
