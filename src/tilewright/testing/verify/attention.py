"""Attention: cases, their references, and how a callable is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import attention as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Edit, Family, label, long

SIGNATURE = """\
f(q, k, v, *, causal=False, scale=None, mask=None, lengths=None, return_stats=False, out=None)
    -> O, or (O, Stats) with return_stats
  q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv), any strides; query head h reads KV
  head h // (Hq // Hkv)
  causal   row i sees keys 0 .. i
  scale    a number or a one-element tensor; None is D ** -0.5
  mask     boolean (Sq, Skv), True may attend
  lengths  int32 (B,): the keys of each sequence; those past it do not exist
  Stats    (B, Hq, Sq, 1) float32, natural log-sum-exp of the scaled scores
  out      O, or (O, Stats), to write into
  Every keyword is optional: cases that need one that is not there are declined."""

_TILES = (8, 16, 32, 64)
Shape = tuple[int, int, int, int, int, int]


def _operands(
    shape: Shape, dtype: torch.dtype, depth_v: int | None = None, size: float = 1.0
) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    batch, heads_q, heads_kv, rows, keys, depth = shape

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        def draw(*dim: int) -> torch.Tensor:
            return torch.randn(*dim, generator=generator)

        return {
            "q": (draw(batch, heads_q, rows, depth) * size).to(dtype),
            "k": (draw(batch, heads_kv, keys, depth) * size).to(dtype),
            "v": draw(batch, heads_kv, keys, depth_v or depth).to(dtype),
        }

    return make


def _expected(
    options: Mapping[str, Any], heads: Callable[[int, int], list[int]] | None = None
) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        k, v = given["k"], given["v"]
        if heads is not None:
            order = heads(given["q"].shape[1], k.shape[1])
            k, v = k[:, order], v[:, order]
        scale = given["scale"].item() if "scale" in given else options.get("scale")
        lengths = given["lengths"].tolist() if "lengths" in given else None
        result = oracle.forward(
            given["q"],
            k,
            v,
            scale=scale,
            right_bound=0 if options.get("causal") else None,
            mask=given.get("mask"),
            seq_len_kv=lengths,
            seq_len_q=None if lengths is None else [given["q"].shape[2]] * len(lengths),
        )
        results = {"O": result.output}
        if options.get("return_stats"):
            results["Stats"] = result.stats
        return results

    return reference


def _padded(options: Mapping[str, Any], tile: int) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    """What comes of keys up to a whole tile that are zero instead of hidden."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        extra = -given["k"].shape[2] % tile
        grown = {n: torch.nn.functional.pad(given[n], (0, 0, 0, extra)) for n in ("k", "v")}
        return _expected(options)({**given, **grown})

    return reference


def _log2(options: Mapping[str, Any]) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        results = _expected(options)(given)
        return {**results, "Stats": results["Stats"] / math.log(2.0)}

    return reference


def _guesses(options: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    guesses: dict[str, Any] = {}
    heads_q, heads_kv, keys = shape[1], shape[2], shape[4]
    if 1 < heads_kv < heads_q:
        guesses["query head h reads KV head h % Hkv"] = _expected(
            options, lambda q, kv: [h % kv for h in range(q)]
        )
        guesses["query head h reads KV head min(h, Hkv - 1)"] = _expected(
            options, lambda q, kv: [min(h, kv - 1) for h in range(q)]
        )
    if not options.get("causal"):
        for tile in _TILES:
            if keys % tile:
                guesses[f"keys past the last are zeros up to a multiple of {tile}"] = _padded(
                    options, tile
                )
    if options.get("return_stats"):
        guesses["Stats is in base 2, not the natural logarithm"] = _log2(options)
    if not options.get("causal"):
        guesses["the causal mask is applied"] = _expected({**options, "causal": True})
    else:
        guesses["the causal mask is not applied"] = _expected({**options, "causal": False})
    return guesses


def _plain(given: Tensors) -> dict[str, torch.Tensor]:
    """Softmax of the whole score matrix in the operands' type; for as many KV heads as heads."""
    q, k, v = given["q"], given["k"], given["v"]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return {"O": torch.softmax(scores, dim=-1) @ v}


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    k, v = given["k"], given["v"]
    third = torch.cat([k, k, k], dim=1)[:, :3]
    return {
        "q and k of other head sizes": {**given, "k": k[..., :-1]},
        "k and v of other lengths": {**given, "v": v[:, :, :-1]},
        "4 query heads over 3 KV heads": {**given, "k": third, "v": third[..., : v.shape[-1]]},
        "k in float64": {**given, "k": k.double()},
    }


def _case(
    name: str,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    *,
    depth_v: int | None = None,
    size: float = 1.0,
    level: int = 0,
    is_detected: bool = False,
    tag: str = "",
    edit: Edit | None = None,
    **options: Any,
) -> Case:
    draw = _operands(shape, dtype, depth_v, size)

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        given = draw(generator)
        if edit is not None:
            edit(given)
        return given

    return Case(
        name,
        make,
        options,
        _expected(options),
        level,
        is_detected,
        tag,
        _guesses(options, shape),
        _wrong if is_detected else None,
        _plain if size > 1.0 else None,
    )


def with_lengths(*lengths: int, poison: bool = False) -> Edit:
    """Adds the keys of each sequence; ``poison`` puts NaN behind them."""

    def edit(given: dict[str, torch.Tensor]) -> None:
        given["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        if poison:
            for b, length in enumerate(lengths):
                given["k"][b, :, length:] = math.nan
                given["v"][b, :, length:] = math.nan

    return edit


def _mask(rows: int, keys: int, dead: tuple[int, ...] = (), poison: bool = False) -> Any:
    def edit(given: dict[str, torch.Tensor]) -> None:
        mask = torch.ones(rows, keys, dtype=torch.bool)
        mask[:, keys - 3 :] = False
        mask[0, 1] = False
        for row in dead:
            mask[row] = False
        given["mask"] = mask
        if poison:
            given["v"][:, :, keys - 3 :] = math.nan

    return edit


def _scale(given: dict[str, torch.Tensor]) -> None:
    given["scale"] = torch.tensor([0.3], dtype=torch.float32)


def _token_major(given: dict[str, torch.Tensor]) -> None:
    for name in ("q", "k", "v"):
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)


def _expanded(given: dict[str, torch.Tensor]) -> None:
    for name in ("k", "v"):
        given[name] = given[name][:1].expand_as(given[name])


def cases() -> tuple[Case, ...]:
    """Every case of attention."""
    found = [
        _case("grouped heads", (2, 4, 2, 5, 19, 16), is_detected=True),
        _case("Stats", (1, 4, 2, 5, 19, 16), is_detected=True, return_stats=True),
        _case("scale in a tensor", (1, 2, 1, 5, 7, 16), is_detected=True, edit=_scale),
        _case("causal", (1, 2, 2, 19, 19, 16), causal=True),
        _case("causal, more keys", (1, 2, 2, 5, 9, 16), causal=True),
        _case("causal, more rows", (1, 2, 2, 9, 5, 16), causal=True),
        _case("causal Stats", (1, 4, 2, 9, 9, 16), causal=True, return_stats=True),
        _case("one KV head", (2, 4, 1, 5, 16, 16)),
        _case("33 keys, 17 rows", (1, 2, 2, 17, 33, 16)),
        _case("one row", (2, 4, 2, 1, 21, 16)),
        _case("one key", (1, 2, 2, 3, 1, 16)),
        _case("head size 8, value head size 24", (1, 2, 2, 5, 7, 8), depth_v=24),
        _case("head size 80", (1, 2, 2, 5, 7, 80)),
        _case("scale given", (1, 2, 2, 5, 7, 16), scale=0.7),
        _case("large logits", (1, 2, 2, 5, 16, 16), size=12.0),
        _case("token-major operands", (2, 4, 2, 6, 8, 16), edit=_token_major),
        _case("keys shared by the batch", (2, 2, 2, 6, 8, 16), edit=_expanded),
        _case("key lengths", (3, 2, 2, 5, 8, 16), edit=with_lengths(8, 3, 1)),
        _case(
            "a sequence without keys",
            (3, 2, 2, 5, 8, 16),
            edit=with_lengths(8, 0, 3),
            tag="rows_without_keys",
        ),
        _case(
            "NaN past the lengths",
            (2, 2, 2, 5, 8, 16),
            edit=with_lengths(8, 3, poison=True),
            tag="masked_nan",
        ),
        _case("mask", (1, 2, 2, 6, 9, 16), edit=_mask(6, 9)),
        _case(
            "mask, rows without keys",
            (1, 2, 2, 6, 9, 16),
            edit=_mask(6, 9, (2, 5)),
            tag="rows_without_keys",
        ),
        _case(
            "mask, NaN in masked values",
            (1, 2, 2, 6, 9, 16),
            edit=_mask(6, 9, poison=True),
            tag="masked_nan",
        ),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        found.append(_case(f"grouped heads, {label(dtype)}", (2, 4, 2, 5, 19, 16), dtype))
        found.append(_case(f"causal, {label(dtype)}", (1, 2, 2, 19, 19, 16), dtype, causal=True))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for keys in (63, 64, 65, 129):
            for depth in (64, 128):
                found.append(
                    _case(
                        f"{keys} keys, head size {depth}, {label(dtype)}",
                        (1, 6, 3, 66, keys, depth),
                        dtype,
                        level=1,
                        causal=keys == 129,
                    )
                )
    half = torch.bfloat16
    found += [
        long(_case("long, head size 128", (1, 16, 16, 8192, 8192, 128), half)),
        long(_case("long, head size 64, causal", (1, 32, 8, 8192, 8192, 64), half, causal=True)),
    ]
    return tuple(found)


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = {name: given[name] for name in ("scale", "mask", "lengths") if name in given}
    keywords.update(options)
    if out is not None:
        keywords["out"] = out
    returned = function(given["q"], given["k"], given["v"], **keywords)
    return named_results(returned, ("O", "Stats")[: 2 if options.get("return_stats") else 1])


def _keywords(given: Tensors, options: Mapping[str, Any]) -> set[str]:
    return {*options, *({"scale", "mask", "lengths"} & set(given))}


def _declare(graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    scale = tensors.get("scale", options.get("scale") or q.dim[-1] ** -0.5)
    keywords: dict[str, Any] = {}
    if "lengths" in tensors:
        keywords = {
            "use_padding_mask": True,
            "seq_len_q": tensors["rows"],
            "seq_len_kv": tensors["lengths"],
        }
    outputs = graph.sdpa(
        q,
        k,
        v,
        attn_scale=scale,
        use_causal_mask=bool(options.get("causal")),
        generate_stats=bool(options.get("return_stats")),
        bias=tensors.get("mask"),
        **keywords,
    )
    return {name: t for name, t in zip(("O", "Stats"), outputs, strict=True) if t is not None}


def for_graph(given: Tensors) -> dict[str, torch.Tensor]:
    """Operands as a graph takes them: a mask as a bias of -inf, rows' lengths beside keys'."""
    changed = dict(given)
    if "mask" in changed:
        hidden = ~changed["mask"]
        open_ = torch.zeros(hidden.shape, device=hidden.device)
        changed["mask"] = open_.masked_fill(hidden, -math.inf)[None, None]
    if "lengths" in changed:
        batch = changed["q"].shape[0]
        changed["lengths"] = changed["lengths"].reshape(batch, 1, 1, 1)
        rows = torch.full((batch, 1, 1, 1), changed["q"].shape[2], dtype=torch.int32)
        changed["rows"] = rows.to(changed["q"].device)
    if "scale" in changed:
        changed["scale"] = changed["scale"].reshape(1, 1, 1, 1)
    return changed


FAMILY = Family("attention", SIGNATURE, cases(), _invoke, _keywords, _declare, for_graph)
