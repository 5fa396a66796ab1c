"""The short way of a plain call: checks, binds and launches in one flat generated function.

A call is plain if every operand is a torch tensor laid out as declared, on the plan's device, and
nothing overlaps. ``DirectCalls.current(pack, workspace, stream)`` runs such a call and returns
True. Of any other it returns False before anything is written, and the binder takes it, which has
every rule and every message; so what is accepted here is a subset of what is accepted there.
``DirectCalls.bind(pack, workspace)`` does all but the launch, in blocks that nobody else has.

Layouts are checked at each call, since a tensor's can change in place: one guard of torch looks at
all operands, whether they are as those that passed last, and where they are not, each is looked at.
So is where it lies: in which storage, how far in, and how long the storage is, since that can be
resized under a tensor. What follows from this alone is not: room, alignment and overlaps are looked
at once for each set of places, and parameters are packed when the places are not those that a block
was last filled for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.launch import kernel_frames
from tilewright.launch.binder import Binder
from tilewright.launch.kernel_frames import BlockPool, BoundPlan
from tilewright.launch.prepared import Constant, HostScalar, KernelLaunch, Operand, Scratch

DirectCall = Callable[[Any, Any, Any], bool]
DirectBind = Callable[[Any, Any], BoundPlan | None]
# Sets of keys that a plan makes a function for; packs with others take the general way.
_MAX_FUNCTIONS = 64
# Sets of places in memory that a function remembers as plain; past that it starts anew.
_MAX_PLAIN = 256
# Sets of layouts for which a function has a guard made; past that the last two stay.
_MAX_GUARDS = 16
# What kernels assume of the pointers that a plan lists: multiples of 16 bytes.
_KERNEL_ALIGNMENT_MASK = 15


class DirectCalls:
    """The generated functions of one plan, one for each set of keys that packs come with."""

    def __init__(self, binder: Binder, pool: BlockPool, needs_aligned: Sequence[int]) -> None:
        self._binder = binder
        self._pool = pool
        self._needs_aligned = frozenset(needs_aligned)
        self._functions: dict[tuple[Any, ...], DirectCall] = {}
        self._binds: dict[tuple[Any, ...], DirectBind] = {}
        self._seen: set[tuple[str, tuple[Any, ...]]] = set()
        self.current: DirectCall = _declined

    def other(self, pack: Any, workspace: Any, stream: Any) -> bool:
        """Run a call that ``current`` did not take, if another function does."""
        if type(pack) is not dict:
            return False
        keys = tuple(pack)
        function = self._functions.get(keys)
        if function is None:
            if len(self._functions) >= _MAX_FUNCTIONS or self._is_first("call", keys):
                return False
            order = self._binder.order_of(keys)
            if order is None:
                return False
            names = {"call": _declined}
            names |= _generate(self._binder, self._pool, self._needs_aligned, keys, order, True)
            function = self._functions[keys] = names["call"]
        if function is self.current:
            return False
        # A race of two threads here costs a look-up, no more: each runs the function of its pack.
        self.current = function
        return function(pack, workspace, stream)

    def _is_first(self, what: str, keys: tuple[Any, ...]) -> bool:
        """True if nothing was asked with these keys yet: making a function takes many calls' time.

        So the first call of a plan, of which many have no other, goes the general way.
        """
        if (what, keys) in self._seen:
            return False
        if len(self._seen) < _MAX_PLAIN:
            self._seen.add((what, keys))
        return True

    def bind(self, pack: Any, workspace: Any) -> BoundPlan | None:
        """A plain call's parameters in blocks of its own; None if the call is not plain."""
        if type(pack) is not dict:
            return None
        keys = tuple(pack)
        function = self._binds.get(keys)
        if function is None:
            if len(self._binds) >= _MAX_FUNCTIONS or self._is_first("bind", keys):
                return None
            order = self._binder.order_of(keys)
            if order is None:
                return None
            names = {"call": _unbound}
            names |= _generate(self._binder, self._pool, self._needs_aligned, keys, order, False)
            function = self._binds[keys] = names["call"]
        return function(pack, workspace)


def _declined(pack: Any, workspace: Any, stream: Any) -> bool:
    return False


def _unbound(pack: Any, workspace: Any) -> None:
    return None


def _generate(
    binder: Binder,
    pool: BlockPool,
    needs_aligned: frozenset[int],
    keys: tuple[Any, ...],
    order: Sequence[int],
    is_launched: bool,
) -> dict[str, Any]:
    """``call`` for packs with these keys; ``order`` is each slot's position in the pack.

    Empty if no such call is plain. Where it is not launched, the function binds.
    """
    slots = binder.slots
    given = [number for number, position in enumerate(order) if position >= 0]
    # A scalar that a call brings is read at the call, which takes the general way.
    if any(slots[number].is_pass_by_value for number in given):
        return {}
    if any(slot.value is None for i, slot in enumerate(slots) if i not in given):
        return {}
    names: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "index": -1 if binder.device.type == "cpu" else binder.device.index,
        "device_index": pool.device_index,
        "current_device": kernel_frames.current_device,
        "current_stream": kernel_frames.current_stream,
        "pop": pool.pop,
        "give": pool.give,
        "make": pool.make,
        "plain": set(),
    }
    lines = [
        "def call(pack, workspace, stream):" if is_launched else "def call(pack, workspace):",
        f" if type(pack) is not dict or len(pack) != {len(keys)}:",
        "  return False",
    ]
    if any(type(key) is int for key in keys):
        # A dict takes True and 1.0 for 1; only their types tell them apart.
        names["kinds"] = set(map(type, keys))
        lines += [" if not kinds.issuperset(map(type, pack)):", "  return False"]
    lines.append(" try:")
    for number in given:
        names[f"k{number}"] = keys[order[number]]
        lines.append(f"  b{number} = pack[k{number}]")
    # Of nested tensors torch's guard cannot ask dims: it ends the process.
    lines += [
        f"  if {' or '.join([f'b{number}.is_nested' for number in given]) or 'False'}:",
        "   return False",
        " except (AttributeError, KeyError):",
        "  return False",
    ]
    lines += _layout_checks(binder, given, names)
    facts = []
    spans = {i: f"p{i} + {_span(binder, i)}" for i in given}
    for number in given:
        # Its address follows from these, and torch is quicker to tell them.
        lines.append(f" s{number} = b{number}.untyped_storage()")
        facts += [f"s{number}.data_ptr()", f"b{number}.storage_offset()", f"len(s{number})"]
        if slots[number].is_flat:
            # It reaches as far as its buffer does.
            lines.append(f" z{number} = b{number}.nbytes")
            facts.append(f"z{number}")
            if not slots[number].is_ragged:
                lines += [f" if z{number} < {slots[number].span_bytes}:", "  return False"]
    lines += _workspace_check(binder.workspace_bytes)
    if binder.workspace_bytes:
        facts += ["w", "sw.data_ptr()", "len(sw)"]
    if is_launched:
        lines += [
            " if stream is None:",
            "  stream = current_stream(device_index)",
            " elif type(stream) is not int:",
            "  return False",
            " if current_device() != device_index:",
            "  return False",
        ]
    # A tensor without memory, such as one of zeros that are not there, has no place to tell.
    lines += [
        " try:",
        f"  facts = ({''.join(fact + ', ' for fact in facts)})",
        " except RuntimeError:",
        "  return False",
    ]
    if is_launched:
        lines += [" try:", "  entry = pop()", " except IndexError:", "  entry = make()"]
    else:
        # The blocks are the frame's from then on.
        lines.append(" entry = make()")
    lines += [
        " if entry[0] != facts:",
        *(f"  p{number} = b{number}.data_ptr()" for number in given),
        "  if facts not in plain:",
        f"   if {' or '.join(_refusals(binder, given, spans, needs_aligned)) or 'False'}:",
        "    give(entry)",
        "    return False",
        f"   if len(plain) >= {_MAX_PLAIN}:",
        "    plain.clear()",
        "   plain.add(facts)",
        "  entry[0] = None",
    ]
    for position, launch in enumerate(pool.launches):
        filling = _filling(position, launch, binder, given, names)
        if filling is None:
            return {}
        lines += filling
    lines.append("  entry[0] = facts")
    if not is_launched:
        lines.append(" return entry[1]")
        exec("\n".join(lines).replace("return False", "return None"), names)
        return names
    for position, launch in enumerate(pool.launches):
        names[f"launch{position}"] = launch.call.launch
        names[f"streams{position}"] = launch.call.streams
        names[f"function{position}"] = launch.call.function
        names[f"recover{position}"] = launch.call.recover
        extra = f"entry[{3 + 2 * position}]"
        lines += [
            f" status = launch{position}(streams{position}[stream], function{position}, None, "
            f"{extra})",
            " if status:",
            f"  recover{position}(status, stream, {extra}, device_index)",
        ]
    lines += [" give(entry)", " return True"]
    exec("\n".join(lines), names)
    return names


def _layout_checks(binder: Binder, given: Sequence[int], names: dict[str, Any]) -> list[str]:
    """Lines that look at each operand, unless all are as those that were looked at last."""
    names["are_as_last"] = names["are_as_before"] = _never
    names["keep"] = _keeping(names)
    operands = ", ".join(f"b{number}" for number in given)
    lines = [f" if not (are_as_last({operands}) or are_as_before({operands})):"]
    for number in given:
        lines += [f" {line}" for line in _layout_check(binder, number, names)]
    return [*lines, f"  keep({operands})"]


def _never(*operands: Any) -> bool:
    """What a guard says before there is one."""
    return False


def _keeping(names: dict[str, Any]) -> Callable[..., None]:
    """A function that makes ``are_as_last`` true of operands like its arguments.

    Like are those of equal types, dispatch keys (the kind of device, and whether values are negated
    when they are read, among them), data types, device indices, dims and strides.
    ``are_as_before`` stays true of those of the time before: one plan may be called with parameters
    and with plain tensors in turn.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Any = getattr(guards, "TensorGuards", None)
    left = _MAX_GUARDS if make else 0

    def keep(*operands: torch.Tensor) -> None:
        nonlocal left
        if left:
            left -= 1
            guard = make(*operands, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            names["are_as_before"], names["are_as_last"] = names["are_as_last"], guard.check

    return keep


def _layout_check(binder: Binder, number: int, names: dict[str, Any]) -> list[str]:
    slot = binder.slots[number]
    buffer = f"b{number}"
    names[f"d{number}"] = slot.dtype
    conditions = [f"{buffer}.dtype is d{number}", f"{buffer}.get_device() == index"]
    if slot.dtype.is_floating_point:
        # Such as the imaginary part of a conjugate: an address alone does not tell it.
        conditions.append(f"not {buffer}.is_neg()")
    if slot.is_flat:
        conditions.append(f"{buffer}.is_contiguous()")
    elif binder.is_packed(number):
        # A buffer is storage: one without gaps that is long enough holds the declared elements.
        span = slot.span_bytes // slot.dtype.itemsize
        conditions += [f"{buffer}.is_contiguous()", f"{buffer}.numel() >= {span}"]
    else:
        conditions += [f"{buffer}.shape == {slot.dim!r}", f"{buffer}.stride() == {slot.stride!r}"]
    return [
        f" kind = type({buffer})",
        f" if not ((kind is Tensor or kind is Parameter) and {' and '.join(conditions)}):",
        "  return False",
    ]


def _span(binder: Binder, number: int) -> str:
    """How many bytes a call uses of an operand, as the function has it."""
    slot = binder.slots[number]
    return f"z{number}" if slot.is_flat else str(slot.span_bytes)


def _workspace_check(needed: int) -> list[str]:
    if not needed:
        # An empty one is often given all the same.
        return [
            " if workspace is not None and not (type(workspace) is Tensor"
            " and workspace.get_device() == index and workspace.numel() == 0):",
            "  return False",
        ]
    return [
        " if not (type(workspace) is Tensor and workspace.get_device() == index"
        f" and workspace.is_contiguous() and workspace.nbytes >= {needed}):",
        "  return False",
        " w, sw = workspace.data_ptr(), workspace.untyped_storage()",
    ]


def _lacks_room(pointer: str, storage: str, span: int | str) -> str:
    """A condition: fewer than ``span`` bytes from an address to the end of its storage."""
    return f"{storage}.data_ptr() + len({storage}) - {pointer} < {span}"


def _refusals(
    binder: Binder, given: Sequence[int], spans: Mapping[int, str], needs_aligned: frozenset[int]
) -> list[str]:
    """Conditions on places in memory under which a call is not plain."""
    masks: dict[int, list[str]] = {}
    for number in given:
        mask = binder.slots[number].alignment_bytes - 1
        if number in needs_aligned:
            mask |= _KERNEL_ALIGNMENT_MASK
        masks.setdefault(mask, []).append(f"p{number}")
    if binder.workspace_bytes:
        masks.setdefault(binder.workspace_alignment_bytes - 1, []).append("w")
    found = [f"({' | '.join(pointers)}) & {mask}" for mask, pointers in masks.items() if mask]
    found += [f"not p{number}" for number in given if binder.slots[number].span_bytes]
    found += [_lacks_room(f"p{i}", f"s{i}", _span(binder, i)) for i in given]
    for written, other, may_share in binder.pairs:
        if written not in given or other not in given:
            continue
        overlap = f"p{written} < {spans[other]} and p{other} < {spans[written]}"
        if may_share and binder.same_layout(written, other):
            overlap += f" and p{written} != p{other}"
        found.append(overlap)
    if binder.workspace_bytes:
        found.append(_lacks_room("w", "sw", binder.workspace_bytes))
        end = f"w + {binder.workspace_bytes}"
        found += [f"w < {spans[number]} and p{number} < {end}" for number in given]
    return found


def _filling(
    position: int,
    launch: KernelLaunch,
    binder: Binder,
    given: Sequence[int],
    names: dict[str, Any],
) -> list[str] | None:
    """Lines that write one kernel's parameters: at once from the first to the last that varies.

    None if the general way is needed.
    """
    values: list[str] = []
    varying: list[int] = []
    for number, argument in enumerate(launch.arguments):
        if isinstance(argument, Operand):
            varying.append(number)
            offset = f" + {argument.offset_bytes}" if argument.offset_bytes else ""
            values.append(f"p{argument.slot}{offset}")
        elif isinstance(argument, Scratch):
            varying.append(number)
            values.append(f"w + {argument.offset_bytes}")
        elif isinstance(argument, HostScalar):
            if argument.value is None:
                return None
            # No scalar is given, so the value is the plan's own.
            varying.append(number)
            values.append(f"c{position}_{number}")
            names[values[-1]] = argument.value
        elif isinstance(argument, Constant):
            values.append(f"c{position}_{number}")
            names[values[-1]] = argument.value
        else:
            # A tensor map: the general filling encodes it.
            numbers = range(len(binder.slots))
            starts = ", ".join(f"p{i}" if i in given else "0" for i in numbers)
            stops = ", ".join(f"p{i} + {_span(binder, i)}" if i in given else "0" for i in numbers)
            scratch = "w" if binder.workspace_bytes else "0"
            fill = f"entry[1].launches[{position}].fill"
            return [f"  {fill}(({starts}, ), ({stops}, ), (), {scratch})"]
    if not varying:
        return []
    first, last = varying[0], varying[-1] + 1
    text, end = "<", launch.offsets[first]
    for number in range(first, last):
        gap = launch.offsets[number] - end
        text += f"{gap}x" if gap else ""
        text += launch.formats[number]
        end = launch.offsets[number] + struct.calcsize("<" + launch.formats[number])
    names[f"pack{position}"] = struct.Struct(text).pack_into
    arguments = ", ".join(values[first:last])
    return [f"  pack{position}(entry[{2 + 2 * position}], {launch.offsets[first]}, {arguments})"]
