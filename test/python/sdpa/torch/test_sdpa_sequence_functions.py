"""Attention over packed sequences and pages: each sequence against dense attention in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dense_attention import check_call, close, draw, reference, visible

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0


@pytest.mark.parametrize("stats_layout", ["head_major", "token_major"])
def test_packed_sequences_equal_a_reference_each(stats_layout: str) -> None:
    # Field report 5, backward too; the gradient of Stats included.
    generator = torch.Generator().manual_seed(9)
    cu_q, cu_kv = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 3, 3, 8])
    tensors = {
        "q": draw(generator, 2, 9, 64),
        "k": draw(generator, 8, 3, 64),
        "v": draw(generator, 8, 3, 64),
    }

    def packed(q: Any, k: Any, v: Any) -> Any:
        return ops.sdpa_varlen(
            q, k, v, cu_q, cu_kv, 1, 5, causal=True, return_stats=True, stats_layout=stats_layout
        )

    def one_by_one(q: Any, k: Any, v: Any) -> Any:
        os, all_stats = [], []
        for b in range(3):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
            if cu_q[b] == cu_q[b + 1]:
                continue
            parts = [t.transpose(0, 1).unsqueeze(0) for t in (q[rows], k[keys], v[keys])]
            may = visible(parts[0].shape[2], parts[1].shape[2], causal=True)
            o, stats = reference(*parts, may=may)
            os.append(o[0].transpose(0, 1))
            all_stats.append(stats[0])
        stats = torch.cat(all_stats, -1)
        return torch.cat(os), stats.t() if stats_layout == "token_major" else stats

    check_call(tensors, packed, one_by_one, generator)


def test_keys_of_no_query_get_exactly_zero_gradient() -> None:
    # Field report 6.
    generator = torch.Generator().manual_seed(10)
    cu_q = torch.tensor([0, 0, 1208, 2048, 2048], dtype=torch.int32)
    cu_kv = torch.tensor([0, 2538, 4280, 5120, 8192], dtype=torch.int32)
    q = draw(generator, 2048, 4, 256).requires_grad_()
    k, v = (draw(generator, 8192, 1, 256).requires_grad_() for _ in range(2))
    ops.sdpa_varlen(q, k, v, cu_q, cu_kv, 1208, 3072).sum().backward()
    for grad in (k.grad, v.grad):
        assert torch.count_nonzero(grad[:2538]) == 0 and torch.count_nonzero(grad[5120:]) == 0
        assert torch.count_nonzero(grad[2538:5120]) > 0


def test_origins_and_holes_of_packed_sequences() -> None:
    # O2: prefix sums need not start at 0; rows of no sequence give 0 and -inf.
    generator = torch.Generator().manual_seed(11)
    q, k, v = (draw(generator, 10, 2, 8) for _ in range(3))
    cu_q, cu_kv = torch.tensor([2, 5, 9]), torch.tensor([1, 4, 10])
    o, stats = ops.sdpa_varlen(q, k, v, cu_q, cu_kv, 4, 6, return_stats=True)
    outside = torch.tensor([0, 1, 9])
    assert torch.count_nonzero(o[outside]) == 0 and torch.isneginf(stats[:, outside]).all()
    parts = [t[None].transpose(1, 2).double() for t in (q[2:5], k[1:4], v[1:4])]
    close(o[2:5], reference(*parts)[0][0].transpose(0, 1), 1e-5)
    with pytest.raises(tw.BindingError, match="reaches element 159"):
        ops.sdpa_varlen(q, k[:9], v[:9], cu_q, cu_kv, 4, 6)


def test_no_token_of_a_query_whose_heads_are_one() -> None:
    # PyTorch keeps the strides of an empty view, 0 among them, in what it makes like it.
    q = torch.empty(0, 1, 8).expand(0, 4, 8).requires_grad_()
    k = torch.ones(3, 2, 8, requires_grad=True)
    none, some = torch.tensor([0, 0]), torch.tensor([0, 3])
    ops.sdpa_varlen(q, k, k, none, some, 2, 3).sum().backward()
    assert q.grad is not None and q.grad.shape == (0, 4, 8)
    assert k.grad is not None and torch.equal(k.grad, torch.zeros(3, 2, 8))


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_paged_keys_equal_dense_ones(page: int) -> None:
    # O4 and field report 7: distinct tables, NaN in free slots, wild indices past the used pages.
    generator = torch.Generator().manual_seed(page)
    lengths = torch.tensor([13, 1, 0, 8], dtype=torch.int32)
    pages = -(-16 // page)
    q = draw(generator, 4, 4, 2, 16)
    k, v = draw(generator, 4, 2, pages * page, 16), draw(generator, 4, 2, pages * page, 16)
    count = 4 * pages
    k_pages = torch.full((count, page, 2, 16), math.nan)
    v_pages = torch.full((count, page, 2, 16), math.nan)
    tables = {}
    for name, dense, pool in (("k", k, k_pages), ("v", v, v_pages)):
        order = torch.randperm(count, generator=generator).to(torch.int32).view(4, pages)
        for b, used in enumerate(lengths.tolist()):
            for t in range(used):
                pool[order[b, t // page], t % page] = dense[b, :, t]
            order[b, -(-used // page) :] = 2**30
        tables[name] = order
    o, stats = ops.sdpa_paged(
        q, k_pages, v_pages, tables["k"], lengths, v_page_table=tables["v"], return_stats=True
    )
    expected, expected_stats = ops.sdpa(
        q, k, v, align="bottom_right", seqlens_kv=lengths, return_stats=True
    )
    close(o, expected.double(), 1e-6)
    close(stats, expected_stats.double(), 1e-6)


def test_no_sequence_of_pages() -> None:
    pages = torch.ones(3, 4, 2, 8)
    table, lengths = torch.zeros(0, 5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    o, stats = ops.sdpa_paged(
        torch.ones(0, 4, 1, 8), pages, pages, table, lengths, return_stats=True
    )
    assert o.shape == (0, 4, 1, 8) and stats.shape == (0, 4, 1)
