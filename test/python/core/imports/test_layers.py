"""The house: a module imports only from rows above its own (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright

pytestmark = pytest.mark.L0

ROOT = Path(tilewright.__file__).parent
# Folder or module -> what it may never import, at any depth of nesting.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "dtypes": ("tilewright", "torch", "numpy"),
    "errors": ("tilewright", "torch", "numpy"),
    "graph": (
        "torch",
        "triton",
        "numpy",
        *(f"tilewright.{name}" for name in ("oracle", "launch", "engines", "ops", "cli")),
    ),
    "oracle": ("tilewright.engines", "tilewright.launch", "tilewright.planning", "tilewright.ops"),
    "artifact": (
        "torch",
        "triton",
        "numpy",
        *(
            f"tilewright.{name}"
            for name in ("graph", "engines", "launch", "planning", "oracle", "ops", "cli")
        ),
    ),
    "launch": ("tilewright.engines", "tilewright.planning", "tilewright.oracle", "tilewright.ops"),
    "engines": ("tilewright.planning", "tilewright.oracle", "tilewright.ops", "tilewright.cli"),
    "planning": ("tilewright.ops", "tilewright.cli", "tilewright.oracle"),
    "ops": ("tilewright.cli", "tilewright.oracle", "tilewright.engines"),
}


# What engines may share: no engine, and it imports none.
SHARED_BY_ENGINES = ("compiled",)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("layer", list(FORBIDDEN))
def test_a_layer_imports_nothing_below_it(layer: str) -> None:
    single = ROOT / f"{layer}.py"
    paths = [single] if single.exists() else sorted((ROOT / layer).rglob("*.py"))
    assert paths, f"no module in layer {layer}"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in sorted(imports_of(path))
        for package in FORBIDDEN[layer]
        if is_within(name, package) and not (layer in ("dtypes", "errors") and name == "__future__")
    ]
    assert not wrong


def test_engines_do_not_import_one_another() -> None:
    folders = [path.name for path in (ROOT / "engines").iterdir() if path.is_dir()]
    engines = [name for name in folders if name not in (*SHARED_BY_ENGINES, "__pycache__")]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for engine in (*engines, *SHARED_BY_ENGINES)
        for path in (ROOT / "engines" / engine).rglob("*.py")
        for name in imports_of(path)
        for other in engines
        if other != engine and is_within(name, f"tilewright.engines.{other}")
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["planning.graph", "planning.plans", "planning.support_matrix", "graph.graph"]
)
def test_planning_loads_no_torch_at_import(module: str) -> None:
    heavy = "[m for m in ('torch', 'triton') if m in sys.modules]"
    code = f"import sys, tilewright.{module}; print({heavy})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
