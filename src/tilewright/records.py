"""Frozen records that cost little to define.

``record`` is ``dataclasses.dataclass(frozen=True)`` without what that does for every class when it
is defined: code that is made and compiled, and a record for each field. That is most of what
importing a graph's vocabulary would cost. ``dataclasses.fields``, ``replace`` and ``asdict`` work
on records. They are meant for what is made once a plan, not once a call: making one takes a few
microseconds.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

__all__ = ["field_names", "record"]

_MISSING = dataclasses.MISSING
_TABLE = "__record_fields__"

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(
        *, frozen: bool, eq: bool = True, kw_only: bool = False
    ) -> Callable[[type[Any]], type[Any]]:
        """A class decorator; takes the dataclass's arguments of these names.

        Raises:
            TypeError: if ``frozen`` is False; there are no records that change.
        """
        if not frozen:
            raise TypeError("record: frozen is False; use dataclasses.dataclass")

        def define(cls: type[Any]) -> type[Any]:
            table = _table_of(cls, kw_only)
            setattr(cls, _TABLE, table)
            cls.__dataclass_fields__ = _LateFields(cls.__name__, table)
            _fill(cls, table, eq)
            return cls

        return define


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """The names of a record's fields in order, without making a dataclass's record of each."""
    return tuple(getattr(cls, _TABLE))


class _Field(NamedTuple):
    annotation: Any
    default: Any
    factory: Any
    kw_only: bool


class _LateFields:
    """``__dataclass_fields__`` of a record: made when somebody asks for it."""

    __slots__ = ("fields", "name", "table")

    def __init__(self, name: str, table: dict[str, _Field]) -> None:
        self.name, self.table = name, table
        self.fields: Any = None

    def __get__(self, instance: Any, owner: Any) -> Any:
        """The fields as a dataclass of the same annotations has them."""
        if self.fields is None:
            body: dict[str, Any] = {"__annotations__": {}}
            for name, (annotation, default, factory, kw_only) in self.table.items():
                body["__annotations__"][name] = annotation
                options: dict[str, Any] = {"kw_only": kw_only}
                options |= {} if default is _MISSING else {"default": default}
                options |= {} if factory is _MISSING else {"default_factory": factory}
                body[name] = dataclasses.field(**options)
            made: Any = type(self.name, (), body)
            dataclasses.dataclass(init=False, repr=False, eq=False)(made)
            self.fields = made.__dataclass_fields__
        return self.fields


def _table_of(cls: Any, kw_only: bool) -> dict[str, _Field]:
    """The fields of the bases' records, then the class's own, in order."""
    table: dict[str, _Field] = {}
    for base in reversed(cls.__mro__[1:]):
        table |= base.__dict__.get(_TABLE, {})
    for name, annotation in inspect.get_annotations(cls).items():
        if isinstance(annotation, str) and annotation.startswith("ClassVar"):
            continue
        default: Any = cls.__dict__.get(name, _MISSING)
        factory: Any = _MISSING
        if isinstance(default, dataclasses.Field):
            default, factory = default.default, default.default_factory
            if default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, default)
        table[name] = _Field(annotation, default, factory, kw_only)
    return table


def _fill(cls: Any, table: dict[str, _Field], eq: bool) -> None:
    """Give the class what a frozen dataclass has, by functions that read its table of fields."""
    names = tuple(table)
    positional = [name for name, field in table.items() if not field.kw_only]
    rows = [(name, field.default, field.factory) for name, field in table.items()]
    put = object.__setattr__
    has_post_init = hasattr(cls, "__post_init__")

    def __init__(self: Any, *values: Any, **given: Any) -> None:
        if values:
            if len(values) > len(positional):
                raise TypeError(
                    f"{cls.__name__}: {len(values)} positional arguments; expected at most "
                    f"{len(positional)}"
                )
            for name, value in zip(positional, values, strict=False):
                if name in given:
                    raise TypeError(f"{cls.__name__}: argument {name!r} is given twice")
                given[name] = value
        for name, default, factory in rows:
            if name in given:
                value = given.pop(name)
            elif default is not _MISSING:
                value = default
            elif factory is not _MISSING:
                value = factory()
            else:
                raise TypeError(f"{cls.__name__}: argument {name!r} is missing")
            put(self, name, value)
        if given:
            raise TypeError(f"{cls.__name__}: no argument {next(iter(given))!r}")
        if has_post_init:
            self.__post_init__()

    def __repr__(self: Any) -> str:
        inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({inside})"

    def __setattr__(self: Any, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self: Any, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    methods: dict[str, Any] = {
        "__init__": __init__,
        "__repr__": __repr__,
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
    }
    if eq:

        def values_of(self: Any) -> tuple[Any, ...]:
            return tuple([getattr(self, name) for name in names])

        def __eq__(self: Any, other: object) -> Any:
            if type(other) is not type(self):
                return NotImplemented
            return values_of(self) == values_of(other)

        def __hash__(self: Any) -> int:
            return hash(values_of(self))

        methods |= {"__eq__": __eq__, "__hash__": __hash__}
    for name, method in methods.items():
        if name not in cls.__dict__ or (name == "__hash__" and cls.__dict__[name] is None):
            method.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, method)
