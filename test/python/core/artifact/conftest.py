"""A store of its own for every test here, and keys and code that need no compiler."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright.artifact import reset_counters
from tilewright.artifact.code import KernelCode
from tilewright.artifact.key import KernelKey
from tilewright.artifact.store import Store

_KEY = KernelKey(
    kernel="made_up",
    source="0" * 64,
    types=(("x", "*bf16"), ("rows", "i64")),
    constants=(("WIDTH", 64), ("HAS_BIAS", False), ("EPSILON", 0.5), ("NAME", "a"), ("NO", None)),
    aligned=frozenset({"x"}),
    warps=4,
    stages=3,
    target=(9, 0),
    environment=(("tilewright", "0"), ("triton", "3.7.1")),
)


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TILEWRIGHT_CACHE", "TILEWRIGHT_CACHE_MAX_BYTES", "TILEWRIGHT_FORBID_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    reset_counters()
    yield
    reset_counters()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store of 1 MiB whose folder does not exist yet."""
    return Store(tmp_path / "store", 2**20)


@pytest.fixture
def make_key() -> Callable[..., KernelKey]:
    """Return a function (**changes) that makes a key: the usual one with some facts changed."""
    return lambda **changes: dataclasses.replace(_KEY, **changes)


@pytest.fixture
def make_code() -> Callable[..., KernelCode]:
    """Return a function (number, size) that makes code whose bytes tell its number."""

    def make(number: int = 0, size: int = 4096) -> KernelCode:
        block = hashlib.sha256(str(number).encode()).digest()
        image = (block * (size // len(block) + 1))[:size]
        return KernelCode(f"kernel_{number}", image, 128, 1024, (9, 0))

    return make


@pytest.fixture
def child_environment(tmp_path: Path) -> dict[str, str]:
    """Variables for a child process that compiles: no interpreter, this test's own store.

    Triton's own cache is the test's too, so that what it says to compile is compiled.
    """
    environment: dict[str, Any] = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    return environment
