"""The attention reference's memory: a block of scores at a time, whatever the heads and rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.oracle.attention_problem import BLOCK_BYTES, AttentionOptions, HeadSource, Problem

pytestmark = pytest.mark.L0

# A whole score tensor of this case would take 8 heads * 1024 * 16384 * 8 bytes = 1 GiB.
_PROGRAM = """
import sys
import torch
from tilewright.oracle import attention
generator = torch.Generator().manual_seed(0)
def randn(heads, rows):
    made = torch.randn(1, heads, rows, 8, generator=generator)
    return made.to(torch.bfloat16)
q, k, v = randn(8, 1024), randn(1, 16384), randn(1, 16384)
attention.forward(q[:, :, :8], k, v)
def peak_kib():
    # Not ru_maxrss: a child of a large process begins with that one's peak.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
before = peak_kib()
kwargs = dict(right_bound=0, bottom_right=True, row_block=32)
result = attention.forward(q[:, :2], k, v, **kwargs)
attention.backward(q[:, :2, :128], k, v, q[:, :2, :128], **kwargs)
after = peak_kib()
print((after - before) // 1024)
"""


def test_peak_memory_does_not_hold_a_whole_score_matrix() -> None:
    """One head's scores are 128 MiB here; blocks of 32 rows are 4 MiB, a dozen live at once."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(Path(tilewright.__file__).parents[1])
    environment["OMP_NUM_THREADS"] = "1"
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < 96


@pytest.mark.parametrize(("rows", "columns"), [(8192, 8192), (5, 131072), (3, 2**24), (7, 1)])
def test_default_blocks_stay_within_the_bound(rows: int, columns: int) -> None:
    def never(_: int, __: int) -> torch.Tensor:
        raise RuntimeError("planning reads no operand")

    q = HeadSource((1, 2, rows, 64), torch.device("cpu"), never)
    k = HeadSource((1, 1, columns, 64), torch.device("cpu"), never)
    blocks = list(Problem(q, k, k, AttentionOptions()).blocks())
    # A row of scores may be larger than the bound; then a block is that one row.
    assert all(
        block.end - block.start == 1 or (block.end - block.start) * columns * 8 <= BLOCK_BYTES
        for block in blocks
    )
    covered = [(block.head, row) for block in blocks for row in range(block.start, block.end)]
    assert covered == [(head, row) for head in range(2) for row in range(rows)]
