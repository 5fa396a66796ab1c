"""Scaled dot product attention on dense torch tensors, and on a cache of which a part is in use."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.arguments import (
    require_device,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.attention_arguments import (
    Window,
    join_bias_and_mask,
    options_of,
    padded_lengths,
    require_heads,
)
from tilewright.ops.attention_dispatch import attend
from tilewright.ops.attention_repeat import Arguments, Way, with_types_of
from tilewright.ops.repeats import Repeats
from tilewright.ops.streams import lowered

_CALLS: Repeats[Way] = Repeats()
_OPERANDS = ("q", "k", "v", "bias", "sink", "seqlens_q", "seqlens_kv")


@lowered("q", "k", "v")
def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    align: str = "top_left",
    window: Window | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    alibi: bool = False,
    soft_cap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    seqlens_q: torch.Tensor | None = None,
    seqlens_kv: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    deterministic: bool = False,
    return_stats: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q K^T + bias, masked) V; every rule is in docs/operations/attention.md.

    Args:
        q: (B, Hq, Sq, D), any strides and float type, as k and v have; kernels for GPUs want one
            type for all three. Hq is a multiple of Hkv; query head h reads KV head
            h // (Hq // Hkv).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        causal: row i sees keys up to i, after alignment.
        align: "top_left", or "bottom_right", which shifts rows by Skv - Sq (actual lengths).
        window: (left, right): row i sees keys i - left to i + right after alignment; None is
            open.
        scale: the factor on Q K^T; default D ** -0.5.
        bias: added to the scores, of any float type; broadcasts to (B, Hq, Sq, Skv).
        mask: boolean, True may attend; broadcasts to (B, Hq, Sq, Skv).
        sink: (Hq,), of any float type: a score that joins each row's denominator.
        alibi: add ALiBi's slopes (Press, Smith and Lewis 2022).
        soft_cap: scores become cap * tanh(score / cap) before bias and masks (Gemma 2, 2024).
        dropout_p: probability of dropping a weight; ``seed`` and ``offset`` (ints or one-element
            tensors) replay a mask; seed None draws one from torch's generator, anew in each replay
            of a captured call.
        seqlens_q, seqlens_kv: (B,) int32 or int64 lengths of padded sequences.
        gate: O's shape; the result is O * sigmoid(gate), in rows of no sequence too.
        deterministic: bitwise repeatable gradients, which torch.use_deterministic_algorithms
            asks for too.
        return_stats: also return Stats (B, Hq, Sq), the natural log-sum-exp of each row in
            float32, float64 for float64.
        out: (B, Hq, Sq, Dv), written in place of a new tensor.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        O (B, Hq, Sq, Dv) in q's axis order and dtype, or (O, Stats). A row that sees nothing
        gives 0 and -inf. Differentiable in q, k, v, bias, sink and gate, of a loss on Stats too.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.

    Source: Vaswani and others 2017 (arXiv:1706.03762).
    """
    arguments = None
    if mask is None and gate is None and stream is None:
        values = with_types_of(
            *(window, causal, align, scale, alibi, soft_cap),
            *(dropout_p, deterministic, return_stats, engine),
        )
        tensors = (q, k, v, bias, sink, seqlens_q, seqlens_kv, out)
        arguments = Arguments(_CALLS, _OPERANDS, tensors, values)
        result = arguments.repeated()
        if result is not None:
            return result
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_float(name, require_tensor(name, tensor, 4))
        require_device(name, tensor, q.device)
    batch, heads, rows, depth = q.shape
    require_heads(heads, k.shape[1])
    require_shape("k", k, (batch, k.shape[1], k.shape[2], depth), "(B, Hkv, Skv, D) with q's B, D")
    require_shape("v", v, (batch, *k.shape[1:3], v.shape[3]), "(B, Hkv, Skv, Dv) with k's axes")
    scores = (batch, heads, rows, k.shape[2])
    operands: dict[str, torch.Tensor] = {}
    joined = join_bias_and_mask(bias, mask, scores, q)
    if joined is not None:
        operands["bias"] = joined
    operands |= padded_lengths(seqlens_q, seqlens_kv, q, k.shape[2])
    options = options_of(
        causal, align, window, scale, depth, alibi, soft_cap, dropout_p, deterministic
    )
    return attend(
        q,
        k,
        v,
        options,
        operands,
        sink=sink,
        seed=seed,
        offset=offset,
        gate=gate,
        return_stats=return_stats,
        out=out,
        engine=engine,
        stream=stream,
        arguments=arguments,
    )


@lowered("q", "k", "v")
def sdpa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens_kv: torch.Tensor,
    *,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    alibi: bool = False,
    soft_cap: float | None = None,
    gate: torch.Tensor | None = None,
    return_stats: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest tokens q (B, Hq, Sq, D) to a cache of which a part is in use.

    k is (B, Hkv, capacity, D) and v (B, Hkv, capacity, Dv); of sequence b the first
    ``seqlens_kv[b]`` keys are read ((B,) int32 or int64), the last Sq of them being q's own: the
    diagonal is aligned at the bottom right. What lies beyond may be anything. The results of two
    caches of the same q can be joined by ``merge_states``. Other arguments, and the result, as for
    ``sdpa``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    if seqlens_kv is None:
        # Of sdpa's it is an option.
        require_tensor("seqlens_kv", seqlens_kv, 1)
    return sdpa(
        q,
        k,
        v,
        causal=causal,
        align="bottom_right",
        window=window,
        scale=scale,
        bias=bias,
        mask=mask,
        sink=sink,
        alibi=alibi,
        soft_cap=soft_cap,
        seqlens_kv=seqlens_kv,
        gate=gate,
        return_stats=return_stats,
        out=out,
        engine=engine,
        stream=stream,
    )
