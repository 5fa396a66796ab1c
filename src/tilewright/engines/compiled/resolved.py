"""A plan whose kernels have code: all that launching it needs, as plain data that can be stored."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from tilewright.artifact.code import KernelCode
from tilewright.dtypes import DataType
from tilewright.launch.prepared import Argument
from tilewright.records import record

_ARGUMENTS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Argument)}
Codes = Mapping[str, KernelCode]


@record(frozen=True)
class ResolvedKernel:
    """One launch: the digest of its code, Triton's types of its arguments, and what goes there.

    ``is_early`` and ``cluster`` as in ``PlannedKernel``.
    """

    digest: str
    types: tuple[str, ...]
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    is_early: bool = False
    cluster: int = 1


@record(frozen=True)
class ResolvedPlan:
    """As ``KernelPlan``, with kernels that need neither the compiler nor their family."""

    kernels: tuple[ResolvedKernel, ...]
    scratch: tuple[tuple[str, int], ...] = ()
    needs_aligned: tuple[int, ...] = ()
    fallback: ResolvedPlan | None = None

    def digests(self) -> Iterator[str]:
        """The code of this plan and of those behind it."""
        yield from (kernel.digest for kernel in self.kernels)
        if self.fallback is not None:
            yield from self.fallback.digests()

    def to_document(self) -> dict[str, Any]:
        """The plan as JSON values.

        Raises:
            TypeError: for an argument that has no exact form there.
        """
        return {
            "kernels": [
                {
                    "digest": kernel.digest,
                    "types": list(kernel.types),
                    "grid": list(kernel.grid),
                    "arguments": [_encoded(argument) for argument in kernel.arguments],
                    "is_early": kernel.is_early,
                    "cluster": kernel.cluster,
                }
                for kernel in self.kernels
            ],
            "scratch": [list(piece) for piece in self.scratch],
            "needs_aligned": list(self.needs_aligned),
            "fallback": None if self.fallback is None else self.fallback.to_document(),
        }


def plan_of(document: Any) -> ResolvedPlan:
    """The plan in a document.

    Raises:
        KeyError, TypeError, ValueError: if it is not the form of one.
    """
    kernels = tuple(
        ResolvedKernel(
            str(kernel["digest"]),
            tuple(map(str, kernel["types"])),
            _grid(kernel["grid"]),
            tuple(_decoded(argument) for argument in kernel["arguments"]),
            bool(kernel["is_early"]),
            int(kernel["cluster"]),
        )
        for kernel in document["kernels"]
    )
    behind = document["fallback"]
    return ResolvedPlan(
        kernels,
        tuple((str(name), int(size)) for name, size in document["scratch"]),
        tuple(map(int, document["needs_aligned"])),
        None if behind is None else plan_of(behind),
    )


def _grid(extents: Any) -> tuple[int, int, int]:
    x, y, z = map(int, extents)
    return x, y, z


def _encoded(argument: Argument) -> list[Any]:
    fields = typing.get_type_hints(type(argument))
    return [
        type(argument).__name__,
        {name: _plain(getattr(argument, name)) for name in fields},
    ]


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_plain(item) for item in value]
    if isinstance(value, DataType):
        return {"data_type": value.name}
    raise TypeError(f"an argument holds {value!r}, which has no exact form in a record")


def _decoded(entry: Any) -> Any:
    name, fields = entry
    return _ARGUMENTS[name](**{key: _value(value) for key, value in fields.items()})


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    if isinstance(value, dict):
        return DataType[value["data_type"]]
    return value
