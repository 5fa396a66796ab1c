"""Attention as operators of PyTorch: ``tilewright::sdpa`` and ``tilewright::sdpa_backward``.

One operator serves dense, packed and paged operands; which of the optional ones are given tells.
Absent outputs are empty tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention_call import attention_forward, empty_output, empty_stats
from tilewright.ops.attention_gradients import attention_gradients
from tilewright.ops.attention_records import AttentionOptions, Call
from tilewright.ops.custom import in_layout_of, made_without_gradients, nothing, register

_OPERANDS = (
    *("q", "k", "v", "bias", "sink", "seed", "offset", "seqlens_q", "seqlens_kv"),
    *("cu_q", "cu_kv", "k_table", "v_table"),
)
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}" for name in _OPERANDS[3:])
    + ", float? scale, bool causal, str align, SymInt? left, SymInt? right, bool alibi,"
    " float? soft_cap, float dropout_p, bool deterministic, SymInt? max_q, SymInt? max_kv,"
    " bool stats_token_major, str? engine"
)
_OPTIONS = 13


def attend_by_operator(call: Call, *, want_stats: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(O, Stats or None) of a call, as one operator of a trace."""
    o, stats = _sdpa(*_arguments(call), want_stats)
    return o, stats if want_stats else None


def _arguments(call: Call) -> tuple[Any, ...]:
    options, (left, right) = call.options, call.options.window
    return (
        *(call.operands.get(name) for name in _OPERANDS),
        *(options.scale, options.causal, options.align, left, right, options.alibi),
        *(options.soft_cap, options.dropout_p, options.deterministic, options.max_q),
        *(options.max_kv, options.stats_token_major, call.engine),
    )


def _call_of(arguments: tuple[Any, ...]) -> Call:
    given = zip(_OPERANDS, arguments[: len(_OPERANDS)], strict=True)
    operands = {name: operand for name, operand in given if operand is not None}
    scale, causal, align, left, right, *others, engine = arguments[len(_OPERANDS) :]
    if scale is None:
        scale = operands["q"].shape[-1] ** -0.5
    options = AttentionOptions(scale, causal, align, (left, right), *others)
    return Call(options, operands, engine, None)


def _compute(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call_of(arguments[:-1])
    o, stats = attention_forward(call, None, want_stats=arguments[-1])
    return o, nothing(o) if stats is None else stats


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call_of(arguments[:-1])
    o = empty_output(call)
    return o, empty_stats(call) if arguments[-1] else nothing(o)


def _compute_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    do, dstats, o, stats, *rest = arguments
    *rest, want_dbias, want_dsink = rest
    call = _call_of(tuple(rest))
    grads = attention_gradients(
        call, o, stats, do, dstats, want_dbias=want_dbias, want_dsink=want_dsink
    )
    return tuple(
        in_layout_of(call.operands[name], grads[f"d{name}"]) if f"d{name}" in grads else nothing(o)
        for name in _DIFFERENTIABLE
    )


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    _, _, o, _, *rest = arguments
    *rest, want_dbias, want_dsink = rest
    operands = _call_of(tuple(rest)).operands
    wanted = {"q": True, "k": True, "v": True, "bias": want_dbias, "sink": want_dsink}
    return tuple(
        torch.empty_like(operands[name]) if is_wanted else nothing(o)
        for name, is_wanted in wanted.items()
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[: len(_OPERANDS)])
    ctx.options, ctx.has_stats = inputs[len(_OPERANDS) : -1], inputs[-1]


def _backward(ctx: Any, do: torch.Tensor | None, dstats: torch.Tensor | None) -> tuple[Any, ...]:
    absent = (None,) * (len(_OPERANDS) + _OPTIONS + 1)
    if do is None and dstats is None:
        return absent
    if not ctx.has_stats:
        raise made_without_gradients("want_stats")
    needs = dict(zip(_OPERANDS, ctx.needs_input_grad, strict=False))
    wanted = [needs["bias"], needs["sink"]]
    grads = _sdpa_backward(do, dstats, *ctx.saved_tensors, *ctx.options, *wanted)
    kept = tuple(
        grad if needs[name] else None for name, grad in zip(_DIFFERENTIABLE, grads, strict=True)
    )
    return (*kept, *absent[len(kept) :])


_sdpa_backward = register(
    "sdpa_backward",
    f"(Tensor? dO, Tensor? dStats, Tensor o, Tensor stats, {_SCHEMA}, bool want_dbias,"
    " bool want_dsink) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_sdpa = register(
    "sdpa",
    f"({_SCHEMA}, bool want_stats) -> (Tensor, Tensor)",
    _compute,
    _fake,
    setup=_setup,
    backward=_backward,
)
