"""docs/operations/attention.md tells the truth: its code runs and its drawings follow the rule."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.dtypes import DataType
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operations.attention_base import AttentionBase

pytestmark = pytest.mark.L0

TEXT = (Path(__file__).resolve().parents[4] / "docs/operations/attention.md").read_text("utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
DRAWINGS = re.findall(r"^```text\n# (.+)\n((?:[.x ]+\n)+)```$", TEXT, re.MULTILINE)


def attention(rows: int, keys: int, **masks: Any) -> AttentionBase:
    graph = DeclaredGraph(io_data_type=DataType.HALF)
    q, k, v = (graph.tensor((1, 2, length, 8)) for length in (rows, keys, keys))
    output, _ = graph.sdpa(q, k, v, **masks)
    assert output is not None
    output.set_output(True)
    graph.validate()
    operation = graph.operations[0]
    assert isinstance(operation, AttentionBase)
    return operation


def test_the_page_draws_both_bounds_at_both_corners() -> None:
    calls = " ".join(call for call, _ in DRAWINGS)
    assert len(DRAWINGS) >= 4
    for word in ("left=", "right=", "TOP_LEFT", "BOTTOM_RIGHT"):
        assert word in calls, word


@pytest.mark.parametrize("index", range(len(DRAWINGS)))
def test_drawings_follow_the_rule(index: int) -> None:
    call, drawn = DRAWINGS[index]
    grid = [row.split() for row in drawn.splitlines()]
    rows, keys = len(grid), len(grid[0])
    bounds = {name: int(value) for name, value in re.findall(r"(left|right)=(\d+)", call)}
    operation = attention(
        rows,
        keys,
        diagonal_band_left_bound=bounds.get("left"),
        diagonal_band_right_bound=bounds.get("right"),
        diagonal_alignment=re.findall(r"TOP_LEFT|BOTTOM_RIGHT", call)[0],
    )
    left, right = operation.left_bound, operation.right_bound
    is_bottom = operation.alignment is diagonal_alignment.BOTTOM_RIGHT
    shift = keys - rows if is_bottom else 0
    for row, marks in enumerate(grid):
        assert len(marks) == keys, (call, row)
        for col, mark in enumerate(marks):
            aligned = row + shift
            is_hidden = (left is not None and col <= aligned - left) or (
                right is not None and col > aligned + right
            )
            assert mark == ("." if is_hidden else "x"), (call, row, col)


def test_the_example_runs_and_is_right() -> None:
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(CODE[0], names)
    q, k, v = names["q"].double(), names["k"].double(), names["v"].double()
    k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(64)
    hidden = torch.arange(7)[None, :] > torch.arange(5)[:, None] + 2
    scores = scores.masked_fill(hidden, -math.inf)
    torch.testing.assert_close(
        names["o"].double(), torch.matmul(torch.softmax(scores, -1), v), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        names["stats"].double(), torch.logsumexp(scores, -1, keepdim=True), atol=1e-5, rtol=1e-5
    )


def test_the_score_program_of_the_page_is_accepted() -> None:
    names: dict[str, Any] = {}
    exec(CODE[1], names)
    operation = attention(5, 7, score_mod=names["soft_cap"])
    modes = [step.attributes()["mode"] for step in operation.nested_operations()]
    assert modes == ["div", "tanh", "mul"]


@pytest.mark.parametrize(
    "kind",
    [
        *("sdpa", "sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward"),
        *("sdpa_mxfp8", "sdpa_mxfp8_backward"),
    ],
)
def test_the_page_names_every_operation(kind: str) -> None:
    assert f"`{kind}`" in TEXT
