"""Scaled dot product attention on torch tensors: dense, packed (varlen) and paged."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tilewright.errors import BindingError, NotSupportedError
from tilewright.ops.arguments import (
    compact,
    require_broadcast,
    require_choice,
    require_device,
    require_float,
    require_number,
    require_out,
    require_shape,
    require_tensor,
)
from tilewright.ops.attention_call import (
    AttentionFunction,
    AttentionOptions,
    Call,
    attention_forward,
    stepped,
)
from tilewright.ops.attention_custom import attend_by_operator
from tilewright.ops.custom import forbid_stream, is_traced
from tilewright.ops.gating import gated
from tilewright.ops.streams import on_its_stream
from tilewright.ops.transforms import apply

Window = tuple[int | None, int | None]
_INTEGERS = (torch.int32, torch.int64)
# Bounds of the graph are 64-bit, and a left one is a window's side and one.
_WIDEST = 2**63 - 1
_SMALLEST_CAP = 1 / torch.finfo(torch.float32).max


@on_its_stream
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
    """softmax(scale * Q K^T + bias, masked) V.

    Args:
        q: (B, Hq, Sq, D), any strides. Hq is a multiple of Hkv; query head h reads KV head
            h // (Hq // Hkv).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        causal: row i sees keys up to i, after alignment.
        align: "top_left", or "bottom_right", which shifts rows by Skv - Sq (actual lengths).
        window: (left, right): row i sees keys i - left to i + right after alignment; None is
            open.
        scale: the factor on Q K^T; default D ** -0.5.
        bias: added to the scores; broadcasts to (B, Hq, Sq, Skv).
        mask: boolean, True may attend; broadcasts to (B, Hq, Sq, Skv).
        sink: (Hq,), a score that joins each row's denominator.
        alibi: add ALiBi's slopes (Press, Smith and Lewis 2022).
        soft_cap: scores become cap * tanh(score / cap) before bias and masks.
        dropout_p: probability of dropping a weight; ``seed`` and ``offset`` (ints or one-element
            tensors) replay a mask; seed None draws one from torch's generator.
        seqlens_q, seqlens_kv: (B,) int32 or int64 lengths of padded sequences.
        gate: O's shape; the result is O * sigmoid(gate).
        deterministic: bitwise repeatable gradients.
        return_stats: also return Stats (B, Hq, Sq), the natural log-sum-exp in float32.
        out: (B, Hq, Sq, Dv), written in place of a new tensor.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        O (B, Hq, Sq, Dv) in q's axis order and dtype, or (O, Stats). A row that sees nothing
        gives 0 and -inf.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_float(name, require_tensor(name, tensor, 4))
        require_device(name, tensor, q.device)
    batch, heads, rows, depth = q.shape
    _require_heads(heads, k.shape[1])
    require_shape("k", k, (batch, k.shape[1], k.shape[2], depth), "(B, Hkv, Skv, D) with q's B, D")
    require_shape("v", v, (batch, *k.shape[1:3], v.shape[3]), "(B, Hkv, Skv, Dv) with k's axes")
    scores = (batch, heads, rows, k.shape[2])
    operands: dict[str, torch.Tensor] = {}
    joined = _join_bias_and_mask(bias, mask, scores, q)
    if joined is not None:
        operands["bias"] = joined
    operands |= _lengths(seqlens_q, seqlens_kv, q, k.shape[2])
    options = _options(
        causal, align, window, scale, depth, alibi, soft_cap, dropout_p, deterministic
    )
    return _call(
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
    )


@on_its_stream
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
    is (Hq, Tq), or (Tq, Hq) for ``stats_layout="token_major"``. Other arguments as for ``sdpa``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_float(name, require_tensor(name, tensor, 3))
        require_device(name, tensor, q.device)
    _require_heads(q.shape[1], k.shape[1])
    require_shape("k", k, (k.shape[0], k.shape[1], q.shape[2]), "(Tkv, Hkv, D) with q's D")
    require_shape("v", v, (*k.shape[:2], v.shape[2]), "(Tkv, Hkv, Dv) with k's axes")
    require_choice("stats_layout", stats_layout, ("head_major", "token_major"))
    q, k, v = stepped(q), stepped(k), stepped(v)
    operands = {}
    for name, prefix in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        _require_integers(name, require_tensor(name, prefix, 1), q.device)
        if prefix.shape[0] < 1:
            raise BindingError(f"{name}: shape (0,); expected (B + 1,)")
        packed = compact(prefix)
        operands["cu_q" if name.endswith("_q") else "cu_kv"] = packed.view(-1, 1, 1, 1)
    require_shape("cu_seqlens_kv", cu_seqlens_kv, cu_seqlens_q.shape, "cu_seqlens_q's shape")
    options = _options(
        causal,
        align,
        window,
        scale,
        q.shape[2],
        alibi,
        soft_cap,
        dropout_p,
        deterministic,
        max_q=_require_length("max_seqlen_q", max_seqlen_q),
        max_kv=_require_length("max_seqlen_kv", max_seqlen_kv),
        stats_token_major=stats_layout == "token_major",
    )
    return _call(
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
    )


@on_its_stream
def sdpa_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_kv: torch.Tensor,
    *,
    v_page_table: torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    causal: bool = False,
    align: str = "bottom_right",
    window: Window | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    alibi: bool = False,
    soft_cap: float | None = None,
    return_stats: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (B, Hq, Sq, D) over paged keys and values, for inference.

    ``k_pages`` is (P, page, Hkv, D) and ``v_pages`` (P, page, Hkv, Dv), any strides. Token t of
    sequence b is row ``t % page`` of page ``page_table[b, t // page]`` ((B, pages) int32 or int64;
    ``v_page_table`` for the values, default the same). Only ``seqlens_kv[b]`` tokens are read;
    table entries past them are not looked at. Other arguments as for ``sdpa``; alignment is
    bottom-right by default, as decoding needs.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if an operand requires grad, or no engine takes the call.
    """
    require_float("q", require_tensor("q", q, 4))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        require_float(name, require_tensor(name, pages, 4))
        require_device(name, pages, q.device)
    batch, heads, _, depth = q.shape
    _require_heads(heads, k_pages.shape[2])
    require_shape("k_pages", k_pages, (*k_pages.shape[:3], depth), "(P, page, Hkv, D) with q's D")
    if v_pages.shape[2] != k_pages.shape[2]:
        raise BindingError(
            f"v_pages: shape {tuple(v_pages.shape)}; expected {k_pages.shape[2]} heads as k_pages"
        )
    tables = {"k_table": page_table, "v_table": v_page_table}
    operands = {}
    for name, table in tables.items():
        argument = "page_table" if name == "k_table" else "v_page_table"
        chosen = page_table if table is None else table
        _require_integers(argument, require_tensor(argument, chosen, 2), q.device)
        require_shape(argument, chosen, (batch, chosen.shape[1]), "one row of pages a sequence")
        operands[name] = compact(chosen).view(batch, 1, chosen.shape[1], 1)
    longest = min(
        page_table.shape[1] * k_pages.shape[1],
        operands["v_table"].shape[2] * v_pages.shape[1],
    )
    if bias is not None:
        joined = _join_bias_and_mask(bias, None, (batch, heads, q.shape[2], longest), q)
        if joined is not None:
            operands["bias"] = joined
    operands |= _lengths(seqlens_q, seqlens_kv, q, longest)
    options = _options(
        causal, align, window, scale, depth, alibi, soft_cap, 0.0, False, max_kv=longest
    )
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k_pages, v_pages, bias, sink)
    ):
        raise NotSupportedError(
            "sdpa_paged: an operand requires grad; paged attention is for "
            "inference, use torch.no_grad"
        )
    # A container's declared axes are (P, Hkv, page, D).
    return _call(
        q,
        k_pages.transpose(1, 2),
        v_pages.transpose(1, 2),
        options,
        operands,
        sink=sink,
        seed=None,
        offset=0,
        gate=None,
        return_stats=return_stats,
        out=out,
        engine=engine,
        stream=stream,
    )


@on_its_stream
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
    caches of the same q can be joined by ``merge_states``. Other arguments as for ``sdpa``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    # One row sees all keys in use, whatever the band to its right is.
    is_banded = causal and require_tensor("q", q, 4).shape[2] != 1
    return sdpa(
        q,
        k,
        v,
        causal=is_banded,
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


def _call(
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    heads = q.shape[1]
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
        operands["seed"] = _draw_seed() if seed is None else _counter("seed", seed)
        operands["offset"] = _counter("offset", offset)
    bias = operands.get("bias")
    differentiable = (q, k, v, bias, sink)
    require_out(out, shape, "(.., Sq, Dv) of q and v", (*differentiable, gate))
    call = Call(options, {"q": q, "k": k, "v": v, **operands}, engine, stream)
    o: torch.Tensor
    stats: torch.Tensor | None
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in differentiable
    )
    if is_traced(*call.operands.values(), out):
        forbid_stream(stream)
        o, stats = attend_by_operator(call, want_stats=return_stats or needs_grad)
        if out is not None and gate is None:
            o = out.copy_(o)
    elif needs_grad:
        o, stats = apply("sdpa", AttentionFunction, q, k, v, bias, sink, call)
    else:
        # A gate is read after O is written, and may be the very buffer of ``out``.
        o, stats = attention_forward(call, out if gate is None else None, want_stats=return_stats)
    if gate is not None:
        o = gated(o, gate, out)
    if not return_stats or stats is None:
        return o
    return o, stats if call.is_packed else stats.squeeze(-1)


def _options(
    causal: bool,
    align: str,
    window: Window | None,
    scale: float | None,
    depth: int,
    alibi: bool,
    soft_cap: float | None,
    dropout_p: float,
    deterministic: bool,
    **bounds: Any,
) -> AttentionOptions:
    require_choice("align", align, ("top_left", "bottom_right"))
    sides = (None, None) if window is None else window
    if (
        not isinstance(sides, tuple | list)
        or len(sides) != 2
        or any(
            side is not None and (not isinstance(side, int) or not 0 <= side < _WIDEST)
            for side in sides
        )
    ):
        raise BindingError(
            f"window: got {window!r}; expected (left, right), each None or from 0 to 2**63 - 2"
        )
    if not 0.0 <= require_number("dropout_p", dropout_p) < 1.0:
        raise BindingError(f"dropout_p: got {dropout_p!r}; expected 0 <= dropout_p < 1")
    if soft_cap is not None and not require_number("soft_cap", soft_cap) >= _SMALLEST_CAP:
        raise BindingError(
            f"soft_cap: got {soft_cap!r}; expected a finite number > 0, or None, whose reciprocal "
            "float32 holds"
        )
    if depth < 1:
        raise BindingError("q: its last axis, the head size, is 0; expected at least 1")
    if scale is not None:
        scale = require_number("scale", scale)
    if scale is None and not torch.compiler.is_compiling():
        scale = depth**-0.5
    return AttentionOptions(
        None if scale is None else float(scale),
        bool(causal),
        align,
        (sides[0], sides[1]),
        bool(alibi),
        None if soft_cap is None else float(soft_cap),
        float(dropout_p),
        bool(deterministic),
        **bounds,
    )


def _join_bias_and_mask(
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    scores: tuple[int, ...],
    q: torch.Tensor,
) -> torch.Tensor | None:
    """One additive operand of four axes: the bias, with -inf where the mask is False."""
    if bias is not None:
        require_float("bias", require_tensor("bias", bias))
        require_broadcast("bias", bias, scores, "(B, Hq, Sq, Skv)")
        require_device("bias", bias, q.device)
        bias = bias[(None,) * (4 - bias.dim())]
    if mask is None:
        return bias
    require_broadcast("mask", require_tensor("mask", mask), scores, "(B, Hq, Sq, Skv)")
    require_device("mask", mask, q.device)
    if mask.dtype is not torch.bool:
        raise BindingError(f"mask: data type {mask.dtype}; expected torch.bool (True may attend)")
    mask = mask[(None,) * (4 - mask.dim())]
    hidden = torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
    open_ = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
    return torch.where(mask, open_, hidden.to(open_.dtype))


def _lengths(
    seqlens_q: torch.Tensor | None,
    seqlens_kv: torch.Tensor | None,
    q: torch.Tensor,
    keys: int,
) -> dict[str, torch.Tensor]:
    """Both lengths as packed (B, 1, 1, 1); the absent one of two is the full extent."""
    if seqlens_q is None and seqlens_kv is None:
        return {}
    batch = q.shape[0]
    lengths = {}
    for name, given, full in (
        ("seqlens_q", seqlens_q, q.shape[2]),
        ("seqlens_kv", seqlens_kv, keys),
    ):
        if given is None:
            given = torch.full((batch,), full, dtype=torch.int32, device=q.device)
        _require_integers(name, require_tensor(name, given, 1), q.device)
        require_shape(name, given, (batch,), "one length a sequence")
        lengths[name] = compact(given).view(batch, 1, 1, 1)
    return lengths


def _require_heads(heads_q: int, heads_kv: int) -> None:
    if heads_kv < 1 or heads_q % heads_kv:
        raise BindingError(
            f"q: {heads_q} heads with {heads_kv} KV heads; expected a multiple of the KV heads"
        )


def _require_integers(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.dtype not in _INTEGERS:
        raise BindingError(f"{name}: data type {tensor.dtype}; expected int32 or int64")
    require_device(name, tensor, device)


def _require_length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise BindingError(f"{name}: got {value!r}; expected an int >= 0")
    return value if isinstance(value, int) else operator.index(value)


def _counter(name: str, value: int | torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype not in _INTEGERS:
            raise BindingError(
                f"{name}: shape {tuple(value.shape)}, {value.dtype}; expected one int32 or int64"
            )
        return value.detach().reshape(1, 1, 1, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise BindingError(f"{name}: got {value!r}; expected a 64-bit int or a one-element tensor")
    return torch.full((1, 1, 1, 1), value, dtype=torch.int64)


def _draw_seed() -> torch.Tensor:
    """A seed from torch's default CPU generator: torch.manual_seed repeats it."""
    return torch.randint(0, 2**63 - 1, (1, 1, 1, 1), dtype=torch.int64)
