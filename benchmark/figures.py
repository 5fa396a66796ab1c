"""Write the figures of README and docs from the committed results of an H200.

    python benchmark/figures.py

A page holds them between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``, where NAME is
one of BLOCKS. Needs nothing but the csv files, so it runs anywhere; `make docs` runs it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from figures_docs import attention, decoding, gate, plans, pointwise, rope, window
from figures_readme import behind, summary

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"(<!-- figures: (?P<name>[a-z ]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)

BLOCKS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (summary, behind, attention, window, plans, decoding, gate, rope, pointwise)
}


def renewed(text: str) -> str:
    """A page with the figures that its blocks name.

    Raises:
        KeyError: if there are no such figures.
        LookupError: if the results do not have them.
    """
    return _BLOCK.sub(lambda block: block[1] + BLOCKS[block["name"]]() + block[3], text)


def pages() -> Iterator[Path]:
    """Every page that may have figures."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def main() -> int:
    """Renew every page."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if renewed(text) != text:
            path.write_text(renewed(text), encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
