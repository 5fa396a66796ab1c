"""sdpa and sdpa_backward in graphs: masks, layouts, pages, dropout, score programs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import (
    assert_close,
    attention,
    attention_problem,
    evaluate,
    layout,
    visible_keys,
)

pytestmark = pytest.mark.L0

_TOL = 1e-12
_B, _HQ, _HKV, _SQ, _SKV, _D, _DV = 2, 4, 2, 5, 6, 3, 4


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _operands() -> dict[str, torch.Tensor]:
    return {
        "q": _randn(_B, _HQ, _SQ, _D, seed=1),
        "k": _randn(_B, _HKV, _SKV, _D, seed=2),
        "v": _randn(_B, _HKV, _SKV, _DV, seed=3),
    }


def _run(buffers: dict[str, torch.Tensor], **arguments: Any) -> list[torch.Tensor]:
    """O and Stats of a forward graph, its operands given by argument name."""
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    records = {name: graph.tensor_like(t) for name, t in buffers.items()}
    arguments.setdefault("generate_stats", True)
    outputs = [t for t in graph.sdpa(**records, **arguments) if t is not None]
    for tensor in outputs:
        tensor.set_output(True)
    graph.validate()
    found = evaluate(graph, {records[name].uid: t for name, t in buffers.items()})
    return [found[tensor.uid] for tensor in outputs]


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        ({}, {}),
        ({"use_causal_mask": True}, {"right_bound": 0}),
        ({"use_causal_mask_bottom_right": True}, {"right_bound": 0, "bottom_right": True}),
        (
            {"use_causal_mask": True, "sliding_window_length": 2},
            {"right_bound": 0, "left_bound": 2},
        ),
        (
            {
                "diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT,
                "diagonal_band_left_bound": 3,
                "diagonal_band_right_bound": 1,
            },
            {"left_bound": 3, "right_bound": 1, "bottom_right": True},
        ),
        ({"diagonal_band_right_bound": 2}, {"right_bound": 2}),
    ],
)
def test_visible_keys_of_every_mask_query_by_query(
    arguments: dict[str, Any], rules: dict[str, Any]
) -> None:
    """Zero scores and identity values: O shows which keys were seen, Stats how many."""
    buffers = {
        "q": torch.zeros(1, 1, _SQ, 2).double(),
        "k": torch.zeros(1, 1, _SKV, 2).double(),
        "v": torch.eye(_SKV).double().reshape(1, 1, _SKV, _SKV),
    }
    output, stats = _run(buffers, **arguments)
    for row in range(_SQ):
        seen = visible_keys(row, length_q=_SQ, length_kv=_SKV, **rules)
        assert (output[0, 0, row] > 0).tolist() == seen
        expected = math.log(sum(seen)) if any(seen) else -math.inf
        assert stats[0, 0, row, 0].item() == pytest.approx(expected)


def test_absent_scale_is_one_and_a_tensor_scale_is_read() -> None:
    buffers = _operands()
    output, _ = _run(buffers)
    assert_close(output, attention.forward(**buffers, scale=1.0).output, tol=_TOL)
    expected = attention.forward(**buffers, scale=0.3).output
    assert_close(_run(buffers, attn_scale=0.3)[0], expected, tol=_TOL)
    scale = torch.full((1, 1, 1, 1), 0.3, dtype=torch.float64)
    assert_close(_run({**buffers, "attn_scale": scale})[0], expected, tol=_TOL)


def test_bias_alibi_sink_and_base_two() -> None:
    bias, sink = _randn(1, _HQ, _SQ, _SKV, seed=4), _randn(1, _HQ, 1, 1, seed=5)
    buffers = {**_operands(), "bias": bias, "sink_token": sink}
    output, stats = _run(buffers, use_alibi_mask=True, use_causal_mask=True, stats_use_log2=True)
    expected = attention.forward(
        **_operands(), scale=1.0, bias=bias, sink=sink, alibi=True, right_bound=0
    )
    assert_close(output, expected.output, tol=_TOL)
    assert_close(stats, expected.stats / math.log(2.0), tol=_TOL)


def test_block_mask() -> None:
    q, k = torch.zeros(1, 2, 130, 2).double(), torch.zeros(1, 1, 260, 2).double()
    v = torch.ones(1, 1, 260, 1).double()
    block_mask = torch.tensor([[[0b001], [0b110]], [[0b000], [0b111]]], dtype=torch.uint8)
    output, stats = _run({"q": q, "k": k, "v": v, "block_mask": block_mask[None]})
    counts = torch.exp(stats[0, :, :, 0])
    assert_close(counts[0, :128], torch.full((128,), 128.0).double(), tol=_TOL)
    assert_close(counts[0, 128:], torch.full((2,), 132.0).double(), tol=_TOL)
    assert (counts[1, :128] == 0).all() and (output[0, 1, :128] == 0).all()


@pytest.mark.parametrize("running", [False, True])
def test_padding_with_poison_in_what_is_padded(running: bool) -> None:
    buffers = _operands()
    lengths_q, lengths_kv = [5, 2], [4, 6]
    dirty = {name: t.clone() for name, t in buffers.items()}
    dirty["q"][1, :, 2:] = math.nan
    dirty["k"][0, :, 4:], dirty["v"][0, :, 4:] = math.inf, math.nan
    if running:
        sums = ([0, 5, 7], [0, 4, 10])
        extra = {
            name: torch.tensor(entries, dtype=torch.int32).reshape(3, 1, 1, 1)
            for name, entries in zip(("cu_seq_len_q", "cu_seq_len_kv"), sums, strict=True)
        }
    else:
        extra = {
            name: torch.tensor(entries, dtype=torch.int32).reshape(2, 1, 1, 1)
            for name, entries in (("seq_len_q", lengths_q), ("seq_len_kv", lengths_kv))
        }
    output, stats = _run(
        {**dirty, **extra}, use_padding_mask=True, use_causal_mask_bottom_right=True
    )
    for b in range(2):
        one = attention.forward(
            buffers["q"][b : b + 1, :, : lengths_q[b]],
            buffers["k"][b : b + 1, :, : lengths_kv[b]],
            buffers["v"][b : b + 1, :, : lengths_kv[b]],
            scale=1.0,
            right_bound=0,
            bottom_right=True,
        )
        assert_close(output[b : b + 1, :, : lengths_q[b]], one.output, tol=_TOL)
        assert_close(stats[b : b + 1, :, : lengths_q[b]], one.stats, tol=_TOL)
    assert (output[1, :, 2:] == 0).all() and (stats[1, :, 2:] == -math.inf).all()


def test_maxima_sums_and_draws_as_outputs() -> None:
    buffers = _operands()
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    q, k, v = (graph.tensor_like(t) for t in buffers.values())
    rows = (_B, _HQ, _SQ, 1)
    given = {
        name: graph.tensor(dim, data_type="FLOAT").set_output(True)
        for name, dim in (
            ("score_max", rows),
            ("score_sum_exp", rows),
            ("rng_dump", (_B, _HQ, _SQ, _SKV)),
        )
    }
    seed, offset = graph.tensor_scalar(11), graph.tensor_scalar(4)
    output, _ = graph.sdpa(q, k, v, dropout=(0.3, seed, offset), is_inference=True, **given)
    assert output is not None
    output.set_output(True)
    graph.validate()
    found = evaluate(graph, {q.uid: buffers["q"], k.uid: buffers["k"], v.uid: buffers["v"]})
    dropout = attention.SeededDropout(0.3, 11, 4)
    expected = attention.forward(**buffers, scale=1.0, dropout=dropout)
    assert_close(found[output.uid], expected.output, tol=_TOL)
    assert_close(found[given["score_max"].uid], expected.row_max, tol=_TOL)
    assert_close(found[given["score_sum_exp"].uid], expected.sum_exp, tol=_TOL)
    drawn = found[given["rng_dump"].uid]
    masked = attention.MaskedDropout(drawn, 1 / 0.7)
    again = attention.forward(**buffers, scale=1.0, dropout=masked)
    assert_close(again.output, expected.output, tol=_TOL)
    assert {*drawn.reshape(-1).tolist()} == {0.0, 1.0}


def test_masked_dropout() -> None:
    buffers = _operands()
    mask = (_randn(_B, _HQ, _SQ, _SKV, seed=6) > 0).double()
    scale = torch.full((1, 1, 1, 1), 1.7, dtype=torch.float64)
    graph = DeclaredGraph(io_data_type="DOUBLE")
    records = {name: graph.tensor_like(t) for name, t in (*buffers.items(), ("mask", mask))}
    factor = graph.tensor_like(scale)
    output, _ = graph.sdpa(
        records["q"], records["k"], records["v"], dropout=(records["mask"], factor)
    )
    assert output is not None
    output.set_output(True)
    graph.validate()
    pack = {records[name].uid: t for name, t in (*buffers.items(), ("mask", mask))}
    found = evaluate(graph, {**pack, factor.uid: scale})[output.uid]
    expected = attention.forward(**buffers, scale=1.0, dropout=attention.MaskedDropout(mask, 1.7))
    assert_close(found, expected.output, tol=_TOL)


def _ragged_tensor(
    graph: DeclaredGraph, lengths: list[int], heads: int, rows: int, depth: int
) -> tuple[Any, Any, torch.Tensor]:
    """A packed (T, H, D) tensor declared (B, H, S, D), its offsets, and their buffer."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    offsets = torch.tensor(sums, dtype=torch.int64) * heads * depth
    record = graph.tensor((len(sums), 1, 1, 1), data_type="INT64")
    tensor = graph.tensor(
        (len(lengths), heads, rows, depth),
        (rows * heads * depth, depth, heads * depth, 1),
        "DOUBLE",
        ragged_offset=record,
    )
    return tensor, record, offsets


def test_ragged_segments_with_an_empty_one_equal_segments_alone() -> None:
    """cu_q = [0, 1, 1, 2], cu_k = [0, 3, 3, 8], nine query and three KV heads, causal."""
    lengths_q, lengths_kv, heads_q, heads_kv, depth = [1, 0, 1], [3, 0, 5], 9, 3, 64
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    q, q_offset, q_sums = _ragged_tensor(graph, lengths_q, heads_q, 1, depth)
    k, k_offset, k_sums = _ragged_tensor(graph, lengths_kv, heads_kv, 5, depth)
    v, v_offset, v_sums = _ragged_tensor(graph, lengths_kv, heads_kv, 5, depth)
    length_q, length_kv = (graph.tensor((3, 1, 1, 1), data_type="INT32") for _ in range(2))
    output, stats = graph.sdpa(
        q,
        k,
        v,
        use_padding_mask=True,
        seq_len_q=length_q,
        seq_len_kv=length_kv,
        use_causal_mask=True,
        generate_stats=True,
        attn_scale=0.125,
    )
    assert output is not None and stats is not None
    output.set_output(True)
    stats.set_output(True)
    graph.validate()
    packed = {
        "q": _randn(2, heads_q, depth, seed=1),
        "k": _randn(8, heads_kv, depth, seed=2),
        "v": _randn(8, heads_kv, depth, seed=3),
    }
    pack = {
        q.uid: packed["q"],
        k.uid: packed["k"],
        v.uid: packed["v"],
        q_offset.uid: q_sums,
        k_offset.uid: k_sums,
        v_offset.uid: v_sums,
        length_q.uid: torch.tensor(lengths_q, dtype=torch.int32),
        length_kv.uid: torch.tensor(lengths_kv, dtype=torch.int32),
    }
    found = evaluate(graph, pack)
    d_o = torch.zeros(3, heads_q, 1, depth, dtype=torch.float64)
    d_o[0], d_o[2] = _randn(heads_q, 1, depth, seed=4), _randn(heads_q, 1, depth, seed=5)
    dense = {
        name: layout.load(t, packed[name], s)
        for name, t, s in (("q", q, q_sums), ("k", k, k_sums), ("v", v, v_sums))
    }
    options: dict[str, Any] = {"scale": 0.125, "right_bound": 0}
    gradients = attention.backward(
        **dense, d_o=d_o, seq_len_q=lengths_q, seq_len_kv=lengths_kv, **options
    )
    for b, (row, start, stop) in ((0, (0, 0, 3)), (2, (1, 3, 8))):
        one = [
            packed["q"][row : row + 1].transpose(0, 1)[None],
            packed["k"][start:stop].transpose(0, 1)[None],
            packed["v"][start:stop].transpose(0, 1)[None],
        ]
        alone = attention.forward(*one, **options)
        assert_close(found[output.uid][b : b + 1], alone.output, tol=_TOL)
        assert_close(found[stats.uid][b : b + 1], alone.stats, tol=_TOL)
        back = attention.backward(*one, d_o[b : b + 1], **options)
        assert_close(gradients.d_q[b : b + 1], back.d_q, tol=_TOL)
        assert_close(gradients.d_k[b : b + 1, :, : stop - start], back.d_k, tol=_TOL)
        assert_close(gradients.d_v[b : b + 1, :, : stop - start], back.d_v, tol=_TOL)
        assert (gradients.d_k[b, :, stop - start :] == 0).all()
    assert (found[output.uid][1] == 0).all() and (found[stats.uid][1] == -math.inf).all()
    assert all((gradient[1] == 0).all() for gradient in gradients[:3])


def test_keys_whose_segments_have_no_query_get_gradient_zero() -> None:
    """Four segments, the first without queries and the last without either: exact zeros."""
    lengths_q, lengths_kv = [0, 3, 2, 0], [4, 3, 2, 3]
    q, d_o = _randn(4, 4, 3, 8, seed=1), _randn(4, 4, 3, 8, seed=2)
    k, v = _randn(4, 1, 4, 8, seed=3), _randn(4, 1, 4, 8, seed=4)
    found = attention.backward(q, k, v, d_o, seq_len_q=lengths_q, seq_len_kv=lengths_kv)
    for gradient in (found.d_k, found.d_v):
        assert (gradient[0] == 0).all() and (gradient[3] == 0).all()
        assert (gradient[1, :, :3] != 0).all() and (gradient[1, :, 3:] == 0).all()


def test_pages_with_independent_tables_and_poisoned_free_rows() -> None:
    """Page size 4, lengths 13 and 6; free rows and unused table entries hold junk."""
    page, lengths, heads = 4, [13, 6], 2
    keys, values = _randn(2, heads, 16, _D, seed=2), _randn(2, heads, 16, _DV, seed=3)
    tables = {
        "paged_attention_k_table": [[5, 0, 3, 7], [1, 2, 10**9, -3]],
        "paged_attention_v_table": [[2, 6, 0, 1], [4, 5, -1, 10**9]],
    }
    containers = {
        "k": torch.full((8, heads, page, _D), math.nan, dtype=torch.float64),
        "v": torch.full((8, heads, page, _DV), math.nan, dtype=torch.float64),
    }
    for name, dense in (("k", keys), ("v", values)):
        table = tables[f"paged_attention_{name}_table"]
        for b, length in enumerate(lengths):
            for token in range(length):
                where = table[b][token // page]
                containers[name][where, :, token % page] = dense[b, :, token]
    q = _randn(2, 4, 2, _D, seed=1)
    buffers = {
        "q": q,
        **containers,
        **{
            name: torch.tensor(entries, dtype=torch.int32).reshape(2, 1, 4, 1)
            for name, entries in tables.items()
        },
        "seq_len_q": torch.tensor([2, 2], dtype=torch.int32).reshape(2, 1, 1, 1),
        "seq_len_kv": torch.tensor(lengths, dtype=torch.int32).reshape(2, 1, 1, 1),
    }
    output, stats = _run(buffers, use_padding_mask=True, paged_attention_max_seq_len_kv=15)
    expected = attention.forward(q, keys, values, scale=1.0, seq_len_kv=lengths)
    assert_close(output, expected.output, tol=_TOL)
    assert_close(stats, expected.stats, tol=_TOL)


def test_a_score_program_with_indices_and_an_external_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relative bias made of gen_index, a tensor a head, and a causal select; in small blocks."""
    monkeypatch.setattr(attention_problem, "BLOCK_BYTES", 2 * _SKV * 8)
    buffers = _operands()
    slopes = _randn(1, _HQ, 1, 1, seed=7)
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    records = {name: graph.tensor_like(t) for name, t in buffers.items()}
    slope = graph.tensor_like(slopes)

    def score_mod(inner: Any, score: Any) -> Any:
        row, col = inner.gen_index(score, axis=2), inner.gen_index(score, axis=3)
        distance = inner.sub(inner.sub(col, row), inner.gen_index(score, axis=1))
        biased = inner.add(score, inner.mul(distance, slope))
        seen = inner.cmp_le(col, row)
        return inner.binary_select(biased, inner.tensor_scalar(-1e30), seen)

    output, stats = graph.sdpa(
        records["q"],
        records["k"],
        records["v"],
        score_mod=score_mod,
        attn_scale=0.5,
        generate_stats=True,
    )
    assert output is not None and stats is not None
    output.set_output(True)
    stats.set_output(True)
    graph.validate()
    pack = {records[name].uid: t for name, t in buffers.items()}
    found = evaluate(graph, {**pack, slope.uid: slopes})
    rows, cols = torch.arange(_SQ)[:, None], torch.arange(_SKV)[None, :]
    bias = slopes * (cols - rows - torch.arange(_HQ).reshape(1, _HQ, 1, 1))
    expected = attention.forward(**buffers, scale=0.5, bias=bias, right_bound=0, row_block=_SQ)
    assert_close(found[output.uid], expected.output, tol=_TOL)
    # What is the same along a row shows in Stats only.
    assert_close(found[stats.uid], expected.stats, tol=_TOL)


@pytest.mark.parametrize("written_out", [False, True])
def test_gradients_through_a_score_program(written_out: bool) -> None:
    buffers = _operands()
    d_o = _randn(_B, _HQ, _SQ, _DV, seed=8)

    def soft_cap(inner: Any, score: Any) -> Any:
        cap = inner.tensor_scalar(1.5, "DOUBLE")
        return inner.mul(inner.tanh(inner.div(score, cap)), cap)

    def soft_cap_gradient(inner: Any, d_score: Any, score: Any) -> Any:
        cap = inner.tensor_scalar(1.5, "DOUBLE")
        bend = inner.tanh(inner.div(score, cap))
        return inner.mul(d_score, inner.sub(inner.tensor_scalar(1.0), inner.mul(bend, bend)))

    def cap(scores: torch.Tensor, _: Any) -> torch.Tensor:
        return 1.5 * torch.tanh(scores / 1.5)

    def cap_gradient(d_scores: torch.Tensor, scores: torch.Tensor, _: Any) -> torch.Tensor:
        return d_scores * (1.0 - torch.tanh(scores / 1.5) ** 2)

    options: dict[str, Any] = {
        "scale": 0.7,
        "score_mod": cap,
        "score_mod_gradient": cap_gradient,
        "right_bound": 0,
    }
    forward = attention.forward(**buffers, **options)
    operands = {**buffers, "o": forward.output, "dO": d_o, "stats": forward.stats}
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    records = {name: graph.tensor_like(t) for name, t in operands.items()}
    results = graph.sdpa_backward(
        **records,
        attn_scale=0.7,
        use_causal_mask=True,
        score_mod=soft_cap,
        score_mod_bprop=soft_cap_gradient if written_out else None,
    )
    for tensor in results:
        tensor.set_output(True)
    graph.validate()
    found = evaluate(graph, {records[name].uid: t for name, t in operands.items()})
    expected = attention.backward(**buffers, d_o=d_o, **options)
    for tensor, gradient in zip(results, expected[:3], strict=True):
        assert_close(found[tensor.uid], gradient, tol=_TOL)


def test_the_backward_operation_uses_the_given_results_and_its_optional_outputs() -> None:
    bias, sink = _randn(1, _HQ, 1, _SKV, seed=4), _randn(1, _HQ, 1, 1, seed=5)
    buffers, d_o = _operands(), _randn(_B, _HQ, _SQ, _DV, seed=8)
    options: dict[str, Any] = {"scale": 0.7, "bias": bias, "sink": sink, "right_bound": 0}
    forward = attention.forward(**buffers, **options)
    rounded = forward.output.to(torch.bfloat16).double()
    operands = {
        **buffers,
        "o": rounded,
        "dO": d_o,
        "stats": forward.stats,
        "bias": bias,
        "sink_token": sink,
    }
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    records = {name: graph.tensor_like(t) for name, t in operands.items()}
    extra = {
        "dBias": graph.tensor(bias.shape).set_output(True),
        "dSink_token": graph.tensor(sink.shape).set_output(True),
    }
    results = graph.sdpa_backward(**records, **extra, attn_scale=0.7, use_causal_mask=True)
    for tensor in results:
        tensor.set_output(True)
    graph.validate()
    found = evaluate(graph, {records[name].uid: t for name, t in operands.items()})
    given = attention.backward(**buffers, d_o=d_o, output=rounded, stats=forward.stats, **options)
    for tensor, gradient in zip((*results, *extra.values()), given, strict=True):
        assert gradient is not None
        assert_close(found[tensor.uid], gradient, tol=_TOL)
    # A rounded output moves the gradients a little, by its rounding and no more.
    exact = attention.backward(**buffers, d_o=d_o, **options)
    assert 0 < (exact.d_q - given.d_q).abs().max() < 0.05
