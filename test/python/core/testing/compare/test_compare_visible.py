"""Which keys plans of the library let each query see, query by query, for every kind of mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright
from tilewright import ops
from tilewright.errors import OracleError
from tilewright.testing.compare_visible import assert_keys_seen, keys_seen

pytestmark = pytest.mark.L0

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# (rows, columns): square, wide, tall, one query, one key, no multiple of anything.
SHAPES = [(9, 9), (5, 12), (12, 5), (1, 7), (7, 1), (33, 21)]


def plan(**attributes: Any) -> Attend:
    """Attention through a graph with these attributes; tensors among them become operands."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        graph = tilewright.Graph(io_data_type=q.dtype)
        buffers = {"q": q, "k": k, "v": v}
        buffers |= {n: t for n, t in attributes.items() if isinstance(t, torch.Tensor)}
        records = {name: graph.tensor_like(t) for name, t in buffers.items()}
        plain = {n: a for n, a in attributes.items() if n not in records}
        out = graph.sdpa(**records, **plain)[0].set_output(True).set_data_type(q.dtype)
        graph.build()
        made = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
        graph.execute({**{records[n]: t for n, t in buffers.items()}, out: made}, workspace)
        return made

    return attend


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(
    ("left", "right"), [(None, None), (None, 0), (1, 0), (4, 0), (3, 2), (2, None), (None, 3)]
)
def test_bounds(
    rows: int, columns: int, bottom_right: bool, left: int | None, right: int | None
) -> None:
    alignment = tilewright.diagonal_alignment
    attend = plan(
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=right,
        diagonal_alignment=alignment.BOTTOM_RIGHT if bottom_right else alignment.TOP_LEFT,
    )
    assert_keys_seen(
        attend,
        rows=rows,
        columns=columns,
        left_bound=left,
        right_bound=right,
        bottom_right=bottom_right,
    )


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_causal_and_sliding_window_arguments(rows: int, columns: int) -> None:
    shape = {"rows": rows, "columns": columns}
    assert_keys_seen(plan(use_causal_mask=True), **shape, right_bound=0)
    bottom = plan(use_causal_mask_bottom_right=True)
    assert_keys_seen(bottom, **shape, right_bound=0, bottom_right=True)
    window = plan(use_causal_mask=True, sliding_window_length=4)
    assert_keys_seen(window, **shape, left_bound=4, right_bound=0)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_lengths_by_batch_index_and_grouped_heads(bottom_right: bool, kv_heads: int) -> None:
    lengths_q, lengths_kv = [9, 4, 0, 7, 1], [11, 3, 5, 0, 8]
    alignment = tilewright.diagonal_alignment

    def column(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).reshape(-1, 1, 1, 1)

    attend = plan(
        use_padding_mask=True,
        seq_len_q=column(lengths_q),
        seq_len_kv=column(lengths_kv),
        diagonal_band_right_bound=1,
        diagonal_alignment=alignment.BOTTOM_RIGHT if bottom_right else alignment.TOP_LEFT,
    )
    assert_keys_seen(
        attend,
        rows=9,
        columns=11,
        batch=5,
        heads=4,
        kv_heads=kv_heads,
        lengths_q=lengths_q,
        lengths_kv=lengths_kv,
        right_bound=1,
        bottom_right=bottom_right,
    )


def test_block_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 256, (1, 2, 2, 1), generator=generator, dtype=torch.int64)
    block_mask = tiles.to(torch.uint8)
    attend = plan(block_mask=block_mask, use_causal_mask=True)
    assert_keys_seen(
        attend,
        rows=140,
        columns=300,
        heads=2,
        depth=64,
        block_mask=block_mask,
        right_bound=0,
    )


def test_boolean_masks_and_packed_sequences() -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(9, 13, generator=generator) < 0.5
    mask[4] = False

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = ops.sdpa(q, k, v, mask=mask, causal=True)
        assert isinstance(found, torch.Tensor)
        return found

    assert_keys_seen(masked, rows=9, columns=13, mask=mask, right_bound=0)
    lengths_q, lengths_kv = [3, 0, 6], [5, 2, 6]

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def pack(t: torch.Tensor, lengths: list[int]) -> torch.Tensor:
            return torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

        def sums(lengths: list[int]) -> torch.Tensor:
            return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

        found = ops.sdpa_varlen(
            pack(q, lengths_q),
            pack(k, lengths_kv),
            pack(v, lengths_kv),
            sums(lengths_q),
            sums(lengths_kv),
            6,
            6,
            causal=True,
            align="bottom_right",
        )
        assert isinstance(found, torch.Tensor)
        out = torch.zeros_like(q)
        for b, rows in enumerate(found.split(lengths_q)):
            out[b, :, : lengths_q[b]] = rows.transpose(0, 1)
        return out

    assert_keys_seen(
        packed,
        rows=6,
        columns=6,
        batch=3,
        heads=2,
        lengths_q=lengths_q,
        lengths_kv=lengths_kv,
        right_bound=0,
        bottom_right=True,
    )


def _plain(left: int, right: int) -> Attend:
    """Attention by hand in which row i sees keys i - left to i + right."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT
        distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
        hidden = (distance > right) | (distance < -left)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0) @ v

    return attend


def test_bounds_off_by_one_are_seen() -> None:
    shape = {"rows": 8, "columns": 8, "left_bound": 3, "right_bound": 0}
    assert_keys_seen(_plain(2, 0), **shape)
    for left, right, message in (
        (3, 0, "query 3: sees 0-3; expected 1-3"),
        (1, 0, "query 2: sees 1-2; expected 0-2"),
        (2, 1, "query 0: sees 0-1; expected 0"),
        (2, -1, "query 0: sees none; expected 0"),
    ):
        with pytest.raises(OracleError, match=message):
            assert_keys_seen(_plain(left, right), **shape)


def test_a_wrong_head_or_batch_index_is_named() -> None:
    right = _plain(8, 0)

    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = right(q, k, v)
        out[1, 1] = _plain(8, 1)(q, k, v)[1, 1]
        return out

    with pytest.raises(OracleError, match=r"7 of 32 queries(.|\n)*query \(1, 1, 0\): sees 0-1"):
        assert_keys_seen(broken, rows=8, columns=8, batch=2, heads=2, right_bound=0)


def test_the_report_is_bounded_and_outputs_are_checked() -> None:
    with pytest.raises(OracleError) as caught:
        assert_keys_seen(_plain(99, 99), rows=60, columns=60, right_bound=0)
    assert len(str(caught.value).split("\n")) <= 40
    assert "and 39 more" in str(caught.value)
    with pytest.raises(OracleError, match="shape"):
        keys_seen(lambda q, k, v: q[:, :, :1], rows=3, columns=3)
    with pytest.raises(OracleError, match="not all finite"):
        keys_seen(lambda q, k, v: q / 0.0, rows=3, columns=3)
