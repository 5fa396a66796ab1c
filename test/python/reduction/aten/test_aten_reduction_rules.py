"""Which axes are reduced, to which type, and what is declined."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import reduction
from tilewright.errors import NotSupportedError
from tilewright.torch_dtypes import to_torch

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")
MODES = ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")


def record(dim, data_type="FLOAT"):
    return tilewright.Graph().tensor(dim, data_type=tilewright.data_type[data_type])


@pytest.mark.parametrize(
    ("source", "out", "axes"),
    [
        ((2, 3, 4), (2, 3, 4), ()),
        ((2, 3, 4), (1, 3, 4), (0,)),
        ((2, 3, 4), (2, 1, 1), (1, 2)),
        ((2, 1, 4), (2, 1, 1), (2,)),
        ((1, 1), (1, 1), ()),
        ((0, 3), (1, 3), (0,)),
        ((2, 0), (2, 1), (1,)),
        ((2, 0), (1, 0), (0,)),
    ],
)
def test_axes(source, out, axes):
    assert reduction.reduced_axes(record(source), record(out)) == axes


@pytest.mark.parametrize("out", [(2, 3), (2, 3, 4, 1), (2, 2, 4), (2, 3, 5), (0, 3, 4)])
def test_dims_that_are_no_reduction(out):
    with pytest.raises(NotSupportedError, match="keeps an axis"):
        reduction.reduced_axes(record((2, 3, 4)), record(out))


def reduce(mode, x, out_dim, out_type):
    op = SimpleNamespace(
        kind="reduction",
        mode=mode,
        inputs={"input": record(tuple(x.shape), tilewright.torch_dtypes.from_torch(x.dtype).name)},
        outputs={"out": record(out_dim, out_type)},
    )
    out = torch.full(out_dim, 77, dtype=to_torch(tilewright.data_type[out_type]))
    reduction.prepare_reduction(op, CPU)({"input": x}, {"out": out})
    return out


FUNCTIONS = {
    "ADD": sum,
    "MUL": math.prod,
    "MIN": min,
    "MAX": max,
    "AMAX": lambda values: max(map(abs, values)),
    "AVG": lambda values: sum(values) / len(values),
    "NORM1": lambda values: sum(map(abs, values)),
    "NORM2": lambda values: math.sqrt(sum(v * v for v in values)),
    "MUL_NO_ZEROS": lambda values: math.prod(v for v in values if v),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.int32])
@pytest.mark.parametrize("out_type", ["FLOAT", "DOUBLE", "HALF", "INT32"])
def test_values_of_every_mode(mode, source, out_type):
    x = torch.tensor([[3, -4, 0], [-2, -1, -7]]).to(source)
    rows = [FUNCTIONS[mode](row) for row in x.double().tolist()]
    columns = [FUNCTIONS[mode](column) for column in x.double().t().tolist()]
    whole = FUNCTIONS[mode](x.double().flatten().tolist())
    alone = [FUNCTIONS[mode]([value]) for value in x.double().flatten().tolist()]
    for dim, expected in (
        ((2, 1), rows),
        ((1, 3), columns),
        ((1, 1), [whole]),
        ((2, 3), alone),
    ):
        found = reduce(mode, x, dim, out_type).double().flatten().tolist()
        if out_type == "INT32":
            expected = [math.trunc(value) for value in expected]
        assert found == pytest.approx(expected, rel=1e-3 if out_type == "HALF" else 1e-6)


def test_unknown_modes_and_statistics_that_are_declined():
    with pytest.raises(NotSupportedError, match="reduction mode NOTHING"):
        reduce("NOTHING", torch.zeros(2), (1,), "FLOAT")

    def prepare(source, total, squares):
        op = SimpleNamespace(
            kind="genstats",
            inputs={"input": record(source)},
            outputs={"SUM": record(total), "SQ_SUM": record(squares)},
        )
        return reduction.prepare_genstats(op, CPU)

    x = torch.arange(24.0).view(2, 3, 4)
    outputs = {port: torch.zeros(1, 3, 1) for port in ("SUM", "SQ_SUM")}
    prepare((2, 3, 4), (1, 3, 1), (1, 3, 1))({"input": x}, outputs)
    assert torch.equal(outputs["SUM"], x.sum((0, 2), keepdim=True))
    assert torch.equal(outputs["SQ_SUM"], x.square().sum((0, 2), keepdim=True))
    prepare((2, 3), (1, 3), (1, 3))
    for dims in (
        ((3,), (1,), (1,)),
        ((2, 3, 4), (1, 2, 1), (1, 3, 1)),
        ((2, 3, 4), (1, 3, 1), (1, 3)),
        ((2, 3, 4), (1, 3, 4), (1, 3, 1)),
        ((2, 3, 4), (1, 3, 1, 1), (1, 3, 1)),
    ):
        with pytest.raises(NotSupportedError):
            prepare(*dims)
