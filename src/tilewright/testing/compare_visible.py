"""Find which keys each query of an attention function weighs, and hold that to the rules.

A query's weights come out of the function itself: with queries of zero all scores are equal, and
with values that are one for a single key the output of a query is its weight for that key. What
is seen does not depend on how the function finds its bounds, nor on any reference's masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tilewright.errors import OracleError
from tilewright.oracle.visibility import visible_keys
from tilewright.testing.report import bounded

__all__ = ["assert_keys_seen", "keys_seen"]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_SHOWN = 20


def keys_seen(
    attend: Attend,
    *,
    rows: int,
    columns: int,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    depth: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Boolean (batch, heads, rows, columns): which keys each query weighs.

    Args:
        attend: `attend(q, k, v) -> o` with q (B, H, rows, depth), k and v (B, Hkv, columns, depth)
            and o (B, H, rows, depth); its masks are what is examined. It is called
            ceil(columns / depth) times.
        depth: Of the heads; that many keys are examined a call.

    Raises:
        OracleError: The output's shape is wrong, or a weight is negative or not finite.
    """
    groups = heads if kv_heads is None else kv_heads
    q = torch.zeros((batch, heads, rows, depth), dtype=dtype, device=device)
    k = torch.zeros((batch, groups, columns, depth), dtype=dtype, device=device)
    seen = torch.zeros((batch, heads, rows, columns), dtype=torch.bool)
    for first in range(0, columns, depth):
        count = min(depth, columns - first)
        v = torch.zeros_like(k)
        index = torch.arange(count, device=device)
        v[:, :, first + index, index] = 1.0
        o = attend(q, k, v)
        if tuple(o.shape) != tuple(q.shape):
            raise OracleError(f"output: shape {tuple(o.shape)}; expected {tuple(q.shape)}")
        weights = o.detach().to("cpu", torch.float64)[..., :count]
        if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise OracleError(
                f"output: weights of keys {first} to {first + count - 1} are not all finite and "
                "at least 0, with finite operands"
            )
        seen[..., first : first + count] = weights > 0
    return seen


def assert_keys_seen(
    attend: Attend,
    *,
    rows: int,
    columns: int,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    depth: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    lengths_q: Sequence[int] | None = None,
    lengths_kv: Sequence[int] | None = None,
    block_mask: torch.Tensor | None = None,
    **rules: Any,
) -> None:
    """Require that every query weighs exactly the keys that `visible_keys` names.

    Args:
        attend, rows, columns, batch, heads, kv_heads, depth, dtype, device: As in `keys_seen`.
        lengths_q, lengths_kv: Actual lengths by batch index; all rows and columns if None.
        block_mask: (batch, heads, rows of tiles, bytes).
        rules: `left_bound`, `right_bound`, `bottom_right`, `mask` of
            `tilewright.oracle.visible_keys`.

    Raises:
        OracleError: Some query sees a key that it may not, or misses one that it must see.
    """
    seen = keys_seen(
        attend,
        rows=rows,
        columns=columns,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        depth=depth,
        dtype=dtype,
        device=device,
    )
    lines = []
    for index, head, row in _queries(batch, heads, rows):
        wanted = visible_keys(
            row,
            length_q=rows if lengths_q is None else lengths_q[index],
            length_kv=columns if lengths_kv is None else lengths_kv[index],
            columns=columns,
            block_mask=None if block_mask is None else block_mask[index, head],
            **rules,
        )
        found = seen[index, head, row].tolist()
        if found != wanted:
            where = f"query {row}" if batch == heads == 1 else f"query {(index, head, row)}"
            lines.append(f"  {where}: sees {_ranges(found)}; expected {_ranges(wanted)}")
    if lines:
        total = batch * heads * rows
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        head_line = f"{len(lines)} of {total} queries see other keys than they may"
        raise OracleError(bounded("\n".join([head_line, *lines[:_SHOWN], *more])))


def _queries(batch: int, heads: int, rows: int) -> Iterator[tuple[int, int, int]]:
    for index in range(batch):
        for head in range(heads):
            for row in range(rows):
                yield index, head, row


def _ranges(answers: Sequence[bool]) -> str:
    """The keys with a true answer, as 0-3, 8."""
    runs: list[list[int]] = []
    for key, answer in enumerate(answers):
        if answer and runs and runs[-1][1] == key - 1:
            runs[-1][1] = key
        elif answer:
            runs.append([key, key])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "none"
