"""Kernels stay inside of the workspace that their plan states, use it to its end, and read of it
only what they wrote. Interpreted without a GPU, compiled on one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import pointwise_layout
from tilewright.engines.triton.engine import ENGINE
from tilewright.launch.workspace import ALIGNMENT_BYTES, plan_workspace
from tilewright.torch_dtypes import to_torch

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
PHASES = tw.norm_forward_phase
# Bytes before and behind, which keep the workspace's alignment.
GUARD = 4 * ALIGNMENT_BYTES
TRIPWIRE = 0xAB
# NaN of every type, and zeros: a number that is read before it was written shows in a difference.
FILLS = (0xFF, 0x00)
Sample = Callable[[Any], None]


def outputs(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.set_output(True)


def norm_with_amax(graph: Any) -> None:
    x, scale = graph.tensor((6, 64)), graph.tensor((1, 64))
    y, _ = graph.rmsnorm(PHASES.INFERENCE, x, scale, None, graph.tensor_scalar(1e-5))
    amax = graph.reduction(y, tw.reduction_mode.AMAX).set_dim((1, 1)).set_stride((1, 1))
    outputs(y, amax.set_data_type("float32"))


def batchnorm_of_long_channels(graph: Any) -> None:
    x, one = graph.tensor((1, 3, 40_000)), (1, 3, 1)
    affine = (graph.tensor(one, data_type="float32") for _ in range(4))
    outputs(*graph.batchnorm(x, *affine, 1e-3, 0.1)[:3])


def rmsnorm_backward(graph: Any) -> None:
    grad, x, scale = graph.tensor((9, 64)), graph.tensor((9, 64)), graph.tensor((1, 64))
    inverse = graph.tensor((9, 1), data_type="float32")
    made = graph.rmsnorm_backward(grad, x, scale, inverse, True)
    outputs(*made)


def instancenorm_backward(graph: Any) -> None:
    dim, one = (2, 4, 8, 8), (1, 4, 1, 1)
    grad, x, scale = graph.tensor(dim), graph.tensor(dim), graph.tensor(one, data_type="float32")
    statistics = (graph.tensor((2, 4, 1, 1), data_type="float32") for _ in range(2))
    outputs(*graph.instancenorm_backward(grad, x, scale, *statistics))


def batchnorm_backward(graph: Any) -> None:
    # More of a channel than a program holds.
    dim, one = (2, 3, 128, 128), (1, 3, 1, 1)
    operands = graph.tensor(dim), graph.tensor(dim)
    rest = (graph.tensor(one, data_type="float32") for _ in range(3))
    outputs(*graph.batchnorm_backward(*operands, *rest))


def split_reduction(graph: Any) -> None:
    x = graph.tensor((2, 9000))
    outputs(graph.reduction(x, tw.reduction_mode.AVG).set_dim((2, 1)))


def decode(graph: Any) -> None:
    q, k, v = (
        graph.tensor((2, 4, 1, 32)),
        graph.tensor((2, 2, 700, 32)),
        graph.tensor((2, 2, 700, 16)),
    )
    lengths = [graph.tensor((2, 1, 1, 1), data_type="int32", name=f"len_{s}") for s in ("q", "kv")]
    options = {"seq_len_q": lengths[0], "seq_len_kv": lengths[1], "use_padding_mask": True}
    outputs(*graph.sdpa(q, k, v, generate_stats=True, attn_scale=0.2, **options))


def attention_backward(graph: Any) -> None:
    q, k, v = (
        graph.tensor((2, 4, 128, 16)),
        graph.tensor((2, 2, 40, 16)),
        graph.tensor((2, 2, 40, 16)),
    )
    o, d_o = graph.tensor((2, 4, 128, 16)), graph.tensor((2, 4, 128, 16))
    stats = graph.tensor((2, 4, 128, 1), data_type="float32")
    outputs(*graph.sdpa_backward(q, k, v, o, d_o, stats, use_causal_mask=True, attn_scale=0.2))


SAMPLES: list[Sample] = [
    norm_with_amax,
    batchnorm_of_long_channels,
    rmsnorm_backward,
    instancenorm_backward,
    batchnorm_backward,
    split_reduction,
    decode,
    attention_backward,
]


def operand(tensor: Any, generator: torch.Generator) -> torch.Tensor:
    if tensor.name.startswith("len_"):
        # The second sequence has one query and no key: none of its runs is written.
        values = [1, 1] if tensor.name == "len_q" else [643, 0]
        return torch.tensor(values, dtype=torch.int32).view(tensor.dim)
    return (torch.rand(tensor.dim, generator=generator) + 0.5).to(to_torch(tensor.data_type))


def build(declare: Sample, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pointwise_layout, "_PROGRAMS_A_MULTIPROCESSOR", 8)
    graph = tw.Graph(
        io_data_type="bfloat16",
        intermediate_data_type="float32",
        handle=tw.create_handle(DEVICE),
    )
    declare(graph)
    graph.create_execution_plans()
    graph.deselect_engines(["aten", "hopper"])
    # Of decoding the plan whose keys are split, wherever it is ranked.
    for index, plan in enumerate(graph.plans):
        if dict(plan.knobs).get(tw.knob_type.SPLIT_K, 0) > 1:
            graph.select_plan(index)
            break
    graph.build()
    assert graph.selected_engine == "triton" and graph.get_workspace_size() > 0
    return graph


@pytest.mark.parametrize("declare", SAMPLES, ids=lambda sample: sample.__name__)
def test_nothing_beyond_it_is_touched_and_nothing_unwritten_read(
    declare: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = build(declare, monkeypatch)
    generator = torch.Generator().manual_seed(5)
    inputs = {t: operand(t, generator).to(DEVICE) for t in graph.inputs() if not t.is_pass_by_value}
    # Runs of keys take places in turn, so that only the longest sequences take them all.
    longest = {t: torch.full_like(x, 700) if t.name == "len_kv" else x for t, x in inputs.items()}
    size = graph.get_workspace_size()
    found, used = [], torch.zeros(size, dtype=torch.bool)
    for fill, given in [(fill, given) for given in (inputs, longest) for fill in FILLS]:
        storage = torch.full((GUARD + size + GUARD,), TRIPWIRE, dtype=torch.uint8, device=DEVICE)
        space = storage[GUARD : GUARD + size]
        space.fill_(fill)
        results = {
            t: torch.full(t.dim, 7.0, dtype=to_torch(t.data_type), device=DEVICE)
            for t in graph.outputs()
        }
        graph.execute({**given, **results}, space)
        outside = torch.cat((storage[:GUARD], storage[GUARD + size :]))
        assert torch.all(outside == TRIPWIRE), "bytes beside the workspace were written"
        used |= (space != fill).cpu()
        found.append([result.cpu() for result in results.values()])
    for first, second in [
        pair for half in (found[:2], found[2:]) for pair in zip(*half, strict=True)
    ]:
        assert torch.equal(first, second), "what the workspace held before shows in a result"
        assert torch.isfinite(first[first != -torch.inf].float()).all()
    # The count is exact: its last piece is used to the end.
    assert used[-16:].any(), "the last bytes are never written"


@pytest.mark.parametrize("declare", SAMPLES, ids=lambda sample: sample.__name__)
def test_a_byte_less_is_refused_before_a_write(
    declare: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = build(declare, monkeypatch)
    generator = torch.Generator().manual_seed(5)
    pack = {t: operand(t, generator).to(DEVICE) for t in graph.inputs() if not t.is_pass_by_value}
    results = {
        t: torch.full(t.dim, 7.0, dtype=to_torch(t.data_type), device=DEVICE)
        for t in graph.outputs()
    }
    size = graph.get_workspace_size()
    short = torch.full((size - 1,), TRIPWIRE, dtype=torch.uint8, device=DEVICE)
    for run in (graph.execute, graph.bind):
        with pytest.raises(tw.BindingError, match=f"{size - 1} bytes given; the plan needs {size}"):
            run({**pack, **results}, short)
    assert torch.all(short == TRIPWIRE)
    assert all(torch.all(result.float() == 7.0) for result in results.values())


@pytest.mark.parametrize("declare", SAMPLES, ids=lambda sample: sample.__name__)
@pytest.mark.parametrize("sm_count", [4, 132])
def test_the_plan_behind_needs_no_more(declare: Sample, sm_count: int) -> None:
    # A call whose addresses are less aligned than a plan assumes runs the one behind it, on the
    # workspace that was stated for the first.
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    declare(graph)
    graph.validate()
    family = ENGINE.family(graph)
    for proposal in family.propose(graph, sm_count):
        plan = family.plan(graph, proposal.knobs, sm_count)
        stated = plan_workspace(list(plan.scratch)).size_bytes
        while plan.fallback is not None:
            plan = plan.fallback
            assert plan_workspace(list(plan.scratch)).size_bytes <= stated
