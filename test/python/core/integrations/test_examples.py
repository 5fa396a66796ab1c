"""The example graphs are what their script declares, and the command line runs each."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tilewright.cli.main import main
from tilewright.graph import json_form
from tilewright.planning.graph import Graph

pytestmark = pytest.mark.L0

FOLDER = Path(__file__).resolve().parents[4] / "examples"
GRAPHS = sorted(FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_examples", FOLDER / "make_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_graph_has_its_function(script: ModuleType) -> None:
    assert [path.stem for path in GRAPHS] == sorted(make.__name__ for make in script.EXAMPLES)


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_the_file_is_what_the_script_writes(path: Path, script: ModuleType) -> None:
    assert path.read_text(encoding="utf-8") == script.document(getattr(script, path.stem)())


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_the_file_reads_back_as_the_same_graph(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    graph = Graph()
    json_form.fill_from_json(graph, text)
    graph.validate()
    assert json_form.to_dict(graph) == json.loads(text)


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_the_command_line_runs_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["run", str(path), "--json", "--repeat", "1", "--device", "cpu"])
    said = json.loads(capsys.readouterr().out)
    assert status == 0
    assert said["verdict"] == "ok"
    assert said["outputs"] and all(entry["verdict"] == "ok" for entry in said["outputs"])
