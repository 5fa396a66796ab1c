"""The ATen engine's table of modules says what each implements."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable

import pytest

import tilewright.engines.aten as package
from tilewright.engines.aten.engine import MODULES

pytestmark = pytest.mark.L0

KINDS = """
import importlib, json, sys
from tilewright.engines.aten import registry
found = {}
for name in sys.argv[1:]:
    before = set(registry._PREPARERS)
    importlib.import_module(f"tilewright.engines.aten.{name}")
    for kind in set(registry._PREPARERS) - before:
        found[kind] = registry._PREPARERS[kind].__module__.rpartition(".")[2]
print(json.dumps(found))
"""


def test_every_kind_is_in_the_table(run_python: Callable[..., str]) -> None:
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    found = json.loads(run_python(KINDS, *names))
    # A decorator may register a function of its own module around the preparer.
    assert set(found) == {kind for kinds in MODULES.values() for kind in kinds}


@pytest.mark.parametrize("name", list(MODULES))
def test_a_module_alone_implements_its_kinds(run_python: Callable[..., str], name: str) -> None:
    assert set(MODULES[name]) <= set(json.loads(run_python(KINDS, name)))
