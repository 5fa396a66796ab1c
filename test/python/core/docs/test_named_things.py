"""What pages and sources name is there: files, folders, and names of the package."""

from __future__ import annotations

import importlib
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
TOPS = ("benchmark", "docs", "examples", "src", "test")
# History may name what has gone.
PAGES = sorted(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "benchmark/*.md",
        "test/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
# Tests below test/python make up names.
SOURCES = sorted(
    path
    for pattern in ("benchmark/*.py", "examples/**/*.py", "src/**/*.py", "test/*.py", "test/*/*.py")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# A file or folder as pages name one: whole, by its end, or with * or <device> in it.
FILE = re.compile(r"\w[\w./<>*-]*(?:\.py|\.csv|\.toml|/)")
# A file as sources name one: from a top folder.
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(TOPS)})/[\w./-]*\w\.(?:py|md|csv)\b(?!/)")
NAME = re.compile(r"\btilewright(?:\.[A-Za-z_]\w*)+")


def files() -> list[str]:
    """Every file and folder of the project, folders with a slash behind."""
    listed = [path for top in TOPS for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    listed += [path for path in ROOT.iterdir() if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in listed]
    return [name for name in names if "__pycache__" not in name]


def is_there(name: str, listed: list[str]) -> bool:
    pattern = re.sub(r"<\w+>", "*", name)
    return any(fnmatch(file, pattern) or fnmatch(file, f"*/{pattern}") for file in listed)


def named_files(text: str) -> set[str]:
    words = {word for code in CODE.findall(FENCE.sub("", text)) for word in code.split()}
    return {word for word in words if FILE.fullmatch(word)}


def named_names(text: str) -> set[str]:
    return {name for code in CODE.findall(text) for name in NAME.findall(code)}


def resolve(name: str) -> Any:
    """The module or attribute that a dotted name stands for."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_files_that_pages_name_are_there() -> None:
    listed = files()
    named = {(page, name) for page in PAGES for name in named_files(page.read_text("utf-8"))}
    assert len(named) > 100
    missing = [f"{page.name}: {name}" for page, name in sorted(named) if not is_there(name, listed)]
    assert missing == []


def test_files_that_sources_name_are_there() -> None:
    named = {(path, name) for path in SOURCES for name in PATH.findall(path.read_text("utf-8"))}
    assert len(named) > 20
    missing = [f"{path.name}: {name}" for path, name in sorted(named) if not (ROOT / name).exists()]
    assert missing == []


def test_names_of_the_package_that_pages_name_are_there() -> None:
    named = {name for page in PAGES for name in named_names(page.read_text("utf-8"))}
    assert len(named) > 10
    for name in sorted(named):
        resolve(name)


def test_what_is_not_there_is_found() -> None:
    listed = ["src/tilewright/launch/binder.py", "src/tilewright/launch/"]
    text = "`launch/binder.py`, `launch/gone.py`, `launch/`, `lunch/`\n```\n`no.py`\n```\n"
    missing = {name for name in named_files(text) if not is_there(name, listed)}
    assert missing == {"launch/gone.py", "lunch/"}
    assert PATH.findall("see docs/cli.md and docs/gone.md.") == ["docs/cli.md", "docs/gone.md"]
    with pytest.raises(AttributeError):
        resolve("tilewright.ops.no_such_function")
