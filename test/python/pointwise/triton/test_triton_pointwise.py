"""Generated kernels: every mode at special values, layouts, declines; interpreted without a GPU.

With a GPU the same cases run the compiled kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_graphs import DEVICE, HAS_GPU, MODES, draw, new_graph, run

import tilewright as tw
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES, PointwiseKind

pytestmark = [
    pytest.mark.L0,
    pytest.mark.usefixtures("interpreted"),
    # numpy's, under the interpreter.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-30, -4.0, 22.0, 88.0, -88.0, 1e4, -1e4, -0.75]
SPECIAL += [1e30, -1e30, math.pi, math.inf, -math.inf, math.nan]
GRADIENTS = [0.0, -0.0, 1.0, -2.0, 0.5]
PARAMETERS: dict[str, tuple[dict[str, float], ...]] = {
    "elu": ({}, {"elu_alpha": 0.3}),
    "softplus": ({}, {"softplus_beta": 2.0}),
    "swish": ({}, {"swish_beta": 0.5}, {"swish_beta": -1.5}),
    "relu": (
        {},
        {"negative_slope": 0.1},
        {"lower_clip": -0.5, "upper_clip": 1.5},
        {"negative_slope": -0.5, "lower_clip": 0.25, "upper_clip": 1.5},
    ),
    "leaky_relu": ({"negative_slope": 0.1}, {"negative_slope": 0.0}),
}


def modes_of(*kinds: PointwiseKind) -> list[tuple[str, dict[str, float]]]:
    """(mode, parameters) of these kinds."""
    return [
        (mode, parameters)
        for mode, row in POINTWISE_MODES.items()
        if row.kind in kinds
        for parameters in PARAMETERS.get(mode.removesuffix("_backward"), ({},))
    ]


K = PointwiseKind
GROUPS = {
    "unary": (K.UNARY,),
    "binary": (K.BINARY,),
    "compare": (K.COMPARE, K.LOGICAL),
    "backward": (K.BACKWARD,),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_mode_at_special_values(group: str, dtype: torch.dtype) -> None:
    graph = new_graph(dtype)
    # Squares of larger numbers are beyond float32.
    moderate = [value for value in SPECIAL if abs(value) != 1e30] + [1e15]
    pairs = moderate if group != "backward" else GRADIENTS
    if group == "unary":
        values = [torch.tensor([*SPECIAL, 1e-40], dtype=torch.float64).to(dtype)]
    else:
        table = torch.tensor(list(itertools.product(pairs, moderate)), dtype=torch.float64)
        values = [table[:, 0].to(dtype).contiguous(), table[:, 1].to(dtype).contiguous()]
    operands = [graph.tensor_like(value) for value in values]
    for mode, parameters in modes_of(*GROUPS[group]):
        arity = POINTWISE_MODES[mode].arity
        getattr(graph, mode)(*operands[:arity], **parameters, name=mode).set_output(True)
    run(graph, dict(zip(operands, values, strict=True)))


def test_selection_and_indices() -> None:
    graph = new_graph()
    values = [draw((3, 7)), draw((3, 1), seed=1), draw((1, 7), seed=2) > 0]
    values[1][1] = math.nan
    a, b, mask = (graph.tensor_like(value) for value in values)
    graph.binary_select(a, b, mask).set_output(True).set_data_type("float16")
    for axis, kind in ((0, "int32"), (-1, "float32"), (1, "uint8")):
        graph.gen_index(a, axis).set_output(True).set_data_type(kind)
    run(graph, dict(zip((a, b, mask), values, strict=True)))


def test_every_type_is_read_and_written() -> None:
    # Integers truncate toward zero and saturate, 8-bit floating types saturate, NaN gives 0 there.
    values = torch.tensor([*SPECIAL, 3e9, -3e9, 1e19, -1e19, 300.7, -0.9, 447.0, 60000.0])
    kinds = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"]
    kinds += ["fp8_e4m3", "fp8_e5m2"]
    for source in ("float32", "float64"):
        graph = new_graph(source)
        x = graph.tensor_like(values.to(getattr(torch, source)))
        for kind in kinds:
            graph.identity(x).set_output(True).set_data_type(kind)
        run(graph, {x: values.to(getattr(torch, source))})
    for kind in kinds:
        graph = new_graph()
        data_type = tw.dtypes.as_data_type(kind)
        dtype = tw.torch_dtypes.to_torch(data_type)
        given = torch.tensor([0, 1, 2, 3, 100, 57, 1, 0]).to(dtype)
        x = graph.tensor_like(given)
        graph.add(x, x).set_output(True)
        graph.cmp_gt(x, graph.tensor_scalar(2)).set_output(True).set_data_type("bool")
        run(graph, {x: given})


def test_virtual_results_are_rounded_to_their_type() -> None:
    graph = new_graph()
    x = graph.tensor((64,), name="x")
    rounded = graph.mul(x, x).set_data_type("fp8_e4m3")
    graph.sub(rounded, x).set_output(True)
    given = draw((64,)) * 8
    # The reference keeps what is not stored unrounded.
    result = run(graph, {x: given}, compares=False)
    square = (given * given).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    assert torch.equal(next(iter(result.values())), square - given)


def test_a_tie_in_float64_is_rounded_once() -> None:
    # Through float32 this would land on a midpoint of bfloat16, and go to the wrong side of it.
    graph = new_graph("float64")
    given = torch.tensor([1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40], dtype=torch.float64)
    x = graph.tensor_like(given)
    out = graph.identity(x).set_output(True).set_data_type("bfloat16")
    assert run(graph, {x: given})[out].tolist() == [1 + 2**-7, 1 + 2**-7]


SHAPES: list[tuple[tuple[int, ...], ...]] = [
    ((1,), (1,), (1,)),
    ((33,), (1,), (33,)),
    ((5, 1, 40), (1, 3, 40), (5, 3, 1)),
    ((2, 3, 4, 5), (4, 1), (1, 3, 1, 5)),
    ((2049,), (2049,), (1,)),
]


@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_operands_broadcast_and_small_results_are_stored_once(dims: Any) -> None:
    graph = new_graph("bfloat16")
    values = [draw(dim, torch.bfloat16, seed) for seed, dim in enumerate(dims)]
    a, b, c = (graph.tensor_like(value) for value in values)
    part = graph.neg(c).set_output(True)
    graph.add(graph.mul(a, b), part).set_output(True)
    # A small result may be bound to its operand's buffer, which the others read too. (An operand
    # of one element is passed by value.)
    kernels = 2 if dims[2] not in (dims[0], (1,)) else 1
    run(graph, dict(zip((a, b, c), values, strict=True)), kernels=kernels)


def test_any_stride() -> None:
    graph = new_graph()
    value = draw((6, 5, 4))
    x = graph.tensor((6, 5, 4), (1, 100, 7))
    y = graph.tensor((6, 5, 4), (0, 4, 1))
    graph.add(x, y).set_output(True).set_dim((6, 5, 4)).set_stride((24, 1, 150))
    run(graph, {x: value, y: draw((1, 5, 4), seed=1).expand(6, 5, 4)})


def test_transposed_tiles() -> None:
    graph = new_graph("float16")
    value = draw((70, 130), torch.float16)
    x = graph.tensor_like(value)
    graph.relu(graph.transpose(x, (1, 0))).set_output(True).set_stride((70, 1)).set_dim((130, 70))
    run(graph, {x: value})


def test_moves_are_addressing() -> None:
    graph = new_graph()
    value = draw((4, 6, 10))
    x, s = graph.tensor_like(value), graph.tensor((4, 3, 1))
    half = graph.mul(x, graph.tensor_scalar(0.5))
    split = graph.reshape(half, reshape_mode=tw.reshape_mode.LOGICAL).set_dim((4, 3, 20))
    cut = graph.slice(split, [slice(1, 4), slice(0, 3, 2), slice(3, 19, 4)])
    graph.transpose(cut, (2, 0, 1)).set_output(True)
    graph.add(split, s).set_output(True)
    run(graph, {x: value, s: draw((4, 3, 1), seed=1)}, kernels=2)


def test_the_first_operand_may_be_overwritten() -> None:
    graph = new_graph()
    x, y = graph.tensor((5, 33), name="x"), graph.tensor((1, 33), name="y")
    out = graph.add(graph.exp(y), x)
    z = graph.mul(x, out).set_output(True).set_name("z")
    graph.build()
    assert graph.selected_engine == "triton"
    a, b = draw((5, 33)), draw((1, 33), seed=1)
    buffer = a.clone().to(DEVICE)
    graph.execute({"x": buffer, "y": b.to(DEVICE), "z": buffer})
    assert torch.allclose(buffer.cpu(), a * (b.exp() + a), rtol=1e-5)
    assert z.name == "z"


def test_a_shared_row_is_overwritten_after_its_last_reader() -> None:
    graph = new_graph()
    x, c = graph.tensor((5, 33), name="x"), graph.tensor((1, 33), name="c")
    part = graph.neg(c).set_output(True).set_name("part")
    graph.add(x, part).set_output(True).set_name("y")
    graph.build()
    assert graph.selected_engine == "triton"
    a, b = draw((5, 33)), draw((1, 33), seed=1)
    buffer, y = b.clone().to(DEVICE), torch.empty(5, 33, device=DEVICE)
    graph.execute({"x": a.to(DEVICE), "c": buffer, "part": buffer, "y": y})
    assert torch.equal(buffer.cpu(), -b) and torch.equal(y.cpu(), a - b)


def test_a_scalar_is_read_at_each_call() -> None:
    graph = new_graph()
    x, s = graph.tensor((4,), name="x"), graph.tensor_scalar(2.0)
    graph.mul(x, s).set_output(True).set_name("y")
    graph.build()
    y, ones = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    graph.execute({"x": ones, "y": y})
    assert y.tolist() == [2.0] * 4
    graph.execute({"x": ones, "y": y, s: torch.full((1, 1, 1, 1), 3.5)})
    assert y.tolist() == [3.5] * 4


def test_nothing_is_launched_without_elements() -> None:
    graph = new_graph()
    x = graph.tensor((3, 0), name="x")
    graph.exp(x).set_output(True).set_name("y")
    graph.build()
    assert graph.selected_engine == "triton"
    graph.execute({"x": torch.empty(3, 0, device=DEVICE), "y": torch.empty(3, 0, device=DEVICE)})


def sparse(folder: Path, elements: int) -> torch.Tensor:
    """bf16 storage of which only the touched pages take memory."""
    storage = torch.UntypedStorage.from_file(str(folder / "storage"), True, 2 * elements)
    return torch.empty(0, dtype=torch.bfloat16).set_(storage)  # type: ignore[call-overload]


@pytest.mark.skipif(HAS_GPU, reason="a GPU has no sparse files; see the tests on a GPU")
def test_strides_beyond_32_bits(tmp_path: Path) -> None:
    # B1: truncated to 32 bits, the second row's address is the first one's, a valid decoy.
    wide = sparse(tmp_path, 2**32 + 8).as_strided((2, 8), (2**32, 1))
    value = draw((2, 8), torch.bfloat16)
    wide.copy_(value)
    for swap in (False, True):
        graph = new_graph("bfloat16")
        x = graph.tensor((2, 8), (2**32, 1), name="x")
        moved = graph.transpose(x, (1, 0)) if swap else x
        graph.neg(moved).set_output(True).set_name("y").set_data_type("bfloat16")
        graph.outputs()[0].set_dim((8, 2) if swap else (2, 8)).set_stride(
            (2, 1) if swap else (8, 1)
        )
        graph.build()
        assert graph.selected_engine == "triton"
        y = torch.empty((8, 2) if swap else (2, 8), dtype=torch.bfloat16)
        graph.execute({"x": wide, "y": y})
        assert torch.equal(y, -(value.t() if swap else value))


DECLINES: list[tuple[str, Any, str]] = [
    (
        "a long row that is used again",
        lambda g: g.sub(
            x := g.tensor((2, 40000)), g.reduction(x, MODES.MAX).set_dim((2, 1))
        ).set_output(True),
        "the kernel keeps 16384",
    ),
    (
        "a result over its own mirror image",
        lambda g: g.add(x := g.tensor((4, 4)), g.transpose(x, (1, 0))).set_output(True),
        "may be bound to the buffer",
    ),
    (
        "something from nothing",
        lambda g: g.reduction(g.tensor((2, 0)), MODES.ADD).set_dim((2, 1)).set_output(True),
        "reduce nothing",
    ),
    (
        "a split of uneven parts",
        lambda g: (
            g.reshape(g.tensor((4, 6), (7, 1)), reshape_mode=tw.reshape_mode.LOGICAL)
            .set_dim((3, 8))
            .set_output(True)
        ),
        "splits an axis unevenly",
    ),
]


@pytest.mark.parametrize(
    ("declare", "reason"), [row[1:] for row in DECLINES], ids=[row[0] for row in DECLINES]
)
def test_a_decline_names_the_rule(declare: Any, reason: str) -> None:
    graph = new_graph()
    declare(graph)
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert graph.selected_engine == "aten" and reason in verdict.reason


CHILD = """
import tilewright as tw
from tilewright.engines.compiled.code_cache import key_of
from tilewright.engines.triton import pointwise

M = tw.reduction_mode

def chain(kind, rows, width):
    graph = tw.Graph(io_data_type=kind, intermediate_data_type="float32")
    x, b, r = (graph.tensor(dim) for dim in ((rows, width), (1, width), (rows, width)))
    y = graph.add(graph.gelu(graph.bias(graph.mul(x, graph.tensor_scalar(0.5)), b)), r)
    y.set_output(True)
    return graph

def columns(kind, rows, width):
    graph = tw.Graph(io_data_type=kind, intermediate_data_type="float32")
    x = graph.tensor((rows, width))
    graph.reduction(graph.relu(x), M.AVG).set_dim((1, width)).set_output(True)
    return graph

def whole(kind, rows, width):
    graph = tw.Graph(io_data_type=kind, intermediate_data_type="float32")
    x = graph.tensor((rows, width))
    graph.reduction(graph.abs(x), M.NORM2).set_dim((1, 1)).set_output(True)
    return graph

for declare, kind in ((chain, "bfloat16"), (columns, "float16"), (whole, "float32")):
    made = []
    for size in ((512, 4096), (1024, 8192)):
        graph = declare(kind, *size)
        graph.validate()
        made.append(pointwise.plan(graph, (), 4))
    for chosen in made[:1]:
        for kernel in chosen.kernels:
            for target in TARGETS:
                digest = key_of(kernel.spec, target).digest()
                told.append(facts_of(kernel, target) | {"digest": digest})
    told[-1]["digests"] = [key_of(p.kernels[0].spec, (9, 0)).digest() for p in made]
"""


def test_generated_kernels_compile_for_four_targets(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    results = compiled_facts(CHILD)
    assert {result["target"] for result in results} == {(8, 0), (9, 0), (10, 0), (12, 0)}
    assert len(results) == 4 * 4
    # A2: different code has different keys, and extents that the code does not hold are in none.
    assert len({result["digest"] for result in results}) == len(results)
    pairs = [result["digests"] for result in results if "digests" in result]
    assert [pair[0] == pair[1] for pair in pairs] == [True, False, True]
