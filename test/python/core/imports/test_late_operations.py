"""A graph's methods load their family's file at first use, and are the family's own functions."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable

import pytest

import tilewright as tw
from tilewright.graph.builder import Builder
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operations.late import FAMILIES

pytestmark = pytest.mark.L0

FAMILY_FILES = """
import json, sys
import tilewright as tw
graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
before = [name for name in sys.modules if name.startswith("tilewright.graph.operations.")]
x, scale = graph.tensor((4, 8)), graph.tensor((1, 8))
y, _ = graph.rmsnorm(tw.norm_forward_phase.INFERENCE, x, scale, None, graph.tensor_scalar(1e-6))
y.set_output(True)
graph.validate()
after = [name for name in sys.modules if name.startswith("tilewright.graph.operations.")]
print(json.dumps([before, sorted(set(after) - set(before))]))
"""


def family_class(module: str) -> type:
    return getattr(  # type: ignore[no-any-return]
        importlib.import_module(f"tilewright.graph.operations.{module}"), FAMILIES[module][0]
    )


@pytest.mark.parametrize("module", list(FAMILIES))
def test_the_table_has_every_public_method(module: str) -> None:
    found = {
        name
        for base in family_class(module).__mro__
        if issubclass(base, Builder) and base is not Builder
        for name in vars(base)
        if not name.startswith("_")
    }
    assert found == set(FAMILIES[module][1])


@pytest.mark.parametrize("module", list(FAMILIES))
def test_a_graphs_methods_are_the_familys(module: str) -> None:
    graph = tw.Graph()
    for name in FAMILIES[module][1]:
        assert getattr(DeclaredGraph, name) is getattr(family_class(module), name)
        assert getattr(graph, name).__func__ is getattr(family_class(module), name)


def test_no_two_families_have_a_method_of_one_name() -> None:
    names = [name for _, methods in FAMILIES.values() for name in methods]
    assert len(names) == len(set(names)) and not set(names) & set(vars(Builder))


def test_a_norm_loads_the_file_of_norms_alone(run_python: Callable[..., str]) -> None:
    before, loaded = json.loads(run_python(FAMILY_FILES))
    assert before == ["tilewright.graph.operations.late"]
    assert set(loaded) == {
        f"tilewright.graph.operations.{name}" for name in ("checks", "normalization")
    }
