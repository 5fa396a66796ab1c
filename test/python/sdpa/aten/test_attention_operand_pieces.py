"""Packed and paged operands of the composed attention, gathered and scattered; their lengths."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from tilewright.engines.aten import attention_operands
from tilewright.engines.aten.attention_operands import Lengths, PagedPort, RaggedPort
from tilewright.errors import BindingError

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    return PagedPort(operation, SimpleNamespace(title="sdpa", keys=keys, ragged=()), "k")


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
