"""Scaled dot product attention on paged keys and values, for inference."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.ops.arguments import (
    compact,
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
    require_integers,
)
from tilewright.ops.attention_dispatch import attend
from tilewright.ops.attention_repeat import Arguments, Way, with_types_of
from tilewright.ops.custom import forbid_gradient
from tilewright.ops.repeats import Repeats
from tilewright.ops.streams import lowered

_CALLS: Repeats[Way] = Repeats()
_OPERANDS = ("q", "k", "v", "k_table", "v_table", "bias", "sink", "seqlens_q", "seqlens_kv")


@lowered("q", "k_pages", "v_pages")
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
    ``v_page_table`` for the values, default the same). Only ``seqlens_kv[b]`` tokens are read
    ((B,) int32 or int64); table entries past them are not looked at. Returns O (B, Hq, Sq, Dv) in
    q's dtype, or (O, Stats). Other arguments as for ``sdpa``; alignment is bottom-right by default,
    as decoding needs.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if an operand requires grad, or no engine takes the call.
    """
    arguments = None
    if stream is None:
        values = with_types_of(window, causal, align, scale, alibi, soft_cap, return_stats, engine)
        given = (q, k_pages, v_pages, page_table, v_page_table, bias, sink)
        arguments = Arguments(_CALLS, _OPERANDS, (*given, seqlens_q, seqlens_kv, out), values)
        result = arguments.repeated()
        if result is not None:
            return result
    require_float("q", require_tensor("q", q, 4))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        require_float(name, require_tensor(name, pages, 4))
        require_device(name, pages, q.device)
    batch, heads, _, depth = q.shape
    require_heads(heads, k_pages.shape[2])
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
        require_integers(argument, require_tensor(argument, chosen, 2), q.device)
        require_shape(argument, chosen, (batch, chosen.shape[1]), "one row of pages a sequence")
        operands[name] = compact(chosen).view(batch, 1, chosen.shape[1], 1)
    longest = min(
        page_table.shape[1] * k_pages.shape[1],
        operands["v_table"].shape[2] * v_pages.shape[1],
    )
    for argument, size in (("k_pages", k_pages.shape), ("v_pages", v_pages.shape)):
        if size[1] < 1:
            raise BindingError(
                f"{argument}: shape {tuple(size)}; expected pages of one token or more"
            )
    if longest < 1:
        argument = "v_page_table" if page_table.shape[1] else "page_table"
        raise BindingError(f"{argument}: shape ({batch}, 0); expected one page a sequence or more")
    if bias is not None:
        joined = join_bias_and_mask(bias, None, (batch, heads, q.shape[2], longest), q)
        if joined is not None:
            operands["bias"] = joined
    require_tensor("seqlens_kv", seqlens_kv, 1)
    operands |= padded_lengths(seqlens_q, seqlens_kv, q, longest)
    options = options_of(
        causal, align, window, scale, depth, alibi, soft_cap, 0.0, False, max_kv=longest
    )
    if sink is not None:
        require_tensor("sink", sink, 1)
    rule = "paged attention is for inference"
    forbid_gradient("sdpa_paged", rule, q, k_pages, v_pages, bias, sink)
    # A container's declared axes are (P, Hkv, page, D).
    return attend(
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
        arguments=arguments,
    )
