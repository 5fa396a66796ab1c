"""Attention's autograd: gradients of a loss on O, and on Stats as well."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.ops.attention_call import attention_backward, attention_forward
from tilewright.ops.attention_declaring import stepped
from tilewright.ops.attention_records import Call
from tilewright.ops.first_order import first_order


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
    dsink_of_stats = _sink_share(call, stats, dstats)
    # dStats is a column of dO there, and 16 bits would round it, or overflow.
    wide, o, do = _with_stats_gradient(_widened(call), _widen(o), _widen(do), dstats)
    grads = attention_backward(wide, o, stats, do, want_dbias=want_dbias, want_dsink=want_dsink)
    grads["dv"] = grads["dv"][..., : call.operands["v"].shape[-1]]
    if want_dsink and dsink_of_stats is not None:
        grads["dsink"] = grads["dsink"] + dsink_of_stats
    return {name: grad.to(call.operands[name[1:]].dtype) for name, grad in grads.items()}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _widened(call: Call) -> Call:
    """The same call on float32 operands where they are 16-bit; lengths and tables stay."""
    operands = {name: _widen(tensor) for name, tensor in call.operands.items()}
    return Call(call.options, operands, call.engine, call.stream)


def _with_stats_gradient(
    call: Call, o: torch.Tensor, do: torch.Tensor, dstats: torch.Tensor
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Fold a gradient of Stats into the operands of the backward operation.

    d Stats / d S is P, so a loss on Stats adds P * dStats to dS = P * (dO V^T - rowsum(dO * O)).
    One more column does that: V gets ones, dO gets dStats, O gets zeros.
    """
    if call.options.dropout_p:
        raise NotSupportedError(
            "a loss on Stats together with dropout_p > 0 has no backward: Stats is not dropped out"
        )
    v = call.operands["v"]
    # Seven more columns of zeros keep the head size a multiple of eight.
    extra = 8
    if call.is_packed and call.options.stats_token_major:
        column = dstats
    else:
        column = dstats.transpose(0, 1) if call.is_packed else dstats
    column = column.to(do.dtype).unsqueeze(-1) if call.is_packed else column.to(do.dtype)
    ones = torch.zeros((*v.shape[:-1], extra), dtype=v.dtype, device=v.device)
    ones[..., 0] = 1
    grown = torch.zeros((*do.shape[:-1], extra), dtype=do.dtype, device=do.device)
    grown[..., :1] = column
    operands = {**call.operands, "v": torch.cat((v, ones), dim=-1)}
    wide = Call(call.options, operands, call.engine, call.stream)
    return (
        wide,
        torch.cat((o, torch.zeros_like(grown)), dim=-1),
        torch.cat((do, grown), dim=-1),
    )


def _sink_share(call: Call, stats: torch.Tensor, dstats: torch.Tensor) -> torch.Tensor | None:
    """What a gradient of Stats gives the sink: exp(sink - Stats) * dStats, summed a head.

    The extra column does not reach the sink, which has no value row.
    """
    sink = call.operands.get("sink")
    if sink is None:
        return None
    # Heads on axis 0 of what is packed head-major, on axis 1 otherwise.
    head_axis = 0 if call.is_packed and not call.options.stats_token_major else 1
    shape = [1] * stats.dim()
    shape[head_axis] = -1
    share = torch.exp(sink.to(stats.dtype).view(shape) - stats)
    # Rows of no sequence hold -inf and have no share.
    share = torch.where(torch.isneginf(stats), torch.zeros_like(share), share) * dstats
    return share.transpose(0, head_axis).flatten(1).sum(1).view(sink.shape)
