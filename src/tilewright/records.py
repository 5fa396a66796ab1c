"""Frozen records that cost little to define.

``record`` is ``dataclasses.dataclass(frozen=True)`` without the code that it makes and compiles for
every class, which is most of what importing a graph's vocabulary would cost. ``dataclasses.fields``
and ``dataclasses.replace`` work on records. They are meant for what is made once a plan, not once a
call: making one takes a few microseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

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
            if cls.__doc__ is None:
                # dataclass would work out a signature for it.
                cls.__doc__ = cls.__name__
            made = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            _fill(made, eq)
            return made

        return define


_MISSING = dataclasses.MISSING


def _fill(cls: Any, eq: bool) -> None:
    """Give the class what a frozen dataclass has, by functions that read its table of fields."""
    fields = [spec for spec in dataclasses.fields(cls) if spec.init]
    positional = [spec.name for spec in fields if not spec.kw_only]
    table = [(spec.name, spec.default, spec.default_factory) for spec in fields]
    names = tuple(spec.name for spec in dataclasses.fields(cls))
    put = object.__setattr__
    post_init = getattr(cls, "__post_init__", None)

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
        for name, default, factory in table:
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
        if post_init is not None:
            self.__post_init__()

    def __repr__(self: Any) -> str:
        inside = ", ".join(
            f"{spec.name}={getattr(self, spec.name)!r}"
            for spec in dataclasses.fields(self)
            if spec.repr
        )
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
