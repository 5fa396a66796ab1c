"""ops.sdpa_decode: the newest tokens over a cache that is used in part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.errors import BindingError

pytestmark = pytest.mark.L0

CAPACITY, USED = 12, [3, 12, 1, 7]


def draw(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def problem(rows: int, bad: float | None = None) -> list[torch.Tensor]:
    """q, k and v of 4 sequences, 4 query heads on 2 key heads; ``bad`` beyond what is used."""
    q, k, v = draw(rows, (4, 4, rows, 8), (4, 2, CAPACITY, 8), (4, 2, CAPACITY, 8))
    for b, used in enumerate(USED):
        if bad is not None:
            k[b, :, used:], v[b, :, used:] = bad, bad
    return [q, k, v]


def reference(
    q: Any, k: Any, v: Any, *, causal: bool = True, left: int | None = None, sink: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64, a sequence and a row at a time, over the keys that the row sees."""
    rows = q.shape[2]
    o = torch.zeros(q.shape, dtype=torch.float64)
    stats = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for b, used in enumerate(USED):
        for h in range(q.shape[1]):
            for row in range(rows):
                at = used - rows + row
                first = 0 if left is None else max(at - left, 0)
                last = max(at + 1, 0) if causal else used
                keys, values = (t[b, h // 2, first:last].double() for t in (k, v))
                scores = keys @ q[b, h, row].double() / math.sqrt(q.shape[3])
                if sink is not None:
                    scores = torch.cat((scores, sink[h : h + 1].double()))
                    values = torch.cat((values, torch.zeros(1, 8, dtype=torch.float64)))
                if len(scores):
                    stats[b, h, row] = torch.logsumexp(scores, 0)
                    o[b, h, row] = torch.softmax(scores, 0) @ values
    return o, stats


def check(found: Any, expected: Any) -> None:
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=0, atol=5e-6)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decoding(rows: int, bad: float | None, dtype: torch.dtype) -> None:
    used = torch.tensor(USED, dtype=dtype)
    operands = problem(rows, bad)
    expected = reference(*problem(rows))
    check(ops.sdpa_decode(*operands, used, return_stats=True), expected)
    assert torch.equal(ops.sdpa_decode(*operands, used), ops.sdpa_decode(*problem(rows), used))


@pytest.mark.parametrize("rows", [1, 3])
def test_windows_sinks_and_both_directions(rows: int) -> None:
    used, operands = torch.tensor(USED), problem(rows)
    (sink,) = draw(9, (4,))
    found = ops.sdpa_decode(*operands, used, window=(2, None), return_stats=True)
    check(found, reference(*operands, left=2))
    found = ops.sdpa_decode(*operands, used, sink=sink, return_stats=True)
    check(found, reference(*operands, sink=sink))
    found = ops.sdpa_decode(*operands, used, causal=False, return_stats=True)
    check(found, reference(*operands, causal=False))


def test_two_caches_merge_to_one() -> None:
    # Field report 8: the prefix's state and the tail's give the whole's.
    q, k, v = problem(1)
    used = torch.tensor(USED)
    first = ops.sdpa_decode(q, k[:, :, :5], v[:, :, :5], used.clamp(max=5), return_stats=True)
    rest = (used - 5).clamp(min=0)
    second = ops.sdpa_decode(q, k[:, :, 5:], v[:, :, 5:], rest, return_stats=True)
    check(ops.merge_states(*first, *second), reference(q, k, v))


@pytest.mark.parametrize("engine", [None, "aten"])
@pytest.mark.parametrize("level", [-1e9, -1e4, 1e6, 1e9])
def test_states_of_any_level_merge_to_their_mean(level: float, engine: str | None) -> None:
    # Where ln 2 is lost beside Stats, the weights still add up to 1.
    outs = [x.requires_grad_(engine is None) for x in draw(4, (3, 4), (3, 4))]
    stats = torch.tensor([level, level, -torch.inf])
    other = torch.tensor([level, -torch.inf, -torch.inf])
    o, merged = ops.merge_states(outs[0], stats, outs[1], other, engine=engine)
    want = torch.stack(((outs[0][0] + outs[1][0]) / 2, outs[0][1], torch.zeros(4)))
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(merged, torch.tensor([level + math.log(2), level, -torch.inf]))
    if engine is None:
        first, second = torch.autograd.grad(o.sum(), outs)
        torch.testing.assert_close(first[:, 0], torch.tensor([0.5, 1.0, 0.0]))
        torch.testing.assert_close(second[:, 0], torch.tensor([0.5, 0.0, 0.0]))


def test_refusals_name_the_argument() -> None:
    q, k, v = problem(1)
    with pytest.raises(BindingError, match="seqlens_kv: shape"):
        ops.sdpa_decode(q, k, v, torch.tensor([1, 2]))
    with pytest.raises(BindingError, match="q: shape"):
        ops.sdpa_decode(q[0], k, v, torch.tensor(USED))
    with pytest.raises(BindingError, match="seqlens_kv: got list"):
        ops.sdpa_decode(q, k, v, USED)  # type: ignore[arg-type]
