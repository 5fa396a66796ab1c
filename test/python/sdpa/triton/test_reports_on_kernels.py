"""Public reports of broken attention, on Triton's kernels and, on its GPU, on Hopper's.

The inputs are those that broke other libraries; where one is too large to interpret, a smaller one
of the same shape stands for it without a GPU. Merging empty states is in
``test_triton_attention_functions.py``, pages and tokens beyond 32 bits on a GPU in
``test_triton_attention_on_gpu.py`` and ``test_triton_attention_backward_on_gpu.py``.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.usefixtures("interpreted_functions")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
# Those of the report on large negative scores.
LENGTHS = (64, 192, 640, 704, 768)


def draw(seed: int, *dim: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator).to(dtype).to(DEVICE)


def integers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, may: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and Stats of (heads, rows, width) in float64; a row that sees nothing gives 0 and -inf."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    if may is not None:
        scores = scores.masked_fill(~may, -torch.inf)
    stats = scores.logsumexp(2, keepdim=True)
    level = torch.where(stats == -torch.inf, 0.0, stats)
    return (scores - level).exp() @ v, stats[..., 0]


def near(made: torch.Tensor, expected: torch.Tensor, tol: float) -> bool:
    if not expected.numel():
        return made.shape == expected.shape
    made, expected = made.detach().double(), expected.detach()
    return bool((made - expected).abs().max() <= tol * max(1.0, float(expected.abs().max())))


@pytest.mark.L0
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_1_rows_that_a_mask_leaves_empty(dtype: torch.dtype) -> None:
    q, k, v = (draw(n, 1, 1, 8, 8, dtype=dtype).requires_grad_() for n in range(3))
    mask = torch.zeros(8, 8, dtype=torch.bool, device=DEVICE)
    mask[:4, :4] = True
    o, stats = ops.sdpa(q, k, v, mask=mask, return_stats=True, engine="triton")
    o.sum().backward()
    assert not o[:, :, 4:].any() and torch.isneginf(stats[:, :, 4:]).all()
    expected, level = dense(*(x.detach()[0].double() for x in (q, k, v)), mask)
    assert near(o[0], expected, 1e-5 if dtype is FP32 else 2**-7)
    assert near(stats[0, :, :4], level[:, :4], 1e-5 if dtype is FP32 else 2**-7)
    assert q.grad is not None and not q.grad[:, :, 4:].any() and q.grad[:, :, :4].any()
    for leaf in (k, v):
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all()
        assert not leaf.grad[:, :, 4:].any() and leaf.grad[:, :, :4].any()


def seen_by(engine: str, rows: int, keys: int, **options: Any) -> torch.Tensor:
    """Which keys each row's weights are of: the values are the rows of an identity."""
    width = 64 if engine == "hopper" else 16
    assert keys <= width
    q = torch.zeros(1, 1, rows, width, dtype=BF16, device=DEVICE)
    k = draw(3, 1, 1, keys, width, dtype=BF16)
    v = torch.eye(keys, width, dtype=BF16, device=DEVICE)[None, None]
    o, stats = ops.sdpa(q, k, v, return_stats=True, engine=engine, **options)
    seen = o[0, 0, :, :keys] > 0
    assert not o[0, 0, :, keys:].any()
    counts = seen.sum(1)
    # Equal weights, and the logarithm of their number, which is -inf for none. The interpreter cuts
    # to bfloat16, where a GPU rounds.
    assert torch.allclose(stats[0, 0], counts.float().log(), atol=1e-3)
    weights = torch.where(seen, 1.0 / counts.clamp(min=1)[:, None], 0.0)
    assert torch.allclose(o[0, 0, :, :keys].float(), weights, rtol=2**-7, atol=0.0)
    return seen.cpu()


def shown(rows: int, keys: int, shift: int, left: int | None, right: int | None) -> torch.Tensor:
    row, col = torch.arange(rows)[:, None] + shift, torch.arange(keys)[None, :]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        seen &= col >= row - left
    if right is not None:
        seen &= col <= row + right
    return seen


@pytest.mark.L0
def test_2_the_alignment_of_a_causal_mask(engine: str) -> None:
    # Few rows are not for Hopper's kernels.
    factor = 10 if engine == "hopper" else 1
    for rows, keys in ((2 * factor, 5 * factor), (5 * factor, 2 * factor)):
        top = seen_by(engine, rows, keys, causal=True)
        assert torch.equal(top, shown(rows, keys, 0, None, 0))
        low = seen_by(engine, rows, keys, causal=True, align="bottom_right")
        assert torch.equal(low, shown(rows, keys, keys - rows, None, 0))
        if (rows, keys) == (2, 5):
            assert top.sum(1).tolist() == [1, 2] and low.sum(1).tolist() == [4, 5]
        if (rows, keys) == (5, 2):
            assert low.sum(1).tolist() == [0, 0, 0, 1, 2]


@pytest.mark.L0
def test_3_a_window_counts_the_query_itself(engine: str) -> None:
    rows = 60 if engine == "hopper" else 12
    seen = seen_by(engine, rows, rows, causal=True, window=(3, 0))
    assert seen.sum(1).tolist() == [1, 2, 3] + [4] * (rows - 3)
    assert bool(seen.diagonal().all())
    # A window of 4 in both directions is 2 on each side.
    seen = seen_by(engine, rows, rows, window=(2, 2))
    assert torch.equal(seen, shown(rows, rows, 0, 2, 2))
    assert seen_of_a_graph(engine, rows) == [1, 2, 3] + [4] * (rows - 3)


def seen_of_a_graph(engine: str, rows: int) -> list[int]:
    """How many keys a graph's sliding_window_length of 4 under a causal mask shows each row."""
    width = 64 if engine == "hopper" else 16
    graph = tw.Graph(io_data_type=BF16, intermediate_data_type="float32")
    tensors = [graph.tensor((1, 1, rows, width), name=name) for name in "qkv"]
    options = {"use_causal_mask": True, "sliding_window_length": 4}
    o, _ = graph.sdpa(*tensors, is_inference=True, attn_scale=1.0, **options)
    o.set_output(True).set_name("o")
    graph.create_execution_plans()
    graph.deselect_engines({"hopper", "triton", "aten"} - {engine})
    graph.build()
    q = torch.zeros(1, 1, rows, width, dtype=BF16, device=DEVICE)
    v = torch.eye(rows, width, dtype=BF16, device=DEVICE)[None, None]
    out = torch.full_like(q, torch.nan)
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=DEVICE)
    graph.execute({"q": q, "k": q, "v": v, "o": out}, workspace)
    return [int(n) for n in (out[0, 0] > 0).sum(1)]


@pytest.mark.parametrize(
    "length",
    [pytest.param(n, marks=pytest.mark.L0 if n == 704 else pytest.mark.L1) for n in LENGTHS],
)
def test_4_large_negative_scores(engine: str, length: int) -> None:
    check_large_negative_scores(engine, length, masked=False)


@pytest.mark.L0
@pytest.mark.parametrize("length", [704])
def test_4_large_negative_scores_under_a_boolean_mask(length: int) -> None:
    check_large_negative_scores("triton", length, masked=True)


def check_large_negative_scores(engine: str, length: int, *, masked: bool) -> None:
    if not HAS_GPU and length > 64:
        length //= 8
    q, k = (0.1 * draw(length + n, 1, 1, length, 64) for n in range(2))
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8.0
    q, k, v = (x.to(BF16).requires_grad_() for x in (q, k, draw(length, 1, 1, length, 64)))
    tril = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    options = {"mask": tril} if masked else {"causal": True}
    o = ops.sdpa(q, k, v, engine=engine, **options)
    # Of a sum, written out: one number for all elements is not for Hopper's kernels.
    o.backward(torch.ones_like(o))
    wide = [x.detach()[0].double().requires_grad_() for x in (q, k, v)]
    dense(*wide, tril)[0].sum().backward()
    for leaf, other in zip((q, k, v), wide, strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert torch.isfinite(leaf.grad).all()
        # dQ's first column sums what cancels: keys of -960, each with its rounded share of dS.
        first = int(leaf is q)
        assert near(leaf.grad[0, :, :, first:], other.grad[:, :, first:], 2**-6)


@pytest.mark.L0
def test_5_short_segments_of_grouped_heads() -> None:
    cu_q, cu_kv = [0, 1, 1, 2], [0, 3, 3, 8]
    leaves = [
        draw(n, t, h, 64).requires_grad_() for n, (t, h) in enumerate(((2, 9), (8, 3), (8, 3)))
    ]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    o, stats = ops.sdpa_varlen(
        *leaves, integers(cu_q), integers(cu_kv), 1, 5, causal=True, return_stats=True,
        engine="triton",
    )  # fmt: skip
    parts = []
    for b in (0, 2):
        q = wide[0][cu_q[b] : cu_q[b + 1]].transpose(0, 1)
        k, v = (x[cu_kv[b] : cu_kv[b + 1]].transpose(0, 1) for x in wide[1:])
        may = shown(q.shape[1], k.shape[1], 0, None, 0).to(DEVICE)
        parts.append(dense(q, k, v, may))
    expected = torch.cat([part.transpose(0, 1) for part, _ in parts])
    assert near(o, expected, 1e-5)
    assert near(stats, torch.cat([level for _, level in parts], 1), 1e-5)
    d_o = draw(9, *o.shape)
    o.backward(d_o)
    expected.backward(d_o.double())
    for leaf, other in zip(leaves, wide, strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert near(leaf.grad, other.grad, 3e-5)


@pytest.mark.L0
def test_6_keys_of_no_query_get_no_gradient(engine: str) -> None:
    factor = 1 if HAS_GPU else 64
    cu_q = [n // factor for n in (0, 0, 1208, 2048, 2048)]
    cu_kv = [n // factor for n in (0, 2538, 4280, 5120, 8192)]
    width, dtype = (256, BF16) if HAS_GPU else (64, FP32)
    q = draw(1, cu_q[-1], 4, width, dtype=dtype).requires_grad_()
    k, v = (draw(n, cu_kv[-1], 1, width, dtype=dtype).requires_grad_() for n in (2, 3))
    longest = (max(b - a for a, b in pairwise(x)) for x in (cu_q, cu_kv))
    ops.sdpa_varlen(
        q, k, v, integers(cu_q), integers(cu_kv), *longest, engine=engine
    ).sum().backward()
    for leaf in (k, v):
        assert leaf.grad is not None
        assert not leaf.grad[: cu_kv[1]].any() and not leaf.grad[cu_kv[3] :].any()
        used = leaf.grad[cu_kv[1] : cu_kv[3]]
        assert torch.isfinite(used).all() and used.flatten(1).any(1).float().mean() > 0.9


@pytest.mark.L0
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_7_a_cache_that_is_used_in_part(bad: float) -> None:
    lengths = [32, 64, 96, 48]
    q, k, v = draw(1, 4, 4, 1, 16), draw(2, 4, 2, 128, 16), draw(3, 4, 2, 128, 16)
    for batch, used in enumerate(lengths):
        k[batch, :, used:], v[batch, :, used:] = 0.0, 0.0
    clean = ops.sdpa_decode(q, k, v, integers(lengths), engine="triton")
    for batch, used in enumerate(lengths):
        k[batch, :, used:], v[batch, :, used:] = bad, bad
    dirty = ops.sdpa_decode(q, k, v, integers(lengths), engine="triton")
    assert isinstance(clean, torch.Tensor) and isinstance(dirty, torch.Tensor)
    assert torch.isfinite(dirty).all() and torch.equal(dirty, clean)


@pytest.mark.L0
def test_7_free_slots_of_a_last_page_and_padding_pages(engine: str) -> None:
    rows, width, dtype = (20, 64, BF16) if engine == "hopper" else (1, 16, FP32)
    q = draw(4, 1, 4, rows, width, dtype=dtype)
    pages = [draw(n, 6, 4, 2, width, dtype=dtype) for n in (5, 6)]
    # Length 13 in pages of 4: the last page has three free slots; what is padded names page 5.
    table, length = integers([[3, 0, 4, 1, 5, 5]]), integers([13])
    made = []
    for filling in (0.0, torch.nan):
        for x in pages:
            x[1, 1:], x[5] = filling, filling
        made.append(ops.sdpa_paged(q, *pages, table, length, engine=engine))
    assert torch.isfinite(made[1]).all() and torch.equal(made[0], made[1])


@pytest.mark.L0
def test_9_statistics_agree_and_a_loss_on_them_has_its_gradient(engine: str) -> None:
    rows, width, dtype = (80, 64, BF16) if engine == "hopper" else (20, 16, FP32)
    leaves = [
        draw(n, 2, h, rows, width, dtype=dtype).requires_grad_() for n, h in enumerate((4, 2, 2))
    ]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    _, stats = ops.sdpa(*leaves, causal=True, return_stats=True, engine=engine)
    may = shown(rows, rows, 0, None, 0).to(DEVICE)
    level = torch.stack([dense(*(x[b] for x in wide), may)[1] for b in range(2)])
    # Natural logarithms: in base 2 they would be 1.4427 times as large.
    assert near(stats, level, 1e-5 if dtype is FP32 else 1e-3)
    weight = draw(9, *stats.shape)
    loss = (stats * weight).sum()
    if engine == "hopper":
        # The gradients of such a loss are made in float32, which its kernels do not take: they
        # raise, unless another engine may run the backward.
        with pytest.raises(NotSupportedError, match="'hopper' has no plan"):
            loss.backward()
        return
    loss.backward()
    (level * weight.double()).sum().backward()
    for leaf, other in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        expected = torch.zeros_like(leaf) if other.grad is None else other.grad
        assert near(leaf.grad, expected.double(), 3e-5 if dtype is FP32 else 2**-6)


def sparse(path: Path, elements: int) -> torch.Tensor:
    """Zeros of float32 in a file without blocks."""
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=4 * elements)
    return torch.empty(0, dtype=FP32).set_(storage)  # type: ignore[call-overload]


@pytest.mark.L0
@pytest.mark.skipif(HAS_GPU, reason="a GPU has no sparse files")
@pytest.mark.parametrize("rows", [2, 20])
def test_10_a_page_whose_offset_passes_32_bits(rows: int, tmp_path: Path) -> None:
    # Cut to 32 bits it is that of page 0, which holds other numbers.
    page, stride, far = 8, 16384, 262144
    q, k, v = draw(1, 1, 2, rows, 16), draw(2, 2, page, 2, 16), draw(3, 2, page, 2, 16)
    pools = []
    for name, values in (("k", k), ("v", v)):
        flat = sparse(tmp_path / name, far * stride + page * 2 * 16)
        pools.append(flat.as_strided((far + 1, page, 2, 16), (stride, 32, 16, 1)))
        pools[-1][far], pools[-1][0] = values[0], values[1]
    lengths, table = integers([page]), integers([[far]])
    made = ops.sdpa_paged(q, *pools, table, lengths, engine="triton")
    expected = ops.sdpa_paged(q, k, v, integers([[0]]), lengths, engine="triton")
    assert torch.equal(made, expected)


@pytest.mark.L0
@pytest.mark.skipif(HAS_GPU, reason="a GPU has no sparse files")
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_11_a_token_stride_whose_offset_passes_31_bits(name: str, tmp_path: Path) -> None:
    given = {n: draw(i, 1, 1, 5, 16) for i, n in enumerate(("q", "k", "v", "do"))}
    # Row 4 lies 2^32 elements behind row 0, and row 2 at 2^31: cut to 32 bits that is in front.
    flat = sparse(tmp_path / name, 2**31 + 2**32 + 16)
    wide = flat.as_strided((1, 1, 5, 16), (16, 16, 2**30, 1), 2**31)
    made = []
    for operands in (given, {**given, name: wide.copy_(given[name])}):
        leaves = [operands[n].detach().requires_grad_() for n in ("q", "k", "v")]
        o = ops.sdpa(*leaves, causal=True, engine="triton")
        made.append([o, *torch.autograd.grad(o, leaves, operands["do"])])
    for got, want in zip(made[1], made[0], strict=True):
        assert torch.equal(got, want)
