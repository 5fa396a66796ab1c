"""What a kernel's source is: its text, that of every helper that it calls, and what they read.

Triton's own ``cache_key`` will not do for code that is stored: it takes over the globals that a
helper reads only if the helper was asked for its key before, so that a kernel's key depends on
which others were made first, and it sorts globals of one name by their modules' addresses.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

# The text of the compiler goes with its version, which a key has; Python's own makes no code.
_FOREIGN = {"triton", *sys.stdlib_module_names}

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
    """(facts of a function by itself, the functions that it refers to)."""
    if id(helper) in _parts:
        return _parts[id(helper)][1:]
    # One that makes the compiler's own instructions is wrapped.
    plain = inspect.unwrap(getattr(helper, "fn", helper))
    where = _where(helper)
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
    yield "defaults", (plain.__defaults__, *sorted((plain.__kwdefaults__ or {}).items()))
    names = sorted(_names_in(plain.__code__))
    enclosed = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    scope = {**plain.__globals__, **{name: cell.cell_contents for name, cell in enclosed}}
    waiting, met = [(name, scope.get(name)) for name in names], set()
    while waiting:
        name, value = waiting.pop()
        if not isinstance(value, ModuleType):
            yield name, value
        elif not _is_foreign(value.__name__) and id(value) not in met:
            met.add(id(value))
            # What is read of a module is among the names; others of them do no harm.
            waiting += [(f"{name}.{other}", getattr(value, other, None)) for other in names]


def _is_foreign(module: str | None) -> bool:
    return (module or "").split(".")[0] in _FOREIGN


def _names_in(code: CodeType) -> set[str]:
    """The names that code and the code within it look up."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _where(function: Any) -> str:
    plain = getattr(function, "fn", function)
    return f"{plain.__module__}.{plain.__qualname__}"


def _told(value: Any) -> tuple[list[Any], str | None]:
    """(functions in a value, what else is to be told of it)."""
    if type(value).__name__ == "constexpr":
        return _told(value.value)
    if getattr(value, "__triton_aggregate__", False):
        return list(value.hash_attrs), repr([_where(function) for function in value.hash_attrs])
    if hasattr(type(value), "cache_key"):
        return [value], _where(value)
    if isinstance(value, tuple):
        parts = [_told(item) for item in value]
        return [f for functions, _ in parts for f in functions], repr([fact for _, fact in parts])
    if isinstance(value, FunctionType) and not _is_foreign(value.__module__):
        return [value], _where(value)
    if value is None or callable(value) or isinstance(value, ModuleType):
        # Types, and what the compiler itself brings.
        return [], None
    return [], repr(value)
