"""The binder: a variant pack to checked views, in one flat pass before the first write.

Holds L1 (validate, then launch), L5 (observed is not declared), L6 (aliasing) and L7 (optional
operands). A buffer is storage: it is read with the declared dim and stride, and the byte span
that the caller's own view covers bounds what may be touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewright.errors import BindingError
from tilewright.graph.tensor import Tensor
from tilewright.launch.slots import Slot, owned_bytes
from tilewright.launch.workspace_binding import check_workspace

if TYPE_CHECKING:
    from tilewright.launch.aliases import ByteRange
    from tilewright.launch.facts import OperandFacts

VariantPack = Mapping[Any, Any]
# Stands for the view of an operand that only its address is wanted of.
_NO_VIEW = torch.empty(0, device="cpu")
# Accepted layouts that a binder remembers; past that each is checked anew.
_MEMO = 256


class Binding:
    """One call's operands, slot by slot: a torch view, and the byte range [start, stop)."""

    __slots__ = ("starts", "stops", "views")

    def __init__(self, views: list[torch.Tensor], starts: list[int], stops: list[int]) -> None:
        self.views = views
        self.starts = starts
        self.stops = stops


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
        workspace_alignment_bytes: int = 1,
        needs_views: bool = True,
    ) -> None:
        self.slots = tuple(slots)
        self.device = device
        self.workspace_bytes = workspace_bytes
        self.workspace_alignment_bytes = workspace_alignment_bytes
        # Without views, a binding may hold the caller's tensors as they came: only addresses count.
        self._needs_views = needs_views
        self._accepted: set[Any] = set()
        self._orders: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[type, ...]]] = {}
        self._virtual_uids = dict(virtual_uids or {})
        # Uid or name -> slot number; a name that several slots bear is no key.
        self._positions: dict[Any, int] = {slot.uid: i for i, slot in enumerate(self.slots)}
        names = [slot.name for slot in self.slots if slot.name]
        self._repeated = {name for name in names if names.count(name) > 1}
        self._positions |= {
            slot.name: i
            for i, slot in enumerate(self.slots)
            if slot.name and slot.name not in self._repeated
        }
        # What the common case compares, flat: (dtype, dim, stride, alignment mask, span). A stride
        # of None means packed, which a tensor answers faster than it lists its strides.
        self._expected = tuple(
            (
                None if slot.is_flat else slot.dtype,
                slot.dim,
                None if _is_packed(slot) else slot.stride,
                slot.alignment_bytes - 1,
                slot.span_bytes,
            )
            for slot in self.slots
        )
        # Values of the plan itself: no caller's memory, and nothing writes them.
        self._defaults = tuple(
            None
            if slot.value is None
            else torch.full(slot.dim, slot.value, dtype=slot.dtype, device="cpu")
            for slot in self.slots
        )
        self._cuda_index = device.index if device.type == "cuda" else None
        # (written slot, other slot, whether they may be one buffer)
        self.pairs = _written_pairs(self.slots, in_place)

    def bind(self, pack: VariantPack, workspace: Any = None) -> Binding:
        """Check every operand of a call and make its views; nothing is written.

        Raises:
            BindingError: naming the tensor, what was given, what was expected, and the rule.
        """
        buffers = self._by_position(pack)
        cuda_index = self._cuda_index
        views: list[torch.Tensor] = []
        starts: list[int] = []
        stops: list[int] = []
        try:
            for buffer, (dtype, dim, stride, mask, span) in zip(
                buffers, self._expected, strict=True
            ):
                # The common case, a torch tensor laid out as declared, takes no detour.
                if (
                    type(buffer) is torch.Tensor
                    and buffer.dtype is dtype
                    and buffer.shape == dim
                    and (buffer.is_contiguous() if stride is None else buffer.stride() == stride)
                    and (buffer.is_cpu if cuda_index is None else buffer.get_device() == cuda_index)
                    and not buffer.requires_grad
                    and not buffer.is_neg()
                    and owned_bytes(buffer) >= span
                ):
                    start = buffer.data_ptr()
                    stop = start + span
                    view = buffer
                else:
                    position = len(views)
                    default = self._defaults[position]
                    if buffer is None and default is not None:
                        # A host scalar of the plan: no caller's memory, so an empty byte range.
                        views.append(default)
                        starts.append(0)
                        stops.append(0)
                        continue
                    view, start, stop = self._bind_other(self.slots[position], buffer)
                if start & mask and stop != start:
                    self._refuse_alignment(self.slots[len(views)], start)
                if stop and not start:
                    self._refuse_null(self.slots[len(views)])
                views.append(view)
                starts.append(start)
                stops.append(stop)
        except RuntimeError:
            from tilewright.launch.facts import refuse_hidden_storage

            refuse_hidden_storage(buffers, (slot.label for slot in self.slots))
            raise
        for written, other, may_share in self.pairs:
            if starts[written] < stops[other] and starts[other] < stops[written]:
                self._check_pair(written, other, may_share, starts, stops)
        if workspace is not None or self.workspace_bytes:
            check_workspace(
                workspace,
                self.workspace_bytes,
                self.workspace_alignment_bytes,
                self.device,
                self.slots,
                starts,
                stops,
            )
        return Binding(views, starts, stops)

    def order_of(self, keys: tuple[Any, ...]) -> tuple[int, ...] | None:
        """Where in a pack with these keys each slot's buffer is, -1 for none.

        None if that needs a closer look at each call: a key that names no slot, two that name one,
        or a tensor whose uid can still change.
        """
        order = [-1] * len(self.slots)
        for number, key in enumerate(keys):
            if type(key) is Tensor:
                if not key._graph._validated:
                    return None
                key = key._uid
            position = self._positions.get(key) if type(key) in (int, str) else None
            if position is None or order[position] >= 0:
                return None
            order[position] = number
        return tuple(order)

    def is_packed(self, number: int) -> bool:
        """True if a contiguous buffer is laid out as the slot declares."""
        return self._expected[number][2] is None

    def same_layout(self, first: int, second: int) -> bool:
        """True if the two slots see the same elements of one buffer."""
        one, two = self.slots[first], self.slots[second]
        return (
            one.dim == two.dim
            and one.data_type.bits == two.data_type.bits
            and _steps(one) == _steps(two)
        )

    def _by_position(self, pack: VariantPack) -> list[Any]:
        """The pack's buffers in slot order, None where it has none."""
        if not isinstance(pack, Mapping):
            raise BindingError(
                f"variant pack: got {type(pack).__name__}; expected a mapping from tensors, uids "
                "or names to buffers"
            )
        keys = tuple(pack)
        kinds = tuple(map(type, keys))
        known = self._orders.get(keys)
        # A dict takes True and 1.0 for 1; only their types tell them apart.
        if known is not None and known[1] == kinds:
            given = [*pack.values(), None]
            return [given[i] for i in known[0]]
        order = self.order_of(keys)
        if order is not None:
            if len(self._orders) < _MEMO:
                self._orders[keys] = order, kinds
            given = [*pack.values(), None]
            return [given[i] for i in order]
        buffers: list[Any] = [None] * len(self.slots)
        for key, buffer in pack.items():
            position = self._positions.get(key._uid if type(key) is Tensor else key)
            if position is None or isinstance(key, bool | float):
                self._check_other_key(key)
                continue
            if buffers[position] is not None and buffers[position] is not buffer:
                uid = self.slots[position].uid
                raise BindingError(f"variant pack: tensor with uid {uid} is given two buffers")
            buffers[position] = buffer
        return buffers

    def _check_other_key(self, key: Any) -> None:
        """Keys that name no slot: None and unknown ones are ignored, virtual tensors refused."""
        if isinstance(key, str):
            if key in self._repeated:
                raise BindingError(
                    f"variant pack: name {key!r} is borne by several tensors; use uids"
                )
            return
        if key is not None and (isinstance(key, bool) or not isinstance(key, Tensor | int)):
            raise BindingError(
                f"variant pack: key {key!r}; expected a graph tensor, a uid, a name, or None"
            )
        uid = key.uid if isinstance(key, Tensor) else key
        if uid in self._virtual_uids:
            raise BindingError(
                f"tensor {self._virtual_uids[uid]} is virtual and was given a buffer; call "
                "set_output(True) on it before the graph is built, or leave it out"
            )

    def _refuse_alignment(self, slot: Slot, start: int) -> None:
        raise BindingError(
            f"tensor {slot.label}: address {start:#x} is not a multiple of "
            f"{slot.alignment_bytes} bytes, the alignment of the declaration"
        )

    def _refuse_null(self, slot: Slot) -> None:
        raise BindingError(f"tensor {slot.label}: a null pointer; expected {slot.span_bytes} bytes")

    def _bind_other(self, slot: Slot, buffer: Any) -> tuple[torch.Tensor, int, int]:
        if buffer is None:
            role = "output" if slot.is_output else "input"
            raise BindingError(
                f"tensor {slot.label} (uid {slot.uid}): the variant pack has no buffer for this "
                f"{role}; every operand that the graph declares is required"
            )
        if isinstance(buffer, torch.Tensor):
            # Layouts that differ from the declared one and were found to reach far enough.
            layout = (slot.uid, buffer.dtype, buffer.device, buffer.shape, buffer.stride())
            is_known = layout in self._accepted and not buffer.is_neg()
            if is_known and owned_bytes(buffer) >= slot.span_bytes:
                start = buffer.data_ptr()
                return self._view(slot, buffer), start, start + slot.span_bytes
            bound = self._observe_and_check(slot, buffer)
            if not slot.is_flat and buffer.dtype is slot.dtype and len(self._accepted) < _MEMO:
                self._accepted.add(layout)
            return bound
        return self._observe_and_check(slot, buffer)

    def _view(self, slot: Slot, buffer: torch.Tensor) -> torch.Tensor:
        if not self._needs_views:
            return buffer
        tensor = buffer.detach() if buffer.requires_grad else buffer
        return tensor.as_strided(slot.dim, slot.stride)

    def _observe_and_check(self, slot: Slot, buffer: Any) -> tuple[torch.Tensor, int, int]:
        # Plain calls never ask, so a first call need not load it.
        from tilewright.launch.facts import observe

        facts = observe(buffer, slot.label, is_written=slot.is_output)
        if facts.tensor is None:
            return self._bind_pointer(slot, facts.pointer)
        dtype = facts.tensor.dtype
        if dtype is not slot.dtype and not (dtype is torch.uint8 and slot.dtype.itemsize == 1):
            from tilewright.torch_dtypes import from_torch

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

    def _bind_pointer(self, slot: Slot, pointer: int) -> tuple[torch.Tensor, int, int]:
        if pointer == 0 and slot.span_bytes:
            self._refuse_null(slot)
        if pointer % slot.alignment_bytes or not (self._needs_views or slot.is_pass_by_value):
            return _NO_VIEW, pointer, pointer + slot.span_bytes
        from tilewright.launch.pointers import bytes_at

        flat = bytes_at(pointer, slot.span_bytes, self.device).view(slot.dtype)
        view = flat if slot.is_flat else flat.as_strided(slot.dim, slot.stride)
        return view, pointer, pointer + slot.span_bytes

    def _check_pair(
        self, written: int, other: int, may_share: bool, starts: list[int], stops: list[int]
    ) -> None:
        out, second = self.slots[written], self.slots[other]
        same_view = starts[written] == starts[other] and self.same_layout(written, other)
        if may_share and same_view:
            return
        # Few calls have operands whose ranges overlap.
        from tilewright.launch.aliases import ranges_clash

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


def _is_packed(slot: Slot) -> bool:
    """True if torch's is_contiguous() says the same as the declared stride."""
    step = 1
    for extent, stride in zip(reversed(slot.dim), reversed(slot.stride), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return 0 not in slot.dim


def _steps(slot: Slot) -> tuple[int, ...]:
    """Strides of the axes that are stepped; a singleton axis may have any stride."""
    return tuple(s for extent, s in zip(slot.dim, slot.stride, strict=True) if extent > 1)


def _byte_range(slot: Slot, start: int, stop: int) -> ByteRange:
    from tilewright.launch.aliases import ByteRange

    if slot.is_flat:
        return ByteRange(start, stop, (stop - start,), (1,), 1)
    item = slot.dtype.itemsize
    # A singleton axis contributes no byte, and its stride may be past what numpy takes.
    strides = tuple(
        s * item if extent > 1 else item for extent, s in zip(slot.dim, slot.stride, strict=True)
    )
    return ByteRange(start, stop, slot.dim, strides, item)
