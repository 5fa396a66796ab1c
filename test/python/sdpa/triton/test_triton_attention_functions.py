"""Functions on torch tensors run on Triton's kernels, both ways; interpreted without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import knob_type
from tilewright.ops import plan_cache
from tilewright.ops.attention_arguments import draw_seed
from tilewright.ops.gating import gated
from tilewright.oracle.attention import merge_states as merge_oracle

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted_functions")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
ROWS, KEYS, WIDTH, WIDTH_V, PAGE = 20, 37, 16, 24, 4
LENGTHS = (13, 37)


def draw(*dim: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator).to(dtype).to(DEVICE)


def integers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def dense(engine: str | None, leaves: list[Any]) -> Any:
    q, k, v, bias, sink, gate = leaves
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool, device=DEVICE).tril(9)
    options = {"bias": bias, "mask": mask, "sink": sink, "soft_cap": 2.0, "gate": gate}
    return ops.sdpa(q, k, v, return_stats=True, engine=engine, **options)


def dense_leaves() -> list[torch.Tensor]:
    q, k = draw(2, 4, ROWS, WIDTH, seed=1), draw(2, 2, KEYS, WIDTH, seed=2)
    v, bias = draw(2, 2, KEYS, WIDTH_V, seed=3), draw(1, 4, 1, KEYS, seed=4)
    return [q, k, v, bias, draw(4, seed=5), draw(2, 4, ROWS, WIDTH_V, seed=6)]


def packed(engine: str | None, leaves: list[torch.Tensor]) -> Any:
    prefix = integers([0, 9, 9, 30], torch.int64)
    options = {"causal": True, "align": "bottom_right", "return_stats": True}
    return ops.sdpa_varlen(*leaves, prefix, prefix, 21, 21, engine=engine, **options)


def packed_leaves() -> list[torch.Tensor]:
    # Rows 30 to 33 are of no sequence.
    sizes = ((4, WIDTH), (2, WIDTH), (2, WIDTH_V))
    return [draw(33, *size, seed=7 + n) for n, size in enumerate(sizes)]


CALLS: dict[str, tuple[Callable[[str, list[torch.Tensor]], Any], Callable[[], Any]]] = {
    "sdpa": (dense, dense_leaves),
    "sdpa_varlen": (packed, packed_leaves),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_and_stats_come_from_the_kernels(name: str) -> None:
    # A loss on O and Stats. engine= runs that engine or raises, which the next test shows.
    call, make = CALLS[name]
    found = {}
    for engine in ("triton", "aten"):
        leaves = [leaf.requires_grad_() for leaf in make()]
        o, stats = call(engine, leaves)
        seen = torch.where(torch.isneginf(stats), torch.zeros_like(stats), stats)
        loss = (o * o).sum() + (0.3 * seen).sum()
        found[engine] = (o, stats, *torch.autograd.grad(loss, leaves))
    for index, (got, want) in enumerate(zip(found["triton"], found["aten"], strict=True)):
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), index
        assert torch.allclose(got[finite], want[finite], rtol=1e-4, atol=2e-5), index
    ran = [(kept.graph.name, kept.built.plan.engine_name) for kept in plan_cache._plans.values()]
    assert sorted(ran) == [
        (function, engine)
        for function in ("sdpa", "sdpa_backward")
        for engine in ("aten", "triton")
    ]


def decoded(engine: str | None, dtype: torch.dtype) -> torch.Tensor:
    q, k = draw(2, 4, 3, WIDTH, seed=11, dtype=dtype), draw(2, 2, KEYS, WIDTH, seed=12, dtype=dtype)
    v = draw(2, 2, KEYS, WIDTH_V, seed=13, dtype=dtype)
    made = ops.sdpa_decode(q, k, v, integers(LENGTHS), window=(9, 0), engine=engine)
    assert isinstance(made, torch.Tensor)
    return made


def paged(engine: str | None, dtype: torch.dtype) -> torch.Tensor:
    # Tables of their own, pages of one row for the values, an entry that names no page.
    q = draw(2, 4, 3, WIDTH, seed=14, dtype=dtype)
    pages = draw(20, PAGE, 2, WIDTH, seed=15, dtype=dtype)
    values = draw(80, 1, 2, WIDTH_V, seed=16, dtype=dtype)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(2, 10)
    value_table = torch.randperm(80, generator=torch.Generator().manual_seed(2)).view(2, 40)
    table[0, 4:] = 2**30
    made = ops.sdpa_paged(
        q,
        pages,
        values,
        table.int().to(DEVICE),
        integers(LENGTHS),
        v_page_table=value_table.to(DEVICE),
        engine=engine,
    )
    assert isinstance(made, torch.Tensor)
    return made


@pytest.mark.parametrize("call", [decoded, paged])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_caches_are_read_by_the_kernels(call: Any, dtype: torch.dtype) -> None:
    made, wanted = call("triton", dtype).double(), call("aten", dtype).double()
    assert (made - wanted).abs().max() <= (1e-5 if dtype is torch.float32 else 2**-7)


@pytest.mark.parametrize(
    ("rows", "heads"), [(2, (2, 2)), (5, (6, 2)), (16, (4, 1)), (16, (2, 2))], ids=str
)
def test_up_to_sixteen_queries_share_the_keys_of_a_group(rows: int, heads: tuple[int, int]) -> None:
    # Split keys; a sequence shorter than its queries, whose first rows see nothing.
    made = []
    for engine in ("triton", "aten"):
        q = draw(2, heads[0], rows, WIDTH, seed=31)
        k, v = (draw(2, heads[1], 300, WIDTH, seed=seed) for seed in (32, 33))
        lengths = integers([300, rows - 1])
        made += ops.sdpa_decode(q, k, v, lengths, return_stats=True, engine=engine)
    assert torch.allclose(made[0], made[2], atol=1e-5)
    assert torch.allclose(made[1], made[3], atol=1e-5)
    assert torch.isneginf(made[1][1, :, 0]).all() and not made[0][1, :, 0].any()
    plans = [kept.built.plan for kept in plan_cache._plans.values()]
    assert [plan.engine_name for plan in plans] == ["triton", "aten"]
    # On a GPU one launch is quicker for so few keys.
    assert HAS_GPU or dict(plans[0].knobs)[knob_type.SPLIT_K] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_is_one_kernel_behind(dtype: torch.dtype) -> None:
    # O7. In a buffer of its own, in the gate's, and in one that overlaps the gate.
    o = draw(2, 4, 5, WIDTH, seed=41, dtype=dtype).transpose(1, 2)
    gate = draw(2, 5, 4, WIDTH, seed=42)
    expected = o.double() * torch.sigmoid(gate.double())
    storage = torch.zeros(gate.numel() + 8, dtype=dtype, device=DEVICE)
    over, apart = storage[8:].view(gate.shape), torch.empty_like(gate, dtype=dtype)
    step = 2**-8 if dtype is torch.bfloat16 else 1e-6
    for given, out in ((gate, None), (gate, apart), (over, over), (over, storage[:-8])):
        if given is over:
            over.copy_(gate)
        into = None if out is None else out.view(gate.shape)
        made = gated(o, given, into, engine="triton")
        assert made.dtype is dtype and (into is None or made is into)
        wanted = expected if given is gate else o.double() * torch.sigmoid(gate.to(dtype).double())
        assert (made.double() - wanted).abs().max() <= step * wanted.abs().max()
    kept_plans = plan_cache._plans.values()
    plans = [kept.built.plan for kept in kept_plans if kept.graph.name == "gate"]
    assert plans and all(plan.engine_name == "triton" for plan in plans)


def kept() -> list[tuple[str, str]]:
    return [(kept.graph.name, kept.built.plan.engine_name) for kept in plan_cache._plans.values()]


def test_attention_takes_it_in_its_own_kernel() -> None:
    leaves = [leaf.bfloat16() for leaf in dense_leaves()]
    (o, stats), (plain, level) = dense("triton", leaves), dense("triton", [*leaves[:5], None])
    assert torch.equal(stats, level)
    expected = plain.double() * torch.sigmoid(leaves[5].double())
    assert (o.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    # Of both calls, and nothing beside them.
    assert kept() == [("sdpa", "triton")] * 2


def test_packed_attention_takes_it_in_its_own_kernel() -> None:
    leaves, gate = packed_leaves(), draw(33, 4, WIDTH_V, seed=43)
    gate[3], gate[4] = torch.inf, -torch.inf
    prefix = integers([0, 9, 9, 30], torch.int64)
    out = torch.full_like(gate, torch.nan)
    for given in (gate, gate[:1].expand_as(gate)):
        made = ops.sdpa_varlen(
            *leaves, prefix, prefix, 21, 21, causal=True, gate=given, out=out, engine="triton"
        )
        plain = ops.sdpa_varlen(*leaves, prefix, prefix, 21, 21, causal=True, engine="aten")
        assert made is out
        assert torch.allclose(out, plain * torch.sigmoid(given), rtol=1e-5, atol=1e-5)
    assert {name for name, _ in kept()} == {"sdpa"}


def test_a_gate_in_the_buffer_of_out_is_read_first() -> None:
    q, k, v, *_, gate = dense_leaves()
    expected = ops.sdpa(q, k, v, engine="aten") * torch.sigmoid(gate)
    assert ops.sdpa(q, k, v, gate=gate, out=gate, engine="triton") is gate
    assert torch.allclose(gate, expected, rtol=1e-5, atol=1e-5)


def halves_of(lengths: tuple[int, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """States over two caches of ten keys and more, and over all; a length of 0 is no key."""
    q, k = draw(2, 4, 1, WIDTH, seed=21), draw(2, 2, KEYS, WIDTH, seed=22)
    v = draw(2, 2, KEYS, WIDTH_V, seed=23)
    options: dict[str, Any] = {"return_stats": True, "engine": "triton"}
    made = []
    for is_first in (True, False):
        keys, values = torch.zeros_like(k), torch.zeros_like(v)
        counts = [length if is_first else KEYS - length for length in lengths]
        for batch, count in enumerate(counts):
            part = slice(0, count) if is_first else slice(KEYS - count, KEYS)
            keys[batch, :, :count], values[batch, :, :count] = k[batch, :, part], v[batch, :, part]
        made += ops.sdpa_decode(q, keys, values, integers(counts), **options)
    return made, list(ops.sdpa_decode(q, k, v, integers([KEYS, KEYS]), **options))


@pytest.mark.parametrize("engine", ["triton", None])
def test_states_of_two_caches_merge(engine: str | None) -> None:
    # The second sequence has nothing in the first cache, and what it left there is NaN.
    states, (whole, level) = halves_of((10, 0))
    states[0][1] = torch.nan
    o, stats = ops.merge_states(*states, engine=engine)
    assert torch.allclose(o, whole, atol=1e-5) and torch.allclose(stats, level, atol=1e-5)
    assert torch.equal(o[1], states[2][1]) and torch.equal(stats[1], states[3][1])
    empty = [torch.full_like(states[0], torch.nan), torch.full_like(states[1], -torch.inf)]
    o, stats = ops.merge_states(*empty, *empty, engine=engine)
    assert not o.any() and torch.isneginf(stats).all()
    if engine:
        kept_plans = plan_cache._plans.values()
        (built,) = (kept.built for kept in kept_plans if kept.graph.name == "merge_states")
        assert built.plan.engine_name == engine and built.workspace_bytes == 0


def test_states_in_16_bits_and_other_layouts_merge() -> None:
    generator = torch.Generator().manual_seed(3)
    o = [torch.randn(3, 5, 2, 16, generator=generator).bfloat16().to(DEVICE) for _ in range(2)]
    stats = [torch.randn(3, 2, 5, generator=generator).to(DEVICE) * 9 for _ in range(2)]
    first, second = (x.transpose(1, 2) for x in o)
    got = ops.merge_states(first, stats[0], second, stats[1], engine="triton")
    states = [t.cpu().double() for t in (first, stats[0], second, stats[1])]
    want = merge_oracle(*states)
    assert got[0].dtype is torch.bfloat16 and got[1].dtype is torch.float32
    assert (got[0].cpu().double() - want[0]).abs().max() <= 2**-8 * want[0].abs().max()
    assert (got[1].cpu().double() - want[1]).abs().max() <= 1e-5


def test_no_engine_has_the_backward_of_a_merge() -> None:
    states, _ = halves_of((10, 5))
    states[0].requires_grad_()
    with pytest.raises(NotSupportedError, match="merge_states: an operand requires grad"):
        ops.merge_states(*states, engine="triton")
    o, stats = ops.merge_states(*states)
    assert torch.autograd.grad(o.sum() + stats.sum(), states[0])[0].isfinite().all()


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU: a CPU waits for nothing")
@pytest.mark.parametrize("engine", ["triton", None])
def test_no_function_waits(engine: str | None) -> None:
    # L3, B22: no length, table, mask or seed is read on the host, forward or backward.
    bf16 = torch.bfloat16
    q = draw(2, 4, ROWS, WIDTH, seed=1, dtype=bf16).requires_grad_()
    k, v = (draw(2, 2, KEYS, WIDTH, seed=n, dtype=bf16).requires_grad_() for n in (2, 3))
    bias = draw(1, 4, 1, KEYS, seed=4).requires_grad_()
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool, device=DEVICE).tril(9)
    sink, gate = draw(4, seed=5).requires_grad_(), draw(2, 4, ROWS, WIDTH, seed=6, dtype=bf16)
    tokens = [draw(33, h, WIDTH, seed=7, dtype=bf16).requires_grad_() for h in (4, 2, 2)]
    prefix, lengths = integers([0, 9, 9, 30], torch.int64), integers(LENGTHS)
    pages, table = draw(20, PAGE, 2, WIDTH, seed=15, dtype=bf16), integers([list(range(10))] * 2)
    d_o, d_tokens = torch.ones_like(q), torch.ones_like(tokens[0])

    def every() -> None:
        options: dict[str, Any] = {"bias": bias, "mask": mask, "sink": sink, "gate": gate}
        o = ops.sdpa(q, k, v, seqlens_kv=lengths, engine=engine, **options)
        torch.autograd.grad(o, (q, k, v, bias, sink), d_o)
        o = ops.sdpa_varlen(*tokens, prefix, prefix, 21, 21, causal=True, engine=engine)
        torch.autograd.grad(o, tokens, d_tokens)
        with torch.no_grad():
            ops.sdpa(q, k, v, dropout_p=0.5, engine=engine)
            ops.sdpa_paged(q, pages, pages, table, lengths, engine=engine)
            state = ops.sdpa_decode(q[:, :, :1], k, v, lengths, return_stats=True, engine=engine)
            ops.merge_states(*state, *state)

    every()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        every()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_a_seed_is_drawn_on_the_device_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(torch, "randint", lambda *_, device, **__: drawn.append(str(device)))
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=captures: c)
        for device in ("cpu", "cuda:1"):
            draw_seed(torch.device(device))
    assert drawn == ["cpu", "cpu", "cpu", "cuda:1"]


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU: a CPU captures nothing")
def test_each_replay_of_a_captured_call_drops_anew() -> None:
    q, k, v, d_o = (draw(1, 2, ROWS, WIDTH, seed=n) for n in range(30, 34))
    v.requires_grad_()

    def step(seed: torch.Tensor | None = None) -> tuple[Any, Any]:
        o = ops.sdpa(q, k, v, dropout_p=0.5, seed=seed)
        return o, torch.autograd.grad(o, v, d_o)[0]

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step(integers([3], torch.int64))
    torch.cuda.current_stream().wait_stream(beside)
    graph, found = torch.cuda.CUDAGraph(), []
    try:
        with torch.cuda.graph(graph):
            o, d_v = step()
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            found.append(o.detach().clone())
            # O is linear in V: these agree if both ways drop the same.
            sides = (o * d_o).sum(), (v * d_v).sum()
            assert torch.isclose(*sides, rtol=1e-3, atol=1e-2), sides
    finally:
        graph.reset()
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


@pytest.mark.skipif(HAS_GPU, reason="on a GPU the engine takes these calls")
def test_an_engine_that_is_named_runs_or_raises() -> None:
    # L13: outside of the interpreter it declines on a CPU, and nothing else is taken in its place.
    from tilewright.engines.compiled import engine as compiled_engine

    ops.clear_plan_cache()
    token = compiled_engine._may_interpret.set(False)
    try:
        leaves = dense_leaves()
        for call in (lambda: decoded("triton", torch.float32), lambda: dense("triton", leaves)):
            with pytest.raises(NotSupportedError, match="'triton' has no plan"):
                call()
    finally:
        compiled_engine._may_interpret.reset(token)
