"""Guard bytes: every byte that is no element of an operand is all ones, which floats read as NaN.

A kernel that reads outside its operand, or between its strides, turns its result to NaN; one that
writes there changes a byte that `Guarded.changed` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.errors import OracleError

__all__ = ["POISON", "Guarded", "guard", "guard_all"]

POISON = 0xFF
"""The byte of guards and gaps: a NaN in every floating format that has one."""

_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class Guarded:
    """A tensor amid guard bytes.

    Attributes:
        name: How messages call it.
        view: The operand: same dtype, shape, strides and numbers as what was guarded.
        raw: All bytes, guards included.
        mask: Boolean, which bytes of `raw` belong to an element.
        before: The bytes as they were at the start.
    """

    name: str
    view: torch.Tensor
    raw: torch.Tensor
    mask: torch.Tensor
    before: torch.Tensor

    def changed(self) -> list[int]:
        """Byte offsets, relative to the first element, of guard and gap bytes that changed."""
        wrong = ((self.raw != self.before) & ~self.mask.to(self.raw.device)).nonzero().reshape(-1)
        start = self.view.data_ptr() - self.raw.data_ptr()
        return [int(offset) - start for offset in wrong.tolist()]

    def check(self, *, read_only: bool = False) -> None:
        """Require that guards and gaps, and with `read_only` the elements too, are as they were.

        Raises:
            OracleError: Some byte changed; the message has the first offsets.
        """
        wrong = self.changed()
        if wrong:
            shown = ", ".join(str(offset) for offset in wrong[:8])
            raise OracleError(
                f"{self.name}: {len(wrong)} bytes outside its elements were written, at byte "
                f"offsets {shown}{', ...' if len(wrong) > 8 else ''} from its first element"
            )
        if read_only and not torch.equal(self.raw, self.before):
            count = int((self.raw != self.before).sum())
            raise OracleError(f"{self.name}: {count} bytes of a read-only operand were written")


def guard(
    tensor: torch.Tensor,
    *,
    name: str = "operand",
    guard_bytes: int = 256,
    poisoned: bool = False,
    device: torch.device | str | None = None,
) -> Guarded:
    """Copy a tensor between guard bytes, with its strides; gaps between elements are poisoned too.

    Args:
        tensor: Any strides, 0 included.
        name: How messages call it.
        guard_bytes: Before and after, at least; the operand starts at a multiple of 256 bytes.
        poisoned: Leave the elements poisoned as well, as an output should start.
        device: Where to put it; the tensor's own device if None.

    Raises:
        ValueError: `guard_bytes` is negative.
    """
    if guard_bytes < 0:
        raise ValueError(f"guard_bytes: {guard_bytes}; expected at least 0")
    place = tensor.device if device is None else torch.device(device)
    size = tensor.element_size()
    span = 0
    if tensor.numel():
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((extent - 1) * stride for extent, stride in reach)
    front = -(-guard_bytes // _ALIGNMENT) * _ALIGNMENT
    total = front + span * size + guard_bytes
    # Over-allocate so that the first element can be aligned wherever the allocator starts.
    raw = torch.full((total + _ALIGNMENT,), POISON, dtype=torch.uint8, device=place)
    start = front + (-(raw.data_ptr() + front)) % _ALIGNMENT
    flat = raw[start : start + span * size].view(tensor.dtype)
    view = flat.as_strided(tensor.shape, tensor.stride())
    touched = torch.zeros(span, dtype=torch.bool)
    touched.as_strided(tensor.shape, tensor.stride()).fill_(True)
    mask = torch.zeros(raw.numel(), dtype=torch.bool)
    mask[start : start + span * size] = touched.repeat_interleave(size)
    if not poisoned and span:
        # Element by element, so that a stride of 0 writes each element once.
        source = tensor.as_strided((span,), (1,), tensor.storage_offset()).to(place)
        codes = source.contiguous().view(torch.uint8)
        inside = mask[start : start + span * size].to(place)
        raw[start : start + span * size] = torch.where(inside, codes, POISON)
    return Guarded(name, view, raw, mask, raw.clone())


def guard_all(tensors: Mapping[str, torch.Tensor], *, guard_bytes: int = 256) -> dict[str, Guarded]:
    """`guard` for each of several operands by name."""
    return {
        name: guard(tensor, name=name, guard_bytes=guard_bytes) for name, tensor in tensors.items()
    }
