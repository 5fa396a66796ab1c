"""Graphs, which need no package at all, on every Python that the project names and that is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).parents[4]
# The lowest Python that pyproject.toml names, and later ones.
VERSIONS = ("3.10", "3.11", "3.12", "3.13")

PROGRAM = """
from tilewright.graph import json_form
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import attribute_hints, operation_kinds

for kind, record in operation_kinds().items():
    attribute_hints(record)
graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
q, k, v = (graph.tensor((1, 2, 4, 8)) for _ in range(3))
o, stats = graph.sdpa(
    q, k, v, attn_scale=0.5, generate_stats=True, use_causal_mask=True,
    score_mod=lambda graph, score: graph.mul(score, graph.tensor_scalar(2.0)),
)
graph.relu(o).set_output(True)
stats.set_output(True)
graph.validate()
again = DeclaredGraph()
json_form.fill_from_dict(again, json_form.to_dict(graph))
assert json_form.to_dict(again) == json_form.to_dict(graph)
print(len(operation_kinds()), "kinds")
"""


def find(version: str) -> str | None:
    """An interpreter of this version: on the path, or kept by pyenv."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*kept.glob(f"{version}.*/bin/python"), *kept.glob(f"{version}/bin/python")]
    return str(found[0]) if found else shutil.which(f"python{version}")


def test_the_lowest_version_is_the_projects() -> None:
    named = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert named is not None and named[1] == VERSIONS[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_are_declared_and_kept(version: str) -> None:
    # 3.10 could declare none: it cannot read the annotations of a class with a bare ClassVar.
    python = find(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-S", "-c", PROGRAM],
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("kinds\n")
