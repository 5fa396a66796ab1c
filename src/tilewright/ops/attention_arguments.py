"""Checks of attention's arguments, and what becomes of them before a call."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.ops.arguments import (
    compact,
    require_broadcast,
    require_choice,
    require_device,
    require_flag,
    require_float,
    require_number,
    require_shape,
    require_tensor,
)
from tilewright.ops.attention_records import AttentionOptions

Window = tuple[int | None, int | None]
_INTEGERS = (torch.int32, torch.int64)
# Bounds of the graph are 64-bit, and a left one is a window's side and one.
_WIDEST = 2**63 - 1
_SMALLEST_CAP = 1 / torch.finfo(torch.float32).max


def options_of(
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
    """The checked options of a call on heads of size ``depth``.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
    """
    require_choice("align", align, ("top_left", "bottom_right"))
    sides = (None, None) if window is None else window
    if (
        not isinstance(sides, tuple | list)
        or len(sides) != 2
        or any(
            side is not None
            and (isinstance(side, bool) or not isinstance(side, int) or not 0 <= side < _WIDEST)
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
    require_head_size("q", depth)
    if scale is not None:
        scale = require_number("scale", scale)
    if scale is None and not torch.compiler.is_compiling():
        scale = depth**-0.5
    return AttentionOptions(
        None if scale is None else float(scale),
        require_flag("causal", causal),
        align,
        (sides[0], sides[1]),
        require_flag("alibi", alibi),
        None if soft_cap is None else float(soft_cap),
        float(dropout_p),
        require_flag("deterministic", deterministic)
        or torch.are_deterministic_algorithms_enabled(),
        **bounds,
    )


def join_bias_and_mask(
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


def padded_lengths(
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
        require_integers(name, require_tensor(name, given, 1), q.device)
        require_shape(name, given, (batch,), "one length a sequence")
        lengths[name] = compact(given).view(batch, 1, 1, 1)
    return lengths


def require_heads(heads_q: int, heads_kv: int) -> None:
    """Require that KV heads divide query heads: head h reads KV head h // (Hq // Hkv)."""
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv:
        raise BindingError(
            f"q: {heads_q} heads with {heads_kv} KV heads; expected a multiple of the KV heads, "
            "1 or more of both"
        )


def require_head_size(name: str, size: int) -> None:
    """Require a last axis that is not empty."""
    if size < 1:
        raise BindingError(f"{name}: its last axis, the head size, is 0; expected at least 1")


def require_integers(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require lengths, prefix sums or a table on ``device``: int32 or int64."""
    if tensor.dtype not in _INTEGERS:
        raise BindingError(f"{name}: data type {tensor.dtype}; expected int32 or int64")
    require_device(name, tensor, device)


def require_length(name: str, value: Any) -> int:
    """``value`` as an int from 0 to 2**63 - 1."""
    # In a trace a length may be read of a tensor that is not there yet: an int of which nothing
    # is known, and whose attributes cannot be asked for.
    is_whole = isinstance(value, int) or hasattr(value, "__index__")
    if (
        isinstance(value, bool)
        or not is_whole
        or _is_known(value < 0)
        or _is_known(value > _WIDEST)
    ):
        raise BindingError(f"{name}: got {value!r}; expected an int from 0 to 2**63 - 1")
    return value if isinstance(value, int) else operator.index(value)


def _is_known(condition: bool | torch.SymBool) -> bool:
    """True if ``condition`` holds, and False if a trace cannot tell."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def counter(name: str, value: int | torch.Tensor) -> torch.Tensor:
    """Dropout's seed or offset as (1, 1, 1, 1): an int on the CPU, a tensor where it is.

    Raises:
        BindingError: if it is no 64-bit integer.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype not in _INTEGERS:
            raise BindingError(
                f"{name}: shape {tuple(value.shape)}, {value.dtype}; expected one int32 or int64"
            )
        return value.detach().reshape(1, 1, 1, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise BindingError(f"{name}: got {value!r}; expected a 64-bit int or a one-element tensor")
    return torch.full((1, 1, 1, 1), value, dtype=torch.int64, device="cpu")


def draw_seed(device: torch.device) -> torch.Tensor:
    """A seed from torch's default generator, which torch.manual_seed sets: the CPU's.

    While a CUDA graph is captured it is the device's, from which each replay draws anew; a number
    of the host would be part of the graph, and all replays would drop the same.
    """
    where: torch.device | str = "cpu"
    if device.type == "cuda" and not torch.compiler.is_compiling():
        where = device if torch.cuda.is_current_stream_capturing() else "cpu"
    return torch.randint(0, 2**63 - 1, (1, 1, 1, 1), dtype=torch.int64, device=where)
