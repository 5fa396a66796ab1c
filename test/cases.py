"""Which test holds which case: the source of docs/cases.md.

    python test/cases.py > docs/cases.md

A case is a trap that has caught a library before; they lie in case_lists/. Ids are stable, since
reviews cite them; a case that no test holds yet is listed with none. That every test named there
exists is checked by test/python/core/docs/test_cases_page.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from case_lists.case import Case
from case_lists.contract import CONTRACT
from case_lists.kit import KIT
from case_lists.operations import OPERATIONS
from case_lists.reports import REPORTS_HELD

CASES: tuple[Case, ...] = (*KIT, *CONTRACT, *OPERATIONS, *REPORTS_HELD)


def page() -> str:
    """The text of docs/cases.md."""
    held = sum(bool(case.tests) for case in CASES)
    lines = [
        "# Cases and the tests that hold them",
        "",
        "Generated: `python test/cases.py > docs/cases.md`. Each case is a trap that has caught a",
        f"library before; {held} of the {len(CASES)} here are held by a test. Tests run at L0",
        "unless their mark says otherwise; those `on_gpu` skip, with that reason, without a GPU.",
        "",
        "| case | what must hold | tests |",
        "|---|---|---|",
    ]
    for case in CASES:
        tests = "<br>".join(f"`{test.removeprefix('test/python/')}`" for test in case.tests)
        lines.append(f"| {case.id} | {case.words} | {tests or 'none yet'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
