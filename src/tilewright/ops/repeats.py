"""Plain calls of a function like an earlier one: what was checked once is not checked again.

Checking a call's arguments takes longer on the host than everything else that it does. A call is
plain if it is eager and each of its operands is an ordinary tensor, strided and without a gradient
to make. Of such a call all that a function checks depends on the operands' types, layouts and
devices, and on values; so one that is equal in these can go the way that the earlier one went.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from tilewright.ops.custom import is_traced

Operands = tuple[torch.Tensor | None, ...]
Values = tuple[Hashable, ...]
_Way = TypeVar("_Way")
# Values of other kinds may change and stay equal to themselves, as a tensor does.
_PLAIN_KINDS = frozenset((bool, int, float, str, tuple, type(None)))
_is_nested = operator.attrgetter("is_nested")
# Calls that a function remembers; past that it starts anew.
_MAX_KNOWN = 1024
# Looks that are tried first, one after another: a model's few shapes in turn.
_MAX_LOOKS = 4
# Looks that are made at one call: one for each mode of autograd, and each mix with parameters.
_MAX_LOOKS_OF_ONE = 16


class Repeats(Generic[_Way]):
    """The ways of plain calls, by what they were given. Threads may share one.

    ``operands`` are tensors, two or more of them, or None; of one function they come in one order,
    and ``values`` in another.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known[_Way]] = {}
        self._looks: tuple[_Look[_Way], ...] = ()

    def find(self, operands: Operands, values: Values) -> _Way | None:
        """The way of an earlier call like this one, or None."""
        if is_traced():
            return None
        types, kinds = tuple(map(type, operands)), tuple(map(type, values))
        for look in self._looks:
            if look.types == types and look.kinds == kinds and look.values == values:
                if look.has_leaves and torch.is_grad_enabled():
                    continue
                # Of nested tensors torch's guard cannot ask dims: it ends the process.
                present = look.present(operands)
                if not any(map(_is_nested, present)) and look.check(*present):
                    return look.way
        facts = _facts(operands, values, kinds)
        known = None if facts is None else self._known.get(facts)
        if known is None:
            return None
        if known.looks_left:
            known.looks_left -= 1
            look = _Look(operands, values, types, kinds, known.way)
            self._looks = (look, *self._looks[: _MAX_LOOKS - 1])
        return known.way

    def keep(self, operands: Operands, values: Values, way: _Way) -> None:
        """Remember the way of a call that was checked, if it is plain."""
        kinds = tuple(map(type, values))
        facts = _facts(operands, values, kinds)
        if facts is None or not _PLAIN_KINDS.issuperset(kinds):
            return
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[facts] = _Known(way)


class _Known(Generic[_Way]):
    """One call that was checked."""

    __slots__ = ("looks_left", "way")

    def __init__(self, way: _Way) -> None:
        self.way = way
        self.looks_left = _MAX_LOOKS_OF_ONE


class _Look(Generic[_Way]):
    """What tells quickly that a call is like a known one; it may miss one that is.

    One guard of torch looks at all operands: their types, dispatch keys as they are for this thread
    (inference mode, autocast, transforms, and views that are negated show there), data types,
    device indices, dims, strides, and whether they require a gradient. Whether gradients are made
    at all it does not ask.
    """

    __slots__ = ("check", "has_leaves", "kinds", "present", "types", "values", "way")

    def __init__(
        self,
        operands: Operands,
        values: Values,
        types: tuple[type, ...],
        kinds: tuple[type, ...],
        way: _Way,
    ) -> None:
        self.way = way
        self.values, self.kinds, self.types = values, kinds, types
        self.present = operator.itemgetter(
            *(number for number, operand in enumerate(operands) if operand is not None)
        )
        present = self.present(operands)
        self.has_leaves = any(operand.requires_grad for operand in present)
        make: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", _Never)
        guard = make(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.check: Callable[..., bool] = guard.check


class _Never:
    """A guard where torch has none."""

    def __init__(self, *operands: Any, **options: Any) -> None:
        pass

    def check(self, *operands: Any) -> bool:
        return False


def _facts(operands: Operands, values: Values, kinds: tuple[type, ...]) -> Hashable:
    """All that checks depend on; None of a call that is not plain.

    ``kinds`` are the types of ``values``: True == 1.0 == 1, and only these tell them apart.
    """
    if is_traced(*operands):
        return None
    needs_grad = torch.is_grad_enabled()
    found: list[Any] = [kinds, values]
    for operand in operands:
        if operand is None:
            found.append(None)
            continue
        if operand.layout is not torch.strided or operand.is_nested:
            return None
        if needs_grad and operand.requires_grad:
            return None
        found += (operand.shape, operand.stride(), operand.dtype, operand.device)
    facts = tuple(found)
    try:
        hash(facts)
    except TypeError:
        return None
    return facts
