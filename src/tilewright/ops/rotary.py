"""Rotary position embedding from cos and sin tables, as a graph of slices and products.

The first and the second elements of the pairs, and what is passed through, are results of their
own, each a view of the result: so nothing need be joined, and an engine can make all in one kernel.

    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin

with (x1, x2) the two halves of the rotated part of the head, or its even and odd elements when
interleaved. Products are float32 (float64 for float64 inputs), rounded once. Source: RoFormer
(Su et al. 2021).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.ops.arguments import (
    require_device,
    require_distinct,
    require_flag,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.custom import is_traced, register, require_operator_arguments
from tilewright.ops.plan_cache import operands_key, run
from tilewright.ops.streams import on_its_stream
from tilewright.ops.transforms import apply


class _Layout(NamedTuple):
    """What a rotation's plan depends on beside its operands; in the order of the operator."""

    interleaved: bool
    rotary_dim: int
    is_backward: bool


@on_its_stream
def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    positions: torch.Tensor | None = None,
    inplace: bool = False,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` elements of each head of x (B, H, S, D).

    Args:
        x: (B, H, S, D), any strides and float type.
        cos: (S, R/2) or (B, S, R/2), R = rotary_dim (default D), of any float type; it has no
            gradient. With ``positions`` (S,) or (B, S) the tables are looked up by position:
            cos[positions].
        sin: cos's shape.
        interleaved: pairs are neighbours (0, 1), (2, 3), ... and not (i, i + R/2).
        rotary_dim: R, even; the elements past it are passed through.
        positions: int32 or int64 positions in the tables; below 0 they count from the tables' end,
            as an index of torch does.
        inplace: write into ``x`` and return it.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        (B, H, S, D) in x's dtype: of each pair (x1, x2), x1 cos - x2 sin and x2 cos + x1 sin.
        Products are float32, float64 for float64. Differentiable in x.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.

    Source: Su and others 2021 (arXiv:2104.09864).
    """
    require_float("x", require_tensor("x", x, 4))
    batch, _, length, depth = x.shape
    width = depth if rotary_dim is None else rotary_dim
    if rotary_dim is not None and not isinstance(width, int):
        raise BindingError(f"rotary_dim: got {width!r}; expected an int")
    if not 0 < width <= depth or width % 2:
        raise BindingError(f"rotary_dim: got {width}; expected an even number from 2 to {depth}")
    tables = {}
    for name, table in (("cos", cos), ("sin", sin)):
        require_float(name, require_tensor(name, table))
        if table.requires_grad and torch.is_grad_enabled():
            raise BindingError(f"{name}: requires grad; expected a table without one: detach it")
        require_device(name, table, x.device)
        if positions is not None:
            table = _look_up(name, table, positions, x)
        if table.dim() == 2:
            table = table.unsqueeze(0)
        rows = 1 if table.shape[0] == 1 else batch
        require_shape(name, table, (rows, length, width // 2), "(S, R/2) or (B, S, R/2)")
        tables[name] = table.detach().unsqueeze(1)
    layout = _Layout(require_flag("interleaved", interleaved), width, is_backward=False)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if require_flag("inplace", inplace) and needs_grad:
        raise BindingError("inplace: given while x requires grad; use it under torch.no_grad")
    if inplace:
        require_distinct("x", x)
    y: torch.Tensor
    if is_traced(x, cos, sin):
        require_operator_arguments(engine, stream)
        y = _rope(x, tables["cos"], tables["sin"], *layout, engine)
        return x.copy_(y) if inplace else y
    if needs_grad:
        operands = (x, tables["cos"], tables["sin"], layout, engine, stream)
        y = apply("rope", _RopeFunction, *operands)
        return y
    y = _rotate(x, tables["cos"], tables["sin"], layout, engine, stream)
    return x.copy_(y) if inplace else y


class _RopeFunction(torch.autograd.Function):
    """The backward of a rotation is the rotation by the opposite angle, as often as it is asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layout: _Layout,
        engine: str | None,
        stream: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.call = (layout, engine, stream)
        return _rotate(x, cos, sin, layout, engine, stream)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        layout, engine, stream = ctx.call
        opposite = layout._replace(is_backward=not layout.is_backward)
        needs_grad = torch.is_grad_enabled() and grad.requires_grad
        rotate = _RopeFunction.apply if needs_grad else _rotate
        dx = rotate(grad.resolve_neg(), cos, sin, opposite, engine, stream)
        return dx, None, None, None, None, None


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: _Layout,
    engine: str | None,
    stream: Any,
) -> torch.Tensor:
    y = torch.empty_like(x)
    inputs = {"x": x, "cos": cos, "sin": sin}
    parts = _parts(layout, x.shape[3])
    outputs = {f"y_{name}": y[..., part] for name, part in parts.items()}

    def declare(graph: DeclaredGraph) -> None:
        source, c, s = (
            graph.tensor(t.shape, t.stride(), t.dtype, name=name) for name, t in inputs.items()
        )
        made = _declare_rotation(graph, source, c, s, layout)
        for tensor, (name, out) in zip(made, outputs.items(), strict=True):
            tensor.set_output(True).set_name(name).set_data_type(out.dtype)
            tensor.set_dim(out.shape).set_stride(out.stride())

    key = (layout, operands_key(inputs), operands_key({"y": y}))
    operation = "rope_backward" if layout.is_backward else "rope"
    run(operation, key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    return y


def _compute(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *layout_and_engine: Any
) -> torch.Tensor:
    *layout, engine = layout_and_engine
    return _rotate(x, cos, sin, _Layout(*layout), engine, None)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, *layout, ctx.engine = inputs
    ctx.save_for_backward(cos, sin)
    ctx.layout = _Layout(*layout)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    opposite = ctx.layout._replace(is_backward=not ctx.layout.is_backward)
    dx = _rope(grad, *ctx.saved_tensors, *opposite, ctx.engine)
    return dx, *(None,) * 6


_rope = register(
    "rope",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved, SymInt rotary_dim, bool is_backward,"
    " str? engine) -> Tensor",
    _compute,
    lambda x, *_: torch.empty_like(x),
    setup=_setup,
    backward=_backward,
)


def _parts(layout: _Layout, depth: int) -> dict[str, slice]:
    """Where in a head the first and second elements of the pairs are, and the rest if there is."""
    width, half = layout.rotary_dim, layout.rotary_dim // 2
    parts = {"first": slice(0, half), "second": slice(half, width)}
    if layout.interleaved:
        parts = {"first": slice(0, width, 2), "second": slice(1, width, 2)}
    return parts | ({"rest": slice(width, depth)} if width < depth else {})


def _declare_rotation(
    graph: DeclaredGraph, x: Tensor, cos: Tensor, sin: Tensor, layout: _Layout
) -> list[Tensor]:
    """A result a part, whose type and layout are the caller's to declare."""
    batch, heads, length, depth = x.dim
    whole = [slice(0, batch), slice(0, heads), slice(0, length)]
    first, second, *rest = (
        graph.slice(x, [*whole, part]).set_data_type(x.data_type)
        for part in _parts(layout, depth).values()
    )
    kept = "float64" if x.data_type is DataType.DOUBLE else "float32"

    def product(a: Tensor, b: Tensor) -> Tensor:
        return graph.mul(a, b).set_data_type(kept)

    forward, backward = (graph.add, graph.sub) if layout.is_backward else (graph.sub, graph.add)
    y1: Tensor = forward(product(first, cos), product(second, sin))
    y2: Tensor = backward(product(second, cos), product(first, sin))
    return [y1, y2, *(graph.identity(tail) for tail in rest)]


def _look_up(
    name: str, table: torch.Tensor, positions: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    require_tensor("positions", positions)
    require_device("positions", positions, x.device)
    if positions.dtype not in (torch.int32, torch.int64):
        raise BindingError(f"positions: data type {positions.dtype}; expected int32 or int64")
    # Axis by axis: a compiler's symbolic extent is found in no tuple.
    rows = positions.shape[0] if positions.dim() == 2 else 1
    if (
        positions.dim() not in (1, 2)
        or positions.shape[-1] != x.shape[2]
        or not (rows == 1 or rows == x.shape[0])
    ):
        raise BindingError(
            f"positions: shape {tuple(positions.shape)}; expected (S,) or (B, S) with S = "
            f"{x.shape[2]}"
        )
    if table.dim() != 2:
        raise BindingError(
            f"{name}: shape {tuple(table.shape)}; expected (positions, R/2) with positions="
        )
    try:
        return table[positions]
    except IndexError as error:
        least, most = positions.aminmax()
        raise BindingError(
            f"positions: from {int(least)} to {int(most)}; expected rows of {name}, which has "
            f"{table.shape[0]}"
        ) from error
