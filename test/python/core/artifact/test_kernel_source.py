"""A kernel's source digest: the same whatever was asked for before, and all that is read in it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tilewright.engines.compiled.kernel_source import source_digest

pytestmark = pytest.mark.L0

pytest.importorskip("triton")

# Compiled functions, not interpreted ones, whatever the environment says.
HELPERS = """
from triton.runtime.jit import JITFunction, constexpr_function
from triton.language import constexpr

LIMIT = 3
WIDTH = constexpr(64)

@constexpr_function
def text(count):
    return "above " + str(LIMIT) * count

@JITFunction
def helper(x):
    return x + WIDTH + len(text(2))
"""
KERNELS = """
from triton.runtime.jit import JITFunction
from triton.language import constexpr
import source_helpers
from source_helpers import helper

LIMIT = constexpr(5)

@JITFunction
def first(x):
    return helper(x)

@JITFunction
def second(x):
    return source_helpers.helper(x) + LIMIT
"""
Load = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """The kernels' module, read anew; ``change`` of a text by another."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    count = 0

    def loaded(*change: str) -> ModuleType:
        nonlocal count
        # A folder each, so that no text is remembered by its file's name.
        folder = tmp_path / str(count)
        count += 1
        folder.mkdir()
        for name, text in (("source_helpers", HELPERS), ("source_kernels", KERNELS)):
            (folder / f"{name}.py").write_text(text.replace(*change) if change else text)
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module("source_kernels")

    return loaded


def test_it_does_not_depend_on_what_was_asked_for_before(load: Load) -> None:
    alone = source_digest(load().second)
    kernels = load()
    source_digest(kernels.first)
    assert source_digest(kernels.second) == alone
    kernels = load()
    # The compiler's own key, of a part.
    assert sys.modules["source_helpers"].text.cache_key
    assert source_digest(kernels.second) == alone


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("WIDTH = constexpr(64)", "WIDTH = constexpr(65)"),
        ("LIMIT = constexpr(5)", "LIMIT = constexpr(6)"),
        ('"above "', '"below "'),
        ("x + WIDTH", "x - WIDTH"),
    ],
)
def test_all_that_is_read_is_in_it(load: Load, old: str, new: str) -> None:
    assert source_digest(load().second) != source_digest(load(old, new).second)


def test_kernels_differ(load: Load) -> None:
    kernels = load()
    assert source_digest(kernels.first) != source_digest(kernels.second)
