"""What attention does on other devices than a CPU; ATen's fused function there has a stand-in.

The stand-in does to values that a causal mask hides what the real one does: it multiplies by 0.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import (
    attention,
    attention_fp8,
    attention_fused,
    attention_mxfp8,
    registry,
)
from tilewright.engines.aten.attention_blocks import (
    DEVICE_SCORE_BLOCK_ELEMENTS,
    OPEN_BAND,
    SCORE_BLOCK_ELEMENTS,
)
from tilewright.engines.aten.attention_parts import PartBuilder
from tilewright.engines.aten.attention_scores import Part
from tilewright.engines.aten.attention_spec import AttentionSpec

pytestmark = pytest.mark.L0

CUDA = torch.device("cuda")
PLAIN = AttentionSpec(
    title="sdpa",
    batch=2,
    heads_q=4,
    heads_kv=2,
    rows=6,
    keys=6,
    depth=8,
    depth_v=8,
    compute=torch.float32,
    scale=0.3,
)


def operation(types=("HALF", "HALF", "HALF"), outputs=("O", "Stats"), out_type="HALF"):
    records = {
        port: SimpleNamespace(data_type=tilewright.data_type[name])
        for port, name in zip("qkv", types, strict=True)
    }
    out = tilewright.Graph().tensor((2, 4, 6, 8), data_type=out_type)
    return SimpleNamespace(inputs=records, outputs=dict.fromkeys(outputs, out))


def spec(**changes):
    return dataclasses.replace(PLAIN, **changes)


def serves(op=None, **changes):
    return attention_fused.fused_forward(op or operation(), spec(**changes), CUDA) is not None


def test_what_is_served():
    assert serves() and serves(operation(["BFLOAT16"] * 3)) and serves(operation(outputs=("O",)))
    for types in (["FLOAT"] * 3, ["DOUBLE"] * 3, ["HALF", "HALF", "BFLOAT16"], ["FP8_E4M3"] * 3):
        assert not serves(operation(types))
    for types in (["HALF", "FLOAT", "HALF"], ["BFLOAT16", "HALF", "HALF"]):
        assert not serves(operation(types))
    for more in ("score_max", "rng_dump"):
        assert not serves(operation(outputs=("O", "Stats", more)))
    assert not serves(has_bias=True) and not serves(scale=None) and not serves(alibi=True)
    assert not serves(has_bias=True, scale=None)
    for depth in (8, 64, 248, 256):
        assert serves(depth=depth, depth_v=depth)
    for depth in (1, 4, 12, 65, 255, 264, 512):
        assert not serves(depth=depth, depth_v=depth)
    assert not serves(depth_v=16)
    assert serves(keys=9) and serves(right=0)
    assert not serves(right=0, keys=9) and not serves(right=0, keys=3)
    assert not serves(right=1) and not serves(left=2) and not serves(left=2, right=0)
    for device in ("xpu", "meta"):
        assert attention_fused.fused_forward(operation(), PLAIN, torch.device(device)) is None


def stand_in(q, k, v, probability, causal, return_mask, scale):
    """What the device's function gives, in float64; only the first two results are used."""
    assert probability == 0.0 and return_mask is False
    for operand in (q, k, v):
        assert operand.stride(3) == 1
    group = q.shape[1] // k.shape[1]
    wide, keys, values = (operand.double() for operand in (q, k, v))
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = scale * wide @ keys.transpose(2, 3)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    o = scores.softmax(-1) @ values
    return o.to(q.dtype), scores.logsumexp(-1).float(), None, None


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stats", [None, False, True], ids=["no_stats", "natural", "log2"])
@pytest.mark.parametrize("layout", ["packed", "turned", "expanded"])
def test_results(monkeypatch, heads_kv, causal, stats, layout):
    monkeypatch.setattr(attention_fused, "_flash_cuda", stand_in)
    outputs = ("O",) if stats is None else ("O", "Stats")
    changes = {"right": 0 if causal else None, "stats_log2": bool(stats), "heads_kv": heads_kv}
    attempt = attention_fused.fused_forward(operation(outputs=outputs), spec(**changes), CUDA)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((2, 4, 6, 8), generator=generator).half()
    k, v = (torch.randn((2, heads_kv, 6, 8), generator=generator).half() for _ in range(2))
    if layout == "turned":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
    elif layout == "expanded":
        q, k, v = (x[..., :1].expand(x.shape) for x in (q, k, v))
    found = {port: torch.full((2, 4, 6, 8 if port == "O" else 1), 9.0) for port in outputs}
    assert attempt({"q": q, "k": k, "v": v}, found) is True
    packed = (x.contiguous() for x in (q, k, v))
    o, expected = stand_in(*packed, 0.0, causal, False, 0.3)[:2]
    assert torch.allclose(found["O"], o.float(), atol=2e-3)
    if stats is not None:
        expected = expected.unsqueeze(-1) * (1 / math.log(2) if stats else 1.0)
        assert torch.allclose(found["Stats"], expected, rtol=1e-6)


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_reach_the_rows_that_see_them(monkeypatch, heads_kv, bad):
    monkeypatch.setattr(attention_fused, "_flash_cuda", stand_in)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn((2, 4, 6, 8), generator=generator).half()
    k, v = (torch.randn((2, heads_kv, 6, 8), generator=generator).half() for _ in range(2))
    clean = stand_in(q, k, v, 0.0, True, False, 0.3)[0].float()
    v[1, heads_kv - 1, 3, 5] = bad
    given = spec(right=0, heads_kv=heads_kv)
    attempt = attention_fused.fused_forward(operation(outputs=("O",)), given, CUDA)
    found = {"O": torch.full((2, 4, 6, 8), 9.0)}
    assert attempt({"q": q, "k": k, "v": v}, found)
    group = 4 // heads_kv
    seen = torch.zeros(2, 4, 6, 8, dtype=torch.bool)
    seen[1, 4 - group :, 3:, 5] = True
    same = (found["O"] == bad) | (found["O"].isnan() & math.isnan(bad))
    assert torch.equal(same, seen)
    # Where the value is hidden, or another column: as it is without it.
    others = ~seen
    others[1, 4 - group :, 3:, 5] = False
    assert torch.allclose(found["O"][others], clean[others], atol=2e-3)


def part_on(device):
    q = torch.zeros(1, 2, 3, 4, device=device)
    return Part(q, q, q, torch.float32, 1.0, OPEN_BAND, False)


def test_blocks_on_a_device_are_larger_and_never_looked_into():
    assert part_on("cpu").block_budget == SCORE_BLOCK_ELEMENTS
    assert part_on("meta").block_budget == DEVICE_SCORE_BLOCK_ELEMENTS
    finite = torch.zeros(3)
    assert part_on("cpu").is_clean(finite) and not part_on("meta").is_clean(finite)


def test_numbers_on_a_device_stay_there():
    builder = object.__new__(PartBuilder)
    builder.spec = spec()
    builder._op = SimpleNamespace(inputs={"dropout_seed": SimpleNamespace(value=7)})
    here, there = torch.full((1, 1, 1, 1), 2.5), torch.zeros((1, 1, 1, 1), device="meta")
    assert builder.scalar({"x": here}, "x") == 2.5
    found = builder.scalar({"x": there.double()}, "x")
    assert found.shape == () and found.dtype is torch.float32 and found.is_meta
    assert builder._word({"x": here.int()}, "x") == 2
    found = builder._word({"x": there.int()}, "x")
    assert found.shape == () and found.dtype is torch.int64 and found.is_meta
    assert builder.scalar({}, "dropout_seed") == 7.0 and builder._word({}, "dropout_seed") == 7


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["sdpa", "sdpa_fp8", "sdpa_mxfp8"])
@pytest.mark.parametrize("direction", ["", "_backward"])
def test_only_a_cpu_has_its_lengths_read_by_the_host(monkeypatch, device, kind, direction):
    module = {"sdpa": attention, "sdpa_fp8": attention_fp8, "sdpa_mxfp8": attention_mxfp8}[kind]
    name = kind.replace("sdpa", "compose") + (direction or "_forward")
    seen = []

    def compose(*arguments):
        seen.append(arguments[-1])
        return "the composition"

    monkeypatch.setattr(module, name, compose)
    if kind == "sdpa":
        monkeypatch.setattr(module, "read_spec", lambda op: None)
        way = direction or "_forward"
        for attempt in ("padded", "fused"):
            monkeypatch.setattr(module, attempt + way, lambda *arguments: None)
    op = SimpleNamespace(kind=kind + direction, name="attention")
    assert registry.prepare(op, torch.device(device)) == "the composition"
    assert seen == [device == "cpu"]
