"""Normalizations with pointwise operations around them and maxima, as one graph of one kernel.

Against the oracle; interpreted without a GPU, compiled with one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import norm_cut, normalization, normalization_split
from tilewright.oracle import assert_close, evaluate
from tilewright.oracle.tolerances import default_tolerance

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
PHASES = tw.norm_forward_phase
AMAX = tw.reduction_mode.AMAX


@pytest.fixture
def rows(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole rows, or rows cut into parts of several small tiles however short they are."""
    if request.param == "cut":
        monkeypatch.setattr(normalization, "is_split", lambda problem: True)
        monkeypatch.setattr(norm_cut, "TILE_ELEMENTS", 16)
        monkeypatch.setattr(normalization_split, "_MAX_SPLITS", 2)
    return str(request.param)


WHOLE_FIRST = pytest.mark.parametrize(
    "rows",
    [
        pytest.param("whole", marks=pytest.mark.L0),
        pytest.param("cut", marks=pytest.mark.L1),
    ],
    indirect=True,
)
CUT_FIRST = pytest.mark.parametrize(
    "rows",
    [
        pytest.param("whole", marks=pytest.mark.L1),
        pytest.param("cut", marks=pytest.mark.L0),
    ],
    indirect=True,
)


class Case:
    """A graph with its operands, drawn as they are declared."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.graph: Any = tw.Graph(
            io_data_type=dtype, intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
        )
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(5)
        self.pack: dict[Any, torch.Tensor] = {}

    def tensor(self, *dim: int, dtype: torch.dtype | None = None, offset: float = 0.0) -> Any:
        values = torch.randn(dim, generator=self.generator) + offset
        buffer = values.to(dtype or self.dtype).to(DEVICE)
        tensor = self.graph.tensor_like(buffer)
        self.pack[tensor] = buffer
        return tensor

    def norm(self, kind: str, x: Any, scale_dim: tuple[int, ...], *, has_bias: bool = True) -> Any:
        scale = self.tensor(*scale_dim)
        bias = self.tensor(*scale_dim) if has_bias else None
        epsilon = self.graph.tensor_scalar(1e-3)
        return getattr(self.graph, kind)(PHASES.INFERENCE, x, scale, bias, epsilon)[0]

    def run(self, tolerance: float | None = None) -> dict[Any, torch.Tensor]:
        """Over poisoned outputs, twice; what is made equals the oracle's and repeats."""
        self.graph.build()
        assert self.graph.selected_engine == "triton", str(self.graph.explain())
        made = {}
        for tensor in self.graph.outputs():
            dtype = tw.torch_dtypes.to_torch(tensor.data_type)
            poison = torch.full((1,), torch.nan if dtype.is_floating_point else 77.0)
            buffer = torch.empty_strided(tensor.dim, tensor.stride, dtype=dtype, device=DEVICE)
            made[tensor] = buffer.copy_(poison.expand(tensor.dim))
        size = self.graph.get_workspace_size()
        workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
        given = {t.uid: b.cpu() for t, b in self.pack.items()}
        expected = evaluate(self.graph, given, round_virtual=True)
        for _ in range(2):
            self.graph.execute({**self.pack, **made}, workspace)
            assert torch.all(workspace[size:] == 0xFF)
            for tensor, buffer in made.items():
                tol = default_tolerance(tensor.data_type) if tolerance is None else tolerance
                assert_close(buffer.cpu(), expected[tensor.uid], tol=tol, name=tensor.name)
        return made


@WHOLE_FIRST
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("is_sum_read", [False, True])
def test_residual_add(kind: str, is_sum_read: bool, rows: str) -> None:
    case = Case()
    x, residual = case.tensor(6, 33), case.tensor(6, 33)
    total = case.graph.add(x, residual, name="total")
    if is_sum_read:
        total.set_output(True).set_data_type(torch.bfloat16)
    case.norm(kind, total, (1, 33)).set_output(True)
    assert len(case.run()) == 1 + is_sum_read


@CUT_FIRST
def test_a_sum_over_its_operand(rows: str) -> None:
    # The running sum of a residual stream is stored where it came from.
    case = Case(torch.float32)
    x, residual = case.tensor(6, 33), case.tensor(6, 33)
    total = case.graph.add(x, residual).set_output(True).set_data_type(torch.float32)
    y = case.norm("layernorm", total, (1, 33)).set_output(True)
    case.graph.build()
    assert case.graph.selected_engine == "triton"
    expected = evaluate(case.graph, {t.uid: b.cpu() for t, b in case.pack.items()})
    stream, found = case.pack[x], torch.full((6, 33), torch.nan, device=DEVICE)
    size = case.graph.get_workspace_size()
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    case.graph.execute({**case.pack, total: stream, y: found}, workspace)
    assert_close(stream.cpu(), expected[total.uid], tol=1e-6)
    assert_close(found.cpu(), expected[y.uid], tol=1e-5)


@CUT_FIRST
def test_batchnorm_relu_of_channels_last_and_added_skip(rows: str) -> None:
    case = Case()
    x = case.tensor(4, 3, 2, 5)
    skip = case.tensor(4, 3, 2, 5)
    scale, bias = (case.tensor(1, 3, 1, 1, dtype=torch.float32) for _ in range(2))
    made = case.graph.batchnorm(x, scale, bias, None, None, 1e-3, None)
    for tensor in made[1:3]:
        tensor.set_output(True).set_data_type("float32")
    case.graph.relu(case.graph.add(made[0], skip)).set_output(True)
    case.run()


@CUT_FIRST
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_with_a_scale_and_the_largest_magnitude(dtype: torch.dtype, rows: str) -> None:
    # The amax is of the unscaled result; the scale takes some elements over the type's limit.
    case = Case()
    y = case.norm("rmsnorm", case.tensor(6, 40), (1, 40), has_bias=False)
    factor = case.tensor(1, 1, dtype=torch.float32, offset=200.0)
    case.graph.mul(y, factor).set_output(True).set_data_type(dtype).set_name("quantized")
    amax = case.graph.reduction(y, AMAX).set_output(True).set_dim((1, 1)).set_stride((1, 1))
    amax.set_data_type("float32").set_name("amax")
    made = case.run()
    quantized = next(b for t, b in made.items() if t.name == "quantized").float()
    largest = torch.finfo(dtype).max
    assert dtype is torch.float8_e5m2 or quantized.abs().max().item() == largest
    assert quantized.isfinite().all()


@WHOLE_FIRST
def test_a_result_in_fp8_and_an_input_in_fp8(rows: str) -> None:
    case = Case(torch.float8_e4m3fn)
    y = case.norm("layernorm", case.tensor(4, 24), (1, 24))
    y.set_output(True)
    case.run()


@CUT_FIRST
def test_activation_columns_rows_numbers_and_masks(rows: str) -> None:
    # One operand for each way to broadcast, a number, a comparison that selects, and a real Y.
    case = Case(torch.float32)
    graph = case.graph
    y = case.norm("layernorm", case.tensor(3, 4, 20), (1, 1, 20))
    y.set_output(True).set_name("y")
    by_column, by_row = case.tensor(1, 1, 20), case.tensor(1, 4, 1)
    scaled = graph.mul(graph.add(y, by_column), by_row)
    active = graph.gelu(graph.mul(scaled, graph.tensor_scalar(0.5)))
    chosen = graph.binary_select(active, y, graph.cmp_gt(scaled, by_row))
    chosen.set_output(True).set_name("chosen")
    graph.identity(graph.mul(chosen, graph.tensor_scalar(20.0))).set_output(True).set_data_type(
        "int8"
    )
    case.run()


@WHOLE_FIRST
def test_the_input_again_after_the_norm(rows: str) -> None:
    case = Case()
    x, residual = case.tensor(5, 24), case.tensor(5, 24)
    # Where a tile reaches beyond a row, the number would count in the statistics.
    total = case.graph.add(case.graph.add(x, residual), case.graph.tensor_scalar(3.0))
    y = case.norm("rmsnorm", total, (1, 24))
    case.graph.add(case.graph.swish(y), total).set_output(True)
    case.run()


@WHOLE_FIRST
def test_the_largest_magnitude_is_of_elements_alone(rows: str) -> None:
    # Where a tile reaches beyond a row y is 0, of which this would be the largest.
    case = Case(torch.float32)
    y = case.norm("rmsnorm", case.tensor(5, 24), (1, 24), has_bias=False)
    near = case.graph.exp(case.graph.neg(case.graph.abs(y)))
    amax = case.graph.reduction(near, AMAX).set_output(True).set_dim((1, 1)).set_stride((1, 1))
    assert case.run()[amax].item() < 1.0


@pytest.mark.L0
def test_inference_batchnorm_with_relu_and_amax() -> None:
    case = Case()
    x = case.tensor(2, 3, 4, 5)
    vectors = [case.tensor(1, 3, 1, 1, dtype=torch.float32, offset=2.0) for _ in range(4)]
    y = case.graph.relu(case.graph.batchnorm_inference(x, *vectors)).set_output(True)
    amax = case.graph.reduction(y, AMAX).set_output(True).set_dim((1, 1, 1, 1))
    amax.set_stride((1, 1, 1, 1)).set_data_type("float32")
    # The maximum is of the rounded result.
    case.run(2**-8)


@pytest.mark.L0
def test_amax_of_nan_is_nan() -> None:
    case = Case(torch.float32)
    x = case.tensor(4, 8)
    y = case.norm("rmsnorm", x, (1, 8))
    y.set_output(True)
    amax = case.graph.reduction(y, AMAX).set_output(True).set_dim((1, 1)).set_stride((1, 1))
    case.pack[x][2, 3] = torch.nan
    assert case.run()[amax].isnan().all()


DECLINES: list[tuple[str, Any, str]] = [
    ("a made scale", lambda c, x, s: c.graph.rmsnorm(
        PHASES.INFERENCE, x, c.graph.add(s, s), None, c.graph.tensor_scalar(1e-3))[0],
     "read it from memory"),
    ("another reduction", lambda c, x, s: c.graph.reduction(
        c.norm("rmsnorm", x, (1, 8)), tw.reduction_mode.ADD).set_dim((4, 1)), "take AMAX over"),
    ("an index", lambda c, x, s: c.graph.add(
        c.norm("rmsnorm", x, (1, 8)), c.graph.gen_index(x, 1)), "elementwise operations of values"),
    ("a statistic", lambda c, x, s: c.graph.mul(x, c.graph.rmsnorm(
        PHASES.TRAINING, x, s, None, c.graph.tensor_scalar(1e-3))[1]), "pass on Y alone"),
    ("a maximum of nothing", lambda c, x, s: c.graph.reduction(
        c.norm("rmsnorm", c.graph.tensor((0, 8)), (1, 8)), AMAX).set_dim((1, 1)), "of no element"),
    ("64-bit integers", lambda c, x, s: c.graph.identity(
        c.norm("rmsnorm", x, (1, 8))).set_data_type("int64"), "write no INT64"),
    ("a small result", lambda c, x, s: [
        c.graph.abs(s).set_output(True), c.norm("rmsnorm", x, (1, 8))][1], "results have"),
]  # fmt: skip


@pytest.mark.L0
@pytest.mark.parametrize(
    ("make", "reason"), [row[1:] for row in DECLINES], ids=[row[0] for row in DECLINES]
)
def test_a_decline_names_the_operation_and_the_rule(make: Any, reason: str) -> None:
    case = Case(torch.float32)
    make(case, case.tensor(4, 8), case.tensor(1, 8)).set_output(True)
    case.graph.validate()
    case.graph.create_execution_plans()
    verdict = next(v for v in case.graph.explain().verdicts if v.engine_name == "triton")
    assert reason in verdict.reason
