"""Attention over paged keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.oracle import attention as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, Reference, label, long

SIGNATURE = """\
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


def _expected(options: Mapping[str, Any], one_table: bool = False, extra: int = 0) -> Reference:
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


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "q and pages of other head sizes": {**given, "k_pages": given["k_pages"][..., :-1]},
        "a table in float32": {**given, "table": given["table"].float()},
        "one length less": {**given, "lengths": given["lengths"][:-1]},
    }


def _case(
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
        "values are read by the table of the keys": _expected(options, one_table=True)
    }
    if not is_poisoned:
        guesses["one token past the length is read"] = _expected(options, extra=1)
    wrong = _wrong if is_detected else None
    expected = _expected(options)
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


def _cases() -> tuple[Case, ...]:
    found = [
        _case("two tables", (13, 4, 9), 4, is_detected=True, has_v_table=True),
        _case("NaN in unused slots and pages", (13, 4, 9), 4, is_poisoned=True),
        _case("NaN, two tables", (13, 4, 9), 4, has_v_table=True, is_poisoned=True),
        _case("Stats", (13, 4), 4, return_stats=True),
        _case("causal, 3 rows", (13, 4, 9), 4, rows=3, causal=True),
        _case("pages of one token", (5, 3), 1),
        _case("one page holds all", (13, 4), 16),
        _case("scale given", (13, 4), 4, scale=0.7),
        _case("float16", (13, 4), 4, torch.float16),
        _case("bfloat16", (13, 4), 4, torch.bfloat16),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        for page in (16, 64):
            name = f"pages of {page}, {label(dtype)}"
            found.append(_case(name, (129, 64, 1), page, dtype, depth=64, level=1))
    lengths, half = (4096, 4095, 1025, 4096), torch.bfloat16
    decoding = _case("long, head size 128", lengths, 64, half, heads=(32, 8), depth=128)
    found.append(long(decoding))
    return tuple(found)


def _invoke(
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


def _declare(graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
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


def _for_graph(given: Tensors) -> dict[str, torch.Tensor]:
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


FAMILY = Family(
    "attention_paged",
    SIGNATURE,
    _cases(),
    _invoke,
    lambda given, options: {*options, *({"v_table"} & set(given))},
    _declare,
    _for_graph,
    is_reference_of_graph=False,
)
