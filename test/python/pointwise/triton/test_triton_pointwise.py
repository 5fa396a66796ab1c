"""Generated kernels: every mode at special values, layouts, reductions; interpreted without a GPU.

With a GPU the same cases run the compiled kernels.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import pointwise, pointwise_layout
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES, PointwiseKind
from tilewright.oracle import default_tolerance, evaluate

pytestmark = [
    pytest.mark.L0,
    pytest.mark.usefixtures("interpreted"),
    # numpy's, under the interpreter.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
MODES = tw.reduction_mode


def new_graph(dtype: Any = "float32") -> Any:
    return tw.Graph(
        io_data_type=dtype, intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
    )


def draw(dim: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def run(
    graph: Any, feeds: dict[Any, torch.Tensor], *, kernels: int = 1, compares: bool = True
) -> dict[Any, torch.Tensor]:
    """Outputs of the Triton engine's plan (CPU tensors by graph tensor), once they are right.

    Right is within the default tolerance of the type, element by element, relative to the
    element; gaps between elements keep what they held.
    """
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert graph.selected_engine == "triton", verdict.reason
    assert len(pointwise.plan(graph, (), 4).kernels) == kernels
    feeds = {tensor: place(value, tensor.stride) for tensor, value in feeds.items()}
    pack: dict[Any, torch.Tensor] = {
        tensor: value if tensor.is_pass_by_value else on_device(value)
        for tensor, value in feeds.items()
    }
    raws = {}
    for tensor in graph.outputs():
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.dim, tensor.stride, strict=True))
        dtype = tw.torch_dtypes.to_torch(tensor.data_type)
        raw = torch.full((span * dtype.itemsize,), 0x5A, dtype=torch.uint8, device=DEVICE)
        raws[tensor] = raw
        pack[tensor] = raw.view(dtype).as_strided(tensor.dim, tensor.stride)
    workspace = torch.full((graph.get_workspace_size() + 64,), 0xAB, dtype=torch.uint8)
    workspace = workspace.to(DEVICE)
    graph.execute(pack, workspace)
    assert torch.all(workspace[-64:] == 0xAB), "nothing beyond the stated workspace is touched"
    expected = evaluate(graph, feeds) if compares else {}
    results = {}
    for tensor, raw in raws.items():
        got = results[tensor] = pack[tensor].cpu().clone()
        if compares:
            compare(tensor, got, expected[tensor.uid])
        pack[tensor].copy_(torch.zeros_like(pack[tensor]))
        flat = raw.view(got.dtype).view(torch.uint8).cpu()
        elements = torch.zeros(flat.numel() // got.element_size(), dtype=torch.bool)
        elements.as_strided(tensor.dim, tensor.stride).fill_(True)
        gaps = flat.view(-1, got.element_size())[~elements]
        assert torch.all(gaps == 0x5A), f"{tensor}: a gap was written"
    return results


def place(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with this stride."""
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, stride, strict=True))
    buffer = torch.zeros(span, dtype=value.dtype).as_strided(value.shape, stride)
    shown = tuple(slice(1) if s == 0 else slice(None) for s in stride)
    buffer[shown] = value[shown]
    return buffer


def on_device(value: torch.Tensor) -> torch.Tensor:
    """A copy of what is placed, with its stride."""
    flat = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,))
    return flat.to(DEVICE).as_strided(value.shape, value.stride())


def compare(tensor: Any, got: torch.Tensor, want: torch.Tensor) -> None:
    want = want.double()
    tolerance = default_tolerance(tensor.data_type)
    if tensor.data_type.is_floating:
        limit = tensor.data_type.layout.largest
        is_fp8 = tensor.data_type.bits == 8
        rounded = (want.clamp(-limit, limit) if is_fp8 else want).to(got.dtype).double()
    else:
        rounded = want
    got = got.double()
    off = (got - rounded).abs() > tolerance * rounded.abs().clamp(min=1.0)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    wrong = torch.where(rounded.isfinite() & got.isfinite(), off, ~same)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{tensor}: {int(wrong.sum())} wrong, at {where}: {got[where]}, not {rounded[where]}"
        )


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
