"""Which calls ATen's fused attention may serve, and what padding hides, each case by name."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.dtypes import DataType
from tilewright.engines.aten import attention_fused, attention_fused_padded
from tilewright.engines.aten.attention_blocks import Block
from tilewright.engines.aten.attention_score_mod import BoundProgram, _compile, _index, _sliced
from tilewright.engines.aten.attention_spec import AttentionSpec, read_spec
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")
PLAIN = AttentionSpec(
    title="sdpa",
    batch=2,
    heads_q=4,
    heads_kv=2,
    rows=5,
    keys=7,
    depth=8,
    depth_v=8,
    compute=torch.float32,
    scale=0.5,
)
LENGTHS = frozenset({"seq_len_q", "seq_len_kv"})
ACTING = [
    {"ragged": frozenset("q")},
    {"paged": frozenset("k")},
    {"alibi": True},
    {"has_block_mask": True},
    {"has_sink": True},
    {"has_score_mod": True},
    {"philox": True},
    {"drop_mask": True},
]
EMPTY = [{"batch": 0}, {"rows": 0}, {"keys": 0}, {"depth": 0, "depth_v": 0}]


def spec(**changes):
    return dataclasses.replace(PLAIN, **changes)


def operation(bias=None, dim=(2, 4, 5, 7), by_value=False):
    inputs = {"attn_scale": SimpleNamespace(is_pass_by_value=by_value)}
    if bias is not None:
        inputs["bias"] = SimpleNamespace(data_type=bias, dim=dim)
    return SimpleNamespace(inputs=inputs)


def test_words_of_a_declaration():
    assert PLAIN.plain and PLAIN.only_masked and not PLAIN.banded and not PLAIN.sequences_differ
    for changes in ACTING:
        assert not spec(**changes).only_masked and not spec(**changes).plain
    padded = spec(lengths=LENGTHS)
    assert padded.only_masked and not padded.plain and padded.sequences_differ
    for port in ("ragged", "paged"):
        assert spec(**{port: frozenset("k")}).sequences_differ
    for bounds in ({"left": 3}, {"right": 0}, {"left": 1, "right": 1}):
        assert spec(**bounds).banded


def test_what_means_the_same():
    same = attention_fused._means_the_same
    assert same(PLAIN) and same(spec(has_bias=True)) and same(spec(right=0))
    assert same(spec(bottom_right=True))
    assert same(spec(right=0, bottom_right=True, keys=5))
    assert not same(spec(right=0, bottom_right=True))
    assert not same(spec(right=0, bottom_right=True, keys=3))
    for bounds in ({"right": 1}, {"right": -1}, {"left": 3}, {"left": 3, "right": 0}):
        assert not same(spec(**bounds)) and not same(spec(**bounds, keys=5))
    for changes in (*ACTING, *EMPTY, {"depth_v": 6}, {"depth": 6}, {"lengths": LENGTHS}):
        assert not same(spec(**changes))


def test_what_the_cpu_function_reads():
    reads = attention_fused.reads_scores_alone
    for changes in ({}, {"right": 0}, {"left": 2, "right": 3}, {"lengths": LENGTHS}):
        assert reads(operation(), spec(**changes), CPU)
        assert not reads(operation(), spec(**changes), torch.device("cuda"))
    for changes in (*ACTING, *EMPTY, {"depth_v": 6}, {"depth": 6}):
        assert not reads(operation(), spec(**changes), CPU)
    assert reads(operation(), spec(scale=None), CPU)
    assert not reads(operation(by_value=True), spec(scale=None), CPU)
    assert reads(operation(by_value=True), PLAIN, CPU)
    biased = spec(has_bias=True)
    for name in ("FLOAT", "DOUBLE", "HALF", "BFLOAT16"):
        assert reads(operation(DataType[name]), biased, CPU)
    for name in ("FP8_E4M3", "INT8"):
        assert not reads(operation(DataType[name]), biased, CPU)


def test_operands_that_can_be_read_as_they_are():
    x = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    for given in (x, x.transpose(1, 2), x[:, :, ::2], x[..., :3], x[:1].expand(6, 3, 4, 5)):
        assert attention_fused.readable(given, torch.float32) is given
    row = torch.arange(5.0)
    for given in (
        x.transpose(2, 3),
        x[..., ::2],
        row.expand(2, 3, 4, 5),
        torch.arange(60.0).as_strided((2, 1, 4, 5), (30, 1, 4, 1)),
        torch.arange(60.0).as_strided((2, 1, 4, 5), (30, 1, 1, 1)),
    ):
        found = attention_fused.readable(given, torch.float32)
        assert found.is_contiguous() and torch.equal(found, given) and found is not given
    tight = torch.arange(60.0).as_strided((2, 1, 4, 5), (30, 1, 5, 1))
    assert attention_fused.readable(tight, torch.float32) is tight
    assert attention_fused.readable(x.half(), torch.float32).dtype is torch.float32
    assert attention_fused.is_finite(x)
    for bad in (math.nan, math.inf, -math.inf):
        assert not attention_fused.is_finite(torch.tensor([1.0, bad]))


def test_how_many_elements_a_mask_has():
    count = attention_fused_padded.mask_elements
    assert count(operation(), spec(lengths=LENGTHS)) == 2 * 7
    assert count(operation(), spec(lengths=LENGTHS, right=0)) == 2 * 7
    for bounds in (
        {"right": 0, "bottom_right": True},
        {"right": 1},
        {"right": -1},
        {"left": 3},
        {"left": 3, "right": 0},
    ):
        assert count(operation(), spec(lengths=LENGTHS, **bounds)) == 2 * 5 * 7
    # Without a band, where its diagonal would start does not matter.
    assert count(operation(), spec(lengths=LENGTHS, bottom_right=True)) == 2 * 7
    for dim, expected in (
        ((2, 4, 5, 7), 2 * 4 * 5 * 7),
        ((1, 4, 1, 7), 2 * 4 * 7),
        ((1, 1, 5, 1), 2 * 5 * 7),
        ((2, 1, 1, 1), 2 * 7),
    ):
        given = operation(DataType.FLOAT, dim)
        assert count(given, spec(lengths=LENGTHS, has_bias=True)) == expected
    given = operation(DataType.FLOAT, (1, 4, 1, 7))
    banded = spec(lengths=LENGTHS, has_bias=True, left=2)
    assert count(given, banded) == 2 * 4 * 5 * 7


def test_masks_that_are_too_large_are_not_made(monkeypatch):
    padded = spec(lengths=LENGTHS)
    for limit, served in ((13, False), (14, True), (15, True)):
        monkeypatch.setattr(attention_fused_padded, "MASK_ELEMENTS", limit)
        assert attention_fused_padded._serves(operation(), padded, CPU) is served
    assert not attention_fused_padded._serves(operation(), PLAIN, CPU)
    assert not attention_fused_padded._serves(operation(), spec(lengths=LENGTHS, alibi=True), CPU)


LEN_Q, LEN_KV = [5, 2, 0, 4], [7, 3, 6, 0]
BANDS = [
    {},
    {"right": 0},
    {"right": 0, "bottom_right": True},
    {"right": 2},
    {"left": 2},
    {"left": 3, "right": 1},
    {"left": 2, "right": 1, "bottom_right": True},
    {"left": 1, "right": 0, "bottom_right": True},
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("band", BANDS)
def test_what_padding_hides(band, has_bias):
    given = spec(batch=4, lengths=LENGTHS, has_bias=has_bias, **band)
    bias = torch.randn((1, 4, 5, 7), generator=torch.Generator().manual_seed(1))
    inputs = {
        "seq_len_q": torch.tensor(LEN_Q).view(-1, 1, 1, 1),
        "seq_len_kv": torch.tensor(LEN_KV).view(-1, 1, 1, 1),
        "bias": bias,
    }
    op = operation(DataType.FLOAT, (1, 4, 5, 7)) if has_bias else operation()
    masks = attention_fused_padded.PaddingMask(op, given)
    # ATen's own causal mask starts at the top left.
    assert masks.causal == (band == {"right": 0})
    found = masks.of(inputs)
    assert found.dead.shape == (4, 1, 5, 1) and found.beyond.shape == (4, 1, 7, 1)
    for b, row in itertools.product(range(4), range(5)):
        seen = 0
        for key in range(7):
            diagonal = row + (LEN_KV[b] - LEN_Q[b] if given.bottom_right else 0)
            hidden = key >= LEN_KV[b]
            assert found.beyond[b, 0, key, 0] == hidden
            if not masks.causal:
                hidden |= given.right is not None and key > diagonal + given.right
                hidden |= given.left is not None and key <= diagonal - given.left
            seen += not hidden
            for head in range(4):
                term = bias[0, head, row, key].item() if has_bias else 0.0
                value = found.mask.expand(4, 4, 5, 7)[b, head, row, key].item()
                assert value == (-math.inf if hidden else term)
        assert found.dead[b, 0, row, 0] == (row >= LEN_Q[b] or seen == 0)
    q, k = torch.randn(4, 4, 5, 8), torch.randn(4, 2, 7, 8)
    cleaned = found.cleaned(q, k, k + 1)
    assert torch.equal(cleaned[0], torch.where(found.dead, 0.0, q))
    assert torch.equal(cleaned[1], torch.where(found.beyond, 0.0, k))
    assert torch.equal(cleaned[2], torch.where(found.beyond, 0.0, k + 1))


@pytest.mark.parametrize("band", [{}, {"right": 0}, {"right": 0, "bottom_right": True}])
def test_calls_that_would_compute_too_much_for_nothing_are_left(monkeypatch, band):
    given = spec(batch=4, lengths=LENGTHS, **band)
    inputs = {
        "seq_len_q": torch.tensor(LEN_Q).view(-1, 1, 1, 1),
        "seq_len_kv": torch.tensor(LEN_KV).view(-1, 1, 1, 1),
    }
    masks = attention_fused_padded.PaddingMask(operation(), given)
    # Scores of all sequences, without those that are seen unless the band hides some as well.
    seen = 0 if "bottom_right" in band else sum(a * b for a, b in zip(LEN_Q, LEN_KV, strict=True))
    waste = (4 * 5 * 7 - seen) * 4 * 8 / 4
    assert waste == int(waste)
    for limit, is_made in ((waste - 1, False), (waste, True)):
        monkeypatch.setattr(attention_fused_padded, "WASTE_A_SEQUENCE", int(limit))
        assert (masks.of(inputs) is not None) is is_made


def test_what_a_score_program_reads():
    bounds = ((1, 3), (2, 6), (3, 4), (5, 9))
    tensor = torch.arange(4 * 6 * 5 * 9.0).view(4, 6, 5, 9)
    assert torch.equal(_sliced(tensor, bounds), tensor[1:3, 2:6, 3:4, 5:9])
    assert torch.equal(_sliced(tensor[:1, :, :, :1], bounds), tensor[:1, 2:6, 3:4, :1])
    assert torch.equal(_sliced(tensor[0, 0], bounds), tensor[None, None, 0, 0, 3:4, 5:9])
    assert torch.equal(_sliced(tensor[0, 0, 0], bounds), tensor[None, None, None, 0, 0, 0, 5:9])
    assert _sliced(torch.tensor(3.0), bounds).shape == (1, 1, 1, 1)
    block = Block((1, 3), (1, 2), (2, 6), (3, 4), (5, 9))
    scores = torch.zeros(1, dtype=torch.float64)
    for axis, (first, last) in enumerate(((8, 10), (2, 6), (3, 4), (5, 9))):
        for given in (axis, axis - 4):
            found = _index(given, scores, block, 7)
            shape = [1] * 4
            shape[axis] = last - first
            assert list(found.shape) == shape and found.dtype is torch.float64
            assert found.flatten().tolist() == list(range(first, last))


@pytest.mark.parametrize("kind", ["matmul", "reduction"])
def test_a_score_program_is_pointwise(kind):
    step = SimpleNamespace(kind=kind, inputs={}, outputs={"out": object()})
    program = SimpleNamespace(operations=[step], input=object(), output=object(), gradient=None)
    with pytest.raises(NotSupportedError, match=f"the score program has a {kind}"):
        _compile(SimpleNamespace(title=lambda: "sdpa"), program)


def test_a_score_program_of_one_sequence_reads_its_own_tensors():
    tensors = [torch.randn(shape) for shape in ((3, 2, 5, 7), (1, 2, 5, 7), (5, 7), (3,), ())]
    program = BoundProgram(None, dict(enumerate(tensors)), torch.float32)
    found = program.narrow_batch(2)._external
    assert torch.equal(found[0], tensors[0][2:3])
    # What has no axis of sequences is read by all.
    assert all(found[key] is tensors[key] for key in range(1, 5))


def graph_of(kind, operands, **options):
    graph = tilewright.Graph(io_data_type=torch.float32)
    tensors = {port: graph.tensor_like(buffer) for port, buffer in operands.items()}
    getattr(graph, kind)(**tensors, attn_scale=0.3, **options)
    op = graph.operations[-1]
    for record in op.outputs.values():
        record.set_output(True)
    graph.validate()
    return op


def attempt_of(kind, operands, **options):
    """What ATen's function left, or None if it left the call to the composition."""
    op = graph_of(kind, operands, **options)
    padded = "seq_len_q" in operands
    module = attention_fused_padded if padded else attention_fused
    way = "backward" if "backward" in kind else "forward"
    attempt = getattr(module, f"{'padded' if padded else 'fused'}_{way}")(op, read_spec(op), CPU)
    assert attempt is not None
    found = {port: torch.full(record.dim, 9.0) for port, record in op.outputs.items()}
    served = attempt(operands, found)
    assert served in (True, False)
    if not served:
        # Nothing is written before it is known.
        assert all((value == 9.0).all() for value in found.values())
    return found if served else None


def operands_of(seed=1, keys=7, bias=None, lengths=False):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((2, 4, 5, 8), generator=generator)
    k, v = (torch.randn((2, 2, keys, 8), generator=generator) for _ in range(2))
    given = {"q": q, "k": k, "v": v}
    if bias is not None:
        given["bias"] = torch.full((2, 4, 5, keys), bias)
    if lengths:
        given["seq_len_q"] = torch.tensor([5, 3], dtype=torch.int32).view(2, 1, 1, 1)
        given["seq_len_kv"] = torch.tensor([6, keys], dtype=torch.int32).view(2, 1, 1, 1)
    return given


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, 0.0, -50.0, 50.0])
def test_finite_calls_are_served_whatever_the_sign_of_their_sums(lengths, causal, bias):
    options = {"use_causal_mask": causal, "use_padding_mask": lengths}
    given = operands_of(bias=bias, lengths=lengths)
    found = attempt_of("sdpa", given, generate_stats=True, **options)
    assert found is not None
    finite = found["Stats"][found["Stats"].isfinite()]
    assert finite.numel() and (bias is None or bias == 0.0 or ((finite > 0) == (bias > 0)).all())
    given |= {"o": found["O"], "stats": found["Stats"], "dO": torch.ones(2, 4, 5, 8)}
    assert attempt_of("sdpa_backward", given, **options) is not None


@pytest.mark.parametrize("lengths", [False, True])
def test_rows_that_a_bias_hides_are_left_to_the_composition(lengths):
    options = {"use_padding_mask": lengths}
    given = operands_of(bias=0.0, lengths=lengths)
    found = attempt_of("sdpa", given, generate_stats=True, **options)
    given["bias"][1, 2, 1] = -math.inf
    assert attempt_of("sdpa", given, generate_stats=True, **options) is None
    stats = found["Stats"].clone()
    stats[1, 2, 1] = -math.inf
    given |= {"o": found["O"], "stats": stats, "dO": torch.ones(2, 4, 5, 8)}
    assert attempt_of("sdpa_backward", given, **options) is None


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_results_that_are_no_numbers_are_made_again_where_values_may_be_hidden(
    lengths, causal, bad
):
    options = {"use_causal_mask": causal, "use_padding_mask": lengths}
    given = operands_of(lengths=lengths)
    found = attempt_of("sdpa", given, generate_stats=True, **options)
    saved = {"o": found["O"], "stats": found["Stats"], "dO": torch.ones(2, 4, 5, 8)}
    given["v"][0, 1, 2, 3] = bad
    hides = causal or lengths
    assert (attempt_of("sdpa", given, generate_stats=True, **options) is None) is hides
    assert (attempt_of("sdpa_backward", given | saved, **options) is None) is hides


@pytest.mark.parametrize("kind", ["sdpa", "sdpa_backward"])
def test_calls_with_too_much_padding_are_left_before_anything_is_written(monkeypatch, kind):
    given = operands_of(lengths=True)
    if kind == "sdpa_backward":
        given |= {port: torch.ones(2, 4, 5, 8) for port in ("o", "dO")}
        given["stats"] = torch.ones(2, 4, 5, 1)
    assert attempt_of(kind, given, use_padding_mask=True) is not None
    monkeypatch.setattr(attention_fused_padded, "WASTE_A_SEQUENCE", 0)
    assert attempt_of(kind, given, use_padding_mask=True) is None
