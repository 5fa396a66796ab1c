"""Links of every page lead somewhere, its code is right, and README.md leads to every page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmark/*.md", "examples/**/*.md", "test/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Whole programs; the other pages' blocks go on from something that the reader has. README.md and
# the pages on operations and on testing have tests of their own.
PROGRAMS = ("docs/functions.md", "docs/generated_kernels.md")
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as they are linked to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link within the project."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = []
    for name, anchor in LINK.findall(text):
        target = (page.parent / name).resolve() if name else page
        found.append((target, anchor))
    return found


def test_there_are_pages() -> None:
    assert len(PAGES) > 25 and ROOT / "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name}: no {target.relative_to(ROOT)}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {target.name} has no #{anchor}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, following = set(), [ROOT / "README.md"]
    while following:
        page = following.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        for target, _ in links(page):
            # A link to a folder shows its README.
            following.append(target / "README.md" if target.is_dir() else target)
    missing = {str(page.relative_to(ROOT)) for page in PAGES if page not in reached}
    assert not missing


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_as_printed(run_python: Callable[..., str], name: str) -> None:
    blocks = list(BLOCK.finditer((ROOT / name).read_text(encoding="utf-8")))
    assert blocks
    for block in blocks:
        printed = run_python(block["code"])
        assert block["output"] is None or printed == block["output"]


def a_call() -> dict[str, Any]:
    """What the pages on launching and artifacts take for granted: a graph and its operands."""
    graph = tw.Graph(io_data_type="float32", handle=tw.create_handle("cpu"))
    x = graph.tensor((2, 3), name="x")
    y = graph.relu(x)
    y.set_output(True)
    pack = {x: torch.tensor([[1.0, -1.0, 2.0], [-3.0, 0.0, 4.0]]), y: torch.empty(2, 3)}
    return {
        "graph": graph,
        "pack": pack,
        "result": pack[y],
        "workspace": None,
        "stream": None,
        "cuda_graph": 1,
    }


def blocks_of(name: str) -> list[str]:
    return [block["code"] for block in BLOCK.finditer((ROOT / name).read_text(encoding="utf-8"))]


def test_the_three_ways_to_call_a_plan() -> None:
    call = a_call()
    call["graph"].build()
    ways = blocks_of("docs/launching.md")[0]
    # On a CPU no plan is made of prepared kernels, and the page says what comes then.
    with pytest.raises(tw.NotSupportedError):
        exec(compile(ways, "launching.md", "exec"), call)
    assert call["frame"].plan_name and call["result"].tolist() == [[1, 0, 2], [0, 0, 4]]


def test_a_graph_is_built_with_the_compiler_forbidden(capsys: pytest.CaptureFixture[str]) -> None:
    (counting,) = blocks_of("docs/artifacts.md")
    exec(compile(counting, "artifacts.md", "exec"), a_call())
    assert "compiles=0" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_python_and_imports_what_is_there(page: Path) -> None:
    for code in blocks_of(str(page.relative_to(ROOT))):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), page.name, "exec"), {})


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, here\n\n[a](other.md) [b](#a-title-here) [c](#no)\n")
    assert [(t.name, t.exists(), a) for t, a in links(page)] == [
        ("other.md", False, ""),
        ("page.md", True, "a-title-here"),
        ("page.md", True, "no"),
    ]
    assert anchors(page) == {"a-title-here"}
