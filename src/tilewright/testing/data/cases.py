"""The record of a case, its repro, and the table of what can be rebuilt."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tilewright.testing.data.draws import Draws
from tilewright.testing.data.guards import Guarded, guard_all

__all__ = ["Built", "DataCase", "ReproError", "from_repro", "make", "rebuild", "recipe"]

VERSION = 1
"""Of the repro: a recipe that changes its numbers takes a new kind name or raises this."""


class ReproError(ValueError):
    """A repro cannot be read, or does not give the bits that it was taken of."""


@dataclass(frozen=True, eq=False)
class DataCase:
    """Operands that were drawn together, and how to draw them again.

    Attributes:
        kind: Which maker made it.
        seed: Of all its draws.
        parameters: What the maker was given, defaults filled in; plain JSON.
        tensors: By name, on the CPU. A test that writes into them should use `guarded()` copies.
        facts: What a test needs to know about them (lengths, hidden keys), plain JSON.
        digest: SHA-256 over names, dtypes, shapes, strides and all bytes of the storages.
    """

    kind: str
    seed: int
    parameters: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    digest: str

    @property
    def repro(self) -> dict[str, Any]:
        """Plain JSON that `from_repro` makes this case of, on this or another machine."""
        return {
            "version": VERSION,
            "kind": self.kind,
            "seed": self.seed,
            "parameters": json.loads(json.dumps(dict(self.parameters))),
            "digest": self.digest,
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def guarded(self, guard_bytes: int = 256) -> dict[str, Guarded]:
        """Copies of all tensors, strides kept, amid guard bytes: see `guard`."""
        return guard_all(self.tensors, guard_bytes=guard_bytes)

    def __repr__(self) -> str:
        return f"DataCase({json.dumps(self.repro)})"


@dataclass(frozen=True)
class Built:
    """What a recipe gives."""

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]


Recipe = Callable[..., Built]
_RECIPES: dict[str, Recipe] = {}


def recipe(kind: str) -> Callable[[Recipe], Recipe]:
    """Register `build(draws, **parameters)` as what makes cases of a kind."""

    def register(build: Recipe) -> Recipe:
        if kind in _RECIPES:
            raise ValueError(f"kind {kind!r} has a recipe already")
        _RECIPES[kind] = build
        return build

    return register


def make(kind: str, generator: torch.Generator, parameters: Mapping[str, Any]) -> DataCase:
    """A case whose seed is the next draw of `generator`.

    Raises:
        ValueError: The generator is not on the CPU.
    """
    if generator.device.type != "cpu":
        raise ValueError(
            f"generator: on {generator.device}; expected one on the CPU, whose draws every "
            "machine can repeat"
        )
    halves = torch.randint(0, 2**31, (2,), generator=generator, dtype=torch.int64)
    return rebuild(kind, int(halves[0]) << 31 | int(halves[1]), parameters)


def rebuild(kind: str, seed: int, parameters: Mapping[str, Any]) -> DataCase:
    """The case of a kind, a seed and parameters.

    Raises:
        ReproError: There is no such kind, or the parameters are not plain JSON.
    """
    if kind not in _RECIPES:
        raise ReproError(f"kind: {kind!r}; expected one of {', '.join(sorted(_RECIPES))}")
    try:
        plain = json.loads(json.dumps(dict(parameters)))
    except (TypeError, ValueError) as reason:
        raise ReproError(f"parameters of {kind}: not plain JSON ({reason})") from None
    try:
        inspect.signature(_RECIPES[kind]).bind(Draws(seed), **plain)
    except TypeError as reason:
        raise ReproError(f"parameters of {kind}: {reason}") from None
    built = _RECIPES[kind](Draws(seed), **plain)
    return DataCase(
        kind,
        seed,
        MappingProxyType(plain),
        MappingProxyType(dict(built.tensors)),
        MappingProxyType(json.loads(json.dumps(dict(built.facts)))),
        digest_of(built.tensors),
    )


def from_repro(repro: Mapping[str, Any]) -> DataCase:
    """Build a case again from `case.repro`.

    Raises:
        ReproError: A key is missing or unknown, the version is another one, or the rebuilt bytes
            are not those the repro was taken of.
    """
    expected = {"version", "kind", "seed", "parameters", "digest"}
    if not isinstance(repro, Mapping) or set(repro) != expected:
        given = sorted(repro) if isinstance(repro, Mapping) else type(repro).__name__
        raise ReproError(f"repro: {given}; expected the keys {sorted(expected)}")
    if repro["version"] != VERSION:
        raise ReproError(f"repro: version {repro['version']!r}; this release reads {VERSION}")
    case = rebuild(repro["kind"], int(repro["seed"]), repro["parameters"])
    if case.digest != repro["digest"]:
        raise ReproError(
            f"repro of {case.kind}: rebuilt bytes have digest {case.digest[:16]}..., the repro has "
            f"{str(repro['digest'])[:16]}...; it was taken with another release"
        )
    return case


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over everything that a kernel can see of some tensors."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        layout = (name, str(tensor.dtype), list(tensor.shape), list(tensor.stride()))
        total.update(json.dumps([*layout, tensor.storage_offset()]).encode())
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        total.update(raw.numpy().tobytes())
    return total.hexdigest()
