"""Whether every kernel of Triton's attention is launched by a sample of the compiled families.

What holds the samples to the launch contract, and compute-sanitizer, see no other kernel.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import triton
from launch_samples import attention as samples
from launch_samples.declaring import Declaring
from test_compiled_families_on_gpu import SAMPLES

import tilewright.engines.triton as package
from tilewright.engines.triton import attention_specialized
from tilewright.engines.triton.engine import ENGINE

pytestmark = pytest.mark.L0

# Multiprocessors of an H200.
SM_COUNT = 132


def launched_kernels() -> set[str]:
    """Names of the attention's jitted functions that no other one refers to."""
    names: dict[tuple[Path, str], set[str]] = {}
    for path in Path(package.__path__[0]).glob("attention*.py"):
        for made in ast.parse(path.read_text(encoding="utf-8")).body:
            is_function = isinstance(made, ast.FunctionDef)
            if is_function and any("jit" in ast.unparse(by) for by in made.decorator_list):
                found = (node.id for node in ast.walk(made) if isinstance(node, ast.Name))
                names[path, made.name] = set(found)
    return {
        own[1]
        for own in names
        if not any(own[1] in used for other, used in names.items() if other != own)
    }


@pytest.mark.skipif(triton.__version__ < "3.6", reason="Gluon's kernels need Triton 3.6")
def test_every_kernel_of_attention_is_a_sample_s(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the versions do that deal loops to warp groups.
    monkeypatch.setattr(attention_specialized, "_COMPILERS", (triton.__version__,))
    seen = set()
    for declare, _, _ in SAMPLES:
        d = Declaring()
        declare(d)
        if "triton" in d.barred or declare.__module__ != samples.__name__:
            continue
        d.graph.validate()
        proposals = ENGINE.family(d.graph).propose(d.graph, SM_COUNT)
        plan = ENGINE.plan(d.graph, min(proposals, key=lambda made: made.cost).knobs, SM_COUNT)
        seen |= {kernel.spec.name for kernel in plan.kernels}
    assert launched_kernels() - seen == set()
