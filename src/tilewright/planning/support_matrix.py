"""docs/support.md: which engine takes which operation, from the capability rows alone.

``python -m tilewright.planning.support_matrix docs/support.md`` writes it; with no file name the
text goes to standard output. No engine's code is imported and no device is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tilewright.dtypes import DataType
from tilewright.planning.rows import CapabilityRow
from tilewright.planning.table import ENGINE_TABLE, EngineEntry

_NOT_IN_THIS_VERSION = "not in this version"
_HEAD = """\
# What runs where

Written by `python -m tilewright.planning.support_matrix docs/support.md` from the capability rows
of `src/tilewright/planning/table.py`; do not edit it by hand.

A row admits an operation by its data types and its device. An engine can still decline a graph for
a layout or an attribute; `tilewright explain GRAPH.json` gives its reason.

"Values" are the accepted types of tensors that carry values, "indices" those of lengths, offsets,
tables and masks. "cpu" and "cuda" mean any such device; a compute capability is exact.
"""
_DEVICE_ORDER = ("cpu", "cuda")


def render(table: Sequence[EngineEntry] = ENGINE_TABLE) -> str:
    """The whole document as Markdown, ending in a newline."""
    parts = [_HEAD, "## Engines\n", _engines(table), "## Operations\n", _operations(table)]
    return "\n".join(parts)


def operation_kinds_of(table: Sequence[EngineEntry]) -> tuple[str, ...]:
    """Every operation kind that some row names, in the order of the rows."""
    kinds = (kind for entry in table for row in entry.rows for kind in row.operations)
    return tuple(dict.fromkeys(kinds))


def _engines(table: Sequence[EngineEntry]) -> str:
    rows = [
        (
            str(entry.engine_id),
            f"`{entry.name}`",
            entry.summary,
            _NOT_IN_THIS_VERSION if entry.module is None else "yes",
        )
        for entry in table
    ]
    return _markdown_table(("id", "engine", "what it is", "runs"), rows)


def _operations(table: Sequence[EngineEntry]) -> str:
    rows = [
        (f"`{kind}`", *(_cell(entry, kind) for entry in table))
        for kind in operation_kinds_of(table)
    ]
    return _markdown_table(("operation", *(f"`{entry.name}`" for entry in table)), rows)


def _cell(entry: EngineEntry, kind: str) -> str:
    if entry.module is None:
        return _NOT_IN_THIS_VERSION
    admitting = [row for row in entry.rows if kind in row.operations]
    return "<br>or ".join(_row_text(row) for row in admitting) or "no"


def _row_text(row: CapabilityRow) -> str:
    parts = [f"values {_names(row.data_types)}"]
    if row.index_types:
        parts.append(f"indices {_names(row.index_types)}")
    parts.append(_devices(row))
    if row.note:
        parts.append(row.note)
    return "; ".join(parts)


def _names(data_types: Iterable[DataType]) -> str:
    # The order of the enum, so that the text does not depend on hashing.
    chosen = set(data_types)
    return ", ".join(data_type.name for data_type in DataType if data_type in chosen)


def _devices(row: CapabilityRow) -> str:
    names = [name for name in _DEVICE_ORDER if name in row.devices]
    names += sorted(row.devices.difference(_DEVICE_ORDER))
    if row.compute_capabilities is None:
        return "on " + ", ".join(names)
    exact = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(row.compute_capabilities))
    return "on " + ", ".join(exact if name == "cuda" else name for name in names)


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the document, or write it to the one file named."""
    if len(arguments) > 1:
        print("usage: python -m tilewright.planning.support_matrix [FILE]", file=sys.stderr)
        return 2
    if arguments:
        Path(arguments[0]).write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
