"""What attention's kernels promise beside values: sums of grouped heads in float32, any stride of
axes that are never stepped, packed operands cut out of one buffer, grids that no length changes.

On Triton's kernels, interpreted without a GPU, and on Hopper's where its GPU is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.engines.triton import attention
from tilewright.graph.enums import knob_type
from tilewright.ops import plan_cache
from tilewright.oracle import evaluate

pytestmark = pytest.mark.usefixtures("interpreted_functions")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
BF16 = torch.bfloat16


def draw(seed: int, *dim: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.L0
def test_the_gradients_of_grouped_heads_are_summed_in_float32(engine: str) -> None:
    # One head brings 256 and fifteen bring 0.75 each: summed in bfloat16, these would vanish.
    heads, rows, width = 16, 64 if HAS_GPU else 8, 64
    q = torch.zeros(1, heads, rows, width, dtype=BF16, device=DEVICE)
    k, v = (torch.zeros(1, 1, rows, width, dtype=BF16, device=DEVICE) for _ in range(2))
    d_o = torch.zeros_like(q)
    # All scores are 0. Row 0 sees the first key alone; row 1 sees two, whose values differ by 4.
    q[:, :, 1, 1] = 1.0
    v[:, :, 1, 0] = 4.0
    parts = torch.full((heads,), 0.75, dtype=BF16, device=DEVICE)
    parts[5] = 256.0
    d_o[0, :, 0, 2] = parts
    d_o[0, :, 1, 0] = parts
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ops.sdpa(*leaves, causal=True, scale=1.0, engine=engine).backward(d_o)
    total = float(parts.double().sum())
    # Of bfloat16 at 256. The interpreter cuts where a GPU rounds.
    assert total == 267.25
    step = 2.0
    # dV of the first key is the sum; dK of the second is it, too: 1/2 * 1/2 * 4 for each head.
    assert v.grad is not None and k.grad is not None
    assert abs(float(v.grad[0, 0, 0, 2]) - total) <= step
    assert abs(float(k.grad[0, 0, 1, 1]) - total) <= step
    assert abs(float(k.grad[0, 0, 0, 1]) + total) <= step


FAR = 2**33


@pytest.mark.L0
@pytest.mark.parametrize("rows", [1, 80])
def test_axes_that_are_never_stepped_may_have_any_stride(engine: str, rows: int) -> None:
    if engine == "hopper" and rows == 1:
        pytest.skip("one row is not for its kernels")
    # B3: one sequence and one head, and one row; each axis has a stride of its own past 2^32.
    keys, width = (300 if rows == 1 else 90), 64
    plain = [draw(n, 1, 1, count, width) for n, count in enumerate((rows, keys, keys))]

    def apart(tensor: torch.Tensor, number: int) -> torch.Tensor:
        steps = [FAR * (number + 1), FAR * (number + 5), width, 1]
        if tensor.shape[2] == 1:
            steps[2] = FAR * (number + 9)
        return tensor.as_strided(tensor.shape, steps)

    made = []
    for is_far in (False, True):
        given = [apart(x, n) if is_far else x for n, x in enumerate(plain)]
        made.append(run_graph(engine, given, far=is_far))
    for got, want in zip(made[1], made[0], strict=True):
        assert torch.equal(got, want) and torch.isfinite(got).all()


def run_graph(engine: str, given: list[torch.Tensor], *, far: bool) -> list[torch.Tensor]:
    """O and Stats, and with many rows dQ, dK and dV, of operands as they lie."""
    q, k, v = given
    rows, width = q.shape[2], q.shape[3]
    steps = (FAR * 3, FAR * 2, width, 1) if far else None
    found = {"o": torch.full(q.shape, torch.nan, dtype=BF16, device=DEVICE)}
    found["stats"] = torch.full((1, 1, rows, 1), torch.nan, device=DEVICE)
    graph = graph_of(engine)
    tensors = [graph.tensor(x.shape, x.stride(), name=n) for n, x in zip("qkv", given, strict=True)]
    o, stats = graph.sdpa(*tensors, generate_stats=True, attn_scale=0.125)
    outputs = {"o": o, "stats": stats}
    execute(graph, dict(zip("qkv", given, strict=True)), outputs, found, steps)
    if rows == 1:
        return list(found.values())
    graph = graph_of(engine)
    saved = {"q": q, "k": k, "v": v, "o": found["o"], "dO": draw(7, *q.shape)}
    saved["stats"] = found["stats"]
    tensors = [graph.tensor(x.shape, x.stride(), x.dtype, name=n) for n, x in saved.items()]
    names = {"dQ": q, "dK": k, "dV": v}
    gradients = dict(zip(names, graph.sdpa_backward(*tensors, attn_scale=0.125), strict=True))
    made = {n: torch.full(x.shape, torch.nan, dtype=BF16, device=DEVICE) for n, x in names.items()}
    execute(graph, saved, gradients, made, steps)
    return [*found.values(), *made.values()]


def graph_of(engine: str) -> Any:
    graph = tw.Graph(
        io_data_type=BF16, intermediate_data_type="float32", handle=tw.create_handle(DEVICE)
    )
    graph.wanted = engine
    return graph


def execute(graph: Any, given: Any, outputs: Any, buffers: Any, steps: Any) -> None:
    """Run it with outputs of one sequence and one head, which lie at ``steps`` if there are any."""
    for name, tensor in outputs.items():
        buffer = buffers[name]
        stride = buffer.stride() if steps is None else (*steps[:2], *buffer.stride()[2:])
        tensor.set_output(True).set_name(name).set_dim(tuple(buffer.shape)).set_stride(stride)
        tensor.set_data_type(buffer.dtype)
    graph.create_execution_plans()
    graph.deselect_engines({"hopper", "triton", "aten"} - {graph.wanted})
    graph.build()
    assert graph.selected_engine == graph.wanted
    views = {
        name: buffer.as_strided(buffer.shape, outputs[name].stride)
        for name, buffer in buffers.items()
    }
    size = max(graph.get_workspace_size(), 1)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    graph.execute({**given, **views}, workspace)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("one buffer", marks=pytest.mark.L0),
        pytest.param("gaps between heads", marks=pytest.mark.L1),
    ],
)
def test_packed_operands_that_are_cut_out_of_others(engine: str, kind: str) -> None:
    # O2: a token of q, k and v is a row of a larger buffer, as a projection of all three leaves it.
    lengths, heads, width = [37, 0, 70, 21] if HAS_GPU else [9, 0, 20, 3], 2, 64
    prefix = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    tokens, longest = sum(lengths), 70
    wide = draw(5, tokens, 3, heads, width + 8)
    if kind == "one buffer":
        wide = wide[..., :width].contiguous()
    views = [x[..., :width] for x in wide.unbind(1)]
    options: dict[str, Any] = {"causal": True, "return_stats": True, "engine": engine}
    made = []
    for operands in (views, [x.contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in operands]
        o, stats = ops.sdpa_varlen(*leaves, prefix, prefix, longest, longest, **options)
        gradients = torch.autograd.grad(o, leaves, draw(6, *o.shape))
        made.append([x.detach() for x in (o, stats, *gradients)])
    room = torch.full((tokens, heads, width + 16), 7.0, dtype=BF16, device=DEVICE)
    out = room[..., 8 : width + 8]
    with torch.no_grad():
        ops.sdpa_varlen(
            *views, prefix, prefix, longest, longest, causal=True, out=out, engine=engine
        )
    assert is_near(out, made[1][0])
    assert (room[..., :8] == 7.0).all() and (room[..., width + 8 :] == 7.0).all()
    assert all(is_near(got, want) for got, want in zip(*made, strict=True))


@pytest.mark.L0
def test_packed_sequences_without_any_key(engine: str) -> None:
    # No buffer of keys owns a byte: an address that a copy may not read.
    lengths, heads, width = [70, 0, 80], 2, 64
    q = draw(8, sum(lengths), heads, width).requires_grad_()
    k, v = (torch.empty(0, heads, width, dtype=BF16, device=DEVICE) for _ in range(2))
    prefix = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    none = torch.zeros_like(prefix)
    leaves = [q, k.requires_grad_(), v.requires_grad_()]
    options: dict[str, Any] = {"causal": True, "return_stats": True, "engine": engine}
    o, stats = ops.sdpa_varlen(*leaves, prefix, none, 80, 80, **options)
    assert not o.any() and torch.isneginf(stats).all()
    gradients = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert not any(gradient.any() for gradient in gradients)


def is_near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Up to what another tile, or another order of a sum, changes."""
    is_finite = want.isfinite()
    bound = 2**-7 * max(1.0, float(want[is_finite].abs().max()))
    differs = (got - want)[is_finite].abs().max()
    return torch.equal(got.isfinite(), is_finite) and float(differs) <= bound


@pytest.mark.L0
@pytest.mark.parametrize("words", [(2**40 + 7, 2**35 + 11), (-5, 2**63 - 1)], ids=str)
def test_draws_take_all_bits_of_seed_and_offset(words: tuple[int, int]) -> None:
    # Against the oracle's own Philox; O tells that attention drops what is told to be dropped.
    q, k, v = (draw(n, 2, 3, rows, 16).float() for n, rows in enumerate((7, 9, 9)))
    numbers = [torch.full((1, 1, 1, 1), word, device=DEVICE) for word in words]
    graph = graph_of("triton")
    tensors = [graph.tensor(x.shape, x.stride(), x.dtype) for x in (q, k, v, *numbers)]
    draws = graph.tensor(name="draws")
    options = {"dropout": (0.5, *tensors[3:]), "rng_dump": draws, "is_inference": True}
    o, _ = graph.sdpa(*tensors[:3], attn_scale=0.25, **options)
    made = {"o": torch.empty_like(q), "draws": torch.empty(2, 3, 7, 9, device=DEVICE)}
    given = dict(zip(tensors, (q, k, v, *numbers), strict=True))
    execute(graph, given, {"o": o, "draws": draws}, made, None)
    expected = evaluate(graph, {tensor.uid: x.cpu() for tensor, x in given.items()})
    assert torch.equal(made["draws"].cpu().double(), expected[draws.uid].double())
    assert 0.3 < float(made["draws"].mean()) < 0.7
    assert is_near(made["o"].cpu(), expected[o.uid].float())


@pytest.fixture
def tf32_is_on() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.L0
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU: a CPU has no TF32")
def test_a_row_with_one_key_is_its_value_where_tf32_is_on(tf32_is_on: None) -> None:
    # R4: what a reference in float32 makes of it is cut to ten bits.
    q, k, v = (draw(n, 1, 2, 80, 64, dtype=torch.float32) for n in range(3))
    hidden = torch.ones(80, 80, dtype=torch.bool, device=DEVICE).triu(1)
    plain = (q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    assert float((plain - v)[:, :, 0].abs().max()) > 1e-4
    o = ops.sdpa(q, k, v, causal=True, engine="triton")
    assert isinstance(o, torch.Tensor)
    assert float((o - v)[:, :, 0].abs().max()) <= 1e-6


@pytest.mark.L0
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU: elsewhere ATen is taken")
def test_functions_take_kernels_unasked() -> None:
    # L13: which plans ran, forward and backward, where no engine is named.
    q, k, v = (draw(n, 2, heads, 80, 64).requires_grad_() for n, heads in enumerate((4, 2, 2)))
    tokens = [draw(n, 150, heads, 64).requires_grad_() for n, heads in enumerate((4, 2, 2))]
    prefix = torch.tensor([0, 70, 150], device=DEVICE, dtype=torch.int32)
    lengths = torch.tensor([80, 33], device=DEVICE, dtype=torch.int32)
    pages = [draw(n, 20, 8, 2, 64) for n in (8, 9)]
    table = torch.randperm(20, device=DEVICE).int().view(2, 10)
    bias = draw(3, 1, 4, 1, 80).requires_grad_()
    made = [
        ops.sdpa(q, k, v, causal=True),
        ops.sdpa(q, k, v, bias=bias, sink=draw(4, 4), soft_cap=3.0),
        ops.sdpa(q, k, v, dropout_p=0.3, seqlens_kv=lengths),
        ops.sdpa_varlen(*tokens, prefix, prefix, 80, 80, causal=True),
    ]
    for o in made:
        assert isinstance(o, torch.Tensor)
        o.sum().backward()
    with torch.no_grad():
        ops.sdpa_paged(q, *pages, table, lengths)
        state = ops.sdpa_decode(q[:, :, :1], k, v, lengths, return_stats=True)
        ops.merge_states(*state, *state)
    ran = [(kept.graph.name, kept.built.plan.engine_name) for kept in plan_cache._plans.values()]
    assert {name for name, _ in ran} >= {"sdpa", "sdpa_backward", "merge_states"} and len(ran) >= 10
    assert {engine for _, engine in ran} <= {"triton", "hopper"}, ran


@pytest.mark.L0
@pytest.mark.parametrize(("batch", "keys"), [(1, 131072), (8, 32768), (8, 16384)])
@pytest.mark.parametrize("count", [132, 148])
def test_programs_of_few_queries_stay_and_take_run_after_run(
    batch: int, keys: int, count: int
) -> None:
    graph = tw.Graph(io_data_type=BF16, intermediate_data_type="float32")
    q = graph.tensor((batch, 32, 1, 128))
    k, v = (graph.tensor((batch, 8, keys, 128)) for _ in range(2))
    lengths = [graph.tensor((batch, 1, 1, 1), data_type="int32") for _ in range(2)]
    masks = {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    o, _ = graph.sdpa(q, k, v, is_inference=True, attn_scale=0.1, **masks)
    o.set_output(True)
    graph.validate()
    knobs = attention.propose(graph, count)[0].knobs
    first = attention.plan(graph, knobs, count).kernels[0]
    assert first.spec.name == "attention_decode"
    runs = batch * 8 * dict(knobs)[knob_type.SPLIT_K]
    # As many as the device holds at once, whatever the lengths are; there are more runs.
    assert first.grid == (3 * count, 1, 1) and runs > 3 * count
