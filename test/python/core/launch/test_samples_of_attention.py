"""Whether every kernel of Triton's attention is launched by a sample of the compiled families.

What holds the samples to the launch contract, and compute-sanitizer, see no other kernel.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import triton
from launch_samples import attention as samples
from launch_samples.declaring import Declaring
from test_compiled_families_on_gpu import SAMPLES

import tilewright.engines.triton as package
from tilewright.engines.triton import attention_specialized
from tilewright.engines.triton.engine import ENGINE

SCRIPTS = Path(__file__).resolve().parents[3] / "gpu"
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


@pytest.mark.L0
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
        best = ENGINE.family(d.graph).propose(d.graph, SM_COUNT)[0]
        plan = ENGINE.plan(d.graph, best.knobs, SM_COUNT)
        seen |= {kernel.spec.name for kernel in plan.kernels}
    assert launched_kernels() - seen == set()


# Samples whose kernels one compiler alone deals to warp groups.
DEALT = ("attention_of_whole_tiles", "attention_gated_behind", "attention_ragged_of_several_tiles")
COMPILE = """
import json, os, sys
os.environ.pop("TRITON_INTERPRET", None)
older, folder, scripts, *names = sys.argv[1:]
sys.path[:0] = [older, folder, scripts]
import triton
from partition_words import disassembled, word_accesses
from launch_samples import attention as samples
from launch_samples.declaring import Declaring
from tilewright.engines.compiled.compiler import compile_kernel
from tilewright.engines.triton.engine import ENGINE

threads, words = {}, {}
for name in names:
    d = Declaring()
    getattr(samples, name)(d)
    d.graph.validate()
    best = ENGINE.family(d.graph).propose(d.graph, 132)[0]
    plan = ENGINE.plan(d.graph, best.knobs, 132)
    for kernel in plan.kernels:
        code = compile_kernel(kernel.spec, (9, 0))
        threads[code.name] = code.threads
        found = word_accesses(disassembled(code.image), code.threads // 32, code.shared_bytes)
        words[code.name] = len(found)
print(json.dumps([triton.__version__, threads, words]))
"""


Compile = Callable[..., tuple[str, dict[str, int], dict[str, int]]]


@pytest.fixture
def compiled(run_python: Callable[..., str]) -> Compile:
    """A function (names of samples) with the oldest Triton that kernels are written for.

    It returns that version, and of each of their kernels on SM90 the threads and the accesses of
    words that tell warps their partition.
    """
    older = Path(sys.prefix) / "older"
    if not (older / "triton").exists():
        pytest.skip(f"no older Triton in {older}; `make test` puts it there")

    def compiled(*names: str) -> tuple[str, dict[str, int], dict[str, int]]:
        folders = (older, Path(__file__).parent, SCRIPTS)
        version, threads, words = json.loads(run_python(COMPILE, *folders, *names))
        return version, threads, words

    return compiled


@pytest.mark.L0
def test_the_oldest_compiler_deals_the_kernels_of_warp_groups(compiled: Compile) -> None:
    version, threads, words = compiled(*DEALT)
    assert version.startswith(attention_specialized._COMPILERS)
    # One warp group that loads, two that compute. They read their words in one place, and these are
    # written where warps are dealt and where they end: what the sanitizer's script looks for.
    for name in ("attention_forward_specialized", "attention_forward_packed"):
        assert threads[name] == 384
        assert words[name] == 3
    others = {"attention_repair", "attention_packed_repair", "order_packed", "attention_gate"}
    assert others <= set(threads)
    assert not any(words[name] for name in others)


@pytest.mark.L1
def test_the_oldest_compiler_takes_every_sample(compiled: Compile) -> None:
    names = [declare.__name__ for declare, _, _ in SAMPLES if hasattr(samples, declare.__name__)]
    names = [name for name in names if not name.endswith("_on_hopper") and name != "attention"]
    _, threads, _ = compiled(*names)
    assert launched_kernels() <= set(threads)
