"""Random combinations of attention's options: the engine and the oracle agree."""

from __future__ import annotations

import random

import pytest
import torch

import tilewright
from tilewright.engines.aten import attention_scores
from tilewright.oracle import attention_operations as _registers_references  # noqa: F401
from tilewright.oracle.registry import reference_of

FORWARD, BACKWARD = 6e-6, 2e-5


def draw_case(seed: int):
    """Operands by argument name, options, and the outputs to pass in, of one case."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    batch, heads_kv, group = (
        chance.choice(choices) for choices in ((1, 2, 3), (1, 2, 3), (1, 2, 4))
    )
    heads, rows = heads_kv * group, chance.choice([1, 3, 17, 64])
    keys, depth = chance.choice([1, 5, 33, 140]), chance.choice([4, 8, 16])
    depth_v = chance.choice([depth, depth, 6])
    operands = {
        "q": numbers(batch, heads, rows, depth),
        "k": numbers(batch, heads_kv, keys, depth),
        "v": numbers(batch, heads_kv, keys, depth_v),
    }
    options = {"attn_scale": chance.choice([0.3, 1.0])}
    mask = chance.randrange(6)
    if mask == 1:
        options["use_causal_mask"] = True
    elif mask == 2:
        options["use_causal_mask_bottom_right"] = True
    elif mask >= 3:
        options["diagonal_alignment"] = chance.choice(list(tilewright.diagonal_alignment))
        if chance.random() < 0.7:
            options["diagonal_band_left_bound"] = chance.choice([1, 2, 7, 30])
        if chance.random() < 0.7:
            options["diagonal_band_right_bound"] = chance.choice([0, 1, 5])
    options["use_alibi_mask"] = chance.random() < 0.3
    if chance.random() < 0.3:
        dim = [chance.choice([1, extent]) for extent in (batch, heads, rows, keys)]
        operands["bias"] = numbers(*dim)
    if chance.random() < 0.3:
        operands["sink_token"] = numbers(1, heads, 1, 1)
    if chance.random() < 0.4:
        options["use_padding_mask"] = True
        for port, extent in (("seq_len_q", rows), ("seq_len_kv", keys)):
            used = [chance.randrange(extent + 1) for _ in range(batch)]
            operands[port] = torch.tensor(used, dtype=torch.int32).view(batch, 1, 1, 1)
    if chance.random() < 0.2:
        dim = (batch, heads, (rows + 127) // 128, (keys + 1023) // 1024)
        operands["block_mask"] = torch.randint(0, 256, dim, generator=generator).to(torch.uint8)
    if chance.random() < 0.3:
        options["probability"] = 0.3
        words = (chance.randrange(-(2**63), 2**63), chance.randrange(2**40))
        for port, word in zip(("dropout_seed", "dropout_offset"), words, strict=True):
            operands[port] = torch.tensor(word, dtype=torch.int64).view(1, 1, 1, 1)
    given = [port for port in ("score_max", "score_sum_exp") if chance.random() < 0.3]
    if "probability" in options and chance.random() < 0.5:
        given.append("rng_dump")
    return operands, options, tuple(given), numbers(batch, heads, rows, depth_v)


def check(bench, seed: int) -> None:
    operands, options, given, d_o = draw_case(seed)
    found = bench.run("sdpa", operands, generate_stats=True, given=given, **options)
    expected = reference_of("sdpa")(bench.runner.graph.operations[0], operands)
    for port, value in found.items():
        bench.close(f"case {seed}: {port}", value, expected[port], FORWARD)
    operands.update(dO=d_o, o=expected["O"].float(), stats=expected["Stats"].float())
    given = tuple(
        port
        for port, source in (("dBias", "bias"), ("dSink_token", "sink_token"))
        if source in operands
    )
    found = bench.run("sdpa_backward", operands, given=given, **options)
    expected = reference_of("sdpa_backward")(bench.runner.graph.operations[0], operands)
    for port, value in found.items():
        bench.close(f"case {seed}: {port}", value, expected[port].view(value.shape), BACKWARD)


@pytest.mark.L0
@pytest.mark.parametrize("seed", range(8))
def test_a_few_cases(ways, seed):
    check(ways, seed)


@pytest.mark.L1
@pytest.mark.parametrize("seed", range(8, 200))
def test_many_cases(ways, seed):
    check(ways, seed)


def check_in_small_blocks(bench, monkeypatch, way: str, seed: int) -> None:
    """Blocks that begin behind 0 on every axis, and groups of query heads that are split."""
    q, k = (draw_case(seed)[0][port] for port in "qk")
    whole = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    budget = max(4, whole // random.Random(seed).choice([3, 8, 25]))
    monkeypatch.setattr(attention_scores, "SCORE_BLOCK_ELEMENTS", budget)
    bench.runner.way = way
    check(bench, seed)


@pytest.mark.L0
@pytest.mark.parametrize("way", ["composed", "device"])
@pytest.mark.parametrize("seed", range(200, 208))
def test_a_few_cases_in_small_blocks(bench, monkeypatch, way, seed):
    check_in_small_blocks(bench, monkeypatch, way, seed)


@pytest.mark.L1
@pytest.mark.parametrize("way", ["composed", "device"])
@pytest.mark.parametrize("seed", range(208, 240))
def test_many_cases_in_small_blocks(bench, monkeypatch, way, seed):
    check_in_small_blocks(bench, monkeypatch, way, seed)
