"""A bias that broadcasts over any axes and lies anyhow, its gradient, and block masks of many keys.

Interpreted without a GPU. What a bias adds and what its gradient sums is compared with the oracle.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import Case
from attention_cases.running import Declared

from tilewright import ops

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
AXES = ("batch", "heads", "rows", "keys")
CASE = Case(heads=(2, 1), sizes=(16, 16), rows=18, keys=17, dtype="float32")


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.deselect_engines(["hopper"])
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
    graph.execute(pack, workspace)
    assert (workspace[size:] == 0xFF).all()


class Biased(Declared):
    """A case with a bias that has extents on ``axes`` alone, laid out by ``lay``."""

    axes: tuple[str, ...] = AXES
    lay: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda bias: bias)

    def bias(self) -> torch.Tensor | None:
        case = self.case
        whole = (case.batch, case.heads[0], case.rows, case.keys)
        named = zip(AXES, whole, strict=True)
        dim = tuple(extent if axis in self.axes else 1 for axis, extent in named)
        return type(self).lay(self.normal(*dim).to(self.dtype))


class BiasedBackward(Biased, DeclaredBackward):
    """Its backward: dBias has the bias's extents, and lies as it does."""

    def _declare_backward(self, q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        made = super()._declare_backward(q, k, v, **arguments)
        bias = arguments["bias"]
        if 0 not in bias.stride:
            self.outputs["dBias"].set_stride(bias.stride)
        return made

    def _with_whole_bias(self) -> DeclaredBackward:
        given = type(self)
        kind = kind_of(BiasedBackward, given.axes, lambda bias: written_out(given.lay(bias), self))
        return kind(self.case, "cpu")  # type: ignore[no-any-return]


def written_out(bias: torch.Tensor, declared: Declared) -> torch.Tensor:
    """A bias of every score."""
    case = declared.case
    return bias.expand(case.batch, case.heads[0], case.rows, case.keys).contiguous()


def kind_of(base: Any, axes: tuple[str, ...], lay: Any = None) -> Any:
    """``base`` for a bias of these axes and this layout."""
    fields = {"axes": axes} | ({} if lay is None else {"lay": staticmethod(lay)})
    return type(base.__name__, (base,), fields)


def levels(values: Iterable[Any], smoke: Container[Any]) -> list[Any]:
    """Those of the smoke run, and others."""
    return [pytest.param(x, marks=pytest.mark.L0 if x in smoke else pytest.mark.L1) for x in values]


def name_of(axes: tuple[str, ...]) -> str:
    return " ".join(axes) or "one number"


EVERY_BROADCAST = [axes for count in range(5) for axes in itertools.combinations(AXES, count)]
SMOKE = ((), ("keys",), ("batch", "rows"), ("batch", "heads", "keys"))
# Softmax does not see a bias that all keys have alike: without a sink its gradient is 0.
GRADIENT_CASE = replace(CASE, sink="same")


@pytest.mark.parametrize("axes", levels(EVERY_BROADCAST, EVERY_BROADCAST[::2]), ids=name_of)
def test_every_broadcast(axes: tuple[str, ...]) -> None:
    # Few queries are another kernel's.
    for rows in (18, 2):
        kind_of(Biased, axes)(replace(CASE, rows=rows), DEVICE).run(execute)


@pytest.mark.parametrize("axes", levels(EVERY_BROADCAST, SMOKE), ids=name_of)
def test_the_gradient_of_every_broadcast(axes: tuple[str, ...]) -> None:
    declared = kind_of(BiasedBackward, axes)(backward_case(GRADIENT_CASE), DEVICE)
    declared.run(execute)


def gaps(bias: torch.Tensor) -> torch.Tensor:
    """NaN between its elements on each axis."""
    wide = torch.full([2 * n + 3 for n in bias.shape], torch.nan, dtype=bias.dtype)
    return wide[tuple(slice(1, 1 + 2 * n, 2) for n in bias.shape)].copy_(bias)


def transposed(bias: torch.Tensor) -> torch.Tensor:
    """Rows are next to one another, and heads outermost."""
    return bias.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2)


def expanded(bias: torch.Tensor) -> torch.Tensor:
    """One head's and one sequence's for all, by steps of 0."""
    return bias[:1, :1].expand(bias.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaps": gaps,
    "transposed": transposed,
    "expanded": expanded,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", levels(("float32", "bfloat16"), ("float32",)))
def test_any_layout(layout: str, dtype: str) -> None:
    case = replace(CASE, dtype=dtype, band="causal")
    kind_of(Biased, AXES, LAYOUTS[layout])(case, DEVICE).run(execute)


@pytest.mark.parametrize("layout", levels(LAYOUTS, ("transposed",)))
def test_the_gradient_in_any_layout(layout: str) -> None:
    case = backward_case(replace(CASE, band="causal"))
    kind_of(BiasedBackward, AXES, LAYOUTS[layout])(case, DEVICE).run(execute)


# A byte of a block mask is of 1024 keys, a bit of it of 128.
BLOCKS = Case(block_mask=True, heads=(2, 1), sizes=(16, 16), batch=1)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        pytest.param(20, 1100, marks=pytest.mark.L0),
        pytest.param(140, 2070, marks=pytest.mark.L1),
    ],
)
def test_a_block_mask_of_several_bytes_a_row(rows: int, keys: int) -> None:
    case = replace(BLOCKS, rows=rows, keys=keys, stats="natural")
    Declared(case, DEVICE).run(execute)


@pytest.mark.L0
def test_the_gradients_under_a_block_mask_of_several_bytes_a_row() -> None:
    case = replace(BLOCKS, rows=20, keys=1100, dtype="float16")
    DeclaredBackward(backward_case(case), DEVICE).run(execute)


@pytest.mark.L0
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(4, 9), (1, 600), (40, 40)])
def test_a_bias_of_the_least_number_is_a_number(
    rows: int, keys: int, dtype: torch.dtype, interpreted_functions: None
) -> None:
    # Additive masks are made of it: a row that has nothing else sees all of its keys alike.
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(1, 2, n, 16, generator=generator).to(dtype).to(DEVICE).requires_grad_()
        for n in (rows, keys, keys)
    )
    bias = torch.zeros(1, 1, rows, keys, dtype=dtype, device=DEVICE)
    bias[:, :, 0] = torch.finfo(dtype).min
    bias[:, :, 1:, ::2] = torch.finfo(dtype).min
    o, stats = ops.sdpa(q, k, v, bias=bias, return_stats=True, engine="triton")
    scores = (q.double() @ k.double().mT / 4 + bias.double()).softmax(-1)
    # Of the first row, whatever the queries are: they are lost beside such a number.
    scores[:, :, 0] = 1 / keys
    want = scores @ v.double()
    assert (o.double() - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()
    assert (stats[:, :, 0] < -1e38).all() and torch.isfinite(stats).all()
    grads = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)
    # In float32 nothing can be added to Stats there, so each key has the weight 1.
    assert (grads[2][0, :, 0] >= 1).all()


@pytest.mark.L0
@pytest.mark.parametrize("level", [3e38, 7e30, 1e12, -1e12, -3e38])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_sink_near_the_end_of_float32_is_a_number(
    rows: int, level: float, interpreted_functions: None
) -> None:
    # Beside such a level, products whose rounding a fused operation keeps are no powers of 2.
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE).requires_grad_() for n in (rows, 300, 300))
    sink = torch.full((2,), level, device=DEVICE).requires_grad_()
    o, stats = ops.sdpa(q, k, v, sink=sink, return_stats=True, engine="triton")
    plain = ops.sdpa(q, k, v, engine="triton")
    assert torch.isfinite(stats).all()
    assert torch.equal(o, torch.zeros_like(o)) if level > 0 else torch.equal(o, plain)
    for grad in torch.autograd.grad(o.sum(), (q, k, v, sink)):
        assert torch.isfinite(grad).all()
