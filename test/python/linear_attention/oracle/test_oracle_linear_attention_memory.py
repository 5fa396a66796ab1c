"""Memory of the linear attention reference: chunks of heads, segments of tokens, honest failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.oracle import assert_close, linear_attention
from tilewright.oracle.linear_attention import CHUNK_BYTES

_NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm"
)

_PREPARE = """
import resource, sys
import torch
from tilewright.oracle import linear_attention
heads, tokens, depth = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
generator = torch.Generator().manual_seed(0)
def randn(*shape):
    return torch.randn(shape, generator=generator).to(torch.bfloat16)
q, k, v, d_o = (randn(1, tokens, heads, depth) for _ in range(4))
k = k / k.float().norm(dim=-1, keepdim=True).to(k.dtype)
g, beta = -randn(1, tokens, heads).abs(), torch.sigmoid(randn(1, tokens, heads))
"""

_MEASURE = (
    _PREPARE
    + """
small = [t[:, :8] for t in (q, k, v, d_o, g, beta)]
def peak():
    # Not ru_maxrss: a child that was started from a large process begins with that one's peak.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
def run(q, k, v, d_o, g, beta):
    out = linear_attention.forward(q, k, v, g=g, beta=beta)
    results = sum(8 * t.numel() for t in out)
    between = peak()
    del out
    found = linear_attention.backward(q, k, v, d_o, g=g, beta=beta)
    # A sum: isfinite would take another tensor of the size.
    assert all(bool(torch.isfinite(t.sum())) for t in found.values())
    return results, between, sum(8 * t.numel() for t in found.values())
run(*small)
# What is mapped now, not the peak that drawing the operands had.
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
forward_results, between, backward_results = run(q, k, v, d_o, g, beta)
extra_forward = between - before - forward_results
extra_backward = peak() - before - backward_results
print(extra_forward, extra_backward)
"""
)


def _run(program: str, *arguments: int) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(Path(tilewright.__file__).parents[1])
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def _extra_bytes(heads: int, tokens: int, depth: int) -> tuple[int, int]:
    """Peak memory beyond operands and results, of the forward and of the backward."""
    finished = _run(_MEASURE, heads, tokens, depth)
    assert finished.returncode == 0, finished.stderr
    forward, backward = finished.stdout.split()
    return int(forward), int(backward)


@_NEEDS_PROC
@pytest.mark.L0
def test_extra_memory_stays_small_on_a_small_case() -> None:
    """The states of all tokens would take 1536 * 32 KiB = 48 MiB a head, several times over."""
    forward, backward = _extra_bytes(3, 1536, 64)
    assert forward < 24 * 2**20
    assert backward < 48 * 2**20


@_NEEDS_PROC
@pytest.mark.L2
def test_extra_memory_does_not_grow_with_heads() -> None:
    """Eleven heads of this size fill a chunk; 32 at once would take three times its bound."""
    for heads in (8, 32):
        forward, backward = _extra_bytes(heads, 2048, 128)
        assert forward < CHUNK_BYTES
        assert backward < 2 * CHUNK_BYTES


@_NEEDS_PROC
@pytest.mark.L3
def test_64_heads_of_16384_tokens_take_less_than_two_gibibytes() -> None:
    forward, backward = _extra_bytes(64, 16384, 128)
    assert forward < 2 * 2**30
    assert backward < 2 * 2**30


@pytest.mark.L0
@pytest.mark.parametrize("token_segment", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("head_chunk", [2, 3, 6])
def test_segments_and_chunks_equal_the_whole(token_segment: int, head_chunk: int) -> None:
    """Ragged sequences, one of them empty and one of one token, grouped heads, partial segments."""
    generator = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = randn(1, 12, 2, 3), randn(1, 12, 2, 3)
    v, d_o = randn(1, 12, 6, 4), randn(1, 12, 6, 4)
    g, beta = -randn(1, 12, 6, 3).abs(), torch.sigmoid(randn(1, 12, 6))
    options = {
        "g": g,
        "beta": beta,
        "initial_state": randn(4, 6, 3, 4),
        "d_final_state": randn(4, 6, 3, 4),
        "cu_seqlens": torch.tensor([0, 7, 7, 8, 12]),
    }
    whole = linear_attention.backward(q, k, v, d_o, **options, head_chunk=6, token_segment=100)
    parts = linear_attention.backward(
        q, k, v, d_o, **options, head_chunk=head_chunk, token_segment=token_segment
    )
    assert set(parts) == {"q", "k", "v", "g", "beta", "initial_state"}
    for name, gradient in parts.items():
        assert gradient.abs().max() > 0.01
        assert_close(gradient, whole[name], tol=1e-12, name=name)


_TOO_LARGE = (
    _PREPARE
    + """
linear_attention.forward(q[:, :2], k[:, :2], v[:, :2])
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
limit = mapped + 48 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from tilewright.oracle.memory import ReferenceMemoryError
try:
    if sys.argv[4] == "1":
        linear_attention.backward(q, k, v, d_o, g=g, beta=beta)
    else:
        linear_attention.forward(q, k, v, g=g, beta=beta)
except ReferenceMemoryError as error:
    print(error)
"""
)


@pytest.mark.L0
@_NEEDS_PROC
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_a_reference_that_runs_out_of_memory_says_that_it_was_the_reference(direction: int) -> None:
    """48 MiB more may be mapped, and the result alone takes 128."""
    finished = _run(_TOO_LARGE, 64, 4096, 64, direction)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("the reference linear attention, ")
    assert "ran out of memory; give a smaller head_chunk" in finished.stdout
