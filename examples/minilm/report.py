"""The report: one HTML file that needs nothing else, with two figures and the numbers."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from examples.minilm.model import Sentence

_COLORS = ("#8a8f98", "#2563a8")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #dde2e8;
         vertical-align: top; }
td.ok { color: #17723b; } td.failed { color: #b3261e; font-weight: 600; }
figcaption { color: #55606e; font-size: .92rem; } figure { margin: 1rem 0; }
"""


@dataclass(frozen=True)
class Section:
    """A table of the report; a cell "ok" or "failed" is coloured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_report(
    path: Path,
    summary: str,
    sections: Sequence[Section],
    matrix: torch.Tensor,
    sentences: Sequence[Sentence],
    by_operation: Mapping[str, Mapping[str, float]],
) -> None:
    """Write the report; ``by_operation`` is seconds by variant and operation."""
    similarity = _figure(_draw_similarity(matrix, sentences))
    bars = _figure(_draw_bars(by_operation))
    tables = "\n".join(_table(section) for section in sections)
    document = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Sentence embeddings on Tilewright</title><style>{_STYLE}</style></head>
<body>
<h1>Sentence embeddings on Tilewright</h1>
<p>{html.escape(summary)}</p>
{tables}
<h2>Time by operation</h2>
<figure><img alt="Bar chart: seconds by operation for both variants" src="{bars}">
<figcaption>Processor seconds for all sentences: what modules take, less what their children
take.</figcaption></figure>
<h2>Similarity of the sentences</h2>
<figure><img alt="Matrix of cosine similarities, ordered by subject" src="{similarity}">
<figcaption>Cosines between Tilewright's embeddings, ordered by subject. The squares on the
diagonal are sentences about the same thing.</figcaption></figure>
</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document, encoding="utf-8")


def _table(section: Section) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in section.columns)
    body = "\n".join(
        "<tr>" + "".join(_cell(text) for text in row) + "</tr>" for row in section.rows
    )
    return (
        f"<h2>{html.escape(section.title)}</h2>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    )


def _cell(text: str) -> str:
    kind = f' class="{text}"' if text in ("ok", "failed") else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _figure(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _draw_similarity(matrix: torch.Tensor, sentences: Sequence[Sentence]) -> Any:
    subjects = list(dict.fromkeys(sentence.subject for sentence in sentences))
    order = sorted(
        range(len(sentences)), key=lambda index: subjects.index(sentences[index].subject)
    )
    figure, axes = plt.subplots(figsize=(8.5, 7.5))
    # The diagonal is 1; the colours are for the rest.
    drawn = axes.imshow(matrix[order][:, order].numpy(), cmap="viridis", vmin=-0.1, vmax=0.6)
    edges, centres, start = [], [], 0
    for subject in subjects:
        count = sum(sentence.subject == subject for sentence in sentences)
        centres.append(start + (count - 1) / 2)
        start += count
        edges.append(start - 0.5)
    for edge in edges[:-1]:
        axes.axhline(edge, color="white", linewidth=0.4, alpha=0.6)
        axes.axvline(edge, color="white", linewidth=0.4, alpha=0.6)
    axes.set_xticks(centres, subjects, rotation=90)
    axes.set_yticks(centres, subjects)
    axes.tick_params(length=0)
    figure.colorbar(drawn, ax=axes, label="cosine similarity", shrink=0.8)
    return figure


def _draw_bars(by_operation: Mapping[str, Mapping[str, float]]) -> Any:
    figure, axes = plt.subplots(figsize=(8.5, 3.6))
    variants = list(by_operation)
    operations = list(by_operation[variants[0]])
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        seconds = [by_operation[variant][operation] for operation in operations]
        places = [
            index + (number - (len(variants) - 1) / 2) * width for index in range(len(seconds))
        ]
        bars = axes.bar(places, seconds, width, label=variant, color=_COLORS[number])
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.set_xticks(range(len(operations)), operations)
    axes.set_ylabel("processor seconds, all sentences")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    return figure
