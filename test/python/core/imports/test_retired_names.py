"""A retired module, function, engine or command is gone everywhere, and its name stays retired.

Whoever retires a name adds it here. Engine ids and knob names are append-only beside that: see
test_plans.py.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.planning.table import ENGINE_TABLE

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
LOOKED_AT = ("src", "test", "docs", "benchmark", "examples", "README.md", "pyproject.toml")
TEXT = (".py", ".md", ".toml", ".csv", ".sh")

MODULES = (
    "tilewright.engines.triton.code_cache",
    "tilewright.engines.triton.compiler",
    "tilewright.engines.triton.executable",
    "tilewright.engines.triton.planned",
    "tilewright.testing.detectors.determinism",
)
# "module:name", where the module is still there.
FUNCTIONS = (
    "tilewright.engines.aten.registry:registered_kinds",
    "tilewright.graph.attributes:JsonForm",
    "tilewright.launch.pointers:view_at",
)
ENGINES: tuple[str, ...] = ()
COMMANDS: tuple[str, ...] = ()


def spellings(name: str) -> Iterator[str]:
    """Patterns of the ways in which source and prose name a module or a function in one."""
    module, _, function = name.partition(":")
    package, _, last = module.rpartition(".")
    path = re.escape(module.replace(".", "/"))
    if function:
        yield rf"\b{re.escape(module)}[.:]{function}\b"
        yield rf"from {re.escape(module)} import [^#\n]*\b{function}\b"
    else:
        yield rf"\b{re.escape(module)}\b"
        yield rf"\b{path}\.py\b"
        yield rf"from {re.escape(package)} import [^#\n]*\b{last}\b"


def mentions(root: Path, names: tuple[str, ...]) -> list[str]:
    """ "file:line: name" for each place under ``root`` that names one of ``names``."""
    patterns = {name: re.compile("|".join(spellings(name))) for name in names}
    found = []
    for place in LOOKED_AT:
        top = root / place
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix not in TEXT or path.name == Path(__file__).name or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            # Imports in parentheses go over several lines.
            text = re.sub(
                r"import \(([^)]*)\)", lambda m: "import " + m[1].replace("\n", " "), text
            )
            for name, pattern in patterns.items():
                found += [f"{path.relative_to(root)}: {name}" for _ in pattern.finditer(text)]
    return found


def test_nothing_names_what_is_retired() -> None:
    assert mentions(ROOT, MODULES + FUNCTIONS) == []


def test_nothing_imports_what_is_retired() -> None:
    for name in MODULES:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    for name in FUNCTIONS:
        module, _, function = name.partition(":")
        assert not hasattr(importlib.import_module(module), function), name


def test_the_table_and_the_command_line_have_no_retired_name() -> None:
    assert not {entry.name for entry in ENGINE_TABLE} & set(ENGINES)
    child = subprocess.run(
        [sys.executable, "-m", "tilewright", "--help"], capture_output=True, text=True, check=True
    )
    assert not set(re.findall(r"\b[a-z]+\b", child.stdout)) & set(COMMANDS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from tilewright.engines.triton import compiler\n", 1),
        ("import tilewright.engines.triton.compiler as c\n", 1),
        ("from tilewright.engines.triton import (\n    rows,\n    compiler,\n)\n", 1),
        ("See src/tilewright/engines/triton/compiler.py.\n", 1),
        ("tilewright.launch.pointers.view_at(p)\n", 1),
        ("from tilewright.launch.pointers import span, view_at\n", 1),
        # Python's own, another module's, and a part of a longer name.
        ("compile('1', 'f', 'eval')\nimport compiler\n", 0),
        ("from tilewright.engines.compiled import compiler\n", 0),
        ("from tilewright.engines.triton import compilers\n", 0),
        ("view_at = torch.as_strided\n", 0),
    ],
)
def test_a_leftover_is_seen(tmp_path: Path, text: str, count: int) -> None:
    names = ("tilewright.engines.triton.compiler", "tilewright.launch.pointers:view_at")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "left.py").write_text(text)
    assert len(mentions(tmp_path, names)) == count
