"""The attention reference, forward: hand values, a dense formula, blocks, masks, NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright.oracle import assert_close, attention, visible_keys

pytestmark = pytest.mark.L0

_TOL = 1e-12


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _inputs(
    batch: int, heads_q: int, heads_kv: int, rows: int, columns: int, depth: int, depth_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _randn(batch, heads_q, rows, depth, seed=1),
        _randn(batch, heads_kv, columns, depth, seed=2),
        _randn(batch, heads_kv, columns, depth_v, seed=3),
    )


def _visible(batch: int, rows: int, columns: int, **rules: Any) -> torch.Tensor:
    """(B, 1, Sq, Skv), from the query-by-query oracle."""
    lengths_q = rules.pop("seq_len_q", None) or [rows] * batch
    lengths_kv = rules.pop("seq_len_kv", None) or [columns] * batch
    return torch.tensor(
        [
            [
                [
                    visible_keys(
                        row,
                        columns=columns,
                        length_q=lengths_q[b],
                        length_kv=lengths_kv[b],
                        **rules,
                    )
                    for row in range(rows)
                ]
            ]
            for b in range(batch)
        ]
    )


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole score matrices at once, KV heads repeated; rows that see nothing give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    scores = scores.masked_fill(~visible, -math.inf)
    probabilities = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bhjd->bhid", probabilities, v), scores.logsumexp(-1, keepdim=True)


def test_two_keys_by_hand() -> None:
    q = torch.tensor([[[[1.0, 0.0]]]])
    k = torch.tensor([[[[math.log(3.0), 5.0], [0.0, 7.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[4.0], [8.0]]]])
    found = attention.forward(q, k, v, scale=1.0)
    # Scores ln 3 and 0: probabilities 3/4 and 1/4.
    assert_close(found.output, torch.tensor([[[[5.0]]]], dtype=torch.float64), tol=_TOL)
    assert_close(found.stats, torch.tensor([[[[math.log(4.0)]]]], dtype=torch.float64), tol=_TOL)
    assert_close(found.row_max, torch.tensor([[[[math.log(3.0)]]]], dtype=torch.float64), tol=_TOL)
    assert_close(found.sum_exp, torch.tensor([[[[4 / 3]]]], dtype=torch.float64), tol=_TOL)


def test_the_scale_defaults_to_one_over_root_d() -> None:
    q, k, v = _inputs(1, 1, 1, 3, 4, 16, 5)
    assert_close(
        attention.forward(q, k, v).output, attention.forward(q, k, v, scale=0.25).output, tol=0.0
    )


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"right_bound": 0},
        {"right_bound": 0, "bottom_right": True},
        {"left_bound": 3, "right_bound": 2},
        {"left_bound": 2, "right_bound": 0, "bottom_right": True, "seq_len_q": [4, 0]},
        {"seq_len_q": [3, 7], "seq_len_kv": [5, 0]},
    ],
)
@pytest.mark.parametrize("row_block", [None, 1, 3])
def test_equals_the_dense_formula(
    heads: tuple[int, int], rules: dict[str, Any], row_block: int | None
) -> None:
    q, k, v = _inputs(2, *heads, 7, 5, 4, 3)
    visible = _visible(2, 7, 5, **rules)
    output, stats = _dense(q, k, v, visible, 0.5)
    found = attention.forward(q, k, v, scale=0.5, row_block=row_block, **rules)
    assert_close(found.output, output, tol=_TOL)
    assert_close(found.stats, stats, tol=_TOL)
    alive = found.sum_exp > 0
    joined = found.row_max + torch.log(found.sum_exp)
    assert_close(joined[alive], stats[alive], tol=_TOL)


def test_different_heads_of_keys_and_values() -> None:
    q = _randn(1, 6, 4, 2)
    k, v = _randn(1, 3, 5, 2, seed=1), _randn(1, 2, 5, 2, seed=2)
    found = attention.forward(q, k, v)
    for head in range(6):
        one = attention.forward(
            q[:, head : head + 1], k[:, head // 2][:, None], v[:, head // 3][:, None]
        )
        assert_close(found.output[:, head : head + 1], one.output, tol=_TOL)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="heads"):
        attention.forward(_randn(1, 3, 2, 2), _randn(1, 2, 2, 2), _randn(1, 2, 2, 2))


def test_a_mask_with_dead_rows_gives_zero_and_minus_infinity() -> None:
    """Eight queries and keys, a boolean mask true only in its first quarter."""
    q, k, v = _inputs(1, 1, 1, 8, 8, 8, 8)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    found = attention.forward(q, k, v, mask=mask)
    assert (found.output[..., 4:, :] == 0).all()
    assert (found.stats[..., 4:, :] == -math.inf).all()
    inner = attention.forward(q[..., :4, :], k[..., :4, :], v[..., :4, :])
    assert_close(found.output[..., :4, :], inner.output, tol=_TOL)


def test_uniform_values_count_visible_keys() -> None:
    """With equal scores, Stats is the logarithm of the number of visible keys."""
    cases = [
        ((2, 5), {"right_bound": 0}, [1, 2]),
        ((2, 5), {"right_bound": 0, "bottom_right": True}, [4, 5]),
        ((5, 2), {"right_bound": 0, "bottom_right": True}, [0, 0, 0, 1, 2]),
        ((12, 12), {"right_bound": 0, "left_bound": 4}, [1, 2, 3] + [4] * 9),
    ]
    for (rows, columns), rules, counts in cases:
        q, k = torch.zeros(1, 1, rows, 2), torch.zeros(1, 1, columns, 2)
        v = torch.ones(1, 1, columns, 1)
        found = attention.forward(q, k, v, **rules)
        seen = torch.exp(found.stats).reshape(-1)
        assert_close(seen, torch.tensor(counts).double(), tol=_TOL)
        output = torch.tensor([1.0 if count else 0.0 for count in counts]).double()
        assert_close(found.output.reshape(-1), output, tol=_TOL)


def test_bias_of_every_broadcast_shape() -> None:
    q, k, v = _inputs(2, 2, 1, 3, 4, 2, 2)
    scores = torch.einsum("bhid,bhjd->bhij", q, k.expand(2, 2, 4, 2))
    for shape in ((1, 1, 3, 4), (2, 1, 1, 4), (1, 2, 3, 1), (2, 2, 3, 4), (1, 1, 1, 1), (3, 4)):
        bias = _randn(*shape, seed=4)
        weights = (scores + bias).softmax(-1)
        expected = torch.einsum("bhij,bhjd->bhid", weights, v.expand(2, 2, 4, 2))
        found = attention.forward(q, k, v, scale=1.0, bias=bias, row_block=2)
        assert_close(found.output, expected, tol=_TOL)


def test_a_bias_of_minus_infinity_hides_like_a_mask() -> None:
    q, k, v = _inputs(1, 1, 1, 3, 3, 2, 2)
    bias = torch.zeros(1, 1, 3, 3)
    bias[0, 0, 0, :] = -math.inf
    bias[0, 0, 1, 2] = -math.inf
    mask = bias == 0
    found, masked = attention.forward(q, k, v, bias=bias), attention.forward(q, k, v, mask=mask)
    assert_close(found.output, masked.output, tol=_TOL)
    assert_close(found.stats, masked.stats, tol=_TOL)
    assert found.stats[0, 0, 0, 0] == -math.inf


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_a_bias_of_minus_infinity_hides_never_reaches_a_result(junk: float) -> None:
    q, k, v = _inputs(1, 1, 1, 3, 3, 2, 2)
    bias = torch.zeros(1, 1, 3, 3)
    bias[0, 0, :2, 2] = -math.inf
    clean = attention.forward(q, k, v, bias=bias)
    v[0, 0, 2] = junk
    found = attention.forward(q, k, v, bias=bias)
    assert_close(found.output[:, :, :2], clean.output[:, :, :2], tol=_TOL)
    assert not torch.isfinite(found.output[:, :, 2]).any()


def test_alibi_slopes_by_hand() -> None:
    assert attention.alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert attention.alibi_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    # Twelve heads: those of eight, then every other one of sixteen.
    finer = [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    assert attention.alibi_slopes(12) == [*attention.alibi_slopes(8), *finer]
    assert attention.alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("bottom_right", [False, True])
def test_alibi_adds_slope_times_distance(bottom_right: bool) -> None:
    q, k, v = _inputs(1, 3, 3, 2, 5, 2, 2)
    lengths = {"seq_len_q": [2], "seq_len_kv": [4]}
    shift = 4 - 2 if bottom_right else 0
    bias = torch.zeros(1, 3, 2, 5, dtype=torch.float64)
    for head, slope in enumerate([2.0**-4, 2.0**-8, 2.0**-2]):
        for row in range(2):
            for col in range(5):
                bias[0, head, row, col] = slope * (col - (row + shift))
    found = attention.forward(q, k, v, alibi=True, bottom_right=bottom_right, **lengths)
    expected = attention.forward(q, k, v, bias=bias, bottom_right=bottom_right, **lengths)
    assert_close(found.output, expected.output, tol=_TOL)
    # A shift of a whole row shows in Stats only.
    assert_close(found.stats, expected.stats, tol=_TOL)


def test_sink_joins_the_denominator() -> None:
    q, k, v = _inputs(1, 2, 1, 3, 4, 2, 2)
    sink = torch.tensor([0.3, 50.0])
    plain = attention.forward(q, k, v)
    found = attention.forward(q, k, v, sink=sink)
    for head, value in enumerate([float(sink[0]), 50.0]):
        total = torch.exp(plain.stats[0, head]) + math.exp(value)
        share = torch.exp(plain.stats[0, head]) / total
        assert_close(found.output[0, head], plain.output[0, head] * share, tol=_TOL)
        assert_close(found.stats[0, head], torch.log(total), tol=_TOL)
    # The largest of scores and sink is what the sum is taken relative to.
    assert (found.row_max[0, 1] == 50.0).all()
    assert_close(found.row_max + torch.log(found.sum_exp), found.stats, tol=_TOL)


def test_sink_of_rows_that_see_nothing_and_of_padded_rows() -> None:
    q, k, v = _inputs(1, 1, 1, 3, 4, 2, 2)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    found = attention.forward(
        q, k, v, mask=mask, sink=torch.tensor([-2.5]), seq_len_q=[2], seq_len_kv=[4]
    )
    assert (found.output[0, 0, 1:] == 0).all()
    assert found.stats[0, 0, 1:, 0].tolist() == [-2.5, -math.inf]


def test_large_scores_do_not_overflow() -> None:
    q = torch.tensor([[[[1e4]]]])
    k = torch.tensor([[[[1e4], [1e4 - 1.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[1.0], [0.0]]]])
    found = attention.forward(q, k, v, scale=1.0)
    assert found.output.item() == 1.0
    assert found.stats.item() == pytest.approx(1e8)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_hidden_keys_and_values_never_reach_a_result(junk: float) -> None:
    q, k, v = _inputs(2, 2, 1, 4, 6, 3, 3)
    rules: dict[str, Any] = {"seq_len_q": [4, 2], "seq_len_kv": [5, 3], "right_bound": 1}
    clean = attention.forward(q, k, v, **rules)
    dirty_q, dirty_k, dirty_v = q.clone(), k.clone(), v.clone()
    dirty_k[0, :, 5:], dirty_v[0, :, 5:] = junk, junk
    dirty_k[1, :, 3:], dirty_v[1, :, 3:] = junk, junk
    dirty_q[1, :, 2:] = junk
    found = attention.forward(dirty_q, dirty_k, dirty_v, **rules)
    for got, want in zip(found, clean, strict=True):
        assert_close(got, want, tol=_TOL)


def test_a_visible_nan_value_reaches_only_those_who_see_it() -> None:
    q, k, v = _inputs(1, 1, 1, 4, 4, 2, 2)
    clean = attention.forward(q, k, v, right_bound=0)
    v[0, 0, 2, 1] = math.nan
    found = attention.forward(q, k, v, right_bound=0)
    assert_close(found.output[0, 0, :2], clean.output[0, 0, :2], tol=_TOL)
    assert_close(found.output[0, 0, :, 0], clean.output[0, 0, :, 0], tol=_TOL)
    assert torch.isnan(found.output[0, 0, 2:, 1]).all()


def test_no_keys_at_all() -> None:
    q, k, v = _randn(1, 1, 3, 2), _randn(1, 1, 0, 2), _randn(1, 1, 0, 2)
    found = attention.forward(q, k, v)
    assert (found.output == 0).all() and (found.stats == -math.inf).all()


def test_seeded_dropout_drops_what_philox_says_and_keeps_stats() -> None:
    from tilewright.oracle.philox import dropout_keep

    q, k, v = _inputs(2, 2, 1, 3, 5, 2, 5)
    dropout = attention.SeededDropout(0.4, seed=77, offset=3)
    plain = attention.forward(q, k, torch.eye(5).expand(2, 1, 5, 5))
    found = attention.forward(q, k, torch.eye(5).expand(2, 1, 5, 5), dropout=dropout, row_block=2)
    flat = torch.arange(2 * 2 * 3 * 5).reshape(2, 2, 3, 5)
    kept = dropout_keep(flat, probability=0.4, seed=77, offset=3)
    assert_close(found.output, plain.output * kept / 0.6, tol=_TOL)
    assert_close(found.stats, plain.stats, tol=0.0)
    assert kept.any() and not kept.all()
    other = attention.forward(q, k, v, dropout=attention.SeededDropout(0.4, seed=78, offset=3))
    same = attention.forward(q, k, v, dropout=attention.SeededDropout(0.4, seed=78, offset=3))
    assert torch.equal(other.output, same.output)
    assert not torch.equal(other.output, attention.forward(q, k, v, dropout=dropout).output)


def test_masked_dropout_multiplies() -> None:
    q, k, _ = _inputs(1, 1, 1, 3, 4, 2, 2)
    eye = torch.eye(4).reshape(1, 1, 4, 4)
    mask = torch.tensor([[[[1.0, 0.0, 1.0, 1.0]]]])
    plain = attention.forward(q, k, eye)
    found = attention.forward(q, k, eye, dropout=attention.MaskedDropout(mask, 2.0))
    assert_close(found.output, plain.output * mask.double() * 2.0, tol=_TOL)


def test_score_mod_runs_after_the_scale_and_before_masks() -> None:
    q, k, v = _inputs(1, 2, 2, 5, 4, 3, 2)
    bias = _randn(1, 1, 5, 4, seed=9)

    def soft_cap(scores: torch.Tensor, block: Any) -> torch.Tensor:
        assert scores.shape == (block.end - block.start, 4)
        return 2.0 * torch.tanh(scores / 2.0)

    found = attention.forward(
        q, k, v, scale=0.7, score_mod=soft_cap, bias=bias, right_bound=0, row_block=2
    )
    scores = 2.0 * torch.tanh(torch.einsum("bhid,bhjd->bhij", q, k) * 0.7 / 2.0) + bias
    scores = scores.masked_fill(~_visible(1, 5, 4, right_bound=0), -math.inf)
    assert_close(found.output, scores.softmax(-1) @ v, tol=_TOL)


def test_low_precision_inputs_are_read_exactly() -> None:
    q, k, v = (t.to(torch.bfloat16) for t in _inputs(1, 1, 1, 3, 4, 2, 2))
    found = attention.forward(q, k, v)
    assert found.output.dtype == torch.float64
    assert_close(
        found.output, attention.forward(q.double(), k.double(), v.double()).output, tol=0.0
    )


def test_merging_states() -> None:
    q, k, v = _inputs(1, 2, 1, 3, 7, 2, 2)
    whole = attention.forward(q, k, v)
    first = attention.forward(q, k[:, :, :3], v[:, :, :3])
    second = attention.forward(q, k[:, :, 3:], v[:, :, 3:])
    output, stats = attention.merge_states(first.output, first.stats, second.output, second.stats)
    assert_close(output, whole.output, tol=_TOL)
    assert_close(stats, whole.stats, tol=_TOL)
    # Stats without the last axis, as the functions on torch tensors have them.
    output, stats = attention.merge_states(
        first.output, first.stats[..., 0], second.output, second.stats[..., 0]
    )
    assert_close(output, whole.output, tol=_TOL)
    assert_close(stats, whole.stats[..., 0], tol=_TOL)


def test_merging_empty_states() -> None:
    nothing, minus = torch.full((2, 3), math.nan), torch.tensor([-math.inf, -math.inf])
    output, stats = attention.merge_states(nothing, minus, nothing, minus)
    assert (output == 0).all() and (stats == -math.inf).all()
    some = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    finite = torch.tensor([1.5, -700.0])
    for arguments in ((some, finite, nothing, minus), (nothing, minus, some, finite)):
        output, stats = attention.merge_states(*arguments)
        assert_close(output, some.double(), tol=0.0)
        assert_close(stats, finite.double(), tol=0.0)
