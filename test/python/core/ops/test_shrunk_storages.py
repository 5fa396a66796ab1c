"""Tensors whose storage was resized under them: PyTorch reads and writes past its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0

B, H, H_KV, S, KEYS, D = 2, 4, 2, 5, 7, 8
LENGTHS, SUMS_Q, SUMS_KV = torch.tensor([7, 5]), torch.tensor([0, 4, 10]), torch.tensor([0, 7, 14])
PAGES, TABLE = torch.randn(4, 4, H_KV, D), torch.tensor([[0, 1], [2, 3]])


def operands(*heads: int) -> list[torch.Tensor]:
    return [torch.randn(B, h, KEYS if h == H_KV else S, D) for h in heads]


def dense(**changed: Any) -> Any:
    q, k, v = operands(H, H_KV, H_KV)
    return ops.sdpa(**{"q": q, "k": k, "v": v, **changed})


def packed(**changed: Any) -> Any:
    q, k, v = torch.randn(B * S, H, D), *torch.randn(2, B * KEYS, H_KV, D)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": SUMS_Q, "cu_seqlens_kv": SUMS_KV}
    return ops.sdpa_varlen(**{**given, "max_seqlen_q": 6, "max_seqlen_kv": 7, **changed})


def paged(**changed: Any) -> Any:
    given = {"k_pages": PAGES, "v_pages": PAGES, "page_table": TABLE, "seqlens_kv": LENGTHS}
    return ops.sdpa_paged(**{"q": operands(H)[0], **given, **changed})


def merged(**changed: Any) -> Any:
    o, stats = torch.randn(B, H, S, D), torch.randn(B, H, S)
    return ops.merge_states(**{"o1": o, "stats1": stats, "o2": o, "stats2": stats, **changed})


def normed(**changed: Any) -> Any:
    return ops.rms_norm(**{"x": torch.randn(4, D), "weight": torch.ones(D), **changed})


RESULT, O_PACKED, ROWS = (B, H, S, D), (B * S, H, D), (4, D)
CALLS: dict[Callable[..., Any], dict[str, tuple[int, ...]]] = {
    dense: {
        "q": RESULT,
        "v": (B, H_KV, KEYS, D),
        "bias": (S, KEYS),
        "sink": (H,),
        "gate": RESULT,
        "out": RESULT,
    },
    packed: {"q": O_PACKED, "cu_seqlens_q": (3,), "gate": O_PACKED, "out": O_PACKED},
    paged: {"k_pages": PAGES.shape, "v_pages": PAGES.shape, "page_table": (2, 2)},
    merged: {"o1": RESULT, "stats1": RESULT[:-1], "o2": RESULT, "stats2": RESULT[:-1]},
    normed: {"x": ROWS, "weight": (D,), "residual": ROWS, "out": ROWS},
}
CASES = [(call, name, shape) for call, shapes in CALLS.items() for name, shape in shapes.items()]


def shrunk(shape: tuple[int, ...], name: str, size: int) -> torch.Tensor:
    is_whole = "cu_" in name or "table" in name
    tensor = torch.zeros(shape, dtype=torch.int64 if is_whole else torch.float32)
    tensor.untyped_storage().resize_(size)
    return tensor


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize(
    ("call", "name", "shape"), CASES, ids=[f"{call.__name__}-{name}" for call, name, _ in CASES]
)
def test_each_operand_is_refused_by_name(
    call: Callable[..., Any], name: str, shape: tuple[int, ...], size: int
) -> None:
    whole = torch.zeros(shape, dtype=shrunk(shape, name, size).dtype)
    if name not in ("cu_seqlens_q", "page_table"):
        for _ in range(2):  # It may be a call like an earlier one.
            call(**{name: whole})
    for others in ({}, {"gate": torch.randn(shape)} if name == "out" and call is dense else {}):
        with pytest.raises(tw.BindingError, match=f"^{name}: its storage has {size} bytes"):
            call(**{name: shrunk(shape, name, size)}, **others)


def test_a_bias_and_a_mask_are_asked_before_they_are_joined() -> None:
    mask = torch.ones(S, KEYS, dtype=torch.bool)
    for size in (0, 4):
        with pytest.raises(tw.BindingError, match="bias: its storage"):
            dense(bias=shrunk((S, KEYS), "bias", size), mask=mask)
    mask.untyped_storage().resize_(3)
    with pytest.raises(tw.BindingError, match="mask: its storage has 3 bytes"):
        dense(mask=mask)


@pytest.mark.parametrize("sums", [[0, 4, 50], [-3, 4, 10]])
def test_packed_sequences_that_are_refused_leave_out_as_it_was(sums: list[int]) -> None:
    # L1. Rows of no sequence are zeros, and are written first.
    out = torch.full(O_PACKED, 7.0)
    for _ in range(3):
        with pytest.raises(tw.BindingError, match="reaches element"):
            packed(cu_seqlens_q=torch.tensor(sums), max_seqlen_q=50, out=out)
        assert bool((out == 7.0).all())
    half = torch.full(O_PACKED, 7.0, dtype=torch.float16)
    rows = torch.randn(B * S, H, D)
    made = packed(q=rows, cu_seqlens_q=torch.tensor([0, 4, 8]), out=half)
    assert made is half and not half[8:].any() and half[:8].all()
