"""The binder: a variant pack to checked views, in one flat pass before the first write.

Holds L1 (validate, then launch), L5 (observed is not declared), L6 (aliasing) and L7 (optional
operands). A buffer is storage: it is read with the declared dim and stride, and the byte span
that the caller's own view covers bounds what may be touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.graph.tensor import Tensor
from tilewright.launch.aliases import ByteRange, ranges_clash
from tilewright.launch.facts import OperandFacts, observe
from tilewright.launch.pointers import bytes_at
from tilewright.launch.slots import Slot
from tilewright.torch_dtypes import from_torch

VariantPack = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Binding:
    """One call's operands, slot by slot: a torch view, and the byte range it covers."""

    views: list[torch.Tensor]
    starts: list[int]
    stops: list[int]


class Binder:
    """Binds variant packs to the slots of one plan on one device."""

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        *,
        in_place: frozenset[tuple[int, int]] = frozenset(),
        virtual_uids: Mapping[int, str] | None = None,
        workspace_bytes: int = 0,
    ) -> None:
        self.slots = tuple(slots)
        self.device = device
        self.workspace_bytes = workspace_bytes
        self._virtual_uids = dict(virtual_uids or {})
        self._by_name: dict[str, int | None] = {}
        for slot in self.slots:
            if slot.name:
                self._by_name[slot.name] = None if slot.name in self._by_name else slot.uid
        self._pairs = _written_pairs(self.slots, in_place)

    def bind(self, pack: VariantPack, workspace: Any = None) -> Binding:
        """Check every operand of a call and make its views; nothing is written.

        Raises:
            BindingError: naming the tensor, what was given, what was expected, and the rule.
        """
        buffers = self._by_uid(pack)
        device = self.device
        views: list[torch.Tensor] = []
        starts: list[int] = []
        stops: list[int] = []
        for slot in self.slots:
            buffer = buffers.get(slot.uid)
            # The common case, a torch tensor laid out as declared, takes no detour.
            if (
                type(buffer) is torch.Tensor
                and buffer.dtype is slot.dtype
                and buffer.shape == slot.dim
                and buffer.stride() == slot.stride
                and buffer.device == device
                and not buffer.requires_grad
                and not slot.is_flat
            ):
                start = buffer.data_ptr()
                stop = start + slot.span_bytes
                view = buffer
            else:
                view, start, stop = self._bind_other(slot, buffer)
            if start % slot.alignment_bytes and stop != start:
                raise BindingError(
                    f"tensor {slot.label}: address {start:#x} is not a multiple of "
                    f"{slot.alignment_bytes} bytes, the alignment of the declaration"
                )
            views.append(view)
            starts.append(start)
            stops.append(stop)
        for written, other, may_share in self._pairs:
            if starts[written] < stops[other] and starts[other] < stops[written]:
                self._check_pair(written, other, may_share, starts, stops)
        if workspace is not None or self.workspace_bytes:
            self._check_workspace(workspace, starts, stops)
        return Binding(views, starts, stops)

    def _by_uid(self, pack: VariantPack) -> dict[int, Any]:
        buffers: dict[int, Any] = {}
        for key, buffer in pack.items():
            if key is None:
                continue
            if type(key) is Tensor:
                uid = key.uid
            elif isinstance(key, str):
                uid = self._uid_of_name(key)
            elif isinstance(key, int) and not isinstance(key, bool):
                uid = key
            else:
                raise BindingError(
                    f"variant pack: key {key!r}; expected a graph tensor, a uid, a name, or None"
                )
            if uid in buffers and buffers[uid] is not buffer:
                raise BindingError(f"variant pack: tensor with uid {uid} is given two buffers")
            if uid in self._virtual_uids:
                raise BindingError(
                    f"tensor {self._virtual_uids[uid]} is virtual and was given a buffer; call "
                    "set_output(True) on it before the graph is built, or leave it out"
                )
            buffers[uid] = buffer
        return buffers

    def _uid_of_name(self, name: str) -> int:
        uid = self._by_name.get(name, -1)
        if uid is None:
            raise BindingError(f"variant pack: name {name!r} is borne by several tensors; use uids")
        return uid

    def _bind_other(self, slot: Slot, buffer: Any) -> tuple[torch.Tensor, int, int]:
        if buffer is None:
            return self._bind_value(slot)
        facts = observe(buffer, slot.label)
        if facts.tensor is None:
            return self._bind_pointer(slot, facts.pointer)
        dtype = facts.tensor.dtype
        if dtype is not slot.dtype and not (dtype is torch.uint8 and slot.dtype.itemsize == 1):
            raise BindingError(
                f"tensor {slot.label}: data type {from_torch(dtype).name}; expected "
                f"{slot.data_type.name} as declared"
            )
        on_host = slot.is_pass_by_value and facts.tensor.device.type == "cpu"
        if facts.tensor.device != self.device and not on_host:
            raise BindingError(
                f"tensor {slot.label}: on {facts.tensor.device}; expected {self.device}, the "
                "device of the plan"
            )
        return self._view_as_declared(slot, facts)

    def _view_as_declared(self, slot: Slot, facts: OperandFacts) -> tuple[torch.Tensor, int, int]:
        tensor, owned = facts.tensor, facts.span_bytes
        if tensor is None or owned is None:
            raise BindingError(f"tensor {slot.label}: the buffer has no known span")
        if not slot.is_ragged and owned < slot.span_bytes:
            raise BindingError(
                f"tensor {slot.label}: the buffer owns {owned} bytes from its first element "
                f"(dim {facts.dim}, stride {facts.stride}); the declared dim {slot.dim} and "
                f"stride {slot.stride} reach {slot.span_bytes} bytes"
            )
        owned_elements = owned // tensor.element_size()
        if slot.is_flat:
            flat = tensor.as_strided((owned_elements,), (1,))
            view = flat if flat.dtype is slot.dtype else flat.view(slot.dtype)
            return view, facts.pointer, facts.pointer + owned
        if tensor.dtype is not slot.dtype:
            tensor = tensor.as_strided((owned_elements,), (1,)).view(slot.dtype)
        view = tensor.as_strided(slot.dim, slot.stride)
        return view, facts.pointer, facts.pointer + slot.span_bytes

    def _bind_value(self, slot: Slot) -> tuple[torch.Tensor, int, int]:
        if slot.value is None:
            role = "output" if slot.is_output else "input"
            raise BindingError(
                f"tensor {slot.label} (uid {slot.uid}): the variant pack has no buffer for this "
                f"{role}; every operand that the graph declares is required"
            )
        # A host scalar of the plan: no caller's memory, so an empty byte range.
        return torch.full(slot.dim, slot.value, dtype=slot.dtype), 0, 0

    def _bind_pointer(self, slot: Slot, pointer: int) -> tuple[torch.Tensor, int, int]:
        if pointer == 0 and slot.span_bytes:
            raise BindingError(
                f"tensor {slot.label}: a null pointer; expected {slot.span_bytes} bytes"
            )
        if pointer % slot.alignment_bytes:
            return torch.empty(0), pointer, pointer + slot.span_bytes
        flat = bytes_at(pointer, slot.span_bytes, self.device).view(slot.dtype)
        view = flat if slot.is_flat else flat.as_strided(slot.dim, slot.stride)
        return view, pointer, pointer + slot.span_bytes

    def _check_pair(
        self, written: int, other: int, may_share: bool, starts: list[int], stops: list[int]
    ) -> None:
        out, second = self.slots[written], self.slots[other]
        same_view = (
            starts[written] == starts[other]
            and out.dim == second.dim
            and out.data_type.bits == second.data_type.bits
            and _steps(out) == _steps(second)
        )
        if may_share and same_view:
            return
        first_range = _byte_range(out, starts[written], stops[written])
        second_range = _byte_range(second, starts[other], stops[other])
        if ranges_clash(first_range, second_range):
            role = "output" if second.is_output else "input"
            raise BindingError(
                f"tensor {out.label}: its bytes [{starts[written]:#x}, {stops[written]:#x}) "
                f"overlap those of {role} {second.label} "
                f"[{starts[other]:#x}, {stops[other]:#x}); an output shares no byte with another "
                "operand unless the operation is elementwise and in place"
            )

    def _check_workspace(self, workspace: Any, starts: list[int], stops: list[int]) -> None:
        needed = self.workspace_bytes
        if workspace is None or (isinstance(workspace, int) and workspace == 0):
            if needed:
                raise BindingError(f"workspace: none given; the plan needs {needed} bytes")
            return
        facts = observe(workspace, "workspace")
        if facts.span_bytes is not None and facts.span_bytes < needed:
            raise BindingError(
                f"workspace: {facts.span_bytes} bytes given; the plan needs {needed}"
            )
        if facts.device is not None and facts.device != self.device:
            raise BindingError(f"workspace: on {facts.device}; expected {self.device}")
        start, stop = facts.pointer, facts.pointer + needed
        for slot, low, high in zip(self.slots, starts, stops, strict=True):
            if start < high and low < stop:
                raise BindingError(
                    f"workspace: its bytes [{start:#x}, {stop:#x}) overlap those of tensor "
                    f"{slot.label} [{low:#x}, {high:#x})"
                )


def workspace_view(workspace: Any, size_bytes: int, device: torch.device) -> torch.Tensor | None:
    """A uint8 view of the first ``size_bytes`` of a workspace; None if no byte is needed."""
    if size_bytes == 0:
        return None
    facts = observe(workspace, "workspace")
    if facts.tensor is None:
        return bytes_at(facts.pointer, size_bytes, device)
    count = -(-size_bytes // facts.tensor.element_size())
    flat = facts.tensor.as_strided((count,), (1,))
    return (flat if flat.dtype is torch.uint8 else flat.view(torch.uint8))[:size_bytes]


def workspace_pointer(workspace: Any) -> int:
    """The address of a workspace that was bound."""
    return observe(workspace, "workspace").pointer


def _written_pairs(
    slots: Sequence[Slot], in_place: frozenset[tuple[int, int]]
) -> tuple[tuple[int, int, bool], ...]:
    pairs = []
    for i, out in enumerate(slots):
        if not out.is_output:
            continue
        for j, other in enumerate(slots):
            if j == i or (other.is_output and j < i):
                continue
            pairs.append((i, j, (out.uid, other.uid) in in_place))
    return tuple(pairs)


def _steps(slot: Slot) -> tuple[int, ...]:
    """Strides of the axes that are stepped; a singleton axis may have any stride."""
    return tuple(s for extent, s in zip(slot.dim, slot.stride, strict=True) if extent > 1)


def _byte_range(slot: Slot, start: int, stop: int) -> ByteRange:
    if slot.is_flat:
        return ByteRange(start, stop, (stop - start,), (1,), 1)
    item = slot.dtype.itemsize
    # A singleton axis contributes no byte, and its stride may be past what numpy takes.
    strides = tuple(
        s * item if extent > 1 else item for extent, s in zip(slot.dim, slot.stride, strict=True)
    )
    return ByteRange(start, stop, slot.dim, strides, item)
