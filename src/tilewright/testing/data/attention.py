"""Attention operands whose scores are where a softmax goes wrong."""

from __future__ import annotations

import math

import torch

from tilewright.oracle.formats import format_of
from tilewright.testing.data.cases import Built, DataCase, make, recipe
from tilewright.testing.data.draws import Draws, cast, dtype_name, dtype_of
from tilewright.testing.data.values import numbers

__all__ = ["PROFILES", "attention_values"]

PROFILES = (
    "normal",
    "large_logits",
    "negative_logits",
    "equal_logits",
    "denormals",
    "infinities",
    "hidden_nan",
)
"""With scale D ** -0.5. normal; large_logits: scores of either sign up to about 10000;
negative_logits: every score near -120, so that a running maximum that starts at 0 makes all
weights vanish; equal_logits: all scores of a row equal, so that the result is a plain average;
denormals: values are subnormal; infinities: a row of scores that are all hidden by a bias of
-inf, and infinite values at keys that the bias hides from every query; hidden_nan: NaN in keys
and values at the end of each sequence, past `seq_len_kv`."""


def attention_values(
    generator: torch.Generator,
    *,
    profile: str = "normal",
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int = 33,
    columns: int = 47,
    depth: int = 16,
    dtype: torch.dtype | str = torch.float32,
) -> DataCase:
    """Tensors `q` (B, H, Sq, D), `k` and `v` (B, Hkv, Skv, D), contiguous.

    "infinities" adds `bias` (1, 1, Sq, Skv) of the same dtype, with the facts `hidden_keys` and
    `dead_rows`; "hidden_nan" adds `seq_len_kv` int32 (B, 1, 1, 1) and the fact `lengths_kv`.

    Raises:
        ValueError: An unknown profile, or heads that kv_heads does not divide.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile: {profile!r}; expected one of {', '.join(PROFILES)}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads}; expected a divisor of heads = {heads}")
    name = dtype_name(dtype)
    target = format_of(dtype_of(name))
    if profile == "infinities" and (target is None or target.specials != "ieee"):
        raise ValueError(f"profile: 'infinities'; {name} has no infinity")
    parameters = {
        "profile": profile,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "dtype": name,
    }
    return make("attention_values", generator, parameters)


@recipe("attention_values")
def _build(
    draws: Draws,
    *,
    profile: str,
    batch: int,
    heads: int,
    kv_heads: int,
    rows: int,
    columns: int,
    depth: int,
    dtype: str,
) -> Built:
    kind = dtype_of(dtype)
    q = draws.normal("q", (batch, heads, rows, depth))
    k = draws.normal("k", (batch, kv_heads, columns, depth))
    v = draws.normal("v", (batch, kv_heads, columns, depth))
    extra: dict[str, torch.Tensor] = {}
    facts: dict[str, object] = {}
    if profile == "large_logits":
        # Scores have a deviation of 2500 and reach four times that.
        q, k = q * 50.0, k * 50.0
    elif profile == "negative_logits":
        q, k = q * 0.1, k * 0.1
        q[..., 0], k[..., 0] = 1.0, -120.0 * math.sqrt(depth)
    elif profile == "equal_logits":
        k = k[:, :, :1].expand(k.shape)
    elif profile == "denormals":
        v = numbers(draws, "v", tuple(v.shape), "denormals", kind)
    elif profile == "infinities":
        hidden = draws.permutation("hidden_keys", columns)[: max(columns // 8, 1)].sort().values
        dead = draws.permutation("dead_rows", rows)[: max(rows // 16, 1)].sort().values
        bias = draws.normal("bias", (1, 1, rows, columns))
        bias[..., hidden] = -math.inf
        bias[:, :, dead] = -math.inf
        v[:, :, hidden] = draws.signs("v/sign", (len(hidden), 1)) * math.inf
        extra["bias"] = cast(bias, kind)
        facts.update(hidden_keys=hidden.tolist(), dead_rows=dead.tolist())
    elif profile == "hidden_nan":
        lengths = draws.integers("lengths", (batch,), 0, columns + 1)
        for index, length in enumerate(lengths.tolist()):
            k[index, :, length:], v[index, :, length:] = math.nan, math.nan
        extra["seq_len_kv"] = lengths.to(torch.int32).reshape(batch, 1, 1, 1)
        facts["lengths_kv"] = lengths.tolist()
    tensors = {name: cast(t.contiguous(), kind) for name, t in (("q", q), ("k", k), ("v", v))}
    return Built({**tensors, **extra}, facts)
