"""Public names mean the same in every order of imports (fresh interpreters).

A package whose function has the name of one of its modules is at risk: importing the module sets
the package's attribute of that name. Each such name must stay what it was, and the module must
stay importable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.L0

Run = Callable[..., str]

SOURCE = Path(__file__).resolve().parents[4] / "src"

# Prints, for each package, the names that it offers and that also name one of its modules, with
# the type of each; a name that is plainly a module is none of them.
COLLISIONS = """
import importlib, json, pkgutil, sys, types
found = {}
for package_name in sys.argv[1:]:
    package = importlib.import_module(package_name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    for name in modules.intersection(package.__all__):
        value = getattr(package, name)
        if callable(value) or not isinstance(value, types.ModuleType):
            found.setdefault(package_name, {})[name] = type(value).__name__
print(json.dumps(found))
"""

# Each order takes (package, name), and ends with `value` as a user's code would find it.
ORDERS = {
    "attribute": "import importlib; value = getattr(importlib.import_module(package), name)",
    "from-import": "exec(f'from {package} import {name} as value', globals())",
    "module-first": (
        "import importlib; importlib.import_module(f'{package}.{name}'); "
        "value = getattr(importlib.import_module(package), name)"
    ),
    "module-then-from-import": (
        "import importlib; importlib.import_module(f'{package}.{name}'); "
        "exec(f'from {package} import {name} as value', globals())"
    ),
    "module-between": (
        "import importlib; top = importlib.import_module(package); getattr(top, name); "
        "importlib.import_module(f'{package}.{name}'); value = getattr(top, name)"
    ),
}
CHECK = """
import importlib, json, sys, types
package, kinds = sys.argv[1], json.loads(sys.argv[2])
for name, kind in kinds.items():
    exec(sys.argv[3])
    assert type(value).__name__ == kind, (name, kind, value)
    assert callable(value), (name, value)
    module = importlib.import_module(f"{package}.{name}")
    assert isinstance(module, types.ModuleType), (name, module)
    assert module.__name__ == f"{package}.{name}", (name, module)
    assert getattr(importlib.import_module(package), name) is value, name
print("held", *kinds)
"""


def packages() -> list[str]:
    """Return the importable packages whose `__init__` offers names (`__all__`)."""
    found = []
    for init in sorted(SOURCE.rglob("__init__.py")):
        if "__all__" in init.read_text(encoding="utf-8"):
            found.append(".".join(init.parent.relative_to(SOURCE).parts))
    return found


def collisions(run_python: Run, *names: str, folder: Path | None = None) -> dict[str, Any]:
    return json.loads(run_python(COLLISIONS, *names, folder=folder))


def check(
    run_python: Run, package: str, kinds: dict[str, str], order: str, folder: Path | None = None
) -> None:
    printed = run_python(CHECK, package, json.dumps(kinds), ORDERS[order], folder=folder)
    assert printed.split() == ["held", *kinds]


@pytest.fixture(scope="module")
def colliding(run_python: Run) -> dict[str, dict[str, str]]:
    """Return package -> name -> type, for the names that are at risk."""
    return collisions(run_python, *packages())


def test_the_vocabulary_function_graph_is_at_risk(colliding: dict[str, dict[str, str]]) -> None:
    assert {"tilewright", "tilewright.ops"} <= set(packages())
    assert "graph" in colliding["tilewright"]


@pytest.mark.parametrize("order", ORDERS)
def test_names_survive(run_python: Run, colliding: dict[str, dict[str, str]], order: str) -> None:
    for package, kinds in colliding.items():
        check(run_python, package, kinds, order)


@pytest.mark.parametrize("first", ["tilewright.graph.tensor", "tilewright.errors", "tilewright"])
def test_every_offered_name_is_there_whatever_came_first(run_python: Run, first: str) -> None:
    printed = run_python(
        "import importlib, sys\n"
        "importlib.import_module(sys.argv[1])\n"
        "import tilewright\n"
        "names = [name for name in tilewright.__all__ if hasattr(tilewright, name)]\n"
        "print(len(tilewright.__all__) - len(names), sorted(set(tilewright.__all__) - set(names)))",
        first,
    )
    assert printed == "0 []\n"


def test_an_unknown_name_is_an_attribute_error(run_python: Run) -> None:
    printed = run_python(
        "import tilewright\n"
        "try:\n    tilewright.no_such_name\n"
        "except AttributeError as error:\n    print(error)"
    )
    assert "no_such_name" in printed


@pytest.mark.parametrize("order", sorted(set(ORDERS) - {"attribute", "from-import"}))
def test_the_check_catches_a_name_that_its_module_replaces(
    run_python: Run, tmp_path: Path, order: str
) -> None:
    naive = tmp_path / "naive"
    naive.mkdir()
    (naive / "__init__.py").write_text(
        "__all__ = ['scale']\n"
        "def __getattr__(name):\n"
        "    if name != 'scale':\n        raise AttributeError(name)\n"
        "    from naive._impl import scale\n    return scale\n"
    )
    (naive / "_impl.py").write_text("def scale(): ...\n")
    (naive / "scale.py").touch()
    kinds = {"scale": "function"}
    assert collisions(run_python, "naive", folder=tmp_path) == {"naive": kinds}
    with pytest.raises(pytest.fail.Exception, match="AssertionError"):
        check(run_python, "naive", kinds, order, folder=tmp_path)
