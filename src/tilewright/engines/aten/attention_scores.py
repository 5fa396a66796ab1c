"""From products of queries and keys to the scores that softmax takes: one block at a time.

In order: the score program, the bias, ALiBi, and what is hidden (set to -inf). Hidden scores are
overwritten, never multiplied, so that NaN and infinity in keys that a row cannot see stay there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.engines.aten.attention_blocks import (
    DEVICE_SCORE_BLOCK_ELEMENTS,
    SCORE_BLOCK_ELEMENTS,
    Band,
    Block,
)
from tilewright.engines.aten.attention_score_mod import BoundProgram
from tilewright.engines.aten.attention_spec import BLOCK_MASK_TILE
from tilewright.engines.aten.dropout import PhiloxDropout, Region

Tensor = torch.Tensor


@dataclass(slots=True)
class MaskDropout:
    """Dropout given as a mask that broadcasts to (B, Hq, Sq, Skv), and a factor."""

    mask: Tensor
    scale: Tensor


@dataclass(slots=True)
class Part:
    """Sequences attended to in one go: views of one call's operands and what acts on them.

    q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv), any strides and float type. Four-axis
    operands (``bias``, a dropout mask, ``block_mask`` in tiles) broadcast to (B, Hq, Sq, Skv).
    ``first_batch`` is the index of the first sequence in the whole operation. With ``len_q`` and
    ``len_kv`` (B,) the lengths stay on the device: rows and keys beyond them are hidden, and the
    contents there may be anything. ``trusted`` means that no operand needs a look for NaN and
    infinity: nothing is hidden.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    compute: torch.dtype
    scale: float | Tensor
    band: Band
    trusted: bool
    first_batch: int = 0
    bias: Tensor | None = None
    block_mask: Tensor | None = None
    sink: Tensor | None = None
    slopes: Tensor | None = None
    philox: PhiloxDropout | None = None
    drop_mask: MaskDropout | None = None
    program: BoundProgram | None = None
    len_q: Tensor | None = None
    len_kv: Tensor | None = None
    shift_by_lengths: bool = False

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.q.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    @property
    def block_budget(self) -> int:
        """Scores a block may have."""
        on_cpu = self.q.device.type == "cpu"
        return SCORE_BLOCK_ELEMENTS if on_cpu else DEVICE_SCORE_BLOCK_ELEMENTS

    def is_clean(self, *operands: Tensor) -> bool:
        """True if no element of the operands is NaN or infinite, as far as the host may know.

        A sum is enough: one such element makes it so. A finite sum that overflows only sends
        the block the safe way.
        """
        if self.trusted:
            return True
        if self.len_kv is not None or self.q.device.type != "cpu":
            return False
        total = 0.0
        for operand in operands:
            total += operand.sum(dtype=self.compute).item()
        return total - total == 0.0


def grouped_rows(operand: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Rows of a block of (B, Hq, Sq, X) as (sequences * key heads, group * rows, X)."""
    batches, heads_kv, group, rows, _ = block.shape
    part = operand[slice(*block.batch), slice(*block.head), slice(*block.row)]
    return part.to(dtype).reshape(batches * heads_kv, group * rows, operand.shape[3])


def ungrouped(values: Tensor, block: Block) -> Tensor:
    """The inverse of ``grouped_rows``: (sequences, query heads, rows, X)."""
    batches, heads_kv, group, rows, _ = block.shape
    return values.view(batches, heads_kv * group, rows, values.shape[-1])


def broadcast_slice(operand: Tensor, block: Block) -> Tensor:
    """What a block sees of an operand that broadcasts to (B, Hq, Sq, Skv), on five axes."""
    for axis, bounds in enumerate((block.batch, block.head, block.row, block.key)):
        if operand.shape[axis] != 1:
            operand = operand.narrow(axis, bounds[0], bounds[1] - bounds[0])
    return split_heads(operand, block)


def split_heads(operand: Tensor, block: Block) -> Tensor:
    """(B, Hq or 1, ...) of a block as (B, key heads or 1, group or 1, ...)."""
    if operand.shape[1] == 1:
        return operand.unsqueeze(2)
    _, heads_kv, group, _, _ = block.shape
    return operand.view(operand.shape[0], heads_kv, group, *operand.shape[2:])


def finish_scores(
    part: Part, products: Tensor, block: Block, clean: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores (sequences * key heads, group * rows, keys) of scaled products of that shape.

    Works in place where it can. The second value is the score program's input, kept for its
    gradient; None without a program.
    """
    shape = block.shape
    before: Tensor | None = None
    if part.program is not None:
        before = products
        products = part.program.apply(ungrouped(products, block), block, part.first_batch)
        products = products.view(before.shape)
    scores = products.view(shape)
    if part.bias is not None:
        bias = broadcast_slice(part.bias, block).to(scores.dtype)
        # Products of finite operands may overflow, to NaN if of either sign.
        is_finite = clean and part.is_clean(scores)
        scores.add_(bias)
        if not is_finite:
            # A bias of -inf hides a key whatever the key holds; NaN - inf would be NaN.
            scores.masked_fill_(bias == -torch.inf, -torch.inf)
    if part.slopes is not None:
        slope = part.slopes[slice(*block.head)].view(1, shape[1], shape[2], 1, 1)
        distance = _columns(part, block) - _diagonal(part, block)
        scores.add_(slope * distance.to(scores.dtype))
    _hide(part, scores, block)
    return products, before


def keep_factor(part: Part, block: Block) -> Tensor | None:
    """The dropout factor of a block (0 or the scale), shaped as its scores; None without one."""
    batches, heads_kv, group, rows, keys = block.shape
    dropped: Tensor
    if part.philox is not None:
        first = part.first_batch
        region = Region(
            (block.batch[0] + first, block.batch[1] + first), block.head, block.row, block.key
        )
        keep = part.philox.keep(region, part.q.device)
        dropped = keep.to(part.compute).mul_(part.philox.scale)
    elif part.drop_mask is not None:
        mask = broadcast_slice(part.drop_mask.mask, block).to(part.compute)
        dropped = (mask * part.drop_mask.scale).expand(block.shape)
    else:
        return None
    return dropped.reshape(batches * heads_kv, group * rows, keys)


def _columns(part: Part, block: Block) -> Tensor:
    return torch.arange(*block.key, device=part.q.device)


def _diagonal(part: Part, block: Block) -> Tensor:
    """The column on the diagonal of each row of a block: (rows, 1), or (B, 1, 1, rows, 1)."""
    rows = torch.arange(*block.row, device=part.q.device)[:, None]
    if part.shift_by_lengths and part.len_q is not None and part.len_kv is not None:
        shift = (part.len_kv - part.len_q)[slice(*block.batch)]
        return rows + shift.view(-1, 1, 1, 1, 1)
    return rows + part.band.shift


def _hide(part: Part, scores: Tensor, block: Block) -> None:
    if part.shift_by_lengths:
        _hide_band_by_lengths(part, scores, block)
    else:
        _hide_band(part, scores, block)
    if part.len_kv is not None:
        beyond = _columns(part, block) >= part.len_kv[slice(*block.batch)].view(-1, 1, 1, 1, 1)
        scores.masked_fill_(beyond, -torch.inf)
    if part.len_q is not None:
        rows = torch.arange(*block.row, device=part.q.device)[:, None]
        beyond = rows >= part.len_q[slice(*block.batch)].view(-1, 1, 1, 1, 1)
        scores.masked_fill_(beyond, -torch.inf)
    if part.block_mask is not None:
        scores.masked_fill_(_hidden_tiles(part.block_mask, part, block), -torch.inf)


def _hide_band(part: Part, scores: Tensor, block: Block) -> None:
    """Fill only the columns at either edge that some row of the block does not see."""
    first_row, last_row = block.row
    first_key, last_key = block.key
    left, right, shift = part.band
    if right is not None:
        edge = max(first_key, first_row + shift + right + 1)
        if edge < last_key:
            columns = torch.arange(edge, last_key, device=scores.device)
            limit = torch.arange(first_row, last_row, device=scores.device) + (shift + right)
            scores[..., edge - first_key :].masked_fill_(columns > limit[:, None], -torch.inf)
    if left is not None:
        edge = min(last_key, last_row + shift - left)
        if edge > first_key:
            columns = torch.arange(first_key, edge, device=scores.device)
            limit = torch.arange(first_row, last_row, device=scores.device) + (shift - left)
            scores[..., : edge - first_key].masked_fill_(columns <= limit[:, None], -torch.inf)


def _hide_band_by_lengths(part: Part, scores: Tensor, block: Block) -> None:
    columns, diagonal = _columns(part, block), _diagonal(part, block)
    if part.band.right is not None:
        scores.masked_fill_(columns > diagonal + part.band.right, -torch.inf)
    if part.band.left is not None:
        scores.masked_fill_(columns <= diagonal - part.band.left, -torch.inf)


def _hidden_tiles(packed: Tensor, part: Part, block: Block) -> Tensor:
    """Booleans on five axes from (B, Hq, row tiles, bytes) of one bit a 128 x 128 tile."""
    device = packed.device
    for axis, bounds in enumerate((block.batch, block.head)):
        if packed.shape[axis] != 1:
            packed = packed.narrow(axis, bounds[0], bounds[1] - bounds[0])
    rows = torch.arange(*block.row, device=device) // BLOCK_MASK_TILE
    columns = torch.arange(*block.key, device=device) // BLOCK_MASK_TILE
    tiles = packed.index_select(2, rows).index_select(3, columns // 8)
    hidden = ((tiles >> (columns % 8).to(torch.uint8)) & 1) == 0
    return split_heads(hidden, block)
