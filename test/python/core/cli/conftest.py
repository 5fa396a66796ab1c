"""Graph files for the tests of the command line; drawn_graphs.py is importable from here on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tilewright import Graph
from tilewright.cli.main import main
from tilewright.graph import json_form

sys.path.insert(0, str(Path(__file__).parent))

Build = Callable[[Graph], None]


def matmul(graph: Graph) -> None:
    """C (2, 8, 4) = A (2, 8, 16) B (2, 16, 4)."""
    a = graph.tensor((2, 8, 16), name="A")
    b = graph.tensor((2, 16, 4), name="B")
    graph.matmul(a, b).set_output(True).set_name("C")


@pytest.fixture
def graph_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the JSON form of what ``build`` declares on a graph."""

    def write(build: Build = matmul, name: str = "graph", io_data_type: str = "float32") -> Path:
        graph = Graph(name, io_data_type, "float32")
        build(graph)
        graph.validate()
        path = tmp_path / f"{name}.json"
        path.write_text(json_form.to_json(graph))
        return path

    return write


class Ran:
    """What one in-process run of the command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Return a function that runs ``tilewright`` in this process with the given arguments."""

    def call(*arguments: str | Path) -> Ran:
        capsys.readouterr()
        code = main(_as_text(arguments))
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return call


def _as_text(arguments: Sequence[str | Path]) -> list[str]:
    return [str(argument) for argument in arguments]


@pytest.fixture
def broken_matmul(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Return a function that replaces the ATen engine's product by ``kernel(inputs, outputs)``."""
    from tilewright.engines.aten import engine, registry

    engine._load_kernels()

    def replace(kernel: Callable[..., None]) -> None:
        monkeypatch.setitem(registry._PREPARERS, "matmul", lambda operation, device: kernel)

    return replace
