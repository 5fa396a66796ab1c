"""Which products the ATen engine takes, and in which type they are made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import matmul
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

CPU, OTHER = torch.device("cpu"), torch.device("cuda")


def record(dim, data_type="FLOAT"):
    return tilewright.Graph().tensor(dim, data_type=tilewright.data_type[data_type])


def prepare(a, b, c, types=("FLOAT",) * 3, **more):
    inputs = {"A": record(a, types[0]), "B": record(b, types[1]), **more}
    outputs = {"C": record(c, types[2])}
    operation = SimpleNamespace(kind="matmul", inputs=inputs, outputs=outputs)
    return matmul.prepare_matmul(operation, CPU)


TAKEN = [
    ((2, 3), (3, 4), (2, 4)),
    ((5, 2, 3), (5, 3, 4), (5, 2, 4)),
    ((5, 2, 3), (1, 3, 4), (5, 2, 4)),
    ((1, 2, 3), (5, 3, 4), (5, 2, 4)),
    ((6, 1, 2, 3), (1, 5, 3, 4), (6, 5, 2, 4)),
    ((2, 3), (5, 3, 4), (5, 2, 4)),
]
DECLINED = [
    ((2, 3), (3, 4), (2, 5)),
    ((2, 3), (3, 4), (3, 4)),
    ((2, 3), (3, 4), (1, 4)),
    ((2, 3), (3, 4), (1, 2, 4)),
    ((2, 3), (4, 4), (2, 4)),
    ((2, 3), (2, 4), (2, 4)),
    ((5, 2, 3), (4, 3, 4), (5, 2, 4)),
    ((6, 2, 3), (3, 3, 4), (6, 2, 4)),
    ((1, 2, 3), (1, 3, 4), (5, 2, 4)),
    ((3,), (3, 4), (4,)),
    ((2, 3), (3,), (2,)),
    ((3,), (3,), ()),
]


@pytest.mark.parametrize("types", [("FLOAT",) * 3, ("HALF", "FLOAT", "FLOAT"), ("HALF",) * 3])
@pytest.mark.parametrize(("a", "b", "c"), TAKEN)
def test_products_of_every_batch(a, b, c, types):
    generator = torch.Generator().manual_seed(1)
    dtypes = [tilewright.torch_dtypes.to_torch(tilewright.data_type[name]) for name in types]
    left, right = (torch.randint(-3, 4, dim, generator=generator) for dim in (a, b))
    out = torch.full(c, 99.0, dtype=dtypes[2])
    prepare(a, b, c, types)({"A": left.to(dtypes[0]), "B": right.to(dtypes[1])}, {"C": out})
    assert torch.equal(out, (left @ right).to(dtypes[2]))


@pytest.mark.parametrize(("a", "b", "c"), DECLINED)
def test_dims_that_are_declined(a, b, c):
    with pytest.raises(NotSupportedError):
        prepare(a, b, c)


def test_other_operands_are_declined():
    with pytest.raises(NotSupportedError, match="'M_override': the ATen engine takes A and B"):
        prepare((2, 3), (3, 4), (2, 4), M_override=record((1,), "INT32"), N_override=record((1,)))


def test_the_type_that_products_are_made_in():
    def found(*types):
        return matmul.product_dtype(*(record((1,), name) for name in types))

    assert found("HALF", "BFLOAT16") is torch.float32
    assert found("FP8_E4M3", "FLOAT") is torch.float32
    assert found("HALF", "DOUBLE") is torch.float64
    for whole in ("INT8", "UINT8", "INT32", "INT64"):
        assert found("HALF", whole) is torch.float64 and found(whole) is torch.float64


def test_which_products_run_in_their_own_type(monkeypatch):
    def runs(*types, device=CPU, c=(32, 32)):
        records = [record(c, name) for name in types]
        return matmul._runs_in_its_own_type(*records, device)

    for name in ("FLOAT", "DOUBLE"):
        assert runs(*[name] * 3) and runs(*[name] * 3, device=OTHER)
    for device, expected in ((CPU, False), (OTHER, True)):
        assert runs(*["HALF"] * 3, device=device) is expected
        for types in (("HALF", "HALF", "FLOAT"), ("FLOAT", "HALF", "HALF"), ("INT8",) * 3):
            assert not runs(*types, device=device)
        assert not runs("FLOAT", "FLOAT", "DOUBLE", device=device)
        assert not runs("FLOAT", "DOUBLE", "DOUBLE", device=device)
    assert runs(*["BFLOAT16"] * 3, device=OTHER)
    for supported in (True, False):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported
        )
        assert runs(*["BFLOAT16"] * 3) is supported
        assert runs(*["BFLOAT16"] * 3, c=(7, 16, 16)) is supported
        for c in ((15, 32), (32, 15), (32, 15, 16), (64, 1, 32)):
            assert not runs(*["BFLOAT16"] * 3, c=c)
