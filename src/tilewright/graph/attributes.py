"""Coercion of attribute values to the types that an operation record declares.

One function serves the Python API and the JSON form, so both accept and refuse the same.
"""

from __future__ import annotations

import enum
import math
import operator
import types
import typing
from typing import Any

from tilewright.errors import GraphError

_FLOAT_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_SHOWN_CHARACTERS = 200


def shown(value: Any) -> str:
    """``value`` for a message: its repr, cut to a readable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python prints neither very long integers nor very deep lists.
        return f"{type(value).__name__} too large to print"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def coerce(hint: Any, value: Any, where: str) -> Any:
    """``value`` as an instance of type hint ``hint``.

    Enums accept their members and names; floats accept ints and the words inf, -inf, nan;
    tuples accept any list or tuple.

    Raises:
        GraphError: saying where, what was given, and what is accepted.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        choices = typing.get_args(hint)
        if value is None and type(None) in choices:
            return None
        return coerce(next(c for c in choices if c is not type(None)), value, where)
    if origin is tuple:
        return _coerce_tuple(hint, value, where)
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise GraphError(f"{where} is {shown(value)}; expected True or False")
    if hint is int:
        return _coerce_int(value, where)
    if hint is float:
        return _coerce_float(value, where)
    if hint is str:
        if isinstance(value, str):
            return value
        raise GraphError(f"{where} is {shown(value)}; expected a string")
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _coerce_enum(hint, value, where)
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise GraphError(f"{where} is {shown(value)}; expected {getattr(hint, '__name__', hint)}")


def encode(value: Any) -> Any:
    """The JSON form of an attribute value; ``coerce`` reads it back."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return [encode(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _coerce_int(value: Any, where: str) -> int:
    if isinstance(value, bool):
        raise GraphError(f"{where} is {shown(value)}; expected an integer")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise GraphError(f"{where} is {shown(value)}; expected an integer") from error
    if not -(2**63) <= number < 2**63:
        raise GraphError(f"{where} is {shown(number)}; expected a 64-bit integer")
    return number


def _coerce_float(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _FLOAT_WORDS:
        return _FLOAT_WORDS[value]
    if isinstance(value, bool | str):
        raise GraphError(f"{where} is {shown(value)}; expected a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise GraphError(f"{where} is {shown(value)}; expected a number") from error


def _coerce_enum(hint: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    if isinstance(value, hint):
        return value
    if isinstance(value, str) and value in hint.__members__:
        return hint[value]
    accepted = ", ".join(hint.__members__)
    raise GraphError(f"{where} is {shown(value)}; accepted are {accepted}")


def _coerce_tuple(hint: Any, value: Any, where: str) -> tuple[Any, ...]:
    parts = typing.get_args(hint)
    if isinstance(value, str) or not hasattr(value, "__iter__") or isinstance(value, dict):
        raise GraphError(f"{where} is {shown(value)}; expected a sequence")
    entries = list(value)
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(coerce(parts[0], entry, where) for entry in entries)
    if len(entries) != len(parts):
        raise GraphError(f"{where} has {len(entries)} entries; expected {len(parts)}")
    return tuple(coerce(part, entry, where) for part, entry in zip(parts, entries, strict=True))
