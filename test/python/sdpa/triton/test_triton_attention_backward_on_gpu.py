"""What only a GPU shows of attention's backward: repeats, replay, no wait, strides, autograd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import Case

import tilewright as tw
from tilewright import ops
from tilewright.engines.triton import attention_backward

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU")
NAMES = ("q", "k", "v", "o", "dO", "stats")
GRADIENTS = ("dQ", "dK", "dV")
REPEATS = 50
LONGEST = 1000
# Rows and keys: whole tiles, tails of either, more of one than of the other.
EXTENTS = ((1, 1), (64, 64), (65, 127), (300, 300), (130, 515), (515, 130))
# Diagonals from the bottom right that start at a tile's first row.
SHIFTED = ((64, 192), (192, 64), (300, 364), (257, 1))


def build(pack: dict[str, torch.Tensor], **masks: Any) -> Any:
    """A built graph on operands as they lie; dq, dk, dv lie as their tensors in ``pack``."""
    q = pack["q"]
    graph = tw.Graph(
        io_data_type=q.dtype, intermediate_data_type="float32", handle=tw.create_handle("cuda")
    )
    declared = [graph.tensor(pack[n].shape, pack[n].stride(), pack[n].dtype, name=n) for n in NAMES]
    made = graph.sdpa_backward(
        *declared,
        attn_scale=q.shape[3] ** -0.5,
        use_deterministic_algorithm=True,
        **masks,
    )
    for name, tensor in zip(GRADIENTS, made, strict=True):
        tensor.set_output(True).set_name(name).set_dim(pack[name].shape)
        tensor.set_stride(pack[name].stride())
    graph.deselect_engines(["hopper"])
    graph.build()
    assert graph.selected_engine == "triton"
    return graph


def draw(
    rows: int, keys: int, depth: int, *, heads: tuple[int, int] = (4, 2), causal: bool = True
) -> dict[str, torch.Tensor]:
    """Operands with a forward's results, and gradients to be written."""
    generator = torch.Generator("cuda").manual_seed(rows + keys + depth)

    def normal(*dim: int) -> torch.Tensor:
        return torch.randn(dim, generator=generator, device="cuda").bfloat16()

    pack = {
        "q": normal(2, heads[0], rows, depth),
        "k": normal(2, heads[1], keys, depth),
        "v": normal(2, heads[1], keys, depth),
        "dO": normal(2, heads[0], rows, depth),
    }
    refresh(pack, causal=causal)
    pack |= {name: torch.full_like(pack[name[1:].lower()], torch.nan) for name in GRADIENTS}
    return pack


def scores(pack: dict[str, torch.Tensor], *, causal: bool) -> torch.Tensor:
    q, k = pack["q"].double(), pack["k"].double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(found.shape[2:], device="cuda", dtype=torch.bool).triu(1)
        found = found.masked_fill(hidden, -torch.inf)
    return found


def refresh(pack: dict[str, torch.Tensor], *, causal: bool) -> None:
    """O and Stats of what q, k and v hold now, written in place where they are."""
    found = scores(pack, causal=causal)
    v = pack["v"].double().repeat_interleave(pack["q"].shape[1] // pack["v"].shape[1], 1)
    made = {"o": (found.softmax(-1) @ v).bfloat16()}
    made["stats"] = found.logsumexp(-1, keepdim=True).float()
    for name, value in made.items():
        pack[name] = pack[name].copy_(value) if name in pack else value


def check(pack: dict[str, torch.Tensor], *, causal: bool) -> None:
    """Against float64 autograd."""
    leaves = {n: pack[n].double().requires_grad_() for n in ("q", "k", "v")}
    found = scores(leaves, causal=causal)
    v = leaves["v"].repeat_interleave(found.shape[1] // leaves["v"].shape[1], 1)
    (found.softmax(-1) @ v).backward(pack["dO"].double())
    for name in GRADIENTS:
        expected = leaves[name[1:].lower()].grad
        error = (pack[name].double() - expected).abs().max()
        assert error <= 2**-6 * max(1.0, expected.abs().max().item()), name


def workspace_of(graph: Any) -> torch.Tensor:
    return torch.full((graph.get_workspace_size(),), 0xAB, dtype=torch.uint8, device="cuda")


@pytest.mark.L0
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("depth", [64, 128, 256])
def test_gradients_repeat_bit_for_bit(depth: int, causal: bool) -> None:
    pack = draw(LONGEST, LONGEST, depth, causal=causal)
    graph = build(pack, use_causal_mask=causal)
    frame = graph.bind(pack, workspace_of(graph))
    frame.launch()
    first = {name: pack[name].clone() for name in GRADIENTS}
    check(pack, causal=causal)
    for _ in range(REPEATS):
        for name in GRADIENTS:
            pack[name].fill_(torch.nan)
        frame.launch()
        for name in GRADIENTS:
            assert torch.equal(pack[name], first[name]), name


@pytest.mark.L0
def test_large_cases() -> None:
    for depth, rows, keys, causal in (
        (64, 1000, 1000, True),
        (64, 777, 1300, False),
        (128, 1024, 1024, True),
        (128, 640, 333, False),
        (256, 300, 300, True),
        (96, 300, 500, False),
    ):
        pack = draw(rows, keys, depth, causal=causal)
        graph = build(pack, use_causal_mask=causal)
        graph.execute(pack, workspace_of(graph))
        check(pack, causal=causal)


@pytest.mark.L0
def test_neither_bind_nor_launch_waits_or_allocates(sync_is_an_error: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    pack = draw(200, 200, 64)
    graph = build(pack, use_causal_mask=True)
    workspace = workspace_of(graph)
    graph.execute(pack, workspace)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph.bind(pack, workspace).launch()
    graph.execute(pack, workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.set_sync_debug_mode("default")
    check(pack, causal=True)


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.L0
def test_replay_reads_operands_as_they_are(captured: Any) -> None:
    pack = draw(300, 300, 64)
    graph = build(pack, use_causal_mask=True)
    frame = graph.bind(pack, workspace_of(graph))
    frame.launch()
    with captured(frame.launch) as recorded:
        for _ in range(3):
            for name in ("q", "k", "v", "dO"):
                pack[name].normal_()
            refresh(pack, causal=True)
            for name in GRADIENTS:
                pack[name].fill_(torch.nan)
            recorded.replay()
            torch.cuda.synchronize()
            check(pack, causal=True)


@pytest.mark.L0
def test_strides_beyond_32_bits_are_addressed() -> None:
    # B1: every operand's row stride truncated to 32 bits leads to a decoy inside the allocation.
    step, width = 2**32 + 4096, 64
    pack = draw(2, 2, width, heads=(1, 1), causal=False)
    pack = {name: tensor[:1] for name, tensor in pack.items()}
    try:
        storage = torch.empty(step + 8192, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("9 GiB of device memory are not free")
    storage[:8192].fill_(777.0)
    for number, name in enumerate(("q", "k", "v", "o", "dO", *GRADIENTS)):
        wide = storage.as_strided((1, 1, 2, width), (step, step, step, 1), number * width)
        pack[name] = wide.copy_(pack[name])
    graph = build(pack)
    graph.execute(pack, workspace_of(graph))
    check(pack, causal=False)
    assert (storage[4096:8192] == 777.0).all(), "nothing landed at the narrow addresses"


@pytest.mark.L0
@pytest.mark.parametrize("deterministic", [True, False])
def test_autograd_of_sdpa_takes_the_kernels(deterministic: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (
        torch.randn(2, h, 150, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
        for h in (4, 2, 2)
    )
    o = ops.sdpa(q, k, v, causal=True, deterministic=deterministic, engine="triton")
    d_o = torch.randn(o.shape, generator=generator, device="cuda").bfloat16()
    o.backward(d_o)
    pack = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "dO": d_o}
    pack |= {"dQ": q.grad, "dK": k.grad, "dV": v.grad}
    check(pack, causal=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(heads=(4, 2)), marks=pytest.mark.L0),
        pytest.param(Case(sizes=(128, 128), dtype="float16", layout="bshd"), marks=pytest.mark.L0),
        pytest.param(Case(sizes=(256, 256), layout="gaps"), marks=pytest.mark.L0),
        pytest.param(Case(sizes=(192, 128), heads=(3, 1)), marks=pytest.mark.L1),
        pytest.param(Case(sizes=(40, 72), dtype="float16", sink="float32"), marks=pytest.mark.L1),
        pytest.param(Case(sizes=(96, 96), out="float32"), marks=pytest.mark.L1),
        pytest.param(Case(sizes=(16, 16), scale="device"), marks=pytest.mark.L1),
    ],
    ids=str,
)
@pytest.mark.parametrize("band", ["open", "causal", "bottom_right"])
def test_plain_scores(case: Case, band: str) -> None:
    for number, (rows, keys) in enumerate(SHIFTED if band == "bottom_right" else EXTENTS):
        drawn = replace(case, band=band, rows=rows, keys=keys, seed=number)
        DeclaredBackward(backward_case(drawn), "cuda", is_deterministic=True).run(execute_plain)


def execute_plain(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """On the kernels that tensor maps feed, where there is one of SM90."""
    graph.deselect_engines(["hopper"])
    graph.build()
    assert graph.selected_engine == "triton"
    properties = torch.cuda.get_device_properties(0)
    if properties.major == 9:
        plan = attention_backward.plan(graph, (), properties.multi_processor_count)
        names = {kernel.spec.name for kernel in plan.kernels}
        assert "attention_backward_plain_rows" in names
    graph.execute(pack, workspace_of(graph))
