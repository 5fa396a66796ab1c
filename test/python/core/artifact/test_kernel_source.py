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
from triton.language.core import builtin

LIMIT = 3
WIDTH = constexpr(64)
DEPTH = 7
OFFSET = 17

def plain(count):
    return [part for part in "abc" * count]

@constexpr_function
def text(count):
    return "above " + str(LIMIT) * count

@builtin
def own(x, _semantic=None):
    return x * DEPTH * len(plain(2))

@JITFunction
def twice(x):
    return x * 2

@JITFunction
def thrice(x, offset=OFFSET):
    return x * 3 + offset

@JITFunction
def endless(x):
    return endless(x)

@JITFunction
def helper(x):
    return own(x) + WIDTH + len(text(2)) + endless(x)
"""
KERNELS = """
from triton.runtime.jit import JITFunction
from triton.language import constexpr
import source_folder.within
import source_helpers
from source_helpers import helper, text, thrice, twice

LIMIT = constexpr(5)
CHOICE = (twice, (thrice, text, constexpr(11)))

@JITFunction
def first(x):
    return helper(x)

@JITFunction
def second(x):
    return source_helpers.helper(x) + LIMIT + CHOICE[0](x) + source_folder.within.deep(x)
"""
WITHIN = """
import source_folder
from triton.runtime.jit import JITFunction

@JITFunction
def deep(x):
    return x * 13
"""
TEXTS = {
    "source_helpers": HELPERS,
    "source_kernels": KERNELS,
    "source_folder/__init__": "",
    "source_folder/within": WITHIN,
}
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
        (folder / "source_folder").mkdir()
        for name, text in TEXTS.items():
            (folder / f"{name}.py").write_text(text.replace(*change) if change else text)
            sys.modules.pop(name.replace("/", ".").removesuffix(".__init__"), None)
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
        ("own(x) + WIDTH", "own(x) - WIDTH"),
        ('"abc"', '"abd"'),
        ("x * DEPTH", "x + DEPTH"),
        ("DEPTH = 7", "DEPTH = 8"),
        ("OFFSET = 17", "OFFSET = 18"),
        ("x * 2", "x * 4"),
        ("x * 3", "x * 4"),
        ("constexpr(11)", "constexpr(12)"),
        ("x * 13", "x * 14"),
        # Which of two it is, both of which are read anyway.
        ("(twice, (thrice,", "(thrice, (twice,"),
    ],
)
def test_all_that_is_read_is_in_it(load: Load, old: str, new: str) -> None:
    assert source_digest(load().second) != source_digest(load(old, new).second)


def test_kernels_differ(load: Load) -> None:
    kernels = load()
    assert source_digest(kernels.first) != source_digest(kernels.second)


def test_no_address_is_in_it(load: Load) -> None:
    # Each load makes all objects anew.
    assert len({source_digest(load().second) for _ in range(3)}) == 1
