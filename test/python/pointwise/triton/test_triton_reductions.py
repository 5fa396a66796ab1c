"""Generated kernels that reduce: every mode, long rows and columns, a softmax.

Interpreted without a GPU; with one the same cases run the compiled kernels.
"""

from __future__ import annotations

import math

import pytest
import torch

# HAS_GPU here tells that these tests use a GPU where there is one.
from generated_graphs import HAS_GPU as HAS_GPU
from generated_graphs import MODES, draw, new_graph, run

from tilewright.engines.triton import pointwise_layout

pytestmark = [
    pytest.mark.L0,
    pytest.mark.usefixtures("interpreted"),
    # numpy's, under the interpreter.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

REDUCED = [((3, 40), (3, 1)), ((40, 3), (1, 3)), ((2, 3, 4, 5), (1, 3, 1, 1)), ((7, 300), (1, 1))]


@pytest.mark.parametrize(("dim", "out"), REDUCED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_reduction(dim: tuple[int, ...], out: tuple[int, ...], dtype: torch.dtype) -> None:
    graph = new_graph(dtype)
    value = draw(dim, dtype)
    value.flatten()[:: value.numel() // 4] = 0.0
    x = graph.tensor_like(value)
    small = graph.mul(x, graph.tensor_scalar(1.5))
    for mode in MODES:
        if mode not in (MODES.NOT_SET, MODES.MUL):
            graph.reduction(small, mode, name=mode.name).set_dim(out).set_output(True)
    run(graph, {x: value})
    graph = new_graph("int32")
    whole = torch.randint(-99, 99, dim, generator=torch.Generator().manual_seed(1)).int()
    x = graph.tensor_like(whole)
    for mode in (MODES.ADD, MODES.MAX, MODES.MIN, MODES.AMAX, MODES.NORM1, MODES.AVG):
        graph.reduction(x, mode).set_dim(out).set_output(True)
    run(graph, {x: whole})


def test_reductions_propagate_nan_and_infinities() -> None:
    graph = new_graph()
    value = draw((4, 9))
    value[0, 3], value[1, 4], value[2, 5] = math.nan, math.inf, -math.inf
    x = graph.tensor_like(value)
    for mode in (MODES.MAX, MODES.MIN, MODES.AMAX, MODES.ADD):
        graph.reduction(x, mode).set_dim((4, 1)).set_output(True)
    run(graph, {x: value})


LONG = [((2, 9000), (2, 1)), ((300, 70), (1, 70)), ((40, 3, 300), (1, 3, 1)), ((20001,), (1,))]


@pytest.mark.parametrize(("dim", "out"), LONG, ids=str)
@pytest.mark.parametrize("programs", [0, 8])
def test_long_reductions_walk_tiles_and_split(
    dim: tuple[int, ...], out: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One kernel with a loop where there are programs enough, else parts and a kernel that joins.
    monkeypatch.setattr(pointwise_layout, "_PROGRAMS_A_MULTIPROCESSOR", programs)
    graph = new_graph("float16")
    value, other = draw(dim, torch.float16), draw(out, torch.float16, seed=1)
    x, y = graph.tensor_like(value), graph.tensor_like(other)
    shifted = graph.add(x, y).set_output(True)
    graph.neg(y).set_output(True)
    total = graph.reduction(shifted, MODES.AVG).set_dim(out).set_data_type("float32")
    graph.mul(graph.sqrt(graph.abs(total)), y).set_output(True)
    graph.reduction(shifted, MODES.MAX).set_dim(out).set_output(True)
    graph.reduction(graph.cmp_gt(x, y), MODES.ADD).set_dim(out).set_output(True)
    run(graph, {x: value, y: other}, kernels=2 if programs else 1)


def test_a_softmax_is_one_kernel() -> None:
    graph = new_graph("bfloat16")
    value = draw((5, 3, 70), torch.bfloat16).transpose(0, 1) * 4
    x = graph.tensor((3, 5, 70), value.stride())
    top = graph.reduction(x, MODES.MAX).set_dim((3, 5, 1))
    part = graph.exp(graph.sub(x, top))
    graph.div(part, graph.reduction(part, MODES.ADD).set_dim((3, 5, 1))).set_output(True)
    run(graph, {x: value})
