"""Pieces of the composed attention, each against its definition written out in loops.

Extents differ from one another, ranges start behind 0, and operands broadcast on some axes.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from tilewright.engines.aten import attention_operands
from tilewright.engines.aten.attention_blocks import OPEN_BAND, Band, Block
from tilewright.engines.aten.attention_forward import _weighted, _with_marks, sink_rows
from tilewright.engines.aten.attention_operands import Lengths, PagedPort, RaggedPort
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
from tilewright.errors import BindingError

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


def ragged(stride, multiplier=1, dim=(3, 2, 4, 5)):
    record = SimpleNamespace(dim=dim, stride=stride, ragged_offset_multiplier=multiplier)
    return RaggedPort("q", record, "sdpa")


# Rows of both heads side by side; heads apart; a wider row step; a strided last axis.
RAGGED = [(0, 5, 10, 1), (0, 60, 5, 1), (99, 6, 13, 1), (0, 1, 20, 2)]


@pytest.mark.parametrize("stride", RAGGED)
@pytest.mark.parametrize("form", ["flat", "dense"])
def test_a_ragged_sequence_gathered_and_scattered(stride, form):
    port = ragged(stride, 3)
    starts = [4, 17, 30]
    inputs = {"q.ragged_offset": torch.tensor([*starts, 99], dtype=torch.int32).view(-1, 1, 1, 1)}
    assert port.starts(inputs).tolist() == [12, 51, 90, 297]
    size = 230
    buffer = draw(12, size + 7)
    flat = buffer[7:]
    operand = flat if form == "flat" else buffer.as_strided((1, 2, 1, 5), (1, 6, 1, 1), 7)

    def place(b, h, s, d):
        return 3 * starts[b] + h * stride[1] + s * stride[2] + d * stride[3]

    places = list(itertools.product(range(3), range(2), range(4), range(5)))
    found = port.gather(operand, inputs)
    assert found.shape == (3, 2, 4, 5)
    assert all(found[index] == flat[place(*index)] for index in places)
    for b, rows in itertools.product(range(3), range(1, 5)):
        view = port.sequence(operand, 3 * starts[b], rows)
        assert torch.equal(view[0], found[b, :, :rows])
        assert view.data_ptr() == flat.data_ptr() + 4 * 3 * starts[b]
    values = draw(13, 3, 2, 4, 5)
    lengths = [4, 0, 2]
    expected = buffer.clone()
    for index in places:
        if index[2] < lengths[index[0]]:
            expected[7 + place(*index)] = values[index]
    port.scatter(
        operand, inputs, values.transpose(1, 2).contiguous().transpose(1, 2), torch.tensor(lengths)
    )
    assert torch.equal(buffer[7:], expected[7:]) and torch.equal(buffer[:7], expected[:7])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_ragged_elements_of_every_width(dtype):
    port = ragged((0, 5, 10, 1))
    inputs = {"q.ragged_offset": torch.tensor([2, 43, 84, 125])}
    flat = draw(14, 130).to(dtype)
    found = port.gather(flat, inputs)
    assert found.dtype is dtype
    written = torch.zeros(130).to(dtype)
    port.scatter(written, inputs, found, torch.tensor([4, 4, 4]))
    kept = flat.float().clone()
    kept[[0, 1, 42, 83, 124, 125, 126, 127, 128, 129]] = 0.0
    assert torch.equal(written.float(), kept)


def test_a_ragged_sequence_must_fit():
    port = ragged((0, 5, 10, 1))
    flat = torch.zeros(100)
    last = 5 + 3 * 10 + 4
    assert port.sequence(flat, 99 - last, 4).shape == (1, 2, 4, 5)
    for operand in (flat, flat.view(10, 10)):
        port.sequence(operand, 99 - last, 4)
        with pytest.raises(BindingError, match="reaches element 100; the buffer has 100"):
            port.sequence(operand, 100 - last, 4)
        with pytest.raises(BindingError):
            port.sequence(operand, -1, 1)
    # What has no element reaches nothing.
    assert port.sequence(flat, 1000, 0).shape == (1, 2, 0, 5)
    part_of_one = torch.zeros(110)[10:].view(10, 10)
    port.sequence(part_of_one, 99 - last, 4)
    with pytest.raises(BindingError):
        port.sequence(part_of_one, 100 - last, 4)


def test_ragged_operands_of_nothing_and_of_one_element():
    inputs = {"q.ragged_offset": torch.tensor([0, 0, 0, 0])}
    found = ragged((0, 5, 10, 1)).gather(torch.zeros(0), inputs)
    assert torch.equal(found, torch.zeros(3, 2, 4, 5))
    # Beyond the end anything may come, from within the buffer.
    assert torch.equal(
        ragged((0, 5, 10, 1)).gather(torch.full((1,), 6.0), inputs), torch.full((3, 2, 4, 5), 6.0)
    )


def test_offsets_of_no_sequence_are_held_to_the_buffer():
    port = ragged((0, 1, 1, 1), dim=(3, 1, 1, 1))
    inputs = {"q.ragged_offset": torch.tensor([-5, 2, 77, 99])}
    assert port.gather(torch.arange(4.0), inputs).flatten().tolist() == [0.0, 2.0, 3.0]
    # The buffer is the view that was given, not the storage behind it.
    inside = torch.arange(100.0)[10:14]
    assert port.gather(inside, inputs).flatten().tolist() == [10.0, 12.0, 13.0]


def spec(**ports):
    fields = {"rows": 6, "keys": 9, "batch": 4, "title": "sdpa"}
    return SimpleNamespace(lengths=frozenset(ports), **fields)


def test_lengths_are_held_to_the_declared_extent():
    given = {
        "seq_len_q": torch.tensor([-3, 2, 6, 7], dtype=torch.int32).view(4, 1, 1, 1),
        "cu_seq_len_kv": torch.tensor([0, 4, 4, 20, 18]),
    }
    assert Lengths(spec(**given), "q").on_host(given) == [0, 2, 6, 6]
    assert Lengths(spec(**given), "kv").on_host(given) == [4, 0, 9, 0]
    assert Lengths(spec(), "q").on_host({}) == [6] * 4
    assert Lengths(spec(), "kv").on_host({}) == [9] * 4
    assert Lengths(spec(**given), "q").on_device(given, CPU).dtype is torch.int64


def paged(keys=7, page=3):
    operation = SimpleNamespace(inputs={"k": SimpleNamespace(dim=(5, 2, page, 4))})
    return PagedPort(operation, SimpleNamespace(title="sdpa", keys=keys), "k")


TABLE = torch.tensor([[4, 1, 0, 99], [2, 2, 3, -1]], dtype=torch.int32).view(2, 1, 4, 1)


def test_pages_that_a_length_uses():
    container = draw(15, 5, 2, 3, 4)
    inputs = {"k": container, "paged_attention_k_table": TABLE}
    port = paged()
    for length, used in ((0, 0), (1, 1), (3, 1), (4, 2), (6, 2), (7, 3), (9, 3)):
        pages = port.pages(inputs, 0, length)
        assert pages.tolist() == [4, 1, 0][:used]
        found = port.sequence(container, pages, length)
        assert found.shape == (1, 2, length, 4)
        for token in range(length):
            page = TABLE[0, 0, token // 3, 0]
            assert torch.equal(found[0, :, token], container[page, :, token % 3])
    with pytest.raises(BindingError, match="the container has 5"):
        port.pages(inputs, 0, 10)
    with pytest.raises(BindingError):
        port.pages(inputs, 1, 10)
    five = {"k": container, "paged_attention_k_table": torch.tensor([[5]])}
    with pytest.raises(BindingError):
        port.pages(five, 0, 1)
    assert port.pages({**five, "k": draw(15, 6, 2, 3, 4)}, 0, 1).tolist() == [5]


@pytest.mark.parametrize("keys", [1, 3, 7, 9, 10, 12])
def test_all_pages_gathered(monkeypatch, keys):
    container = draw(16, 5, 2, 3, 4)
    counts = []

    def select(operand, index):
        counts.append(index.numel())
        return operand.index_select(0, index)

    # As many pages as the keys need, and no more.
    monkeypatch.setattr(attention_operands, "_select", select)
    paged(keys).gather({"k": container, "paged_attention_k_table": TABLE})
    assert counts == [2 * math.ceil(keys / 3)]
    monkeypatch.undo()
    found = paged(keys).gather({"k": container, "paged_attention_k_table": TABLE})
    assert found.shape == (2, 2, keys, 4)
    for b, token in itertools.product(range(2), range(keys)):
        page = min(max(int(TABLE[b, 0, token // 3, 0]), 0), 4)
        assert torch.equal(found[b, :, token], container[page, :, token % 3])
