"""What alignment the functions declare: an address that tensor maps do not take is told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.ops import attention_call, attention_declaring, attention_repeat
from tilewright.ops.declaring import alignment_of

pytestmark = pytest.mark.L0


class OnGpu:
    """An operand at an address on a GPU, as far as alignment is concerned."""

    device = torch.device("cuda", 0)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@pytest.mark.parametrize(
    ("address", "expected"), [(0, 0), (64, 0), (4096 + 8, 8), (4096 + 12, 4), (4096 + 2, 2), (7, 1)]
)
def test_the_largest_power_of_two_below_a_map_s(address: int, expected: int) -> None:
    operand: Any = OnGpu(address)
    assert alignment_of(operand) == expected


def test_operands_on_a_cpu_share_plans_whatever_their_address() -> None:
    assert alignment_of(torch.zeros(9)[1:]) == 0


def test_attention_declares_what_its_operands_have(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU: views that start a row of 8 bytes late.
    declared: list[dict[str, int]] = []
    keys: list[Any] = []
    run = attention_call.run

    def noticing(operation: str, key: Any, declare: Any, *operands: Any, **options: Any) -> None:
        graph = tw.Graph(intermediate_data_type="float32", handle=tw.create_handle("cpu"))
        declare(graph)
        graph.validate()
        tensors = [*graph.inputs(), *graph.outputs()]
        declared.append({tensor.name: tensor.alignment_value for tensor in tensors})
        keys.append(key)
        run(operation, key, declare, *operands, **options)

    def of(tensor: torch.Tensor) -> int:
        rest = tensor.data_ptr() % 16
        return rest & -rest

    monkeypatch.setattr(attention_call, "run", noticing)
    for module in (attention_call, attention_declaring):
        monkeypatch.setattr(module, "alignment_of", of)
    monkeypatch.setattr(
        attention_repeat, "are_aligned", lambda _, tensors: not any(map(of, tensors))
    )
    whole = torch.randn(3, 2 * 6 * 8 + 4, dtype=torch.float32)
    q, k, v = (torch.empty(2 * 6 * 8 + 4)[4:].copy_(row[4:]).view(1, 2, 6, 8) for row in whole)
    late = torch.empty(2 * 6 * 8 + 2)[2:].copy_(whole[0, 4:]).view(1, 2, 6, 8)
    assert q.data_ptr() % 16 == 0 and late.data_ptr() % 16 == 8
    wide, narrow = ops.sdpa(q, k, v), ops.sdpa(late, k, v)
    assert [row["q"] for row in declared] == [0, 8]
    assert [row["k"] for row in declared] == [0, 0]
    assert keys[0] != keys[1]
    torch.testing.assert_close(wide, narrow)
