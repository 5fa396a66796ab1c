"""The collection audit: a file that holds tests and that no run collects is an error."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tilewright.testing.levels import listing


def check(config: pytest.Config, folders: Iterable[str]) -> None:
    """Look through ``folders`` (relative to the project's root).

    Raises:
        pytest.UsageError: naming the files with tests that the default sweep never collects, each
            with the reason: outside the swept folders, a name that no pattern matches, or a folder
            that collection skips.
    """
    lost = _lost_files(config, folders)
    if lost:
        raise pytest.UsageError(listing("tests that no run collects", lost))


def _lost_files(config: pytest.Config, folders: Iterable[str]) -> list[str]:
    root = config.rootpath
    swept = [root / path for path in config.getini("testpaths")] or [root]
    where = ", ".join(config.getini("testpaths"))
    skipped = tuple(config.getini("norecursedirs"))
    patterns = tuple(config.getini("python_files"))
    lost = []
    for top in folders:
        for path in sorted((root / top).rglob("*.py")):
            reason = None
            if not any(path.is_relative_to(folder) for folder in swept):
                reason = f"outside {where}"
            elif not any(path.match(pattern) for pattern in patterns):
                reason = f"its name matches none of {', '.join(patterns)}"
            elif any(_matches(part, skipped) for part in path.relative_to(root).parts[:-1]):
                reason = "in a folder that collection skips"
            if reason and _defines_tests(path):
                lost.append(f"{path.relative_to(root)}: {reason}")
    return lost


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(Path(name).match(pattern) for pattern in patterns)


def _defines_tests(path: Path) -> bool:
    """Tell whether the module holds what pytest would take for a test, at its top level."""
    text = path.read_text(encoding="utf-8")
    if "test" not in text.lower():
        return False
    try:
        body = ast.parse(text, filename=str(path)).body
    except SyntaxError:
        # A template or a broken script; a broken test file fails at its own collection.
        return False
    for node in body:
        if _is_test(node):
            return True
        if (
            isinstance(node, ast.ClassDef)
            and node.name.startswith("Test")
            and any(_is_test(inner) for inner in node.body)
        ):
            return True
    return False


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
