"""docs/support.md is the generated text, and the generator tells what the rows say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.dtypes import DataType
from tilewright.graph.operation import operation_kinds
from tilewright.planning.rows import CapabilityRow
from tilewright.planning.support_matrix import main, operation_kinds_of, render
from tilewright.planning.table import ENGINE_TABLE, EngineEntry

pytestmark = pytest.mark.L0

COMMITTED = Path(__file__).resolve().parents[4] / "docs/support.md"


def entry(name: str, module: str | None, *rows: CapabilityRow) -> EngineEntry:
    return EngineEntry(7, name, module, 1, rows, f"summary of {name}")


def cells(text: str, kind: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| `{kind}` |")]
    return [cell.strip() for cell in line.strip("|").split(" | ")][1:]


def test_the_committed_document_is_the_generated_one() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == render(), (
        "run: python -m tilewright.planning.support_matrix docs/support.md"
    )


def test_every_operation_kind_has_one_line() -> None:
    text = render()
    kinds = set(operation_kinds()) | set(operation_kinds_of(ENGINE_TABLE))
    assert {"matmul", "reduction"} <= kinds
    for kind in kinds:
        assert len(cells(text, kind)) == len(ENGINE_TABLE)


def test_an_engine_without_code_is_not_in_this_version() -> None:
    row = CapabilityRow(("matmul",), frozenset({DataType.HALF}))
    text = render([entry("ready", "some.module", row), entry("later", None, row)])
    assert cells(text, "matmul") == ["values HALF; on cpu, cuda", "not in this version"]


def test_a_cell_tells_types_devices_and_note() -> None:
    row = CapabilityRow(
        ("matmul",),
        frozenset({DataType.HALF, DataType.FLOAT}),
        frozenset({DataType.INT64, DataType.INT32}),
        frozenset({"cuda"}),
        frozenset({(10, 0), (9, 0)}),
        "tiles of 128",
    )
    text = render([entry("a", "m", row), entry("b", "m", CapabilityRow(("rope",), frozenset()))])
    assert cells(text, "matmul") == [
        "values FLOAT, HALF; indices INT32, INT64; on sm_90, sm_100; tiles of 128",
        "no",
    ]


def test_two_rows_of_one_kind_are_both_told() -> None:
    first = CapabilityRow(("matmul",), frozenset({DataType.HALF}), devices=frozenset({"cpu"}))
    second = CapabilityRow(("matmul",), frozenset({DataType.FLOAT}), devices=frozenset({"cuda"}))
    [cell] = cells(render([entry("a", "m", first, second)]), "matmul")
    assert cell == "values HALF; on cpu<br>or values FLOAT; on cuda"


def test_the_command_writes_the_named_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "s.md")]) == 0
    assert (tmp_path / "s.md").read_text(encoding="utf-8") == render()
    assert main([]) == 0
    assert capsys.readouterr().out == render()
    assert main(["a", "b"]) == 2


def test_no_torch_is_needed(run_python: Callable[..., str]) -> None:
    code = (
        "import sys\nfrom tilewright.planning.support_matrix import render\nrender()\n"
        "print([name for name in ('torch', 'triton', 'numpy') if name in sys.modules])\n"
    )
    assert run_python(code) == "[]\n"
