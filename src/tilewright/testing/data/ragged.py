"""Ragged batches: sequences packed one after another, empty, of one token, highly uneven."""

from __future__ import annotations

import itertools

import torch

from tilewright.testing.data.cases import Built, DataCase, make, recipe
from tilewright.testing.data.draws import Draws, cast, dtype_name, dtype_of, poison

__all__ = ["PROFILES", "ragged", "ragged_lengths"]

PROFILES = ("mixed", "empty", "one_token", "uneven", "all_empty", "full")
"""mixed: lengths around tile sizes; empty: first, last and neighbouring sequences are empty;
one_token: each has one; uneven: one is full, the others next to nothing; all_empty; full."""

_TILES = (16, 32, 64, 128)


def ragged_lengths(draws: Draws, name: str, batch: int, longest: int, profile: str) -> list[int]:
    """Lengths of a batch of sequences, each from 0 to `longest`."""
    if profile == "full":
        return [longest] * batch
    if profile == "all_empty":
        return [0] * batch
    if profile == "one_token":
        return [min(1, longest)] * batch
    if profile == "uneven":
        lengths = [min(n, longest) for n in draws.integers(name, (batch,), 0, 4).tolist()]
        if batch:
            lengths[draws.integer(f"{name}/long", 0, batch)] = longest
        return lengths
    edges = sorted({min(n, longest) for t in _TILES for n in (0, 1, t - 1, t, t + 1, longest)})
    lengths = [edges[i] for i in draws.integers(name, (batch,), 0, len(edges)).tolist()]
    if profile == "empty":
        for index in {0, batch - 1, batch // 2, batch // 2 + 1}:
            if 0 <= index < batch and batch > 1:
                lengths[index] = 0
        if batch > 1 and not any(lengths):
            lengths[min(1, batch - 1)] = longest
    return lengths


def ragged(
    generator: torch.Generator,
    *,
    profile: str = "mixed",
    batch: int = 4,
    longest_q: int = 70,
    longest_kv: int | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    depth: int = 16,
    dtype: torch.dtype | str = torch.float32,
    spare: int = 3,
) -> DataCase:
    """Packed attention operands.

    Args:
        profile: Of `PROFILES`, for queries and, drawn apart, for keys.
        longest_q, longest_kv: No sequence is longer; queries' bound serves keys if None.
        spare: Rows of NaN that the buffers own past the last sequence.

    Tensors: `q` (Tq + spare, H, D), `k` and `v` (Tkv + spare, Hkv, D), packed; `cu_seqlens_q`,
    `cu_seqlens_kv` int32 (B + 1); `seq_len_q`, `seq_len_kv` int32 (B, 1, 1, 1); and
    `q.ragged_offset`, `kv.ragged_offset` int64 (B + 1, 1, 1, 1) in elements. Facts: `lengths_q`,
    `lengths_kv`.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile: {profile!r}; expected one of {', '.join(PROFILES)}")
    parameters = {
        "profile": profile,
        "batch": batch,
        "longest_q": longest_q,
        "longest_kv": longest_q if longest_kv is None else longest_kv,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "depth": depth,
        "dtype": dtype_name(dtype),
        "spare": spare,
    }
    return make("ragged", generator, parameters)


@recipe("ragged")
def _build(
    draws: Draws,
    *,
    profile: str,
    batch: int,
    longest_q: int,
    longest_kv: int,
    heads: int,
    kv_heads: int,
    depth: int,
    dtype: str,
    spare: int,
) -> Built:
    kind = dtype_of(dtype)
    lengths = {
        "q": ragged_lengths(draws, "lengths_q", batch, longest_q, profile),
        "kv": ragged_lengths(draws, "lengths_kv", batch, longest_kv, profile),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, count, side in (("q", heads, "q"), ("k", kv_heads, "kv"), ("v", kv_heads, "kv")):
        total = sum(lengths[side])
        rows = poison((total + spare) * count * depth, kind).reshape(total + spare, count, depth)
        if total:
            rows[:total] = cast(draws.normal(name, (total, count, depth)), kind)
        tensors[name] = rows
    for side, count in (("q", heads), ("kv", kv_heads)):
        sums = torch.tensor([0, *itertools.accumulate(lengths[side])], dtype=torch.int64)
        tensors[f"cu_seqlens_{side}"] = sums.to(torch.int32)
        tensors[f"seq_len_{side}"] = torch.tensor(lengths[side], dtype=torch.int32).reshape(
            batch, 1, 1, 1
        )
        offsets = (sums * count * depth).reshape(batch + 1, 1, 1, 1)
        tensors[f"{side}.ragged_offset"] = offsets
    return Built(tensors, {"lengths_q": lengths["q"], "lengths_kv": lengths["kv"]})
