"""The committed results of an H200, and how figures are written in a page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from results import read_rows

RESULTS = Path(__file__).resolve().parent / "results/nvidia_h200"
Row = dict[str, str]


def rows(file: str, /, **wanted: str) -> list[Row]:
    """The rows of a result whose columns have these values.

    Raises:
        LookupError: if there is none.
    """
    found = [
        row
        for row in read_rows(RESULTS / f"{file}.csv")
        if all(row[column] == value for column, value in wanted.items())
    ]
    if not found:
        raise LookupError(f"{file}.csv has no row with {wanted}")
    return found


def row(file: str, /, **wanted: str) -> Row:
    """The one row of these values.

    Raises:
        LookupError: if there are others too.
    """
    found = rows(file, **wanted)
    if len(found) != 1:
        raise LookupError(f"{file}.csv has {len(found)} rows with {wanted}")
    return found[0]


def numbers(found: Iterable[Row], column: str) -> list[Decimal]:
    """What the rows have in a column; those that have nothing are left out."""
    return [Decimal(each[column]) for each in found if each[column]]


def span(values: Iterable[Decimal], digits: int = 2) -> str:
    """From the least to the most."""
    least, most = (f"{pick(known):.{digits}f}" for known in [list(values)] for pick in (min, max))
    return least if least == most else f"{least} to {most}"


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    cells = [list(head), *map(list, body)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def geometric_mean(values: Iterable[Decimal]) -> float:
    """Of positive numbers."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def wrapped(text: str, width: int = 100) -> str:
    """A paragraph of lines of at most ``width`` characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines) + "\n"


def decode(length: str, mask: str, who: str = "tilewright triton") -> Row:
    """Of decoding."""
    return row("attention", kind="decode", length=length, mask=mask, who=who)


def ropes(layout: str = "", angles: str = "") -> list[Decimal]:
    """Shares of a copy's rate."""
    return numbers(
        (
            each
            for each in rows("rope")
            if each["subject"].startswith("tilewright")
            and each["subject"].endswith(angles)
            and each["layout"].startswith(layout)
        ),
        "of_copy",
    )
