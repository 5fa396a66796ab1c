"""report.html: one file that needs nothing else, pictures included."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tilewright.testing.verify.results import VALUES, Check, Report, Status, worst
from tilewright.testing.verify.running import RULES

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px }
th, td { border: 1px solid #ccc; padding: .25em .6em; text-align: left; vertical-align: top }
th { background: #f3f3f3; font-weight: 600 }
.held { background: #e2f2e2 } .broken { background: #f6c9c9; font-weight: 600 }
.deviates { background: #fbe6b8 } .declined { color: #777 }
pre { background: #f7f7f7; padding: .7em; overflow-x: auto; white-space: pre-wrap; margin: .4em 0 }
img { image-rendering: pixelated; border: 1px solid #999 }
figure { margin: .6em 0 } figcaption { font-size: 13px; color: #555 }
.counts span { padding: .2em .6em; margin-right: .5em; border-radius: .3em }
"""


def write_report(report: Report, place: Path) -> Path:
    """Write the page to ``place``, or to report.html in it if it does not end in .html.

    The file appears whole or not at all. Returns its path.

    Raises:
        OSError: if it cannot be written.
    """
    path = place if place.suffix == ".html" else place / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(render(report), encoding="utf-8")
    os.replace(partial, path)
    return path


def render(report: Report) -> str:
    """The page as text."""
    title = f"tilewright verify: {report.subject}"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    counts = " ".join(
        f'<span class="{status.value}">{report.count(status)} {status.value}</span>'
        for status in Status
    )
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(', '.join(report.families))}; level {report.level}; device "
        f"{_text(report.device)}; {_text(versions)}</p>",
        f'<p class="counts">{counts}</p>',
        *_findings(report, Status.BROKEN, "Broken"),
        *_findings(report, Status.DEVIATES, "Deviates, as the callable says of itself"),
    ]
    for family in report.families:
        checks = [check for check in report.checks if check.family == family]
        parts += [f"<h2>{_text(family)}</h2>", *_matrix(checks), *_values(checks)]
    parts += _all_checks(report.checks)
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}'
        f"</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _findings(report: Report, status: Status, title: str) -> Iterable[str]:
    found = [check for check in report.checks if check.status is status]
    if found:
        yield f"<h2>{_text(title)}</h2>"
    for check in found:
        yield (
            f"<h3>{_text(check.family)}, {_text(check.case)}: {_text(check.rule)} "
            f"({_text(check.detector)})</h3><pre>{_text(check.text)}</pre>{_picture(check)}"
        )


def _matrix(checks: Sequence[Check]) -> Iterable[str]:
    cases = list(dict.fromkeys(check.case for check in checks if check.rule != VALUES))
    if not cases:
        return
    yield "<h3>Rules</h3>"
    yield _row("th", [("", "rule"), *(("", case) for case in cases)], start="<table>")
    for rule in (rule for rule in RULES if any(check.rule == rule for check in checks)):
        cells = [("", rule)]
        for case in cases:
            of_cell = [c for c in checks if c.rule == rule and c.case == case]
            status = worst(of_cell)
            cells.append((status.value, status.value) if status else ("", ""))
        yield _row("td", cells)
    yield "</table>"


def _values(checks: Sequence[Check]) -> Iterable[str]:
    yield "<h3>Cases against the float64 reference</h3>"
    yield _row("th", [("", "case"), ("", "verdict"), ("", "what was seen")], start="<table>")
    for check in checks:
        if check.rule == VALUES:
            picture = _picture(check)
            if picture and check.status is Status.HELD:
                picture = f"<details><summary>error map</summary>{picture}</details>"
            elif picture:
                picture = "see above"
            status = check.status.value
            yield (
                f'<tr><td>{_text(check.case)}</td><td class="{status}">{status}</td>'
                f"<td>{_text(check.text.splitlines()[0] if check.text else '')}{picture}</td></tr>"
            )
    yield "</table>"


def _all_checks(checks: Sequence[Check]) -> Iterable[str]:
    yield "<h2>All detectors</h2>"
    columns = ("family", "case", "rule", "detector", "verdict", "what was seen, or why not")
    yield _row("th", [("", column) for column in columns], start="<table>")
    for check in checks:
        if check.rule != VALUES:
            names = (check.family, check.case, check.rule, check.detector)
            cells = [("", name) for name in names]
            yield _row("td", [*cells, (check.status.value,) * 2, ("", check.text)])
    yield "</table>"


def _row(tag: str, cells: Sequence[tuple[str, str]], start: str = "") -> str:
    inner = "".join(
        f'<{tag} class="{kind}">{_text(text)}</{tag}>' if kind else f"<{tag}>{_text(text)}</{tag}>"
        for kind, text in cells
    )
    return f"{start}<tr>{inner}</tr>"


def _picture(check: Check) -> str:
    if check.picture is None:
        return ""
    data = base64.b64encode(check.picture.png).decode()
    plane = f"[{', '.join(map(str, check.picture.at))}]" if check.picture.at else ""
    return (
        f'<figure><img alt="error map of {_text(check.picture.name)}" '
        f'src="data:image/png;base64,{data}"><figcaption>|error| of '
        f"{_text(check.picture.name)}{plane} over its last two axes: white 0, yellow at the "
        "bound, orange to dark red beyond it, violet where NaN or infinities differ</figcaption>"
        "</figure>"
    )


def _text(text: str) -> str:
    return html.escape(str(text))
