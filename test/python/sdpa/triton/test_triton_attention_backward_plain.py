"""The kernels of plain scores, which only SM90 is given: interpreted, as they are planned there."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import Case

from tilewright.engines.compiled.planned import KernelPlan, slot_numbers
from tilewright.engines.triton import attention_backward
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import knob_type
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Constant, HostScalar, Operand, Scratch
from tilewright.launch.tensor_maps import TensorMap

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here, on a GPU"
    ),
]
SM90_MULTIPROCESSORS = 132
TILE_M, TILE_N = knob_type.TILE_M, knob_type.TILE_N
PLAIN = ("attention_backward_plain_keys", "attention_backward_plain_rows")


def plan_of(graph: Any, sm_count: int = SM90_MULTIPROCESSORS) -> KernelPlan:
    knobs = attention_backward.propose(graph, sm_count)[0].knobs
    return attention_backward.plan(graph, knobs, sm_count)


def kernels_of(plan: KernelPlan | None) -> list[str]:
    return [] if plan is None else [kernel.spec.name for kernel in plan.kernels]


def interpret(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """Every kernel of the plan with maps, on the operands as they are declared."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    graph.validate()
    plan = plan_of(graph)
    assert set(PLAIN) <= set(kernels_of(plan)), "the case is one for the kernels of plain scores"
    given = {getattr(key, "uid", key): buffer for key, buffer in pack.items()}
    tensors: dict[int, Tensor] = {t.uid: t for t in [*graph.inputs(), *graph.outputs()]}
    views = {
        slot: given[uid].as_strided(
            tensors[uid].dim, tensors[uid].stride, given[uid].storage_offset()
        )
        for uid, slot in slot_numbers(graph).items()
        if uid in given
    }
    scratch = torch.full((sum(size for _, size in plan.scratch) + 1024,), 0xFF, dtype=torch.uint8)
    for kernel in plan.kernels:
        arguments: dict[str, Any] = dict(kernel.spec.constants)
        for (name, kind), value in zip(kernel.spec.types, kernel.arguments, strict=True):
            if isinstance(value, TensorMap):
                box = [int(extent) for extent in re.findall(r"\d+", kind.partition("[")[2])]
                view = views[value.slot]
                arguments[name] = TensorDescriptor(view, list(value.dim), list(value.stride), box)
            elif isinstance(value, Operand):
                arguments[name] = views[value.slot]
            elif isinstance(value, (HostScalar, Constant)):
                arguments[name] = value.value
            elif isinstance(value, Scratch):
                arguments[name] = scratch[value.offset_bytes :].view(torch.float32)
        kernel.spec.function[kernel.grid](**arguments)


CASES = [
    Case(),
    Case(band="causal", heads=(4, 2), rows=130, keys=130),
    Case(band="causal", rows=70, keys=190, dtype="float16", layout="bshd", values="hidden_nan"),
    Case(band="causal", rows=190, keys=70, out="float32"),
    Case(band="bottom_right", rows=70, keys=198, heads=(3, 1), sink="float32"),
    Case(band="bottom_right", rows=198, keys=70, dtype="float16"),
    Case(sizes=(40, 72), rows=66, keys=129, layout="gaps", dtype="float16", scale="device"),
    Case(sizes=(192, 128), band="causal", rows=129, keys=129, batch=1),
    Case(sizes=(16, 16), heads=(4, 2), rows=65, keys=65),
    # Scores far below 0: what a tile has beyond the last key would be infinitely likely.
    Case(values="large", rows=66, keys=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    DeclaredBackward(backward_case(case), "cpu").run(interpret)


def test_keys_that_no_row_sees_may_hold_anything() -> None:
    case = Case(band="causal", rows=70, keys=100)
    declared = DeclaredBackward(backward_case(case), "cpu")
    for tensor, buffer in declared.inputs.items():
        if tensor.name in ("k", "v"):
            buffer[:, :, case.rows : -3] = torch.nan
            buffer[:, :, -3:] = torch.inf
    declared.run(interpret)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="float32"),
        Case(alibi=True),
        Case(bias="full"),
        Case(band="window"),
        Case(lengths="lengths"),
        Case(lengths="lengths", place="ragged"),
        Case(dropout="philox"),
        Case(block_mask=True),
        Case(layout="stepped"),
        # Its first rows do not start at a tile's.
        Case(band="bottom_right", rows=40, keys=50),
    ],
    ids=str,
)
def test_what_else_is_declared_is_left_to_the_general_kernels(case: Case) -> None:
    graph = DeclaredBackward(backward_case(case), "cpu").graph
    graph.validate()
    assert not set(PLAIN) & set(kernels_of(plan_of(graph)))


def test_tiles_that_do_not_start_on_the_diagonal_are_left_to_the_general_kernels() -> None:
    graph = DeclaredBackward(backward_case(Case(band="causal")), "cpu").graph
    graph.validate()
    for knobs in ((TILE_M, 128), (TILE_N, 64)), ((TILE_M, 64), (TILE_N, 32)):
        plan = attention_backward.plan(graph, knobs, SM90_MULTIPROCESSORS)
        assert not set(PLAIN) & set(kernels_of(plan))
    with pytest.raises(NotSupportedError, match="TILE_M is 256"):
        attention_backward.plan(graph, ((TILE_M, 256),), SM90_MULTIPROCESSORS)


def test_general_kernels_stand_behind_and_elsewhere() -> None:
    graph = DeclaredBackward(backward_case(Case()), "cpu").graph
    graph.validate()
    assert set(PLAIN) <= set(kernels_of(plan_of(graph)))
    behind = kernels_of(plan_of(graph).fallback)
    assert behind and not set(PLAIN) & set(behind)
    assert not set(PLAIN) & set(kernels_of(plan_of(graph, sm_count=108)))
