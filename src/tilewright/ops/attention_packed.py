"""Scaled dot product attention on packed sequences, one after another (varlen)."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.ops.arguments import (
    compact,
    require_choice,
    require_device,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.attention_arguments import (
    Window,
    options_of,
    require_heads,
    require_integers,
    require_length,
)
from tilewright.ops.attention_declaring import stepped
from tilewright.ops.attention_dispatch import attend
from tilewright.ops.attention_repeat import Arguments, Way, with_types_of
from tilewright.ops.repeats import Repeats
from tilewright.ops.streams import lowered

_CALLS: Repeats[Way] = Repeats()
_OPERANDS = ("q", "k", "v", "cu_q", "cu_kv", "sink")


@lowered("q", "k", "v")
def sdpa_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    causal: bool = False,
    align: str = "top_left",
    window: Window | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    alibi: bool = False,
    soft_cap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    gate: torch.Tensor | None = None,
    deterministic: bool = False,
    return_stats: bool = False,
    stats_layout: str = "head_major",
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed sequences: q (Tq, Hq, D), k (Tkv, Hkv, D), v (Tkv, Hkv, Dv).

    Sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q and the same of
    ``cu_seqlens_kv`` for k and v: (B + 1,) int32 or int64. No length is longer than
    ``max_seqlen_q`` or ``max_seqlen_kv``. Rows of no sequence give 0, and -inf in Stats, which
    is (Hq, Tq), or (Tq, Hq) for ``stats_layout="token_major"``. Returns O (Tq, Hq, Dv) in q's
    dtype, or (O, Stats). Other arguments as for ``sdpa``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    arguments = None
    if gate is None and stream is None:
        values = with_types_of(
            *(window, max_seqlen_q, max_seqlen_kv, causal, align, scale, alibi, soft_cap),
            *(dropout_p, deterministic, return_stats, stats_layout, engine),
        )
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_kv, sink, out)
        arguments = Arguments(_CALLS, _OPERANDS, tensors, values)
        result = arguments.repeated()
        if result is not None:
            return result
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_float(name, require_tensor(name, tensor, 3))
        require_device(name, tensor, q.device)
    require_heads(q.shape[1], k.shape[1])
    require_shape("k", k, (k.shape[0], k.shape[1], q.shape[2]), "(Tkv, Hkv, D) with q's D")
    require_shape("v", v, (*k.shape[:2], v.shape[2]), "(Tkv, Hkv, Dv) with k's axes")
    require_choice("stats_layout", stats_layout, ("head_major", "token_major"))
    q, k, v = stepped(q), stepped(k), stepped(v)
    operands = {}
    for name, prefix in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        require_integers(name, require_tensor(name, prefix, 1), q.device)
        if prefix.shape[0] < 1:
            raise BindingError(f"{name}: shape (0,); expected (B + 1,)")
        packed = compact(prefix)
        operands["cu_q" if name.endswith("_q") else "cu_kv"] = packed.view(-1, 1, 1, 1)
    require_shape("cu_seqlens_kv", cu_seqlens_kv, cu_seqlens_q.shape, "cu_seqlens_q's shape")
    options = options_of(
        causal,
        align,
        window,
        scale,
        q.shape[2],
        alibi,
        soft_cap,
        dropout_p,
        deterministic,
        max_q=require_length("max_seqlen_q", max_seqlen_q),
        max_kv=require_length("max_seqlen_kv", max_seqlen_kv),
        stats_token_major=stats_layout == "token_major",
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
