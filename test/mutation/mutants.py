"""Draw mutants of numeric code: one changed operator, number or branch each (Cosmic Ray's).

    pip install cosmic-ray
    python test/mutation/mutants.py --lines lines.json --output mutants.json

Drawn evenly over all changes that Cosmic Ray can make in the files of subjects.py, but for those
that README.md lists (``excluded`` here) and those that leave the syntax tree as it is but for
annotations and docstrings. ``lines.json`` is what lines.py writes: a mutant's tests are those
that run the changed statement, its own folder's first, short ones first. run.py runs them. With
``--again`` the mutants are those of an earlier results.csv, in the code as it is now.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from subjects import CUTS, ROOT, subject_files

# What the tests of one mutant may take in all, as measured without one.
TESTS_SECONDS = 40.0
# A test that takes longer by itself is not asked.
TEST_SECONDS = 3.0
# Comparisons that cannot differ: CPython holds small integers, names and enumerators once.
_SAME_COMPARISONS = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")
_IDLE_DECORATORS = ("dataclass", "record(", "cache")
Span = tuple[int, int, int, int]
Site = tuple[str, int, int, int]


class _Meaning(ast.NodeTransformer):
    """Drops what does not change behaviour: annotations and docstrings."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        self.generic_visit(node)
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node


def meaning(code: str) -> str:
    """The syntax tree without annotations and docstrings, as text."""
    return ast.dump(_Meaning().visit(ast.parse(code)))


def sites(code: str) -> list[Site]:
    """(operator name, occurrence, line, column) of all that Cosmic Ray can change in ``code``."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(code)))
    found = []
    for name in sorted(operator_names()):
        operator = get_operator(name)
        # Parameterized operators are given their cases by a configuration, which there is none of.
        if operator.arguments():
            continue
        places = (place for node in nodes for place in operator().mutation_positions(node))
        for occurrence, ((line, column), _) in enumerate(places):
            found.append((name, occurrence, line, column))
    return found


def excluded(code: str) -> list[tuple[str, Span]]:
    """Where no mutant is drawn, each with its reason; README.md has more words."""
    tree = ast.parse(code)
    found: list[tuple[str, Span]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            found.append(("text of a refusal", _span(node)))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                if any(word in ast.unparse(decorator) for word in _IDLE_DECORATORS):
                    line, _, *end = _span(decorator)
                    found.append(("decorator", (line, 0, end[0], end[1])))
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            found.append(("strict of zip", _span(node)))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if statement.targets[0].id in CUTS:
                found.append(("sets how work is cut", _span(statement)))
            elif _is_type(statement.value):
                found.append(("name of a type", _span(statement)))
    return found


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and _is_type(node.left)
    )


def _span(node: ast.expr | ast.stmt | ast.keyword) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _reason(line: int, column: int, spans: Iterable[tuple[str, Span]]) -> str | None:
    for reason, (a, b, c, d) in spans:
        if (a, b) <= (line, column) < (c, d):
            return reason
    return None


def statement_lines(code: str, line: int) -> tuple[set[int], bool]:
    """Lines of the innermost statement at ``line`` (of its head, if it has a body).

    The second value is whether it runs when the module is imported.
    """
    best: tuple[int, set[int], bool] | None = None

    def visit(node: ast.AST, at_import: bool) -> None:
        nonlocal best
        for child in ast.iter_child_nodes(node):
            inner = at_import and not isinstance(node, ast.FunctionDef)
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                body = getattr(child, "body", None)
                first = min([child.lineno, *(d.lineno for d in _decorators(child))])
                last = child.end_lineno or 0
                if body and first <= line < body[0].lineno:
                    last = body[0].lineno - 1
                if first <= line <= last and (best is None or last - first <= best[0]):
                    best = (last - first, set(range(first, last + 1)), inner)
            visit(child, inner)

    visit(ast.parse(code), True)
    return (best[1], best[2]) if best else ({line}, True)


def _uses(code: str, line: int) -> set[int]:
    """The lines on which the name that the module's statement at ``line`` gives is used."""
    tree = ast.parse(code)
    given: set[str] = set()
    for statement in tree.body:
        if statement.lineno <= line <= (statement.end_lineno or 0):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            given = {target.id for target in targets if isinstance(target, ast.Name)}
    return {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in given
    }


def _decorators(node: ast.AST) -> list[ast.expr]:
    return getattr(node, "decorator_list", [])


class Chooser:
    """The tests of a mutant, from what lines.py recorded."""

    def __init__(self, records: dict[str, Any]) -> None:
        self._runs: dict[str, list[tuple[str, float, set[int]]]] = {}
        for test, record in records.items():
            if record["seconds"] > TEST_SECONDS:
                continue
            for name, lines in record["lines"].items():
                self._runs.setdefault(name, []).append((test, record["seconds"], set(lines)))

    def choose(self, name: str, own: str, code: str, line: int) -> list[str]:
        """Tests that run the statement at ``line``, own ones first, then by time.

        Of a statement that runs at import they are those that run what it holds (lambdas), or
        the statements that use the name it gives; others that run the file come after them.
        """
        lines, at_import = statement_lines(code, line)
        if at_import:
            lines |= _uses(code, line)
        runs = self._runs.get(name, [])
        # What only the import calls is met by no test, and yet makes what tests use.
        at_import = at_import or all(lines.isdisjoint(run) for _, _, run in runs)
        found = []
        for test, seconds, run in runs:
            meets = not lines.isdisjoint(run)
            if meets or at_import:
                found.append((not meets, not test.startswith(own), seconds, test))
        chosen, total = [], 0.0
        for *_, seconds, test in sorted(found):
            total += seconds
            if total > TESTS_SECONDS:
                break
            chosen.append(test)
        return chosen


def mutant(name: str, own: str, code: str, site: Site, tests: Chooser) -> dict[str, Any] | None:
    """The record of a mutant that run.py reads; None if nothing is changed."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator, occurrence, line, _ = site
    changed = mutate_code(code, get_operator(operator)(), occurrence)
    try:
        if changed is None or meaning(changed) == meaning(code):
            return None
    except SyntaxError:
        return None
    first, before, after = _changed_lines(code, changed)
    return {
        "file": name,
        "operator": operator.removeprefix("core/"),
        "occurrence": occurrence,
        "change": _change(code, changed),
        "first": first,
        "before": before,
        "after": after,
        "tests": tests.choose(name, own, code, line),
    }


def population() -> tuple[dict[str, tuple[str, str]], list[tuple[str, Site]], Counter[str]]:
    """File -> (code, own tests); every site that may be drawn; how many others, by reason."""
    sources = {name: ((ROOT / name).read_text(), own) for name, own in subject_files().items()}
    every = []
    left_out: Counter[str] = Counter()
    for name, (code, _) in sources.items():
        spans = excluded(code)
        for site in sites(code):
            reason = _reason(site[2], site[3], spans)
            if site[0].endswith(_SAME_COMPARISONS):
                reason = "is for =="
            if reason is None:
                every.append((name, site))
            else:
                left_out[reason] += 1
    return sources, every, left_out


def draw(count: int, seed: int, tests: Chooser) -> list[dict[str, Any]]:
    """``count`` distinct mutants, drawn evenly over all sites."""
    sources, every, _ = population()
    random.Random(seed).shuffle(every)
    mutants: list[dict[str, Any]] = []
    for name, site in every:
        if len(mutants) == count:
            break
        code, own = sources[name]
        made = mutant(name, own, code, site, tests)
        if made is not None:
            mutants.append(made)
    return mutants


def draw_again(results: Path, tests: Chooser) -> list[dict[str, Any]]:
    """The mutants of an earlier results.csv: the same change of the same line, by its text.

    Raises:
        KeyError: for one whose line is not there any more.
    """
    sources, every, _ = population()
    mutants = []
    with results.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            name, operator = row["file"], row["operator"]
            code, own = sources[name]
            found = [site for file, site in every if (file, site[0]) == (name, f"core/{operator}")]
            # Where the code has not moved it is the first one.
            found.sort(key=lambda site: abs(site[1] - int(row["occurrence"])))
            made = (mutant(name, own, code, site, tests) for site in found)
            text = _text(row["change"])
            same = next((entry for entry in made if entry and _text(entry["change"]) == text), None)
            if same is None:
                raise KeyError(
                    f"{name}: {operator}: {row['change']}: the line is not there any more"
                )
            mutants.append(same)
    return mutants


def _text(change: str) -> str:
    """A change without its line number."""
    return change.partition(": ")[2]


def _changed_lines(before: str, after: str) -> tuple[int, list[str], list[str]]:
    """The first line (from 0) that differs, and the differing lines of both."""
    old, new = before.split("\n"), after.split("\n")
    first = 0
    while old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    return first, old[first : len(old) - last], new[first : len(new) - last]


def _change(before: str, after: str) -> str:
    """The first changed line, before and after."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    for number, (old, new) in enumerate(lines, 1):
        if old != new:
            return f"{number}: {old.strip()} -> {new.strip()}"
    return "lines were removed"


def _packed(mutants: list[dict[str, Any]]) -> dict[str, Any]:
    """The mutants with their tests as numbers in one list of names."""
    numbers: dict[str, int] = {}
    for entry in mutants:
        entry["tests"] = [numbers.setdefault(test, len(numbers)) for test in entry["tests"]]
    return {"tests": list(numbers), "mutants": mutants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="a results.csv to take the mutants from")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    _, every, left_out = population()
    print(f"{len(every)} sites; left out: {dict(left_out.most_common())}")
    records: dict[str, Any] = {}
    for path in arguments.lines:
        records |= json.loads(path.read_text())
    tests = Chooser(records)
    if arguments.again:
        mutants = draw_again(arguments.again, tests)
    else:
        mutants = draw(arguments.count, arguments.seed, tests)
    arguments.output.write_text(json.dumps(_packed(mutants)))
    print(f"{len(mutants)} mutants in {arguments.output}")


if __name__ == "__main__":
    main()
