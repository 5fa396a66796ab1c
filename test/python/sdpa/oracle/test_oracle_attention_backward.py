"""The attention reference's written-out gradients against float64 autograd of a dense formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright.oracle import assert_close, attention
from tilewright.oracle.attention_problem import Block
from tilewright.oracle.visibility import visible_block

pytestmark = pytest.mark.L0

_TOL = 1e-11


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_o: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    probability: float = 0.0,
    soft_cap: float | None = None,
    scale: float = 0.6,
    mask: torch.Tensor | None = None,
    seq_len_q: list[int] | None = None,
    seq_len_kv: list[int] | None = None,
    **rules: Any,
) -> list[torch.Tensor]:
    """Gradients by q, k, v, then bias and sink if given."""
    batch, heads, rows, _ = q.shape
    columns, group = k.shape[2], heads // k.shape[1]
    visible = torch.stack(
        [
            visible_block(
                torch.arange(rows),
                torch.arange(columns),
                length_q=rows if seq_len_q is None else seq_len_q[b],
                length_kv=columns if seq_len_kv is None else seq_len_kv[b],
                **rules,
            )
            for b in range(batch)
        ]
    )[:, None]
    if mask is not None:
        visible = visible & mask
    leaves = [t.clone().requires_grad_(True) for t in (q, k, v)]
    extra = [None if t is None else t.clone().requires_grad_(True) for t in (bias, sink)]
    scores = torch.einsum("bhid,bhjd->bhij", leaves[0], leaves[1].repeat_interleave(group, 1))
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if extra[0] is not None:
        scores = scores + extra[0]
    scores = scores.masked_fill(~visible, -1e300)
    if extra[1] is not None:
        column = extra[1].reshape(1, heads, 1, 1).expand(batch, heads, rows, 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights * visible
    if keep is not None:
        weights = weights * keep / (1.0 - probability)
    output = torch.einsum("bhij,bhjd->bhid", weights, leaves[2].repeat_interleave(group, 1))
    wanted = [*leaves, *(t for t in extra if t is not None)]
    return list(torch.autograd.grad(output, wanted, d_o))


def _operands(
    heads: tuple[int, int] = (4, 2), rows: int = 6, columns: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _randn(2, heads[0], rows, 3, seed=1),
        _randn(2, heads[1], columns, 3, seed=2),
        _randn(2, heads[1], columns, 4, seed=3),
        _randn(2, heads[0], rows, 4, seed=4),
    )


def _check(found: attention.AttentionGradients, expected: list[torch.Tensor]) -> None:
    given = [gradient for gradient in found if gradient is not None]
    assert len(given) == len(expected)
    for index, (got, want) in enumerate(zip(given, expected, strict=True)):
        assert_close(got, want, tol=_TOL, name=f"gradient {index}")


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("row_block", [None, 1, 4])
@pytest.mark.parametrize("given", [False, True])
def test_heads_blocks_and_given_results(
    heads: tuple[int, int], row_block: int | None, given: bool
) -> None:
    q, k, v, d_o = _operands(heads)
    forward = attention.forward(q, k, v, scale=0.6)
    saved = {"output": forward.output, "stats": forward.stats} if given else {}
    found = attention.backward(q, k, v, d_o, scale=0.6, row_block=row_block, **saved)
    _check(found, _autograd(q, k, v, d_o))


@pytest.mark.parametrize(
    "rules",
    [
        {"right_bound": 0},
        {"right_bound": 0, "bottom_right": True},
        {"left_bound": 2, "right_bound": 1},
        {"seq_len_q": [6, 3], "seq_len_kv": [2, 5]},
        {"seq_len_q": [0, 6], "seq_len_kv": [5, 0], "right_bound": 0, "bottom_right": True},
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_masks(rules: dict[str, Any], given: bool) -> None:
    q, k, v, d_o = _operands()
    forward = attention.forward(q, k, v, scale=0.6, **rules)
    saved = {"output": forward.output, "stats": forward.stats} if given else {}
    found = attention.backward(q, k, v, d_o, scale=0.6, **saved, **rules)
    _check(found, _autograd(q, k, v, d_o, **rules))


def test_dead_rows_of_a_mask_have_gradient_zero() -> None:
    q, k, v, d_o = (_randn(1, 1, 8, 8, seed=seed) for seed in range(4))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    forward = attention.forward(q, k, v, mask=mask, scale=0.6)
    found = attention.backward(
        q, k, v, d_o, mask=mask, scale=0.6, output=forward.output, stats=forward.stats
    )
    _check(found, _autograd(q, k, v, d_o, mask=mask))
    assert (found.d_q[..., 4:, :] == 0).all()
    assert (found.d_k[..., 4:, :] == 0).all() and (found.d_v[..., 4:, :] == 0).all()


@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (1, 4, 6, 5), (2, 1, 1, 5), (1, 1, 6, 1)])
def test_bias_gradient_sums_what_it_broadcasts_to(shape: tuple[int, ...]) -> None:
    q, k, v, d_o = _operands()
    bias = _randn(*shape, seed=5)
    found = attention.backward(q, k, v, d_o, scale=0.6, bias=bias, right_bound=1, row_block=4)
    _check(found, _autograd(q, k, v, d_o, bias=bias, right_bound=1))


def test_sink_gradient() -> None:
    q, k, v, d_o = _operands()
    sink = _randn(4, seed=6)
    rules: dict[str, Any] = {"seq_len_q": [6, 4], "seq_len_kv": [5, 2], "right_bound": 0}
    forward = attention.forward(q, k, v, scale=0.6, sink=sink, **rules)
    expected = _autograd(q, k, v, d_o, sink=sink, **rules)
    for saved in ({}, {"output": forward.output, "stats": forward.stats}):
        _check(attention.backward(q, k, v, d_o, scale=0.6, sink=sink, **saved, **rules), expected)


def test_rows_whose_given_stats_are_minus_infinity_are_dead() -> None:
    q, k, v, d_o = _operands()
    forward = attention.forward(q, k, v, scale=0.6)
    stats = forward.stats.clone()
    stats[0, 1, 2] = -math.inf
    found = attention.backward(q, k, v, d_o, output=forward.output, stats=stats, scale=0.6)
    assert (found.d_q[0, 1, 2] == 0).all()
    d_o[0, 1, 2] = 0.0
    expected = attention.backward(
        q, k, v, d_o, output=forward.output, stats=forward.stats, scale=0.6
    )
    assert_close(found.d_v, expected.d_v, tol=_TOL)


def test_a_loss_on_stats() -> None:
    q, k, v, d_o = _operands()
    sink, d_stats = _randn(4, seed=6), _randn(2, 4, 6, 1, seed=7)
    leaves = [t.clone().requires_grad_(True) for t in (q, k, sink)]
    scores = 0.6 * torch.einsum("bhid,bhjd->bhij", leaves[0], leaves[1].repeat_interleave(2, 1))
    column = leaves[2].reshape(1, 4, 1, 1).expand(2, 4, 6, 1)
    stats = torch.cat((scores, column), -1).logsumexp(-1, keepdim=True)
    expected = torch.autograd.grad(stats, leaves, d_stats)
    zero = torch.zeros_like(d_o)
    found = attention.backward(q, k, v, zero, d_stats=d_stats, scale=0.6, sink=sink, row_block=4)
    got = (found.d_q, found.d_k, found.d_sink)
    for gradient, want in zip(got, expected, strict=True):
        assert gradient is not None
        assert_close(gradient, want, tol=_TOL)
    assert (found.d_v == 0).all()
    both = attention.backward(q, k, v, d_o, d_stats=d_stats, scale=0.6, sink=sink)
    alone = attention.backward(q, k, v, d_o, scale=0.6, sink=sink)
    assert_close(both.d_q, alone.d_q + found.d_q, tol=_TOL)


def test_dropout_gradients() -> None:
    from tilewright.oracle.philox import dropout_keep

    q, k, v, d_o = _operands()
    dropout = attention.SeededDropout(0.35, seed=9, offset=1)
    flat = torch.arange(2 * 4 * 6 * 5).reshape(2, 4, 6, 5)
    keep = dropout_keep(flat, probability=0.35, seed=9, offset=1)
    expected = _autograd(q, k, v, d_o, keep=keep.double(), probability=0.35)
    forward = attention.forward(q, k, v, scale=0.6, dropout=dropout)
    for saved in ({}, {"output": forward.output, "stats": forward.stats}):
        found = attention.backward(q, k, v, d_o, scale=0.6, dropout=dropout, row_block=4, **saved)
        _check(found, expected)
    masked = attention.MaskedDropout(keep.double(), 1 / 0.65)
    _check(attention.backward(q, k, v, d_o, scale=0.6, dropout=masked), expected)


def test_soft_cap_gradient() -> None:
    q, k, v, d_o = _operands()

    def forward(scores: torch.Tensor, _: Block) -> torch.Tensor:
        return 1.5 * torch.tanh(scores / 1.5)

    def gradient(d_scores: torch.Tensor, scores: torch.Tensor, _: Block) -> torch.Tensor:
        return d_scores * (1.0 - torch.tanh(scores / 1.5) ** 2)

    found = attention.backward(
        q, k, v, d_o, scale=0.6, score_mod=forward, score_mod_gradient=gradient, right_bound=0
    )
    _check(found, _autograd(q, k, v, d_o, soft_cap=1.5, right_bound=0))
    with pytest.raises(ValueError, match="score_mod_gradient"):
        attention.backward(q, k, v, d_o, score_mod=forward)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_hidden_operands_never_reach_a_gradient(junk: float) -> None:
    q, k, v, d_o = _operands()
    rules: dict[str, Any] = {"seq_len_q": [4, 6], "seq_len_kv": [5, 2], "right_bound": 0}
    forward = attention.forward(q, k, v, scale=0.6, **rules)
    stats, output = forward.stats.clone(), forward.output.clone()
    clean = attention.backward(q, k, v, d_o, output=output, stats=stats, scale=0.6, **rules)
    for tensor in (q, d_o, output):
        tensor[0, :, 4:] = junk
    for tensor in (k, v):
        tensor[1, :, 2:] = junk
    found = attention.backward(q, k, v, d_o, output=output, stats=stats, scale=0.6, **rules)
    for got, want in zip(found[:3], clean[:3], strict=True):
        assert_close(got, want, tol=_TOL)
        assert torch.isfinite(got).all()


def test_what_a_bias_of_minus_infinity_hides_has_no_gradient() -> None:
    """Of a row that sees a NaN, and whose O is NaN, a hidden key gets 0 as behind a mask."""
    q, k, v, d_o = _operands()
    bias = torch.zeros(1, 1, q.shape[2], k.shape[2])
    bias[0, 0, :-1, -1] = -math.inf
    bias[0, 0, -1, :2] = -math.inf
    v[:, :, -1] = math.nan
    by_bias, by_mask = (
        attention.backward(q, k, v, d_o, output=forward.output, stats=forward.stats, **rule)
        for rule in ({"bias": bias}, {"mask": bias == 0})
        for forward in [attention.forward(q, k, v, **rule)]
    )
    for got, want in zip(by_bias[:3], by_mask[:3], strict=True):
        assert_close(got, want, tol=_TOL)
    assert torch.isfinite(by_bias.d_k[:, :, :2]).all() and by_bias.d_k.isnan().any()
    assert not by_bias.d_bias[0, 0, -1, :2].any()


def test_a_large_negative_score_in_a_causal_row_keeps_gradients_finite() -> None:
    """Rows whose visible scores are all near -120 while hidden ones are large."""
    for rows in (64, 192):
        q, k = 0.1 * _randn(1, 1, rows, 64, seed=1), 0.1 * _randn(1, 1, rows, 64, seed=2)
        q[..., 0] = 1.0
        k[..., 0] = -120.0 * math.sqrt(64.0)
        v, d_o = _randn(1, 1, rows, 64, seed=3), _randn(1, 1, rows, 64, seed=4)
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        found = attention.backward(q, k, v, d_o, mask=mask)
        assert all(torch.isfinite(gradient).all() for gradient in found[:3])
        # The first row sees one key: its probability is 1 whatever the score.
        assert found.d_q[0, 0, 0].abs().max() < 1e-9


def test_finite_differences() -> None:
    """One independent check that needs no autograd at all."""
    q, k, v, d_o = _operands((2, 1), 3, 4)
    options: dict[str, Any] = {"right_bound": 1, "alibi": True, "sink": _randn(2, seed=8)}
    found = attention.backward(q, k, v, d_o, **options)
    step = 1e-6
    for tensor, gradient in ((q, found.d_q), (k, found.d_k), (v, found.d_v)):
        flat = tensor.reshape(-1)
        for index in range(0, flat.numel(), 5):
            kept = flat[index].item()
            values = []
            for offset in (step, -step):
                flat[index] = kept + offset
                values.append((attention.forward(q, k, v, **options).output * d_o).sum().item())
            flat[index] = kept
            slope = (values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx(gradient.reshape(-1)[index].item(), abs=1e-7)
