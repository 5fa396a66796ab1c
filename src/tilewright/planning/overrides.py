"""Overrides: the declared form of a graph with other shapes and strides for some uids."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from tilewright.errors import BindingError

_Tuples = tuple[tuple[int, ...], ...]


def override_key(uids: Any, shapes: Any, strides: Any) -> tuple[tuple[int, ...], _Tuples, _Tuples]:
    """The three lists of an override as tuples; None is an empty one.

    Raises:
        BindingError: if they are no lists.
    """
    try:
        return (
            tuple(uids),
            tuple(tuple(shape) for shape in shapes or ()),
            tuple(tuple(stride) for stride in strides or ()),
        )
    except TypeError as error:
        raise BindingError(
            f"override: uids {uids!r}, shapes {shapes!r}, strides {strides!r}; expected a list of "
            "uids, and of a tuple of integers for each"
        ) from error


def overridden_form(
    form: dict[str, Any],
    uids: Sequence[int],
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """A copy of ``form`` with the given dims and strides; the rest is inferred anew.

    Raises:
        BindingError: if the lists differ in length, or a uid is unknown or comes twice.
    """
    if len(shapes) != len(uids) or len(strides) not in (0, len(uids)):
        raise BindingError(
            f"override: {len(uids)} uids, {len(shapes)} shapes, {len(strides)} strides; expected "
            "one shape, and one stride or none at all, a uid"
        )
    if len(set(uids)) != len(uids):
        raise BindingError(f"override: uids {list(uids)}; expected each once")
    result = copy.deepcopy(form)
    by_uid = {tensor["uid"]: tensor for tensor in result["tensors"]}
    for position, uid in enumerate(uids):
        if uid not in by_uid:
            raise BindingError(f"override: no tensor has uid {uid}")
        by_uid[uid]["dim"] = list(shapes[position])
        by_uid[uid]["stride"] = list(strides[position]) if strides else []
    return result
