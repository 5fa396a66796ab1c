"""Buffers amid guard bytes: what lies outside the declared elements, and whether it was touched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.graph.shapes import span_elements
from tilewright.testing.detectors.subject import Layout, Tensors

# One cache line and more, and a multiple of any alignment that kernels ask for.
GUARD_BYTES = 256
# All ones is NaN in every floating format that has one; the second is finite in all of them.
NAN_PATTERN, FINITE_PATTERN = 0xFF, 0x47


@dataclass(frozen=True)
class Guarded:
    """``view`` is the operand; ``raw`` all bytes of it, its stride gaps and its guards."""

    raw: torch.Tensor
    view: torch.Tensor
    pattern: int

    def damaged(self) -> int | None:
        """The first byte outside the operand's elements that changed, from its start, or None."""
        changed = (self.raw != self.pattern) & ~touched_bytes(Layout.of(self.view), self.raw)
        return int(changed.nonzero()[0, 0]) - GUARD_BYTES if bool(changed.any()) else None


def guarded(layout: Layout, pattern: int) -> Guarded:
    """A buffer whose every byte is the pattern."""
    size = span_elements(layout.dim, layout.stride) * layout.dtype.itemsize
    raw = torch.empty(size + 2 * GUARD_BYTES, dtype=torch.uint8, device=layout.device)
    raw.fill_(pattern)
    flat = raw[GUARD_BYTES : GUARD_BYTES + size].view(layout.dtype)
    return Guarded(raw, flat.as_strided(layout.dim, layout.stride), pattern)


def guarded_copy(tensor: torch.Tensor, pattern: int) -> Guarded:
    """A copy of an operand, strides and shared elements included, amid guards."""
    buffer = guarded(Layout.of(tensor), pattern)
    copy_elements(buffer.view, tensor)
    return buffer


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor of the same layout; a broadcast axis is one element."""
    stepped = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    target[stepped].copy_(source.detach()[stepped])


def guard_all(tensors: Tensors, pattern: int) -> dict[str, Guarded]:
    """A guarded copy of each operand."""
    return {name: guarded_copy(tensor, pattern) for name, tensor in tensors.items()}


def views(buffers: dict[str, Guarded]) -> dict[str, torch.Tensor]:
    """The operands themselves."""
    return {name: buffer.view for name, buffer in buffers.items()}


def touched_bytes(layout: Layout, raw: torch.Tensor) -> torch.Tensor:
    """Which bytes of a guarded buffer hold an element."""
    span = span_elements(layout.dim, layout.stride)
    elements = torch.zeros(max(span, 1), dtype=torch.bool, device=raw.device)
    elements.as_strided(layout.dim, layout.stride).fill_(True)
    touched = torch.zeros(raw.shape, dtype=torch.bool, device=raw.device)
    spread = elements[:span].repeat_interleave(layout.dtype.itemsize)
    touched[GUARD_BYTES : GUARD_BYTES + spread.numel()] = spread
    return touched


def with_gaps(layout: Layout) -> Layout:
    """The same dim, packed but for a gap of three elements after each run of the last axis."""
    if len(layout.dim) < 2:
        return layout
    strides = [1]
    step = layout.dim[-1] + 3
    for extent in reversed(layout.dim[1:-1]):
        strides.append(step)
        step *= extent
    strides.append(step)
    return Layout(layout.dim, tuple(reversed(strides)), layout.dtype, layout.device)


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, shape (*dim, itemsize): NaNs compare as what they are."""
    dense = tensor.detach().contiguous().reshape(-1)
    return dense.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def differing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Which elements of two tensors of one layout differ in any bit."""
    return (element_bytes(first) != element_bytes(second)).any(dim=-1)


def describe(where: torch.Tensor) -> str:
    """ "3 of 24 elements, first at (0, 1, 2)"."""
    first = tuple(int(i) for i in where.nonzero()[0])
    return f"{int(where.sum())} of {where.numel()} elements, first at {first}"


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).clone()


def changed_names(before: dict[str, torch.Tensor], tensors: Tensors) -> list[str]:
    """The operands whose storage is no longer what ``before`` holds."""
    return [
        name for name, tensor in tensors.items() if not torch.equal(all_bytes(tensor), before[name])
    ]
