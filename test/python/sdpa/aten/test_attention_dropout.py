"""Dropout by seed and offset, and by a given mask."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.engines.aten import dropout
from tilewright.engines.aten.dropout import PhiloxDropout, Region
from tilewright.oracle.philox import dropout_keep

pytestmark = pytest.mark.L0

FLOAT32 = 5e-6


def draw(seed: int, *shapes: tuple[int, ...]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def scalar(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64).view(1, 1, 1, 1)


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_philox_known_answers():
    """The vectors that are published beside the generator (Random123, kat_vectors)."""
    assert philox_words([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_words([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


@pytest.mark.parametrize("keys", [8, 13])
@pytest.mark.parametrize("offset", [0, 7, 2**40 + 3])
def test_keep_is_the_generators_word_of_each_element(keys, offset):
    seed, heads, rows, probability = 0x123456789ABCDEF, 3, 5, 0.3
    dropout = PhiloxDropout(probability, seed, offset, heads, rows, keys)
    region = Region((1, 3), (0, 3), (2, 5), (3, keys))
    found = dropout.keep(region, torch.device("cpu"))
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for b in range(1, 3):
        for h in range(3):
            for row in range(2, 5):
                for col in range(3, keys):
                    flat = ((b * heads + h) * rows + row) * keys + col
                    counter = [flat // 4, 0, offset & 0xFFFFFFFF, offset >> 32]
                    word = philox_words(counter, key)[flat % 4]
                    kept = word >= math.floor(probability * 2**32)
                    assert found[b - 1, h, row - 2, col - 3].item() == kept


# Counters beyond one word, words with the top bit set, rows that start at each place in a counter,
# and regions that start at 0, at a multiple of four, and elsewhere.
WIDE = [
    (2**63 + 2**32 + 5, 2**63 + 7, 2**20 + 3, 2**22 + 1, Region((2, 4), (4, 6), (9, 12), (0, 6))),
    (2**64 - 1, 2**64 - 1, 2**21, 2**20, Region((1, 2), (2**20, 2**20 + 2), (7, 9), (4, 11))),
    (-1, -(2**40), 3, 12, Region((2**52, 2**52 + 2), (0, 3), (1, 3), (8, 12))),
    (2**31, 2**32, 7, 13, Region((0, 1), (2, 3), (0, 7), (2, 5))),
    (0, 0, 4, 5, Region((0, 2), (0, 2), (0, 4), (1, 2))),
    (3, 4, 5, 8, Region((0, 2), (0, 2), (0, 5), (4, 5))),
    (5, 6, 3, 9, Region((0, 1), (0, 2), (0, 3), (2, 4))),
    (7, 8, 3, 12, Region((0, 1), (0, 2), (0, 3), (3, 3))),
]


@pytest.mark.parametrize(("seed", "offset", "rows", "keys", "region"), WIDE)
def test_keep_of_wide_words_equals_the_oracles(seed, offset, rows, keys, region):
    heads, probability = 6, 0.37
    if region.head[1] > heads:
        heads = 2**20 + 5
    dropout = PhiloxDropout(probability, seed, offset, heads, rows, keys)
    as_signed = [torch.tensor((word + 2**63) % 2**64 - 2**63) for word in (seed, offset)]
    on_device = dropout._replace(seed=as_signed[0], offset=as_signed[1])
    b, h, r, c = (torch.arange(*bounds) for bounds in region)
    line = (b.view(-1, 1, 1, 1) * heads + h.view(-1, 1, 1)) * rows + r.view(-1, 1)
    expected = dropout_keep(line * keys + c, probability=probability, seed=seed, offset=offset)
    for given in (dropout, on_device):
        assert torch.equal(given.keep(region, torch.device("cpu")), expected)


@pytest.mark.parametrize("keys", [8, 9, 10, 12])
@pytest.mark.parametrize("first", [0, 1, 3, 4])
@pytest.mark.parametrize("width", [0, 1, 3, 4, 5])
def test_no_more_counters_than_a_row_needs(monkeypatch, keys, first, width):
    counts = []

    def recording(index, seed, offset):
        counts.append(index.shape[-1])
        return philox(index, seed, offset)

    philox = dropout._philox
    monkeypatch.setattr(dropout, "_philox", recording)
    region = Region((0, 2), (0, 3), (0, 4), (first, first + width))
    PhiloxDropout(0.5, 1, 2, 3, 4, keys).keep(region, torch.device("cpu"))
    # Rows that all begin a counter need no more than their own words.
    begins = keys % 4 == 0 and first % 4 == 0
    assert counts == [math.ceil(width / 4) + (not begins)]


def test_the_factor_on_what_is_kept():
    assert PhiloxDropout(0.75, 0, 0, 1, 1, 1).scale == 4.0
    assert PhiloxDropout(0.0, 0, 0, 1, 1, 1).scale == 1.0
    assert PhiloxDropout(1.0, 0, 0, 1, 1, 1).scale == 0.0


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_all_or_nothing_is_kept(probability):
    dropout = PhiloxDropout(probability, 1, 2, 3, 40, 41)
    keep = dropout.keep(Region((0, 2), (0, 3), (0, 40), (0, 41)), torch.device("cpu"))
    assert keep.all() if probability == 0.0 else not keep.any()


def run(bench, operands, probability, seed, offset, kind="sdpa", **options):
    given = {"dropout_seed": scalar(seed), "dropout_offset": scalar(offset)}
    return bench.run(kind, {**operands, **given}, probability=probability, **options)


def keep_of(bench, q, k, probability, seed, offset):
    operands = {"q": q, "k": k, "v": k}
    found = run(bench, operands, probability, seed, offset, given=("rng_dump",))
    return found["rng_dump"]


@pytest.mark.parametrize(("rows", "keys"), [(33, 40), (300, 301)])
@pytest.mark.parametrize("mask", ["none", "window"])
def test_forward_and_backward_drop_the_same(ways, rows, keys, mask):
    q, k, v, d_o = draw(1, (2, 4, rows, 8), *[(2, 2, keys, 8)] * 2, (2, 4, rows, 8))
    keep = keep_of(ways, q, k, 0.25, 42, 3)
    assert set(keep.unique().tolist()) == {0.0, 1.0}
    assert abs(keep.mean().item() - 0.75) < 0.02
    options = {"use_causal_mask": True, "sliding_window_length": 9} if mask == "window" else {}
    rule = ways.Rule(scale=0.3, keep=keep / 0.75)
    if options:
        rule.left, rule.right = 9, 0
    operands = {"q": q, "k": k, "v": v}
    options["attn_scale"] = 0.3
    found = run(ways, operands, 0.25, 42, 3, generate_stats=True, **options)
    expected = ways.reference(q, k, v, rule)
    ways.close("O", found["O"], expected["O"], FLOAT32)
    ways.close("Stats", found["Stats"], expected["Stats"], FLOAT32)
    operands.update(o=expected["O"].float(), dO=d_o, stats=expected["Stats"].float())
    found = run(ways, operands, 0.25, 42, 3, kind="sdpa_backward", **options)
    gradients = ways.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        ways.close(port, value, gradients[port], FLOAT32)


def test_same_seed_and_offset_repeat_and_others_differ(bench):
    q, k = draw(2, (2, 4, 16, 8), (2, 2, 20, 8))
    first = keep_of(bench, q, k, 0.5, 1, 0)
    assert torch.equal(first, keep_of(bench, q, k, 0.5, 1, 0))
    for seed, offset in [(2, 0), (1, 1), (1, 2**32), (1 + 2**32, 0)]:
        assert not torch.equal(first, keep_of(bench, q, k, 0.5, seed, offset))
    flat = first.flatten(0, 1)
    assert not any(torch.equal(flat[0], other) for other in flat[1:])


def test_padded_sequences_drop_as_the_whole(ways):
    """Element indices count in the declared extents, whatever the lengths."""
    q, k, v = draw(3, (3, 4, 10, 8), *[(3, 2, 13, 8)] * 2)
    used_q, used_kv = [10, 4, 0], [13, 6, 5]
    keep = keep_of(ways, q, k, 0.4, 5, 6)
    lengths = [torch.tensor(used).view(-1, 1, 1, 1).int() for used in (used_q, used_kv)]
    operands = {"q": q, "k": k, "v": v, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    found = run(ways, operands, 0.4, 5, 6, use_padding_mask=True, attn_scale=0.3)
    rule = ways.Rule(scale=0.3, len_q=used_q, len_kv=used_kv, keep=keep / 0.6)
    ways.close("O", found["O"], ways.reference(q, k, v, rule)["O"], FLOAT32)


@pytest.mark.parametrize("dim", [(2, 4, 9, 11), (1, 4, 9, 11), (2, 1, 1, 11)])
def test_given_mask(ways, dim):
    q, k, v, d_o = draw(4, (2, 4, 9, 8), *[(2, 2, 11, 8)] * 2, (2, 4, 9, 8))
    generator = torch.Generator().manual_seed(5)
    mask = (torch.rand(dim, generator=generator) > 0.3).float()
    scale = torch.full((1, 1, 1, 1), 1.5)
    rule = ways.Rule(scale=0.3, keep=mask * 1.5)
    operands = {"q": q, "k": k, "v": v, "dropout_mask": mask, "dropout_scale": scale}
    found = ways.run("sdpa", operands, attn_scale=0.3)
    expected = ways.reference(q, k, v, rule)
    ways.close("O", found["O"], expected["O"], FLOAT32)
    operands.update(o=expected["O"].float(), dO=d_o, stats=expected["Stats"].float())
    found = ways.run("sdpa_backward", operands, attn_scale=0.3)
    gradients = ways.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        ways.close(port, value, gradients[port], FLOAT32)
