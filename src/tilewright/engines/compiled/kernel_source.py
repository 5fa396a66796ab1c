"""What a kernel's source is: its text, that of every helper that it calls, and what they read.

Triton's own ``cache_key`` will not do for code that is stored: it takes over the globals that a
helper reads only if the helper was asked for its key before, so that a kernel's key depends on
which others were made first, and it sorts globals of one name by their modules' addresses.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

# By identity, beside the function, which so lives on: hashing it would ask for Triton's key.
_digests: dict[int, tuple[Any, str]] = {}
_parts: dict[int, tuple[Any, frozenset[tuple[str, str, str]], list[Any]]] = {}


def source_digest(function: Any) -> str:
    """The digest of a kernel's source; the same in every process, whatever was asked for before.

    An interpreted function's is of its own text alone: nothing of it is ever stored.
    """
    if not hasattr(type(function), "cache_key"):
        return "text " + hashlib.sha256(inspect.getsource(function.fn).encode()).hexdigest()
    known = _digests.get(id(function))
    if known is not None:
        return known[1]
    facts: set[tuple[str, str, str]] = set()
    found, waiting = {id(function)}, [function]
    while waiting:
        own, callees = _own_parts(waiting.pop())
        facts |= own
        for callee in callees:
            if id(callee) not in found:
                found.add(id(callee))
                waiting.append(callee)
    digest = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()
    _digests[id(function)] = (function, digest)
    return digest


def _own_parts(helper: Any) -> tuple[frozenset[tuple[str, str, str]], list[Any]]:
    """(facts of a function by itself, the compiled functions that it refers to)."""
    if id(helper) in _parts:
        return _parts[id(helper)][1:]
    plain = getattr(helper, "fn", helper)
    where = f"{plain.__module__}.{plain.__qualname__}"
    # Tables of lines are made of its place, and they reach the code.
    settings = (plain.__code__.co_firstlineno, getattr(helper, "noinline", False))
    text = getattr(helper, "src", None) or inspect.getsource(plain)
    facts, callees = {(where, repr(settings), text)}, []
    for name, value in _read_by(plain):
        functions, fact = _told(value)
        callees += functions
        if fact is not None:
            facts.add((where, name, fact))
    made = _parts[id(helper)] = (helper, frozenset(facts), callees)
    return made[1:]


def _read_by(plain: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of each global that a function reads; those of modules by their attributes."""
    names = sorted(_names_in(plain.__code__))
    enclosed = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    scope = {**plain.__globals__, **{name: cell.cell_contents for name, cell in enclosed}}
    for name in names:
        value = scope.get(name)
        if not isinstance(value, ModuleType):
            yield name, value
        elif value.__name__.split(".")[0] != "triton":
            # What is read of a module is among the names; others of them do no harm.
            for attribute in names:
                yield f"{name}.{attribute}", getattr(value, attribute, None)


def _names_in(code: CodeType) -> set[str]:
    """The names that code and the code within it look up."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _told(value: Any) -> tuple[list[Any], str | None]:
    """(compiled functions in a value, what else is to be told of it)."""
    if type(value).__name__ == "constexpr":
        return _told(value.value)
    if getattr(value, "__triton_aggregate__", False):
        return list(value.hash_attrs), None
    if hasattr(type(value), "cache_key"):
        return [value], None
    if value is None or callable(value) or isinstance(value, ModuleType):
        # Types, and what the compiler itself brings.
        return [], None
    return [], repr(value)
