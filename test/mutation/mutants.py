"""Draw mutants of numeric code: one changed operator, number or branch each (Cosmic Ray's).

    pip install cosmic-ray
    python test/mutation/mutants.py --count 200 --seed 1 --output mutants.json

A mutant whose syntax tree is the original's but for annotations and docstrings changes nothing
and is not drawn. run.py runs the tests against each.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Files of numeric code, and the tests that are to notice a change there.
SUBJECTS: dict[str, str] = {
    "src/tilewright/engines/aten/attention*.py": "test/python/sdpa",
    "src/tilewright/engines/aten/dropout.py": "test/python/sdpa",
    "src/tilewright/engines/aten/matmul.py": "test/python/matmul",
    "src/tilewright/engines/aten/convolution.py": "test/python/conv",
    "src/tilewright/engines/aten/normalization*.py": "test/python/norm/aten",
    "src/tilewright/engines/aten/batchnorm.py": "test/python/batchnorm",
    "src/tilewright/engines/aten/pointwise*.py": "test/python/pointwise",
    "src/tilewright/engines/aten/reduction.py": "test/python/reduction",
    "src/tilewright/engines/aten/shape.py": "test/python/shape",
    "src/tilewright/engines/aten/rope.py": "test/python/rope/aten",
    "src/tilewright/engines/aten/block_scale.py": "test/python/block_scale",
    "src/tilewright/engines/aten/moe.py": "test/python/moe",
    "src/tilewright/engines/aten/casts.py": "test/python/pointwise test/python/matmul "
    "test/python/block_scale",
    "src/tilewright/graph/shapes.py": "test/python/core/graph test/python/core/launch",
    "src/tilewright/launch/binder.py": "test/python/core/launch test/python/core/planning",
    "src/tilewright/launch/workspace.py": "test/python/core/launch test/python/core/planning",
}


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


def sites(code: str) -> list[tuple[str, int]]:
    """(operator name, occurrence) of every mutation that Cosmic Ray can make in ``code``."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(code)))
    found = []
    for name in sorted(operator_names()):
        operator = get_operator(name)
        # Parameterized operators are given their cases by a configuration, which there is none of.
        if operator.arguments():
            continue
        count = sum(len(list(operator().mutation_positions(node))) for node in nodes)
        found += [(name, occurrence) for occurrence in range(count)]
    return found


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` distinct mutants that change what their file means, drawn evenly over all sites."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    sources: dict[str, tuple[str, str]] = {}
    for pattern, tests in SUBJECTS.items():
        for path in sorted(ROOT.glob(pattern)):
            sources[str(path.relative_to(ROOT))] = (path.read_text(), tests)
    every = [(name, *site) for name, (code, _) in sources.items() for site in sites(code)]
    random.Random(seed).shuffle(every)
    mutants: list[dict[str, Any]] = []
    for name, operator, occurrence in every:
        if len(mutants) == count:
            break
        code, tests = sources[name]
        changed = mutate_code(code, get_operator(operator)(), occurrence)
        try:
            if changed is None or meaning(changed) == meaning(code):
                continue
        except SyntaxError:
            continue
        mutants.append(
            {
                "file": name,
                "operator": operator.removeprefix("core/"),
                "occurrence": occurrence,
                "change": _change(code, changed),
                "code": changed,
                "tests": tests,
            }
        )
    return mutants


def _change(before: str, after: str) -> str:
    """The first changed line, before and after."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    for number, (old, new) in enumerate(lines, 1):
        if old != new:
            return f"{number}: {old.strip()} -> {new.strip()}"
    return "lines were removed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    mutants = draw(arguments.count, arguments.seed)
    arguments.output.write_text(json.dumps(mutants))
    print(f"{len(mutants)} mutants in {arguments.output}")


if __name__ == "__main__":
    main()
