"""Which rows a group has, on the host and on a device, and what is done with the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import moe
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

ROWS, FEATURES, COLUMNS, EXPERTS = 9, 3, 5, 4
CPU, OTHER = torch.device("cpu"), torch.device("cuda")
NONE, GATHER, SCATTER = (SimpleNamespace(name=name) for name in ("NONE", "GATHER", "SCATTER"))


def draw(*dim, seed=0):
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def record(*dim, data_type="FLOAT"):
    return tilewright.Graph().tensor(dim, data_type=data_type)


# Starts, maybe with the end, and the rows of each group.
STARTS = [
    ([0, 2, 2, 6], [(0, 2), (2, 2), (2, 6), (6, 9)]),
    ([0, 2, 2, 6, 8], [(0, 2), (2, 2), (2, 6), (6, 8)]),
    ([3, 4, 7, 9, 9], [(3, 4), (4, 7), (7, 9), (9, 9)]),
    ([-4, 1, 5, 30, 40], [(0, 1), (1, 5), (5, 9), (9, 9)]),
    ([-4, -1, 5, 9], [(0, 0), (0, 5), (5, 9), (9, 9)]),
]


@pytest.mark.parametrize(("starts", "expected"), STARTS)
@pytest.mark.parametrize("device", [CPU, OTHER])
def test_rows_of_a_group(starts, expected, device):
    groups = moe._grouping(record(len(starts), 1, 1, data_type="INT32"), EXPERTS, ROWS, device)
    for (expert, members), number, (first, end) in zip(
        groups(torch.tensor(starts)), range(EXPERTS), expected, strict=True
    ):
        assert expert == number
        inside = torch.zeros(ROWS, dtype=torch.bool)
        inside[members if device is CPU else members.squeeze(1)] = True
        assert torch.equal(inside.nonzero().flatten(), torch.arange(first, end))


def test_offsets_that_are_declined():
    for bad in ((3, 1, 1), (6, 1, 1), (4, 2, 1), (5, 1, 3), ()):
        with pytest.raises(NotSupportedError, match="an offset a group"):
            moe._grouping(record(*bad, data_type="INT32"), EXPERTS, ROWS, CPU)
    with pytest.raises(NotSupportedError, match="offsets are integers"):
        moe._grouping(record(4, 1, 1), EXPERTS, ROWS, CPU)


def operation(kind, inputs, outputs, **attributes):
    records = {port: tilewright.Graph().tensor_like(buffer) for port, buffer in inputs.items()}
    found = {port: tilewright.Graph().tensor_like(buffer) for port, buffer in outputs.items()}
    return SimpleNamespace(kind=kind, inputs=records, outputs=found, **attributes)


@pytest.mark.parametrize("device", [CPU, OTHER])
@pytest.mark.parametrize(("starts", "expected"), STARTS)
def test_weight_gradients_of_rows_in_no_group_count_nothing(device, starts, expected):
    token, grad = draw(1, ROWS, FEATURES), draw(1, ROWS, COLUMNS, seed=1)
    for row in range(ROWS):
        if not any(first <= row < end for first, end in expected):
            token[0, row], grad[0, row] = float("nan"), float("inf")
    inputs = {
        "token": token,
        "doutput": grad,
        "first_token_offset": torch.tensor(starts).view(-1, 1, 1),
    }
    outputs = {"dweight": torch.full((EXPERTS, FEATURES, COLUMNS), 7.0)}
    op = operation("moe_grouped_matmul_bwd", inputs, outputs)
    moe.prepare_moe_grouped_matmul_bwd(op, device)(inputs, outputs)
    for expert, (first, end) in enumerate(expected):
        wanted = token[0, first:end].double().t() @ grad[0, first:end].double()
        assert torch.allclose(outputs["dweight"][expert].double(), wanted, atol=1e-5)


@pytest.mark.parametrize("device", [CPU, OTHER])
@pytest.mark.parametrize("mode", [NONE, GATHER, SCATTER], ids=["none", "gather", "scatter"])
def test_products_with_slots_and_rows_in_no_group(device, mode):
    slots, rows = 3, 7
    starts, bounds = [1, 3, 3, 5, 6], [(1, 3), (3, 3), (3, 5), (5, 6)]
    token, weight = draw(1, ROWS, FEATURES), draw(EXPERTS, FEATURES, COLUMNS, seed=1)
    inputs = {
        "token": token,
        "weight": weight,
        "first_token_offset": torch.tensor(starts).view(-1, 1, 1),
    }
    attributes = {"top_k": 0}
    out_rows, count = ROWS, ROWS
    if mode is GATHER:
        index = torch.tensor([99, 8, 0, 8, 1, 2, -7], dtype=torch.int32)
        out_rows = count = rows
        inputs["token_index"] = index.view(1, -1, 1)
    elif mode is SCATTER:
        out_rows = 4 * slots
        index = torch.tensor([500, 3, 1, 0, 3, 2, -9, 77, 78], dtype=torch.int32)
        slot = torch.tensor([7, 2, 1, 0, 1, 2, 5, 6, 8], dtype=torch.int32)
        inputs["token_index"], inputs["token_ks"] = index.view(1, -1, 1), slot.view(1, -1, 1)
        attributes = {"top_k": slots}
    expected = torch.zeros(out_rows, COLUMNS, dtype=torch.float64)
    for expert, (first, end) in enumerate(bounds):
        for row in range(first, end):
            source = int(index[row]) if mode is GATHER else row
            target = int(index[row]) * slots + int(slot[row]) if mode is SCATTER else row
            expected[target] = token[0, source].double() @ weight[expert].double()
    outputs = {"out": torch.full((1, out_rows, COLUMNS), 7.0)}
    op = operation("moe_grouped_matmul", inputs, outputs, mode=mode, **attributes)
    moe.prepare_moe_grouped_matmul(op, device)(inputs, outputs)
    assert torch.allclose(outputs["out"][0].double(), expected, atol=1e-5)
    assert count >= bounds[-1][1]


def check(mode, token, weight, out, top_k=0, **more):
    inputs = {"token": record(*token), "weight": record(*weight)}
    inputs |= {port: record(*dim, data_type="INT32") for port, dim in more.items()}
    op = SimpleNamespace(inputs=inputs, top_k=top_k)
    moe._check_forward(op, mode, record(*out))


def test_declarations_that_are_taken_and_declined():
    token, weight = (1, 6, 3), (4, 3, 5)
    index = {"token_index": (1, 6, 1)}
    taken = [
        ("NONE", (1, 6, 5), {}),
        ("GATHER", (1, 6, 5), index),
        ("GATHER", (1, 8, 5), {"token_index": (1, 8, 1)}),
        ("SCATTER", (1, 9, 5), index),
        ("SCATTER", (1, 6, 5), {**index, "top_k": 1}),
        ("SCATTER", (1, 9, 5), {**index, "token_ks": (1, 6, 1), "top_k": 1}),
        ("SCATTER", (1, 12, 5), {**index, "token_ks": (1, 6, 1), "top_k": 2}),
    ]
    for mode, out, more in taken:
        check(mode, token, weight, out, **more)
    declined = [
        ("COMBINE", token, weight, (1, 6, 5), {}),
        ("GATHER", token, weight, (1, 6, 5), {**index, "token_ks": (1, 6, 1), "top_k": 2}),
        ("SCATTER", token, weight, (1, 6, 5), {**index, "token_ks": (1, 6, 1), "top_k": 0}),
        ("SCATTER", token, weight, (1, 6, 5), {**index, "top_k": 2}),
        ("NONE", (6, 3), weight, (1, 6, 5), {}),
        ("NONE", (2, 6, 3), weight, (1, 6, 5), {}),
        ("NONE", token, (4, 2, 5), (1, 6, 5), {}),
        ("NONE", token, (3, 5), (1, 6, 5), {}),
        ("NONE", token, weight, (1, 6, 5), index),
        ("GATHER", token, weight, (1, 6, 5), {}),
        ("SCATTER", token, weight, (1, 6, 5), {}),
        ("NONE", token, weight, (6, 5), {}),
        ("NONE", token, weight, (2, 6, 5), {}),
        ("NONE", token, weight, (1, 6, 4), {}),
        ("NONE", token, weight, (1, 5, 5), {}),
        ("NONE", token, weight, (1, 7, 5), {}),
        ("GATHER", token, weight, (1, 6, 5), {"token_index": (1, 7, 1)}),
        ("SCATTER", token, weight, (1, 6, 5), {"token_index": (1, 7, 1)}),
        ("SCATTER", token, weight, (1, 6, 5), {"token_index": (1, 5, 1)}),
    ]
    for mode, t, w, out, more in declined:
        with pytest.raises(NotSupportedError):
            check(mode, t, w, out, **more)
