"""Attention over packed (ragged) sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.oracle import attention as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, Reference, label, long

SIGNATURE = """\
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


def _spans(prefix: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(prefix.reshape(-1).tolist()))


def _expected(options: Mapping[str, Any], shift: int = 0, keys_of_all: bool = False) -> Reference:
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


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "k and v of other lengths": {**given, "v": given["v"][:-1]},
        "q and k of other head sizes": {**given, "k": given["k"][..., :-1]},
        "prefixes in float32": {**given, "cu_q": given["cu_q"].float()},
        "one sequence less of keys": {**given, "cu_k": given["cu_k"][:-1]},
    }


def _case(
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
        "each sequence reads the keys of the next one": _expected(options, shift=1),
        "the keys of a sequence go on to the end": _expected(options, keys_of_all=True),
    }
    wrong = _wrong if is_detected else None
    expected = _expected(options)
    return Case(name, make, whole, expected, level, is_detected, "", guesses, wrong, others=others)


def _cases() -> tuple[Case, ...]:
    found = [
        _case(
            "uneven lengths, an empty sequence",
            (5, 0, 7),
            (9, 0, 3),
            is_detected=True,
            other_rows=(7, 0, 5),
        ),
        _case("Stats", (5, 1, 7), (9, 4, 3), return_stats=True),
        _case("causal", (5, 1, 7), (5, 1, 7), causal=True),
        _case("rows without keys", (2, 3), (4, 0), return_stats=True),
        _case("keys without rows", (4, 0), (2, 3)),
        _case("one token each", (1, 1, 1), (1, 1, 1)),
        _case("one sequence", (17,), (33,), heads=(2, 2)),
        _case("scale given", (5, 3), (4, 6), scale=0.7),
        _case("causal, float16", (5, 0, 7), (5, 0, 7), torch.float16, causal=True),
        _case("bfloat16", (5, 0, 7), (9, 0, 3), torch.bfloat16),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        name = f"lengths 1 to 129, {label(dtype)}"
        lengths = (1, 129, 0, 64)
        found.append(_case(name, lengths, lengths, dtype, depth=64, level=1, causal=True))
    lengths, half = (4096, 4096, 2048, 6144), torch.bfloat16
    packed = _case("long, head size 128", lengths, lengths, half, heads=(16, 16), depth=128)
    found.append(long(packed))
    return tuple(found)


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = dict(options) if out is None else {**options, "out": out}
    operands = [given[name] for name in ("q", "k", "v", "cu_q", "cu_k")]
    names = ("O", "Stats")[: 2 if options.get("return_stats") else 1]
    return named_results(function(*operands, **keywords), names)


def _ours(
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


FAMILY = Family(
    "attention_ragged",
    SIGNATURE,
    _cases(),
    _invoke,
    lambda given, options: set(options),
    None,
    function=_ours,
)
