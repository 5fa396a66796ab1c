"""The ATen engine's table of modules says what each implements."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable

import pytest

import tilewright.engines.aten as package
from tilewright.engines.aten.engine import MODULES

pytestmark = pytest.mark.L0

# Each module alone, in a process that is forked once torch is there.
KINDS = """
import importlib, json, os, sys
import torch
from tilewright.engines.aten import registry
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        importlib.import_module(f"tilewright.engines.aten.{name}")
        print(json.dumps([name, sorted(registry._PREPARERS)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_each_module_alone_implements_its_kinds(run_python: Callable[..., str]) -> None:
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    lines = run_python(KINDS, *names).splitlines()
    found = {name: set(kinds) for name, kinds in map(json.loads, lines)}
    assert set(found) == set(names)
    for name, kinds in MODULES.items():
        assert set(kinds) <= found[name]
    every = set().union(*found.values())
    assert every == {kind for kinds in MODULES.values() for kind in kinds}
