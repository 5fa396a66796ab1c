"""Matrix products, rotary embeddings, and pointwise functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import matmul as matmul_oracle
from tilewright.oracle import moe as moe_oracle
from tilewright.oracle import pointwise as pointwise_oracle
from tilewright.oracle import rope as rope_oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, label, long

MATMUL_SIGNATURE = """\
f(a, b, *, out=None) -> c
  a (..., M, K), b (..., K, N), any strides; batch axes broadcast where an extent is 1
  out      c, to write into"""
GROUPED_SIGNATURE = """\
f(x, weights, starts, *, out=None) -> y
  x (T, K), weights (E, K, N), any strides; starts int32 (E + 1,): group e is rows starts[e] to
  starts[e + 1] of x, and y there is their product with weights[e]; rows of no group are 0
  out      y (T, N), to write into"""
ROPE_SIGNATURE = """\
f(x, freqs, *, out=None) -> y
  x (B, H, S, D); freqs (1 or B, 1, S, D) float32, angles in radians, the halves of the last axis
  equal; element i of the first half is paired with element i + D / 2
  out      y, to write into"""
POINTWISE_SIGNATURE = """\
f(mode, *inputs, out=None) -> y
  mode     the name of the function: add, mul, sub, div, relu, gelu, sigmoid, tanh, exp, ...
  inputs   one or two tensors, which broadcast where an extent is 1
  out      y, to write into"""


def _matmul_expected(given: Tensors) -> dict[str, torch.Tensor]:
    return {"c": matmul_oracle.forward(given["a"], given["b"])}


def _matmul_wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "inner extents that differ": {**given, "b": given["b"][..., :-1, :]},
        "b in float64": {**given, "b": given["b"].double()},
    }


def _matmul_case(
    name: str,
    a_dim: tuple[int, ...],
    b_dim: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    level: int = 0,
    is_detected: bool = False,
    is_transposed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        a = torch.randn(*a_dim, generator=generator).to(dtype)
        b = torch.randn(*b_dim, generator=generator).to(dtype)
        if is_transposed:
            b = b.transpose(-1, -2).contiguous().transpose(-1, -2)
        return {"a": a, "b": b}

    wrong = _matmul_wrong if is_detected else None
    return Case(name, make, {}, _matmul_expected, level, is_detected, wrong=wrong)


def _matmul_cases() -> tuple[Case, ...]:
    found = [
        _matmul_case("batch of 2, odd extents", (2, 5, 19), (2, 19, 7), is_detected=True),
        _matmul_case("one row", (1, 1, 33), (1, 33, 17)),
        _matmul_case("one inner element", (1, 5, 1), (1, 1, 7)),
        _matmul_case("b shared by the batch", (3, 5, 8), (1, 8, 4)),
        _matmul_case("b transposed", (2, 5, 8), (2, 8, 6), is_transposed=True),
        _matmul_case("inner extent 257", (1, 9, 257), (1, 257, 9)),
        _matmul_case("float16", (2, 17, 40), (2, 40, 9), torch.float16),
        _matmul_case("bfloat16", (2, 17, 40), (2, 40, 9), torch.bfloat16),
    ]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for extent in (63, 64, 129):
            dims = (2, extent, extent + 1), (2, extent + 1, extent - 1)
            found.append(_matmul_case(f"{extent}, {label(dtype)}", *dims, dtype, level=1))
    dims = (1, 8192, 4096), (1, 4096, 8192)
    found.append(long(_matmul_case("long, 8192 by 8192", *dims, torch.bfloat16)))
    return tuple(found)


def _matmul_invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = {} if out is None else {"out": out}
    return named_results(function(given["a"], given["b"], **keywords), ("c",))


def _grouped_expected(shift: int = 0) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    """``shift`` takes another group's weights."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        weights = given["weights"].roll(-shift, 0)
        # A graph's token has an axis more.
        x = given["x"].reshape(1, *given["x"].shape[-2:])
        y = moe_oracle.forward(x, weights, given["starts"])
        return {"y": y.reshape(*given["x"].shape[:-1], -1)}

    return reference


def _grouped_wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "inner extents that differ": {**given, "weights": given["weights"][:, :-1]},
        "starts in float32": {**given, "starts": given["starts"].float()},
    }


def _grouped_case(
    name: str,
    starts: tuple[int, ...],
    rows: int,
    inner: int = 19,
    columns: int = 7,
    dtype: torch.dtype = torch.float32,
    *,
    level: int = 0,
    is_detected: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        groups = len(starts) - 1
        return {
            "x": torch.randn(rows, inner, generator=generator).to(dtype),
            "weights": torch.randn(groups, inner, columns, generator=generator).to(dtype),
            "starts": torch.tensor(starts, dtype=torch.int32),
        }

    def others(given: Tensors) -> dict[str, torch.Tensor]:
        # Ends stay where they are; a group in between grows by a row.
        changed = list(starts)
        middle = len(changed) // 2
        if changed[middle] < changed[-1]:
            changed[middle:-1] = [max(start, changed[middle] + 1) for start in changed[middle:-1]]
        return {"starts": torch.tensor(changed, dtype=torch.int32)}

    guesses = {"each group takes the weights of the next one": _grouped_expected(1)}
    wrong = _grouped_wrong if is_detected else None
    expected = _grouped_expected()
    return Case(name, make, {}, expected, level, is_detected, "", guesses, wrong, others=others)


def _grouped_cases() -> tuple[Case, ...]:
    found = [
        _grouped_case("three groups, one empty", (0, 4, 4, 9), 9, is_detected=True),
        _grouped_case("one row each", (0, 1, 2, 3), 3),
        _grouped_case("all rows in the last group", (0, 0, 0, 5), 5),
        _grouped_case("rows of no group", (0, 2, 5), 8),
        _grouped_case("no rows in any group", (0, 0, 0), 4),
        _grouped_case("float16", (0, 3, 9), 9, 40, 9, torch.float16),
        _grouped_case("bfloat16", (0, 3, 9), 9, 40, 9, torch.bfloat16),
    ]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = f"65 rows, {label(dtype)}"
        found.append(_grouped_case(name, (0, 1, 64, 65), 65, 64, 65, dtype, level=1))
    starts = (0, 1000, 1000, 5001, 8192)
    many = _grouped_case("long, 8192 rows", starts, 8192, 2048, 4096, torch.bfloat16)
    found.append(long(many))
    return tuple(found)


def _grouped_invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = {} if out is None else {"out": out}
    return named_results(
        function(given["x"], given["weights"], given["starts"], **keywords), ("y",)
    )


def _grouped_declare(
    graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    operands = (tensors[name] for name in ("x", "weights", "starts"))
    return {"y": graph.moe_grouped_matmul(*operands)}


def _grouped_for_graph(given: Tensors) -> dict[str, torch.Tensor]:
    """Tokens as (1, T, K), starts as (E + 1, 1, 1)."""
    return {**given, "x": given["x"][None], "starts": given["starts"].reshape(-1, 1, 1)}


def _rope_case(
    name: str,
    dim: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    tables: int = 1,
    size: float = 1.0,
    level: int = 0,
    is_detected: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randn(*dim, generator=generator).to(dtype)
        half = torch.rand(tables, 1, dim[2], dim[3] // 2, generator=generator) * 6.0 * size
        return {"x": x, "freqs": torch.cat([half, half], dim=-1)}

    def expected(given: Tensors) -> dict[str, torch.Tensor]:
        return {"y": rope_oracle.forward(given["x"], given["freqs"])}

    def interleaved(given: Tensors) -> dict[str, torch.Tensor]:
        x = given["x"]
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        turned = rope_oracle.forward(halves, given["freqs"])
        first, second = turned.chunk(2, dim=-1)
        return {"y": torch.stack([first, second], dim=-1).flatten(-2)}

    def wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
        return {"one position less in freqs": {**given, "freqs": given["freqs"][:, :, :-1]}}

    guesses = {"neighbours are paired, not halves": interleaved}
    return Case(
        name, make, {}, expected, level, is_detected, "", guesses, wrong if is_detected else None
    )


def _rope_cases() -> tuple[Case, ...]:
    found = [
        _rope_case("angles to 6", (2, 3, 5, 16), is_detected=True),
        _rope_case("a table a sequence", (2, 3, 5, 16), tables=2),
        _rope_case("angles to 60000", (1, 2, 7, 8), size=1e4),
        _rope_case("two elements", (1, 2, 5, 2)),
        _rope_case("float16", (1, 2, 9, 64), torch.float16),
        _rope_case("bfloat16", (1, 2, 9, 64), torch.bfloat16),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        found.append(_rope_case(f"513 positions, {label(dtype)}", (2, 4, 513, 128), dtype, level=1))
    found.append(long(_rope_case("long, 4096 positions", (1, 32, 4096, 128), torch.bfloat16)))
    return tuple(found)


def _rope_invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = {} if out is None else {"out": out}
    return named_results(function(given["x"], given["freqs"], **keywords), ("y",))


_UNARY = ("relu", "gelu", "gelu_approx_tanh", "sigmoid", "tanh", "exp", "neg", "abs", "sqrt")
_BINARY = ("add", "sub", "mul", "div", "max", "min")
# What is undefined for negative numbers gets their magnitudes.
_POSITIVE = ("sqrt", "log", "rsqrt")


def _pointwise_case(
    mode: str,
    dims: tuple[tuple[int, ...], ...],
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "",
    level: int = 0,
    is_detected: bool = False,
    has_specials: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        given = {}
        for position, dim in enumerate(dims):
            values = torch.randn(*dim, generator=generator)
            if mode in _POSITIVE:
                values = values.abs()
            if mode == "div" and position == 1:
                values = values.sign() * (values.abs() + 0.5)
            given[f"in{position}"] = values.to(dtype)
        if has_specials:
            ends = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-30])
            given["in0"].view(-1)[:5] = ends.to(dtype)
        return given

    def expected(given: Tensors) -> dict[str, torch.Tensor]:
        inputs = [tensor.double() for tensor in given.values()]
        parameters = pointwise_oracle.Parameters()
        return {"y": pointwise_oracle.FORWARD[mode](inputs, parameters)}

    def wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
        return {"extents that do not broadcast": {**given, "in1": given["in1"][..., :-1]}}

    title = name or f"{mode}, {label(dtype)}"
    check = wrong if is_detected and len(dims) == 2 else None
    return Case(title, make, {"mode": mode}, expected, level, is_detected, wrong=check)


def _pointwise_cases() -> tuple[Case, ...]:
    plain = (3, 5, 19)
    found = [_pointwise_case("add", (plain, plain), is_detected=True)]
    found += [_pointwise_case(mode, (plain, plain)) for mode in _BINARY[1:]]
    found += [_pointwise_case(mode, (plain,)) for mode in _UNARY]
    found += [
        _pointwise_case("add", (plain, (1, 1, 19)), name="add, one row for all"),
        _pointwise_case("relu", (plain,), name="relu, NaN and infinities", has_specials=True),
        _pointwise_case("gelu", (plain,), torch.float16),
        _pointwise_case("mul", (plain, plain), torch.bfloat16),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        found += [_pointwise_case(mode, ((7, 513),), dtype, level=1) for mode in _UNARY]
        found += [_pointwise_case(m, ((7, 513), (7, 513)), dtype, level=1) for m in _BINARY]
    many = (4096, 4096)
    found.append(long(_pointwise_case("gelu", (many,), torch.bfloat16, name="long, gelu")))
    return tuple({case.name: case for case in found}.values())


def _pointwise_invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = {} if out is None else {"out": out}
    return named_results(function(options["mode"], *given.values(), **keywords), ("y",))


def _nothing(given: Tensors, options: Mapping[str, Any]) -> set[str]:
    return set()


MATMUL = Family(
    "matmul",
    MATMUL_SIGNATURE,
    _matmul_cases(),
    _matmul_invoke,
    _nothing,
    lambda graph, tensors, options: {"c": graph.matmul(tensors["a"], tensors["b"])},
)
GROUPED_MATMUL = Family(
    "grouped_matmul",
    GROUPED_SIGNATURE,
    _grouped_cases(),
    _grouped_invoke,
    _nothing,
    _grouped_declare,
    _grouped_for_graph,
)
ROPE = Family(
    "rope",
    ROPE_SIGNATURE,
    _rope_cases(),
    _rope_invoke,
    _nothing,
    lambda graph, tensors, options: {"y": graph.rope(tensors["x"], tensors["freqs"])},
)
POINTWISE = Family(
    "pointwise",
    POINTWISE_SIGNATURE,
    _pointwise_cases(),
    _pointwise_invoke,
    _nothing,
    lambda graph, tensors, options: {"y": getattr(graph, options["mode"])(*tensors.values())},
)
