"""Pieces of the composed attention, each against its definition written out in loops.

Extents differ from one another, ranges start behind 0, and operands broadcast on some axes.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tilewright.engines.aten.attention_blocks import OPEN_BAND, Band, Block
from tilewright.engines.aten.attention_forward import _weighted, _with_marks, sink_rows
from tilewright.engines.aten.attention_parts import dump_keep, one_batch
from tilewright.engines.aten.attention_scores import (
    MaskDropout,
    Part,
    broadcast_slice,
    finish_scores,
    grouped_rows,
    keep_factor,
    ungrouped,
)
from tilewright.engines.aten.attention_spec import alibi_slopes
from tilewright.engines.aten.dropout import PhiloxDropout, Region

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")

# Two key heads of three query heads each, the second and third of four.
BLOCK = Block((1, 4), (1, 3), (3, 9), (3, 7), (5, 11))
BATCHES, HEADS_KV, GROUP, ROWS, KEYS = 5, 4, 3, 8, 13


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(**fields):
    q = torch.zeros(BATCHES, HEADS_KV * GROUP, ROWS, 2)
    k = torch.zeros(BATCHES, HEADS_KV, KEYS, 2)
    given = {"compute": torch.float32, "scale": 1.0, "band": OPEN_BAND, "trusted": False}
    return Part(q, k, k, **{**given, **fields})


def cells(block=BLOCK):
    """(place in the block's five axes, place in the whole operation) of each score."""
    for b, h, r, c in itertools.product(
        *(range(*bounds) for bounds in (block.batch, block.head, block.row, block.key))
    ):
        head = h - block.head[0]
        place = (b - block.batch[0], head // GROUP, head % GROUP, r - block.row[0])
        yield (*place, c - block.key[0]), (b, h, r, c)


@pytest.mark.parametrize("broadcast", [(), (0,), (1,), (2, 3), (0, 1, 2), (3,), (0, 1, 2, 3)])
def test_what_a_block_sees_of_an_operand(broadcast):
    full = (BATCHES, HEADS_KV * GROUP, ROWS, KEYS)
    shape = [1 if axis in broadcast else extent for axis, extent in enumerate(full)]
    operand = draw(1, *shape)
    found = broadcast_slice(operand, BLOCK).expand(BLOCK.shape)
    for inside, whole in cells():
        index = tuple(0 if axis in broadcast else i for axis, i in enumerate(whole))
        assert found[inside] == operand[index]


def test_rows_of_a_group_lie_along_one_axis_and_come_back():
    operand = draw(2, BATCHES, HEADS_KV * GROUP, ROWS, 3)
    found = grouped_rows(operand, BLOCK, torch.float64)
    assert found.dtype is torch.float64 and found.shape == (3 * 2, 3 * 4, 3)
    for (b, kv, g, r, c), (batch, head, row, _) in cells():
        if c == 0:
            expected = operand[batch, head, row].double()
            assert torch.equal(found[b * 2 + kv, g * 4 + r], expected)
    back = ungrouped(found, BLOCK)
    assert torch.equal(back, operand[1:4, 3:9, 3:7].double())


def test_the_sink_of_each_row():
    sink = draw(3, HEADS_KV * GROUP)
    found = sink_rows(sink, BLOCK)
    assert found.shape == (6, 12, 1)
    for (b, kv, g, r, _), (_, head, _, _) in cells():
        assert found[b * 2 + kv, g * 4 + r, 0] == sink[head]


LEN_Q, LEN_KV = [8, 2, 6, 4, 0], [13, 7, 3, 12, 9]


BANDS = {
    "open": Band(None, None, 0),
    "causal": Band(None, 0, 0),
    "shifted": Band(None, 0, 5),
    "right": Band(None, 3, -2),
    "left": Band(2, None, 4),
    "both": Band(4, 1, 3),
    "narrow": Band(1, 0, 2),
    "none_seen": Band(None, 0, -9),
    "none_seen_left": Band(1, None, 20),
}


@pytest.mark.parametrize("by_lengths", [False, True], ids=["shift", "by_lengths"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("band", BANDS)
def test_what_is_hidden(band, padded, by_lengths):
    band = BANDS[band]
    lengths = {}
    if padded or by_lengths:
        lengths = {"len_q": torch.tensor(LEN_Q), "len_kv": torch.tensor(LEN_KV)}
    given = part(band=band, shift_by_lengths=by_lengths, **lengths)
    batches, heads, group, rows, keys = BLOCK.shape
    products = draw(4, batches * heads, group * rows, keys)
    before = products.clone()
    found, source = finish_scores(given, products, BLOCK, True)
    assert source is None
    found, before = found.view(BLOCK.shape), before.view(BLOCK.shape)
    for inside, (b, _, r, c) in cells():
        diagonal = r + (LEN_KV[b] - LEN_Q[b] if by_lengths else band.shift)
        hidden = bool(lengths) and (c >= LEN_KV[b] or r >= LEN_Q[b])
        hidden |= band.left is not None and c <= diagonal - band.left
        hidden |= band.right is not None and c > diagonal + band.right
        assert found[inside] == (-math.inf if hidden else before[inside]), (inside, b, r, c)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shift", [-7, -2, 0, 1, 6])
def test_only_columns_that_some_row_does_not_see_are_looked_at(monkeypatch, band, shift):
    band = BANDS[band]._replace(shift=shift)
    seen = []
    arange = torch.arange

    def recording(*bounds, **options):
        seen.append(bounds)
        return arange(*bounds, **options)

    batches, heads, group, rows, keys = BLOCK.shape
    products = torch.zeros(batches * heads, group * rows, keys)
    monkeypatch.setattr(torch, "arange", recording)
    finish_scores(part(band=band), products, BLOCK, True)
    monkeypatch.undo()
    expected = []
    for bound, hides in (
        (band.right, lambda row, key: key > row + shift + band.right),
        (band.left, lambda row, key: key <= row + shift - band.left),
    ):
        if bound is None:
            continue
        columns = [c for c in range(*BLOCK.key) if any(hides(r, c) for r in range(*BLOCK.row))]
        if columns:
            expected += [(columns[0], columns[-1] + 1), BLOCK.row]
    assert seen == expected


@pytest.mark.parametrize("by_lengths", [False, True])
def test_alibi_counts_from_the_diagonal(by_lengths):
    slopes = draw(5, HEADS_KV * GROUP)
    lengths = {"len_q": torch.tensor(LEN_Q), "len_kv": torch.tensor([13] * 5)}
    given = part(band=Band(None, None, 4), slopes=slopes, shift_by_lengths=by_lengths)
    if by_lengths:
        given.len_q, given.len_kv = lengths["len_q"], lengths["len_kv"]
    found, _ = finish_scores(given, torch.zeros(6, 12, 6), BLOCK, True)
    found = found.view(BLOCK.shape)
    for inside, (b, h, r, c) in cells():
        if by_lengths and r >= LEN_Q[b]:
            assert found[inside] == -math.inf
        else:
            shift = 13 - LEN_Q[b] if by_lengths else 4
            assert found[inside] == slopes[h] * (c - r - shift)


@pytest.mark.parametrize("clean", [True, False])
def test_a_bias_of_minus_infinity_hides_what_is_no_number(clean):
    bias = draw(6, 1, 12, ROWS, KEYS)
    bias[0, 4, 3, 6], bias[0, 5, 5, 9], bias[0, 8, 6, 10] = -math.inf, math.inf, -1.0
    products = draw(7, 6, 12, 6)
    if not clean:
        products[:, :, 1], products[:, :, 4] = math.nan, math.inf
    before = products.clone().view(BLOCK.shape)
    found, _ = finish_scores(part(bias=bias.half()), products, BLOCK, clean)
    found = found.view(BLOCK.shape)
    for inside, (_, h, r, c) in cells():
        term = bias.half().float()[0, h, r, c]
        expected = -math.inf if term == -math.inf else (before[inside] + term).item()
        got = found[inside].item()
        assert got == expected or (math.isnan(got) and math.isnan(expected))


@pytest.mark.parametrize("broadcast", [(), (0,), (1,), (0, 1)])
def test_hidden_tiles(broadcast):
    # Rows and keys that begin within a tile and end in a later one; keys reach a second byte.
    block = Block((1, 4), (1, 3), (3, 9), (250, 260), (1020, 1290))
    shape = [1 if axis in broadcast else (5, 12)[axis] for axis in range(2)] + [3, 2]
    generator = torch.Generator().manual_seed(8)
    packed = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scores = torch.zeros(6, 30, 270)
    found, _ = finish_scores(part(block_mask=packed), scores, block, True)
    found = found.view(block.shape)
    for b, h, r, c in itertools.product(range(3), range(6), range(10), range(0, 270, 5)):
        row, column = (250 + r) // 128, (1020 + c) // 128
        batch, head = 0 if 0 in broadcast else b + 1, 0 if 1 in broadcast else h + 3
        seen = int(packed[batch, head, row, column // 8]) >> (column % 8) & 1
        assert found[b, h // 3, h % 3, r, c] == (0.0 if seen else -math.inf)


def test_dropout_of_a_block_is_that_of_the_whole():
    philox = PhiloxDropout(0.4, 11, 12, 12, ROWS, KEYS)
    whole = philox.keep(Region((0, 7), (0, 12), (0, ROWS), (0, KEYS)), CPU)
    found = keep_factor(part(philox=philox, first_batch=2), BLOCK).view(BLOCK.shape)
    for inside, (b, h, r, c) in cells():
        assert found[inside] == (philox.scale if whole[b + 2, h, r, c] else 0.0)
    mask = draw(9, 1, 12, ROWS, 1)
    given = part(drop_mask=MaskDropout(mask, torch.tensor(1.5)))
    found = keep_factor(given, BLOCK).view(BLOCK.shape)
    for inside, (_, h, r, _) in cells():
        assert found[inside] == mask[0, h, r, 0] * 1.5
    assert keep_factor(part(), BLOCK) is None


def test_the_dump_of_a_large_mask_is_its_parts():
    philox = PhiloxDropout(0.5, 3, 4, 2, 300, 1001)
    output = torch.full((2, 2, 300, 1001), 7.0)
    dump_keep(philox, output)
    whole = philox.keep(Region((0, 2), (0, 2), (0, 300), (0, 1001)), CPU)
    assert torch.equal(output, whole.float())


def test_values_that_are_no_numbers_reach_the_rows_that_see_them():
    values = torch.tensor(
        [
            [1.0, math.nan, math.inf, 2.0],
            [2.0, 5.0, math.inf, -math.inf],
            [4.0, 6.0, -math.inf, 3.0],
        ]
    )
    weights = torch.tensor(
        [[0.5, 0.25, 0.0], [1.0, 0.0, 0.0], [0.0, 0.75, 0.5], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    )
    expected = torch.tensor(
        [
            [1.0, math.nan, math.inf, -math.inf],
            [1.0, math.nan, math.inf, 2.0],
            [3.5, 6.75, math.nan, -math.inf],
            [8.0, 12.0, -math.inf, 6.0],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    marked = _with_marks(values[None].double())
    assert marked.shape == (1, 3, 16) and torch.isfinite(marked).all()
    found = _weighted(weights[None].double(), marked, 4)
    torch.testing.assert_close(found[0], expected.double(), rtol=0, atol=0, equal_nan=True)
    # Values without marks: a product, and no more.
    weights = torch.tensor([[[2.0, 1.0]]])
    plain = torch.tensor([[[3.0, 4.0], [5.0, 7.0]]])
    assert torch.equal(_weighted(weights, plain, 2), torch.tensor([[[11.0, 15.0]]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_operand_is_clean_if_all_of_it_is_finite(bad):
    good = draw(10, 3, 4)
    spoilt = good.clone()
    spoilt[2, 1] = bad
    assert part().is_clean(good, good) and part().is_clean()
    assert not part().is_clean(spoilt) and not part().is_clean(good, spoilt)
    # Infinities of both signs do not cancel.
    assert not part().is_clean(spoilt, -spoilt)
    assert part(trusted=True).is_clean(spoilt)
    assert not part(len_kv=torch.zeros(5)).is_clean(good)


def test_heads_a_key_head():
    assert part().group == GROUP
    empty = torch.zeros(1, 0, 3, 2)
    assert Part(empty, empty, empty, torch.float32, 1.0, OPEN_BAND, False).group == 1


def test_one_batch_of_what_may_broadcast():
    operand = draw(11, 4, 2)
    assert torch.equal(one_batch(operand, 2), operand[2:3])
    assert torch.equal(one_batch(operand[:1], 2), operand[:1])


def test_slopes():
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(2) == [2.0**-4, 2.0**-8]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    assert alibi_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    halves = [2.0 ** -(n / 2) for n in range(1, 17)]
    assert alibi_slopes(12) == [*(2.0**-n for n in range(1, 9)), *halves[0:8:2]]
    assert alibi_slopes(16) == pytest.approx(halves, rel=1e-15)
