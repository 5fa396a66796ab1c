"""The draws of one test: seeded by its node id and the run's seed, printed, and replayed."""

from __future__ import annotations

import ast
import hashlib
import random
import shlex
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Draws:
    """What one test draws and which dimensions it takes.

    Every draw depends on the run's seed and on the test's node id alone: not on the tests before
    it, on the worker, or on a global generator. All of it is on the CPU, so another machine draws
    the same bits.
    """

    def __init__(
        self,
        test: str,
        seed: int,
        dims: Mapping[str, int] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.test = test
        self.seed = seed
        self.dims_read: dict[str, int] = {}
        self._dims = dict(dims or {})
        self._given = {k: v for k, v in (given or {}).items() if k not in ("test", "seed")}
        self._values: dict[str, Any] = {}
        self._generator: torch.Generator | None = None
        self._random: Random | None = None

    @property
    def number(self) -> int:
        """The seed of this test's generators, from 0 up to 2**63."""
        return _number(f"{self.seed}:{self.test}")

    @property
    def generator(self) -> torch.Generator:
        """This test's ``torch.Generator`` on the CPU, one object for the whole test."""
        if self._generator is None:
            import torch

            self._generator = torch.Generator().manual_seed(self.number)
        return self._generator

    @property
    def random(self) -> Random:
        """This test's ``random.Random``, one object for the whole test."""
        if self._random is None:
            self._random = Random(self.number)
        return self._random

    def dim(self, name: str, default: int) -> int:
        """The dimension ``name``: of ``--repro``, else of ``--dim``, else ``default``."""
        value = int(self._given.get(name, self._dims.get(name, default)))
        self.dims_read[name] = value
        return value

    def value(self, name: str, draw: Callable[[Random], T]) -> T:
        """A drawn part of the case: of ``--repro`` if it is there, else ``draw(generator)``.

        Each name has a generator of its own, so a value taken from ``--repro`` shifts no other.

        Raises:
            TypeError: if the value is no Python literal, so that no printed case could hold it.
        """
        if name in self._given:
            value: T = self._given[name]
        else:
            value = draw(Random(_number(f"{self.seed}:{self.test}:{name}")))
        if not _is_literal(value):
            raise TypeError(f"the part {name!r} of a case is no Python literal: {value!r}")
        self._values[name] = value
        return value

    @property
    def unasked(self) -> tuple[str, ...]:
        """Parts of ``--repro`` that the test has not asked for: it is of another version of it."""
        return tuple(sorted(set(self._given) - set(self.dims_read) - set(self._values)))

    def repro(self) -> dict[str, Any]:
        """The dict that ``--repro`` takes to run this case again."""
        return {"test": self.test, "seed": self.seed, **self.dims_read, **self._values}


def as_option(case: str) -> str:
    """``--repro`` and a printed case, as a shell takes it word for word."""
    # The usual case reads best in double quotes; in these the shell would look for its own signs.
    quoted = shlex.quote(case) if set(case) & set('"$`\\!\n') else f'"{case}"'
    return f"--repro {quoted}"


def check_ignores_global_state(build: Callable[[], Any]) -> None:
    """Build a case twice, the global generators shifted in between, and require the same case.

    ``build`` returns what it drew: tensors, numbers, and lists, tuples and dicts of them. It must
    start from a generator of its own each time. Global states are restored.

    Raises:
        AssertionError: naming the first part that differs.
    """
    import torch

    states = (random.getstate(), torch.get_rng_state())
    try:
        random.seed(1)
        torch.manual_seed(1)
        first = build()
        random.seed(2)
        torch.manual_seed(2)
        # And a shift of the position, not of the seed alone.
        random.random()
        torch.rand(3)
        _check_same(first, build(), "case")
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])


def _check_same(first: Any, second: Any, where: str) -> None:
    import torch

    if type(first) is not type(second):
        raise AssertionError(f"{where}: {type(first).__name__}, then {type(second).__name__}")
    if isinstance(first, Mapping):
        if list(first) != list(second):
            raise AssertionError(f"{where}: keys {list(first)}, then {list(second)}")
        for key in first:
            _check_same(first[key], second[key], f"{where}[{key!r}]")
    elif isinstance(first, list | tuple):
        if len(first) != len(second):
            raise AssertionError(f"{where}: {len(first)} parts, then {len(second)}")
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            _check_same(one, other, f"{where}[{index}]")
    elif isinstance(first, torch.Tensor):
        same = (
            first.shape == second.shape
            and first.dtype == second.dtype
            and torch.allclose(first.double(), second.double(), rtol=0, atol=0, equal_nan=True)
        )
        if not same:
            raise AssertionError(f"{where}: the tensor depends on a global generator")
    elif first != second:
        raise AssertionError(f"{where}: {first!r}, then {second!r}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return False
