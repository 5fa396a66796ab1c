"""Attention's gradients: cases, their references, and how a callable is called."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import attention as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.attention import with_lengths
from tilewright.testing.verify.case import Case, Edit, Family, label, long, packed_strides

SIGNATURE = """\
f(q, k, v, do, *, o, stats, causal=False, scale=None, lengths=None, out=None) -> (dq, dk, dv)
  q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv), any strides; query head h reads KV
  head h // (Hq // Hkv), and dk, dv sum over the heads that read them
  do       (B, Hq, Sq, Dv), the gradient of O
  o, stats what a forward pass saved: O in q's type, and the natural log-sum-exp of the scaled
           scores, (B, Hq, Sq, 1) float32; leave them out if you recompute them
  causal   row i sees keys 0 .. i
  scale    a number; None is D ** -0.5
  lengths  int32 (B,): the keys of each sequence; those past it get gradients of 0
  out      (dq, dk, dv), to write into"""

NAMES = ("dq", "dk", "dv")
Shape = tuple[int, int, int, int, int, int]


def _visible(given: Tensors, options: Mapping[str, Any]) -> dict[str, Any]:
    """The oracle's options for a case."""
    lengths = given["lengths"].reshape(-1).tolist() if "lengths" in given else None
    return {
        "scale": options.get("scale"),
        "right_bound": 0 if options.get("causal") else None,
        "seq_len_kv": lengths,
        "seq_len_q": None if lengths is None else [given["q"].shape[2]] * len(lengths),
    }


def _expected(
    options: Mapping[str, Any], heads: Callable[[int, int], list[int]] | None = None
) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        k, v = given["k"], given["v"]
        groups = k.shape[1]
        if heads is not None:
            order = heads(given["q"].shape[1], groups)
            k, v = k[:, order], v[:, order]
        found = oracle.backward(
            given["q"],
            k,
            v,
            given["do"],
            output=given.get("o"),
            stats=given.get("stats"),
            **_visible(given, options),
        )
        grads = [found.d_q, found.d_k, found.d_v]
        if heads is not None:
            target = torch.tensor(order, device=k.device)
            for index in (1, 2):
                dim = (k.shape[0], groups, *grads[index].shape[2:])
                grads[index] = grads[index].new_zeros(dim).index_add(1, target, grads[index])
        return dict(zip(NAMES, grads, strict=True))

    return reference


def _scaled(
    options: Mapping[str, Any], names: tuple[str, ...], power: float
) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    """Gradients in which the named ones lack, or have once more, the factor of the scores."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        factor = (options.get("scale") or given["q"].shape[-1] ** -0.5) ** power
        found = _expected(options)(given)
        return {name: g * factor if name in names else g for name, g in found.items()}

    return reference


def _undiminished(options: Mapping[str, Any]) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    """Gradients without the term rowsum(dO * O)."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        return _expected(options)({**given, "o": torch.zeros_like(given["do"])})

    return reference


def _last_head(given: Tensors, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """dk and dv of the last query head of each group, as where heads overwrite one another."""
    group = given["q"].shape[1] // given["k"].shape[1]
    kept = {n: given[n][:, group - 1 :: group] for n in ("q", "do", "o", "stats") if n in given}
    return {**_expected(options)({**given, **kept}), "dq": _expected(options)(given)["dq"]}


def _guesses(options: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    guesses: dict[str, Any] = {
        "dq and dk lack the scale": _scaled(options, ("dq", "dk"), -1.0),
        "dq lacks the scale": _scaled(options, ("dq",), -1.0),
        "dk lacks the scale": _scaled(options, ("dk",), -1.0),
        "the term rowsum(dO * O) is missing": _undiminished(options),
    }
    if 1 < shape[2] < shape[1]:
        guesses["query head h reads KV head h % Hkv"] = _expected(
            options, lambda q, kv: [h % kv for h in range(q)]
        )
    if shape[2] < shape[1]:
        guesses["dk and dv are of one head of each group, not their sum"] = lambda given: (
            _last_head(given, options)
        )
    causal = bool(options.get("causal"))
    what = "the causal mask is not applied" if causal else "the causal mask is applied"
    guesses[what] = _expected({**options, "causal": not causal})
    return guesses


def _plain(options: Mapping[str, Any]) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    """Autograd through softmax of the whole score matrix, in the operands' type."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            q, k, v = (given[name].detach().clone().requires_grad_() for name in "qkv")
            group = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
            scores = scores * (options.get("scale") or q.shape[-1] ** -0.5)
            if options.get("causal"):
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
                scores = scores.masked_fill(~seen, -math.inf)
            o = torch.softmax(scores, dim=-1) @ v.repeat_interleave(group, 1)
            grads = torch.autograd.grad(o, (q, k, v), given["do"])
        return dict(zip(NAMES, grads, strict=True))

    return reference


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "do of another length": {**given, "do": given["do"][:, :, :-1]},
        "q and k of other head sizes": {**given, "k": given["k"][..., :-1]},
        "do in float64": {**given, "do": given["do"].double()},
    }


def _case(
    name: str,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    *,
    depth_v: int | None = None,
    level: int = 0,
    is_detected: bool = False,
    tag: str = "",
    edit: Edit | None = None,
    **options: Any,
) -> Case:
    batch, heads_q, heads_kv, rows, keys, depth = shape

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        def draw(*dim: int) -> torch.Tensor:
            return torch.randn(*dim, generator=generator).to(dtype)

        given = {
            "q": draw(batch, heads_q, rows, depth),
            "k": draw(batch, heads_kv, keys, depth),
            "v": draw(batch, heads_kv, keys, depth_v or depth),
            "do": draw(batch, heads_q, rows, depth_v or depth),
        }
        if edit is not None:
            edit(given)
        saved = oracle.forward(given["q"], given["k"], given["v"], **_visible(given, options))
        given["o"], given["stats"] = saved.output.to(dtype), saved.stats.float()
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
        None if edit is not None else _plain(options),
    )


def cases() -> tuple[Case, ...]:
    """Every case."""
    found = [
        _case("grouped heads", (2, 4, 2, 5, 19, 16), is_detected=True),
        _case("causal", (1, 2, 2, 19, 19, 16), causal=True),
        _case("causal, more keys", (1, 2, 1, 5, 9, 16), causal=True),
        _case("causal, more rows", (1, 2, 2, 9, 5, 16), causal=True),
        _case("one KV head", (2, 4, 1, 17, 33, 16)),
        _case("one row, one key", (1, 2, 2, 1, 1, 16)),
        _case("head size 8, value head size 24", (1, 2, 2, 5, 7, 8), depth_v=24),
        _case("scale given", (1, 2, 2, 5, 7, 16), scale=0.7),
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
    ]
    for dtype in (torch.float16, torch.bfloat16):
        found.append(_case(f"grouped heads, {label(dtype)}", (2, 4, 2, 5, 19, 16), dtype))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for keys, depth in ((63, 64), (129, 128)):
            name = f"{keys} keys, head size {depth}, {label(dtype)}"
            shape = (1, 6, 3, 66, keys, depth)
            found.append(_case(name, shape, dtype, level=1, causal=keys == 129))
    found.append(_long("long, head size 128", (1, 16, 16, 4096, 4096, 128), torch.bfloat16))
    return tuple(found)


def _long(name: str, shape: Shape, dtype: torch.dtype) -> Case:
    """What a forward pass saves is put in its place here: the right size, at no cost."""
    batch, heads_q, heads_kv, rows, keys, depth = shape

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        def draw(heads: int, length: int) -> torch.Tensor:
            return torch.randn(batch, heads, length, depth, generator=generator).to(dtype)

        return {
            "q": draw(heads_q, rows),
            "k": draw(heads_kv, keys),
            "v": draw(heads_kv, keys),
            "do": draw(heads_q, rows),
            "o": torch.zeros(batch, heads_q, rows, depth, dtype=dtype),
            # Of scores with variance 1.
            "stats": torch.full((batch, heads_q, rows, 1), math.log(keys) + 0.5),
        }

    return long(dataclasses.replace(_case(name, shape, dtype), make=make))


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = {name: given[name] for name in ("o", "stats", "lengths") if name in given}
    keywords.update(options)
    if out is not None:
        keywords["out"] = out
    return named_results(function(*(given[n] for n in ("q", "k", "v", "do")), **keywords), NAMES)


def _keywords(given: Tensors, options: Mapping[str, Any]) -> set[str]:
    return {*options, *({"lengths"} & set(given))}


def _declare(graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    if "lengths" in tensors:
        keywords = {
            "use_padding_mask": True,
            "seq_len_q": tensors["rows"],
            "seq_len_kv": tensors["lengths"],
        }
    outputs = graph.sdpa_backward(
        *(tensors[name] for name in ("q", "k", "v", "o", "do", "stats")),
        attn_scale=options.get("scale") or tensors["q"].dim[-1] ** -0.5,
        use_causal_mask=bool(options.get("causal")),
        **keywords,
    )
    # A gradient would be laid out like its operand, gigabytes long where that is.
    for output, like in zip(outputs, "qkv", strict=True):
        output.set_dim(tensors[like].dim).set_stride(packed_strides(tensors[like].dim))
    return dict(zip(NAMES, outputs, strict=True))


def _for_graph(given: Tensors) -> dict[str, torch.Tensor]:
    """Lengths with the rank of everything else, and rows' lengths beside keys'."""
    changed = dict(given)
    if "lengths" in changed:
        batch = changed["q"].shape[0]
        changed["lengths"] = changed["lengths"].reshape(batch, 1, 1, 1)
        rows = torch.full((batch, 1, 1, 1), changed["q"].shape[2], dtype=torch.int32)
        changed["rows"] = rows.to(changed["q"].device)
    return changed


FAMILY = Family(
    "attention_backward",
    SIGNATURE,
    cases(),
    _invoke,
    _keywords,
    _declare,
    _for_graph,
    saved=("o", "stats"),
)
