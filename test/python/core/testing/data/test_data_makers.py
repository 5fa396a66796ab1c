"""What each maker promises of its operands, checked on many draws."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.oracle import attention
from tilewright.testing import data
from tilewright.testing.compare import assert_close

pytestmark = pytest.mark.L0


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("profile", data.RAGGED_PROFILES)
def test_ragged_batches(profile: str) -> None:
    g = _generator()
    for _ in range(5):
        case = data.ragged(g, profile=profile, batch=5, longest_q=40, longest_kv=70, kv_heads=1)
        for side, longest, heads, port in (("q", 40, 2, "q"), ("kv", 70, 1, "k")):
            lengths = case.facts[f"lengths_{side}"]
            assert len(lengths) == 5
            assert all(0 <= length <= longest for length in lengths)
            sums = case[f"cu_seqlens_{side}"]
            assert sums.dtype == torch.int32
            assert sums.diff().tolist() == lengths
            assert case[f"seq_len_{side}"].reshape(-1).tolist() == lengths
            offsets = case[f"{side}.ragged_offset"]
            assert offsets.shape == (6, 1, 1, 1)
            assert offsets.reshape(-1).tolist() == (sums.long() * heads * 16).tolist()
            rows, used = case[port], sum(lengths)
            assert rows.shape == (used + 3, heads, 16)
            assert not rows[:used].isnan().any()
            assert rows[used:].isnan().all()
            if profile == "empty":
                assert lengths[0] == lengths[-1] == 0
                assert lengths[2] == lengths[3] == 0
                assert any(lengths)
            if profile == "uneven":
                assert max(lengths) == longest
                assert sorted(lengths)[-2] <= 3
            if profile == "one_token":
                assert lengths == [1] * 5


def test_mixed_lengths_lie_around_tiles() -> None:
    g = _generator(3)
    seen = set()
    for _ in range(30):
        seen |= set(data.ragged(g, longest_q=70, longest_kv=200).facts["lengths_kv"])
    assert {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200} <= seen


@pytest.mark.parametrize("unused", data.UNUSED_ENTRIES)
def test_paged_caches_hold_nan_wherever_no_token_lies(unused: str) -> None:
    g = _generator()
    for lengths in ([0, 13, 32], [40, 1, 16], None):
        case = data.paged_cache(g, lengths=lengths, page_size=8, longest=40, unused=unused)
        known, used = case.facts["lengths"], case.facts["used_entries"]
        named: dict[str, list[int]] = {"k": [], "v": []}
        for port in ("k", "v"):
            container, table = case[f"{port}_container"], case[f"{port}_table"]
            assert table.shape == (3, 1, 5, 1)
            finite = 0
            for b, length in enumerate(known):
                entries = table[b, 0, :, 0].tolist()
                named[port] += entries[: used[b]]
                for token in range(length):
                    row = container[entries[token // 8], :, token % 8]
                    assert torch.equal(row, case[port][b, :, token])
                finite += length
                assert (case[port][b, :, length:] == 0).all()
                for entry in entries[used[b] :]:
                    if unused == "wild":
                        assert entry >= 2**30
                    elif unused == "negative":
                        assert entry == -1
                    else:
                        assert container[entry].isnan().all()
            # Every other element of the container is NaN.
            assert int((~container.isnan()).sum()) == finite * 2 * 16
            assert len(set(named[port])) == len(named[port])
        if sum(used) > 3:
            assert named["k"] != named["v"]


def test_the_reference_reads_a_paged_cache_as_its_dense_twin() -> None:
    from tilewright.oracle.attention_operands import paged_source

    case = data.paged_cache(_generator(4), lengths=[0, 13, 40], page_size=8)
    lengths = case.facts["lengths"]
    sources = [
        paged_source(case[f"{port}_container"], case[f"{port}_table"], lengths, 40)
        for port in ("k", "v")
    ]
    paged = attention.forward(case["q"], *sources, seq_len_kv=lengths)
    dense = attention.forward(case["q"], case["k"], case["v"], seq_len_kv=lengths)
    assert torch.equal(paged.output, dense.output)
    assert bool(torch.isfinite(paged.output).all())


@pytest.mark.parametrize("name", data.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn])
def test_layouts(name: str, dtype: torch.dtype) -> None:
    dim = (3, 1, 5, 8)
    case = data.layout(_generator(), dim=dim, layout=name, dtype=dtype)
    x = case["x"]
    assert tuple(x.shape) == dim
    assert x.dtype is dtype
    assert list(x.stride()) == case.facts["strides"]
    numbers = x.to(torch.float32)
    assert not numbers.isnan().any()
    if dtype.is_floating_point:
        assert len(numbers.unique()) > 10
    assert x.is_contiguous() == (name in ("contiguous", "offset", "wide_singleton"))
    if name == "expanded":
        axis = case.facts["axis"]
        assert x.stride(axis) == 0
        assert dim[axis] > 1
    if name == "offset":
        assert x.storage_offset() > 0
    if name == "wide_singleton":
        assert x.stride(1) > 2**31
    if name in ("padded", "strided") and dtype.is_floating_point:
        raw = torch.empty(0, dtype=dtype).set_(x.untyped_storage())
        gaps = raw.numel() - x.numel()
        assert gaps > 0
        assert int(raw.to(torch.float32).isnan().sum()) == gaps


def test_layouts_give_one_case_each_and_take_odd_shapes() -> None:
    assert len(data.layouts(_generator(), dim=(4,))) == len(data.LAYOUTS)
    for dim in ((0, 4), (1,), (1, 1)):
        for case in data.layouts(_generator(), dim=dim):
            assert tuple(case["x"].shape) == dim
    with pytest.raises(ValueError, match="layout"):
        data.layout(_generator(), dim=(2,), layout="reversed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("profile", data.VALUE_PROFILES)
def test_values(profile: str, dtype: torch.dtype) -> None:
    x = data.values(_generator(1), dim=(16, 32), profile=profile, dtype=dtype)["x"]
    info = torch.finfo(dtype)
    magnitude = x.double().abs()
    if profile == "denormals":
        assert magnitude.min() > 0
        assert magnitude.max() <= info.smallest_normal
        assert (magnitude < info.smallest_normal).any()
        assert {-1.0, 1.0} == set(x.double().sign().unique().tolist())
    if profile == "large":
        assert magnitude.max() == info.max
        assert magnitude.min() > info.max / 16
    assert bool(x.isinf().any()) == (profile in ("infinities", "nan"))
    assert bool(x.isnan().any()) == (profile == "nan")
    if profile in ("infinities", "nan"):
        assert (x == math.inf).any()
        assert (x == -math.inf).any()
        assert torch.isfinite(x).sum() > x.numel() // 2
    if profile == "zeros":
        assert magnitude.max() == 0
        assert 0 < torch.signbit(x).sum() < x.numel()
    if profile == "constant":
        assert (x == x[:, :1]).all()
        assert len(x[:, 0].unique()) > 8
    if profile == "huge_offset":
        assert 990 < x.double().mean() < 1010


def test_values_that_a_type_does_not_have_are_refused() -> None:
    for dtype, profile in (("float8_e4m3fn", "infinities"), ("int32", "normal")):
        with pytest.raises(ValueError, match=r"E4M3 has no|expected a floating type"):
            data.values(_generator(), dim=(4,), dtype=dtype, profile=profile)
    assert (
        data.values(_generator(), dim=(64,), dtype="float8_e5m2", profile="infinities")["x"]
        .float()
        .isinf()
        .any()
    )


def _scores(case: data.DataCase) -> torch.Tensor:
    q, k = case["q"].double(), case["k"].double().repeat_interleave(2, dim=1)
    return q @ k.mT / math.sqrt(q.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("profile", data.ATTENTION_PROFILES)
def test_attention_values(profile: str, dtype: torch.dtype) -> None:
    case = data.attention_values(_generator(2), profile=profile, dtype=dtype)
    scores = _scores(case)
    if profile == "large_logits":
        assert scores.max() > 5000
        assert scores.min() < -5000
    if profile == "negative_logits":
        assert scores.max() < -110
        assert scores.min() > -130
    if profile == "equal_logits":
        assert (case["k"] == case["k"][:, :, :1]).all()
        assert (scores - scores[..., :1]).abs().max() < 1e-12
    if profile == "denormals":
        tiny = torch.finfo(dtype).smallest_normal
        assert case["v"].double().abs().min() > 0
        assert case["v"].double().abs().max() <= tiny
    if profile == "infinities":
        bias, hidden = case["bias"], case.facts["hidden_keys"]
        assert (bias[..., hidden] == -math.inf).all()
        assert (bias[:, :, case.facts["dead_rows"]] == -math.inf).all()
        assert case["v"][:, :, hidden].isinf().all()
        others = [c for c in range(47) if c not in hidden]
        assert torch.isfinite(case["v"][:, :, others]).all()
    if profile == "hidden_nan":
        for b, length in enumerate(case.facts["lengths_kv"]):
            assert case["k"][b, :, length:].isnan().all()
            assert torch.isfinite(case["v"][b, :, :length]).all()


def test_negative_logits_catch_a_maximum_that_starts_at_zero() -> None:
    case = data.attention_values(_generator(), profile="negative_logits")
    q, k, v = (case[name] for name in "qkv")
    exact = attention.forward(q, k, v).output
    keys, values = (t.repeat_interleave(2, dim=1) for t in (k, v))
    scores = q @ keys.mT * 0.25

    def attend(top: torch.Tensor) -> torch.Tensor:
        weights = (scores - top).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ values

    assert_close(attend(scores.amax(-1, keepdim=True)), exact)
    broken = attend(scores.amax(-1, keepdim=True).clamp(min=0))
    with pytest.raises(AssertionError):
        assert_close(broken, exact)


def test_wrong_parameters_are_refused() -> None:
    g = _generator()
    with pytest.raises(ValueError, match="profile"):
        data.ragged(g, profile="no_such")
    with pytest.raises(ValueError, match="profile"):
        data.attention_values(g, profile="no_such")
    with pytest.raises(ValueError, match="kv_heads"):
        data.attention_values(g, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="unused"):
        data.paged_cache(g, unused="no_such")
    with pytest.raises(ValueError, match="lengths"):
        data.paged_cache(g, lengths=[41])
    with pytest.raises(ValueError, match="profile"):
        data.values(g, dim=(3,), profile="no_such")
    with pytest.raises(ValueError, match="element_type"):
        data.format_ties(g, element_type="HALF")
