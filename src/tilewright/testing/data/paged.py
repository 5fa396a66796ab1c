"""Paged key and value caches with NaN wherever no token lies, and page tables with wild ends."""

from __future__ import annotations

import torch

from tilewright.testing.data.cases import Built, DataCase, make, recipe
from tilewright.testing.data.draws import Draws, cast, dtype_name, dtype_of, poison
from tilewright.testing.data.ragged import PROFILES, ragged_lengths

__all__ = ["UNUSED_ENTRIES", "paged_cache"]

UNUSED_ENTRIES = ("wild", "negative", "nan_page")
"""What table entries past a sequence's last page hold: numbers far beyond the container, -1, or
the index of a page of NaN."""

_FREE_PAGES = 3


def paged_cache(
    generator: torch.Generator,
    *,
    lengths: list[int] | None = None,
    profile: str = "mixed",
    batch: int = 3,
    longest: int = 40,
    page_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int = 1,
    depth: int = 16,
    dtype: torch.dtype | str = torch.float32,
    unused: str = "wild",
) -> DataCase:
    """Queries and a paged cache in which no page of K lies where the page of V does.

    Args:
        lengths: Tokens of each sequence; drawn by `profile` (of the ragged ones) if None.
        unused: Of `UNUSED_ENTRIES`.

    Tensors: `q` (B, H, rows, D); `k_container`, `v_container` (pages, Hkv, page_size, D);
    `k_table`, `v_table` int32 (B, 1, pages a sequence, 1), drawn apart; `seq_len_kv` int32
    (B, 1, 1, 1); and for references `k`, `v` (B, Hkv, longest, D), zero past each length. The
    containers own pages that no table names, in NaN, as are free rows of a last page. Facts:
    `lengths`, `pages` and `used_entries` of each sequence.

    Raises:
        ValueError: naming the parameter.
    """
    if unused not in UNUSED_ENTRIES:
        raise ValueError(f"unused: {unused!r}; expected one of {', '.join(UNUSED_ENTRIES)}")
    if profile not in PROFILES:
        raise ValueError(f"profile: {profile!r}; expected one of {', '.join(PROFILES)}")
    if lengths is not None and not all(0 <= length <= longest for length in lengths):
        raise ValueError(f"lengths: {lengths}; expected numbers from 0 to longest = {longest}")
    parameters = {
        "lengths": lengths,
        "profile": profile,
        "batch": batch if lengths is None else len(lengths),
        "longest": longest,
        "page_size": page_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "rows": rows,
        "depth": depth,
        "dtype": dtype_name(dtype),
        "unused": unused,
    }
    return make("paged_cache", generator, parameters)


@recipe("paged_cache")
def _build(
    draws: Draws,
    *,
    lengths: list[int] | None,
    profile: str,
    batch: int,
    longest: int,
    page_size: int,
    heads: int,
    kv_heads: int,
    rows: int,
    depth: int,
    dtype: str,
    unused: str,
) -> Built:
    kind = dtype_of(dtype)
    known = (
        ragged_lengths(draws, "lengths", batch, longest, profile) if lengths is None else lengths
    )
    used = [-(-length // page_size) for length in known]
    pages = sum(used) + _FREE_PAGES
    entries = max(-(-longest // page_size), 1)
    tensors = {
        "q": cast(draws.normal("q", (batch, heads, rows, depth)), kind),
        "seq_len_kv": torch.tensor(known, dtype=torch.int32).reshape(batch, 1, 1, 1),
    }
    for name in ("k", "v"):
        dense = cast(draws.normal(name, (batch, kv_heads, longest, depth)), kind)
        order = draws.permutation(f"{name}_pages", pages).tolist()
        free = order[sum(used) :]
        shape = (pages, kv_heads, page_size, depth)
        container = poison(pages * kv_heads * page_size * depth, kind).reshape(shape)
        table = _unused_entries(draws, f"{name}_unused", (batch, entries), unused, free, pages)
        taken = iter(order)
        for index, length in enumerate(known):
            for page in range(used[index]):
                number = next(taken)
                table[index, page] = number
                first = page * page_size
                count = min(page_size, length - first)
                container[number, :, :count] = dense[index, :, first : first + count]
            dense[index, :, length:] = 0
        tensors[f"{name}_container"] = container
        tensors[f"{name}_table"] = table.to(torch.int32).reshape(batch, 1, entries, 1)
        tensors[name] = dense
    return Built(tensors, {"lengths": known, "pages": pages, "used_entries": used})


def _unused_entries(
    draws: Draws, name: str, shape: tuple[int, int], unused: str, free: list[int], pages: int
) -> torch.Tensor:
    if unused == "negative":
        return torch.full(shape, -1, dtype=torch.int64)
    if unused == "nan_page":
        picks = draws.integers(name, shape, 0, len(free))
        return torch.tensor(free, dtype=torch.int64)[picks]
    return draws.integers(name, shape, 2**30, 2**31 - 1)
