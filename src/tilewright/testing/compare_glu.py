"""Tell where a product with a gated unit goes wrong: in the product, or in what follows it.

A product of N columns holds inputs u and gates g; the result of N / 2 columns is u * act(g). In the
"halves" layout all u come first; in "interleaved32" blocks of 32 columns alternate, u first. So
result column c reads u from column `64 * (c // 32) + c % 32` of the product and g from 32 further.

Three numbers tell a failing element's story: what the stored product gives through the epilogue,
what an independent dot product of x and the weights gives, and what the kernel gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tilewright.errors import OracleError
from tilewright.oracle.formats import format_of, to_float64
from tilewright.oracle.tolerances import default_tolerance
from tilewright.testing.report import bounded

__all__ = ["GLU_BLOCK", "GluFailure", "explain_glu_failure", "glu_columns", "glu_report"]

GLU_BLOCK = 32
"""Columns of one block of inputs, and of one of gates, of the interleaved layout."""

_SHOWN = 6
_BLOCKS = 8
# Elements whose dot products are computed; the report speaks of these.
_SAMPLED = 512

Activation = Callable[[float], float]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda g: g / (1.0 + math.exp(-g)) if g > -700.0 else 0.0,
    "sigmoid": lambda g: 1.0 / (1.0 + math.exp(-g)) if g > -700.0 else 0.0,
    "relu": lambda g: max(g, 0.0),
    "gelu": lambda g: 0.5 * g * math.erfc(-g / math.sqrt(2.0)),
    "gelu_tanh": lambda g: (
        0.5 * g * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g**3)))
    ),
    "tanh": math.tanh,
}


class GluFailure(OracleError):
    """The original assertion's text, with the report after it; `__cause__` is the original."""


@dataclass(frozen=True)
class _Element:
    """One wrong element of the result."""

    row: int
    column: int
    actual: float
    from_product: float | None
    from_dots: float
    product: tuple[float, float] | None
    dots: tuple[float, float]


def glu_columns(column: int, width: int, layout: str = "interleaved32") -> tuple[int, int]:
    """The product's columns that hold u and g of a result column, of `width` result columns.

    Raises:
        ValueError: The layout is unknown, the width does not fit it, or the column is outside.
    """
    if not 0 <= column < width:
        raise ValueError(f"column: {column}; expected one from 0 to {width - 1}")
    if layout == "halves":
        return column, width + column
    if layout != "interleaved32":
        raise ValueError(f"layout: {layout!r}; expected halves or interleaved32")
    if width % GLU_BLOCK:
        raise ValueError(f"width: {width}; expected a multiple of {GLU_BLOCK} with interleaved32")
    block, place = divmod(column, GLU_BLOCK)
    first = 2 * GLU_BLOCK * block + place
    return first, first + GLU_BLOCK


def glu_report(
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
    layout: str = "interleaved32",
    activation: str = "silu",
    tol: float | None = None,
) -> str:
    """Which stage of a product with a gated unit is wrong, where, and by how much.

    Args:
        actual: (M, N / 2), what the kernel gave.
        x: (M, K).
        weight: (N, K).
        bias: (N,).
        product: (M, N), the product with bias that the kernel stored, if it did.
        expected: (M, N / 2), what the test compared with; if None, every element is judged by its
            dot products.
        layout: "interleaved32" or "halves".
        activation: silu, sigmoid, relu, gelu, gelu_tanh, or tanh, of the gate.
        tol: What counts as wrong, relative to max(|x|, 1); default of the coarsest type involved.

    Returns:
        At most 40 lines.

    Raises:
        ValueError: Shapes do not fit one another, or a name is unknown.
    """
    rows, width = _check(actual, x, weight, bias, product, expected, layout, activation)
    limit = _limit(actual, product, tol)
    wrong = _suspects(actual, x, weight, bias, expected, layout, activation, limit)
    head = f"GLU report ({layout}, {activation}), result {rows} x {width}"
    if not len(wrong):
        return f"{head}: every element agrees with its independent dot products"
    step = max(1, len(wrong) // _SAMPLED)
    act = _ACTIVATIONS[activation]
    elements = [
        _element(int(row), int(column), actual, x, weight, bias, product, layout, act)
        for row, column in wrong[::step][:_SAMPLED].tolist()
    ]
    lines = [
        f"{head}: {len(wrong)} of {actual.numel()} elements are wrong; {len(elements)} examined"
    ]
    lines += _verdict(elements, product is not None, limit)
    lines += _blocks(wrong, width, layout)
    lines.append("  examined elements:")
    for element in elements[:_SHOWN]:
        lines += _tell(element, width, layout)
    return bounded("\n".join(lines))


@contextmanager
def explain_glu_failure(
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
    layout: str = "interleaved32",
    activation: str = "silu",
    tol: float | None = None,
) -> Iterator[None]:
    """Around an assertion on a product with a gated unit: if it fails, add `glu_report` to it.

    The original assertion is kept: its text comes first, and it is the cause of what is raised.
    An error in the report itself never replaces it.

    Raises:
        GluFailure: The assertion inside failed. It is an AssertionError.
    """
    try:
        yield
    except AssertionError as failure:
        try:
            report = glu_report(
                actual,
                x,
                weight,
                bias=bias,
                product=product,
                expected=expected,
                layout=layout,
                activation=activation,
                tol=tol,
            )
        except (ValueError, RuntimeError) as reason:
            report = f"(no GLU report: {reason})"
        raise GluFailure(f"{failure}\n{report}") from failure


def _check(
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: torch.Tensor | None,
    expected: torch.Tensor | None,
    layout: str,
    activation: str,
) -> tuple[int, int]:
    if actual.dim() != 2 or x.dim() != 2 or weight.dim() != 2:
        shapes = [tuple(t.shape) for t in (actual, x, weight)]
        raise ValueError(f"actual, x, weight: shapes {shapes}; expected two axes each")
    rows, width = actual.shape
    for name, tensor, wanted in (
        ("x", x, (rows, x.shape[1])),
        ("weight", weight, (2 * width, x.shape[1])),
        ("bias", bias, (2 * width,)),
        ("product", product, (rows, 2 * width)),
        ("expected", expected, (rows, width)),
    ):
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}; expected {wanted}")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}; expected one of {', '.join(_ACTIVATIONS)}")
    if width:
        glu_columns(0, width, layout)
    return rows, width


def _limit(actual: torch.Tensor, product: torch.Tensor | None, tol: float | None) -> float:
    if tol is not None:
        return tol
    types = [t.dtype for t in (actual, product) if t is not None and format_of(t.dtype) is not None]
    return max((default_tolerance(dtype) for dtype in types), default=0.0)


def _suspects(
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    expected: torch.Tensor | None,
    layout: str,
    activation: str,
    limit: float,
) -> torch.Tensor:
    """(count, 2): rows and columns of wrong elements, the worst first."""
    got = to_float64(actual)
    if expected is None:
        expected = _by_sums(x, weight, bias, got.shape[1], layout, _ACTIVATIONS[activation])
    want = to_float64(expected).to(got.device)
    error = (got - want).abs()
    error = torch.where(torch.isnan(error), math.inf, error)
    error = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, error)
    finite = want[torch.isfinite(want)]
    top = max(float(finite.abs().max()) if finite.numel() else 0.0, 1.0)
    places = (error > limit * top).nonzero()
    order = torch.argsort(error[places[:, 0], places[:, 1]], descending=True, stable=True)
    return places[order]


def _by_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    width: int,
    layout: str,
    act: Activation,
) -> torch.Tensor:
    """The whole result in float64, by sums of elementwise products a row at a time."""
    pairs = [glu_columns(column, width, layout) for column in range(width)]
    values, gates = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
    right = to_float64(weight).cpu()
    added = 0.0 if bias is None else to_float64(bias).cpu()
    result = torch.zeros((x.shape[0], width), dtype=torch.float64)
    for row, left in enumerate(to_float64(x).cpu()):
        product = (right * left).sum(dim=1) + added
        gate = torch.tensor([act(g) for g in product[gates].tolist()], dtype=torch.float64)
        result[row] = product[values] * gate
    return result


def _dots(
    row: int,
    column: int,
    width: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
) -> tuple[float, float]:
    """u and g of one element: exactly rounded sums of products, by no matrix product."""
    left = to_float64(x[row]).tolist()
    found = []
    for index in glu_columns(column, width, layout):
        right = to_float64(weight[index]).tolist()
        terms = [a * b for a, b in zip(left, right, strict=True)]
        if bias is not None:
            terms.append(float(bias[index]))
        found.append(math.fsum(terms))
    return found[0], found[1]


def _element(
    row: int,
    column: int,
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: torch.Tensor | None,
    layout: str,
    act: Activation,
) -> _Element:
    width = actual.shape[1]
    columns = glu_columns(column, width, layout)
    u, g = _dots(row, column, width, x, weight, bias, layout)
    stored = None
    if product is not None:
        held = to_float64(product[row])
        stored = (float(held[columns[0]]), float(held[columns[1]]))
    return _Element(
        row,
        column,
        float(to_float64(actual[row])[column]),
        None if stored is None else stored[0] * act(stored[1]),
        u * act(g),
        stored,
        (u, g),
    )


def _differs(got: float, want: float, limit: float) -> bool:
    if got == want or (math.isnan(got) and math.isnan(want)):
        return False
    return not abs(got - want) <= limit * max(abs(want), 1.0)


def _verdict(elements: list[_Element], stored: bool, limit: float) -> list[str]:
    """Which stage disagrees, and how often."""
    if not stored:
        return ["  no stored product was given: product and epilogue cannot be told apart"]
    value_off = gate_off = epilogue_off = swapped = 0
    for element in elements:
        stored_pair = element.product or (0.0, 0.0)
        off = [
            _differs(got, want, limit) for got, want in zip(stored_pair, element.dots, strict=True)
        ]
        value_off += off[0]
        gate_off += off[1]
        follows = not _differs(element.actual, element.from_product or 0.0, limit)
        epilogue_off += not follows
        crossed = [
            _differs(got, want, limit)
            for got, want in zip(stored_pair, reversed(element.dots), strict=True)
        ]
        swapped += any(off) and not any(crossed)
    total = len(elements)
    lines = [
        f"  stored product against dot products: input wrong in {value_off} of {total}, "
        f"gate wrong in {gate_off}",
        f"  result against its stored product through the epilogue: wrong in {epilogue_off}",
    ]
    if value_off + gate_off == 0 and epilogue_off:
        lines.append("  -> the product is right; the epilogue (or its column mapping) is wrong")
    elif epilogue_off == 0 and value_off + gate_off:
        lines.append("  -> the epilogue follows its product; the product is wrong")
    elif epilogue_off == 0:
        lines.append("  -> result, product and dot products agree; look at what was expected")
    else:
        lines.append("  -> both the product and the epilogue are wrong")
    if swapped:
        lines.append(f"  -> input and gate of the product are exchanged in {swapped}")
    return lines


def _blocks(wrong: torch.Tensor, width: int, layout: str) -> list[str]:
    """Wrong elements by block of 32 result columns, with the product's blocks that each reads."""
    counts = torch.bincount(wrong[:, 1] // GLU_BLOCK)
    lines = ["  by block of 32 result columns:"]
    hit = counts.nonzero().reshape(-1).tolist()
    for block in hit[:_BLOCKS]:
        first = block * GLU_BLOCK
        last = min(first + GLU_BLOCK, width) - 1
        u, g = glu_columns(first, width, layout)
        lines.append(
            f"    columns {first}-{last}: {int(counts[block])} wrong; inputs are the product's "
            f"columns {u}-{u + last - first}, gates {g}-{g + last - first}"
        )
    if len(hit) > _BLOCKS:
        lines.append(f"    and {len(hit) - _BLOCKS} more blocks")
    return lines


def _tell(element: _Element, width: int, layout: str) -> list[str]:
    u, g = glu_columns(element.column, width, layout)
    line = f"    ({element.row}, {element.column}): result {element.actual:.7g}"
    if element.product is not None:
        line += (
            f"; stored u[{u}] {element.product[0]:.7g}, g[{g}] {element.product[1]:.7g} "
            f"give {element.from_product:.7g}"
        )
    return [
        line,
        f"      dot products u[{u}] {element.dots[0]:.7g}, g[{g}] {element.dots[1]:.7g} "
        f"give {element.from_dots:.7g}",
    ]
