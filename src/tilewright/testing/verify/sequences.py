"""Attention over packed (ragged) sequences and over paged keys and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.oracle import attention as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, Reference, label

RAGGED_SIGNATURE = """\
f(q, k, v, cu_q, cu_k, *, max_q, max_k, causal=False, scale=None, return_stats=False, out=None)
    -> O, or (O, Stats) with return_stats
  q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), any strides: sequence b is rows cu_q[b] to
  cu_q[b + 1] of q and cu_k[b] to cu_k[b + 1] of k and v; query head h reads KV head
  h // (Hq // Hkv); a sequence may be empty, and rows without keys give 0
  cu_q, cu_k  int32 (B + 1,), to be read at each call
  max_q, max_k  numbers that no length passes
  causal   row i of a sequence sees its keys 0 .. i
  scale    a number; None is D ** -0.5
  Stats    (Hq, Tq) float32, natural log-sum-exp of the scaled scores, -inf without keys
  out      O, to write into"""
PAGED_SIGNATURE = """\
f(q, k_pages, v_pages, table, lengths, *, v_table=None, causal=False, scale=None,
  return_stats=False, out=None) -> O, or (O, Stats) with return_stats
  q (B, Hq, Sq, D), k_pages (P, page, Hkv, D), v_pages (P, page, Hkv, Dv), any strides; query head
  h reads KV head h // (Hq // Hkv)
  table    int32 (B, n): token t of sequence b is row t % page of page table[b, t // page]
  lengths  int32 (B,): tokens in use; later slots and table entries may hold anything
  v_table  the table of the values, where it is another
  causal   the last row of a sequence sees all of its keys, the one before it one less
  scale    a number; None is D ** -0.5
  Stats    (B, Hq, Sq, 1) float32, natural log-sum-exp of the scaled scores
  out      O, or (O, Stats), to write into"""


def _spans(prefix: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(prefix.reshape(-1).tolist()))


def _ragged_expected(
    options: Mapping[str, Any], shift: int = 0, keys_of_all: bool = False
) -> Reference:
    """``shift`` takes another sequence's keys; ``keys_of_all`` ends none of them."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        q, k, v = (given[name].double().transpose(0, 1)[None] for name in "qkv")
        o = q.new_zeros((*q.shape[:3], v.shape[3]))
        stats = q.new_full((*q.shape[1:3],), -math.inf)
        spans_k = _spans(given["cu_k"])
        for b, (start, end) in enumerate(_spans(given["cu_q"])):
            if start == end:
                continue
            first, last = spans_k[(b + shift) % len(spans_k)]
            last = k.shape[2] if keys_of_all else last
            found = oracle.forward(
                q[:, :, start:end],
                k[:, :, first:last],
                v[:, :, first:last],
                scale=options.get("scale"),
                right_bound=0 if options.get("causal") else None,
            )
            o[:, :, start:end] = found.output
            stats[:, start:end] = found.stats[0, :, :, 0]
        results = {"O": o[0].transpose(0, 1)}
        return {**results, "Stats": stats} if options.get("return_stats") else results

    return reference


def _prefix(lengths: Sequence[int]) -> torch.Tensor:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=torch.int32)


def _ragged_wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "k and v of other lengths": {**given, "v": given["v"][:-1]},
        "q and k of other head sizes": {**given, "k": given["k"][..., :-1]},
        "prefixes in float32": {**given, "cu_q": given["cu_q"].float()},
        "one sequence less of keys": {**given, "cu_k": given["cu_k"][:-1]},
    }


def _ragged_case(
    name: str,
    rows: Sequence[int],
    keys: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    heads: tuple[int, int] = (4, 2),
    depth: int = 16,
    level: int = 0,
    is_detected: bool = False,
    other_rows: Sequence[int] | None = None,
    **options: Any,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        def draw(*dim: int) -> torch.Tensor:
            return torch.randn(*dim, generator=generator).to(dtype)

        return {
            "q": draw(sum(rows), heads[0], depth),
            "k": draw(sum(keys), heads[1], depth),
            "v": draw(sum(keys), heads[1], depth),
            "cu_q": _prefix(rows),
            "cu_k": _prefix(keys),
        }

    def others(given: Tensors) -> dict[str, torch.Tensor]:
        # Another split of as many rows; that of the keys is turned round.
        return {"cu_q": _prefix(other_rows or rows), "cu_k": _prefix(keys[::-1])}

    longest = max((*rows, *(other_rows or ())))
    whole = {**options, "max_q": longest, "max_k": max(keys)}
    guesses = {
        "each sequence reads the keys of the next one": _ragged_expected(options, shift=1),
        "the keys of a sequence go on to the end": _ragged_expected(options, keys_of_all=True),
    }
    wrong = _ragged_wrong if is_detected else None
    expected = _ragged_expected(options)
    return Case(name, make, whole, expected, level, is_detected, "", guesses, wrong, others=others)


def _ragged_cases() -> tuple[Case, ...]:
    found = [
        _ragged_case(
            "uneven lengths, an empty sequence",
            (5, 0, 7),
            (9, 0, 3),
            is_detected=True,
            other_rows=(7, 0, 5),
        ),
        _ragged_case("Stats", (5, 1, 7), (9, 4, 3), return_stats=True),
        _ragged_case("causal", (5, 1, 7), (5, 1, 7), causal=True),
        _ragged_case("rows without keys", (2, 3), (4, 0), return_stats=True),
        _ragged_case("keys without rows", (4, 0), (2, 3)),
        _ragged_case("one token each", (1, 1, 1), (1, 1, 1)),
        _ragged_case("one sequence", (17,), (33,), heads=(2, 2)),
        _ragged_case("scale given", (5, 3), (4, 6), scale=0.7),
        _ragged_case("causal, float16", (5, 0, 7), (5, 0, 7), torch.float16, causal=True),
        _ragged_case("bfloat16", (5, 0, 7), (9, 0, 3), torch.bfloat16),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        name = f"lengths 1 to 129, {label(dtype)}"
        lengths = (1, 129, 0, 64)
        found.append(_ragged_case(name, lengths, lengths, dtype, depth=64, level=1, causal=True))
    return tuple(found)


def _ragged_invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = dict(options) if out is None else {**options, "out": out}
    operands = [given[name] for name in ("q", "k", "v", "cu_q", "cu_k")]
    names = ("O", "Stats")[: 2 if options.get("return_stats") else 1]
    return named_results(function(*operands, **keywords), names)


def _our_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float | None = None,
    return_stats: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
) -> Any:
    from tilewright.ops import sdpa_varlen

    if out is not None and return_stats:
        raise NotSupportedError("sdpa_varlen writes O alone into out")
    return sdpa_varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        causal=causal,
        scale=scale,
        return_stats=return_stats,
        out=out,
        engine=engine,
    )


def _paged_expected(
    options: Mapping[str, Any], one_table: bool = False, extra: int = 0
) -> Reference:
    """``one_table`` reads values by the keys' table; ``extra`` reads tokens past the lengths."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        q = given["q"].double()
        pages = {"k": given["k_pages"].double(), "v": given["v_pages"].double()}
        tables = {"k": given["table"], "v": given.get("v_table", given["table"])}
        if one_table:
            tables["v"] = tables["k"]
        o = q.new_zeros((*q.shape[:3], pages["v"].shape[3]))
        stats = q.new_full((*q.shape[:3], 1), -math.inf)
        lengths = given["lengths"].reshape(-1).tolist()
        for b, length in enumerate(lengths):
            gathered = {
                # (pages, page, Hkv, D) of one sequence, then its tokens, then (1, Hkv, tokens, D).
                name: pages[name][tables[name].reshape(len(lengths), -1)[b].long()]
                .flatten(0, 1)[: length + extra]
                .transpose(0, 1)[None]
                for name in "kv"
            }
            found = oracle.forward(
                q[b : b + 1],
                gathered["k"],
                gathered["v"],
                scale=options.get("scale"),
                right_bound=0 if options.get("causal") else None,
                bottom_right=bool(options.get("causal")),
            )
            o[b], stats[b] = found.output[0], found.stats[0]
        return {"O": o, "Stats": stats} if options.get("return_stats") else {"O": o}

    return reference


def _paged_wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "q and pages of other head sizes": {**given, "k_pages": given["k_pages"][..., :-1]},
        "a table in float32": {**given, "table": given["table"].float()},
        "one length less": {**given, "lengths": given["lengths"][:-1]},
    }


def _paged_case(
    name: str,
    lengths: Sequence[int],
    page: int,
    dtype: torch.dtype = torch.float32,
    *,
    rows: int = 1,
    heads: tuple[int, int] = (4, 2),
    depth: int = 16,
    has_v_table: bool = False,
    is_poisoned: bool = False,
    level: int = 0,
    is_detected: bool = False,
    **options: Any,
) -> Case:
    columns = max(-(-length // page) for length in lengths) + 1
    used = sum(-(-length // page) for length in lengths)

    def tables(generator: torch.Generator) -> torch.Tensor:
        """Pages in any order; entries that are not in use name the last page, of nobody."""
        order = torch.randperm(used, generator=generator).to(torch.int32)
        table = torch.full((len(lengths), columns), used, dtype=torch.int32)
        start = 0
        for b, length in enumerate(lengths):
            count = -(-length // page)
            table[b, :count] = order[start : start + count]
            start += count
        return table

    def poison(pages: torch.Tensor, table: torch.Tensor) -> None:
        pages[used] = math.nan
        for b, length in enumerate(lengths):
            if length % page:
                pages[int(table[b, length // page]), length % page :] = math.nan

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        def draw(*dim: int) -> torch.Tensor:
            return torch.randn(*dim, generator=generator).to(dtype)

        given = {
            "q": draw(len(lengths), heads[0], rows, depth),
            "k_pages": draw(used + 1, page, heads[1], depth),
            "v_pages": draw(used + 1, page, heads[1], depth),
            "table": tables(generator),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
        }
        if has_v_table:
            given["v_table"] = tables(generator)
        if is_poisoned:
            poison(given["k_pages"], given["table"])
            poison(given["v_pages"], given.get("v_table", given["table"]))
        return given

    def others(given: Tensors) -> dict[str, torch.Tensor]:
        # Every page holds numbers where nothing is poisoned, so any table of them is valid.
        changed = {"table": given["table"].flip(0), "lengths": (given["lengths"] - 1).clamp(min=1)}
        if "v_table" in given:
            changed["v_table"] = given["v_table"].flip(1)
        return changed

    guesses: dict[str, Reference] = {
        "values are read by the table of the keys": _paged_expected(options, one_table=True)
    }
    if not is_poisoned:
        guesses["one token past the length is read"] = _paged_expected(options, extra=1)
    wrong = _paged_wrong if is_detected else None
    expected = _paged_expected(options)
    return Case(
        name,
        make,
        options,
        expected,
        level,
        is_detected,
        "" if not is_poisoned else "masked_nan",
        guesses,
        wrong,
        others=others,
    )


def _paged_cases() -> tuple[Case, ...]:
    found = [
        _paged_case("two tables", (13, 4, 9), 4, is_detected=True, has_v_table=True),
        _paged_case("NaN in unused slots and pages", (13, 4, 9), 4, is_poisoned=True),
        _paged_case("NaN, two tables", (13, 4, 9), 4, has_v_table=True, is_poisoned=True),
        _paged_case("Stats", (13, 4), 4, return_stats=True),
        _paged_case("causal, 3 rows", (13, 4, 9), 4, rows=3, causal=True),
        _paged_case("pages of one token", (5, 3), 1),
        _paged_case("one page holds all", (13, 4), 16),
        _paged_case("scale given", (13, 4), 4, scale=0.7),
        _paged_case("float16", (13, 4), 4, torch.float16),
        _paged_case("bfloat16", (13, 4), 4, torch.bfloat16),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        for page in (16, 64):
            name = f"pages of {page}, {label(dtype)}"
            found.append(_paged_case(name, (129, 64, 1), page, dtype, depth=64, level=1))
    return tuple(found)


def _paged_invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = dict(options)
    if "v_table" in given:
        keywords["v_table"] = given["v_table"]
    if out is not None:
        keywords["out"] = out
    operands = [given[name] for name in ("q", "k_pages", "v_pages", "table", "lengths")]
    names = ("O", "Stats")[: 2 if options.get("return_stats") else 1]
    return named_results(function(*operands, **keywords), names)


def _paged_declare(
    graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    q, table = tensors["q"], tensors["table"]
    causal = bool(options.get("causal"))
    outputs = graph.sdpa(
        q,
        tensors["k_pages"],
        tensors["v_pages"],
        attn_scale=options.get("scale") or q.dim[-1] ** -0.5,
        use_causal_mask_bottom_right=causal,
        generate_stats=bool(options.get("return_stats")),
        use_padding_mask=True,
        seq_len_q=tensors["rows"],
        seq_len_kv=tensors["lengths"],
        paged_attention_k_table=table,
        paged_attention_v_table=tensors.get("v_table", table),
        paged_attention_max_seq_len_kv=table.dim[2] * tensors["k_pages"].dim[2],
    )
    return {name: t for name, t in zip(("O", "Stats"), outputs, strict=True) if t is not None}


def _paged_for_graph(given: Tensors) -> dict[str, torch.Tensor]:
    """Pages as (P, Hkv, page, D), tables as (B, 1, n, 1), lengths as (B, 1, 1, 1)."""
    changed = dict(given)
    batch = changed["q"].shape[0]
    for name in ("k_pages", "v_pages"):
        changed[name] = changed[name].transpose(1, 2)
    for name in ("table", "v_table"):
        if name in changed:
            changed[name] = changed[name].reshape(batch, 1, -1, 1)
    changed["lengths"] = changed["lengths"].reshape(batch, 1, 1, 1)
    rows = torch.full((batch, 1, 1, 1), changed["q"].shape[2], dtype=torch.int32)
    return {**changed, "rows": rows.to(changed["q"].device)}


RAGGED = Family(
    "attention_ragged",
    RAGGED_SIGNATURE,
    _ragged_cases(),
    _ragged_invoke,
    lambda given, options: set(options),
    None,
    function=_our_ragged,
)
PAGED = Family(
    "attention_paged",
    PAGED_SIGNATURE,
    _paged_cases(),
    _paged_invoke,
    lambda given, options: {*options, *({"v_table"} & set(given))},
    _paged_declare,
    _paged_for_graph,
    is_reference_of_graph=False,
)
