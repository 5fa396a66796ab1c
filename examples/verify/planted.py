"""A stranger's attention and RMSNorm in plain torch, right and with one bug planted in each.

`attention` and `rms_norm` are right. Every other name has one bug, which random inputs of friendly
shapes do not show:

    tilewright verify attention --target examples.verify.planted:attention_missed_head

The kernels go through the keys in blocks of 16 and read rows by their addresses, as kernels do.
"""

from __future__ import annotations

import functools
import math

import torch

BLOCK = 16
BUGS = (
    "narrow_stride",
    "unmasked_tail",
    "missed_head",
    "wrong_log",
    "stale_scale",
    "unwritten_rows",
)
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Out = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


def _rows(x: torch.Tensor, index: tuple[int, int], first: int, count: int, narrow: bool):
    """Rows first .. first + count - 1 of x[index], gathered by address; zeros past the last."""
    whole = torch.zeros(count, x.shape[3], dtype=torch.float32)
    for i in range(min(count, x.shape[2] - first)):
        offset = index[0] * x.stride(0) + index[1] * x.stride(1) + (first + i) * x.stride(2)
        if narrow:
            # The bug: the offset is kept in 32 bits.
            offset = torch.tensor(offset).to(torch.int32).item()
        start = x.storage_offset() + offset
        whole[i] = x.as_strided((x.shape[3],), (x.stride(3),), start)
    return whole


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one type")
    if k.shape[3] != q.shape[3] or k.shape[2] != v.shape[2] or k.shape[1] != v.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit")


def _check_out(outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> None:
    def span(x: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    for position, written in enumerate(outputs):
        start, stop = span(written)
        for other in (*inputs, *outputs[position + 1 :]):
            first, last = span(other)
            if first < stop and start < last:
                raise ValueError("out overlaps another operand")


# The bug of stale_scale: the scale is read once for each tensor. The tensor is kept, so that no
# other one gets its address: the bug is to be seen under replay, each time and nowhere else.
_SCALES: dict[int, tuple[torch.Tensor, float]] = {}


def _attention(
    bug: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | torch.Tensor | None = None,
    return_stats: bool = False,
    out: Out = None,
) -> Result:
    _check(q, k, v)
    batch, heads, rows, depth = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    if out is None:
        o = torch.empty(batch, heads, rows, v.shape[3], dtype=q.dtype)
        stats = torch.empty(batch, heads, rows, 1)
    else:
        given = out if isinstance(out, tuple) else (out, torch.empty(batch, heads, rows, 1))
        _check_out(given[: 1 + return_stats], (q, k, v))
        o, stats = given
    if isinstance(scale, torch.Tensor):
        if bug == "stale_scale":
            scale = _SCALES.setdefault(scale.data_ptr(), (scale, float(scale)))[1]
        scale = float(scale)
    factor = depth**-0.5 if scale is None else scale
    # The bug of unwritten_rows: only whole blocks of 4 rows are stored.
    stored = rows - rows % 4 if bug == "unwritten_rows" else rows
    narrow = bug == "narrow_stride"
    position = torch.arange(rows)
    for b in range(batch):
        for h in range(heads):
            kv = h % k.shape[1] if bug == "missed_head" else h // group
            queries = _rows(q, (b, h), 0, rows, narrow)
            top = torch.full((rows, 1), -math.inf)
            total = torch.zeros(rows, 1)
            sums = torch.zeros(rows, v.shape[3])
            for first in range(0, keys, BLOCK):
                key = _rows(k, (b, kv), first, BLOCK, narrow)
                value = _rows(v, (b, kv), first, BLOCK, narrow)
                column = first + torch.arange(BLOCK)
                scores = queries @ key.T * factor
                hidden = torch.zeros(rows, BLOCK, dtype=torch.bool)
                if bug != "unmasked_tail":
                    hidden |= column >= keys
                if causal:
                    hidden |= column > position[:, None]
                scores = scores.masked_fill(hidden, -math.inf)
                higher = torch.maximum(top, scores.amax(dim=1, keepdim=True))
                weights = torch.exp(scores - higher)
                fade = torch.exp(top - higher)
                total = total * fade + weights.sum(dim=1, keepdim=True)
                sums = sums * fade + weights @ value
                top = higher
            o[b, h, :stored] = (sums / total)[:stored].to(o.dtype)
            log = torch.log2(total) + top * math.log2(math.e)
            stats[b, h] = log if bug == "wrong_log" else log * math.log(2.0)
    return (o, stats) if return_stats else o


def _rms_norm(
    bug: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)}, expected {tuple(x.shape[-1:])}")
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if out is not None:
        _check_out((y,), (x, weight))
    width = x.shape[-1]
    # A block is a whole number of 16 elements; those past the last are zeros.
    block = -(-width // BLOCK) * BLOCK
    rows = x.numel() // width
    lengths = x.shape[:-1]
    for row in range(rows - rows % 4 if bug == "unwritten_rows" else rows):
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(row), lengths))
        offset = sum(i * step for i, step in zip(index, x.stride(), strict=False))
        if bug == "narrow_stride":
            offset = torch.tensor(offset).to(torch.int32).item()
        values = torch.zeros(block)
        values[:width] = x.as_strided((width,), (x.stride(-1),), x.storage_offset() + offset)
        count = block if bug == "unmasked_tail" else width
        inverse = torch.rsqrt(values.square().sum() / count + eps)
        y[index] = (values[:width] * inverse * weight.float()).to(y.dtype)
    return y


def _named(function, bug: str):
    found = functools.partial(function, bug)
    found.__name__ = f"{function.__name__.lstrip('_')}{'_' + bug if bug else ''}"
    # Like any composition of torch functions it works in temporaries, and says so.
    found.verify_notes = {"ALLOCATES_TEMPORARIES"}
    return found


attention = _named(_attention, "")
attention_narrow_stride = _named(_attention, "narrow_stride")
attention_unmasked_tail = _named(_attention, "unmasked_tail")
attention_missed_head = _named(_attention, "missed_head")
attention_wrong_log = _named(_attention, "wrong_log")
attention_stale_scale = _named(_attention, "stale_scale")
attention_unwritten_rows = _named(_attention, "unwritten_rows")

rms_norm = _named(_rms_norm, "")
rms_norm_narrow_stride = _named(_rms_norm, "narrow_stride")
rms_norm_unmasked_tail = _named(_rms_norm, "unmasked_tail")
rms_norm_unwritten_rows = _named(_rms_norm, "unwritten_rows")
