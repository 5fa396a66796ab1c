"""What the commands print: rich tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Output to a file or a pipe has no width of its own; this one holds our widest table.
_PIPE_WIDTH = 140


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object; numbers that JSON has not (NaN, infinities) become strings."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def console() -> Console:
    """A console on standard output that wraps to the terminal, and to no less in a pipe."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            # rich would end the process with status 1; main knows better.
            raise BrokenPipeError

    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _PIPE_WIDTH
    return PlainConsole(width=width, highlight=False, emoji=False)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Iterable[str] = ()
) -> None:
    """Print a table; ``numeric`` names the columns that are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    aligned_right = set(numeric)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "right" if column in aligned_right else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        # Text, not markup: names and messages may hold brackets.
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Print plain lines as they are."""
    for line in lines:
        print(line)


def format_bytes(count: int) -> str:
    """A count of bytes for people: "1536 B", "1.5 MiB"."""
    if count < 10_000:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
