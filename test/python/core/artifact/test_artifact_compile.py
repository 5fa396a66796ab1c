"""Triton's kernels through memory, the store and the compiler, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from tilewright.artifact import compiler_forbidden, counters
from tilewright.artifact.forbidding import is_compiler_forbidden, require_compiler
from tilewright.cli.main import main
from tilewright.errors import LaunchError
from tilewright.graph import json_form

WIDTH = 256


def norm(rows: int = 8, width: int = WIDTH, name: str = "norm") -> tw.Graph:
    graph = tw.Graph(name, "bfloat16", "float32")
    x, scale = graph.tensor((rows, width), name="x"), graph.tensor((1, width), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, x, scale, None, graph.tensor_scalar(1e-5))
    y.set_output(True).set_name("y")
    graph.validate()
    return graph


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "norm.json"
    path.write_text(json_form.to_json(norm()))
    return path


@pytest.fixture
def tilewright(child_environment: dict[str, str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function (*arguments, **variables) that runs the command in a process."""

    def run(*arguments: object, **variables: str) -> tuple[int, str, str]:
        child = subprocess.run(
            [sys.executable, "-m", "tilewright.cli.main", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=child_environment | variables,
        )
        return child.returncode, child.stdout, child.stderr

    return run


@pytest.mark.L0
def test_another_process_finds_what_one_compiled(
    tilewright: Callable[..., tuple[int, str, str]], graph_file: Path, tmp_path: Path
) -> None:
    arguments = ("compile", graph_file, "--target", "sm_90", "--json")
    code, out, error = tilewright(*arguments)
    assert code == 0, error
    made = json.loads(out)
    assert made["compiled"] == 2 and made["found"] == 0
    # Triton's own cache is not what serves the second process.
    elsewhere = {"TILEWRIGHT_FORBID_COMPILER": "1", "TRITON_CACHE_DIR": str(tmp_path / "no")}
    code, out, error = tilewright(*arguments, **elsewhere)
    assert code == 0, error
    found = json.loads(out)
    assert found["compiled"] == 0 and found["found"] == 2
    assert found["kernels"] == made["kernels"] and not (tmp_path / "no").exists()


@pytest.mark.L0
def test_triton_needs_no_cache_of_its_own(
    tilewright: Callable[..., tuple[int, str, str]], graph_file: Path, tmp_path: Path
) -> None:
    nowhere = tmp_path / "file"
    nowhere.touch()
    arguments = ("compile", graph_file, "--target", "sm_90", "--json")
    code, out, error = tilewright(*arguments, TRITON_CACHE_DIR=str(nowhere / "cache"))
    assert code == 0, error
    assert json.loads(out)["compiled"] == 2


@pytest.fixture
def tilewright_at_once(
    child_environment: dict[str, str], graph_file: Path
) -> Callable[[int], list[subprocess.Popen[str]]]:
    """Return a function that starts so many processes that compile the graph."""
    command = [sys.executable, "-m", "tilewright.cli.main", "compile", str(graph_file)]
    command += ["--target", "sm_90", "--target", "sm_120", "--json"]

    def start(count: int) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment)
            for _ in range(count)
        ]

    return start


@pytest.mark.L1
def test_eight_processes_compile_into_one_empty_store(
    tilewright_at_once: Callable[[int], list[subprocess.Popen[str]]], store: Any
) -> None:
    documents = []
    for child in tilewright_at_once(8):
        out, _ = child.communicate(timeout=300)
        assert child.returncode == 0
        documents.append(json.loads(out))
    for document in documents:
        assert document["compiled"] + document["found"] == 4
    keys = {kernel["key"] for document in documents for kernel in document["kernels"]}
    entries = list(store.entries())
    assert {f"{key}.twk" for key in keys} == {file.path.name for file, _, _ in entries}
    assert len(keys) == 4 and all(wrong == "" for _, _, wrong in entries)


# Runs the steps that are given, on kernels of a module that it imports anew each time.
STEPS = """
import dataclasses, importlib, json, sys
import triton
from tilewright.artifact import compiler_forbidden, counters, reset_counters
from tilewright.engines.compiled import code_cache
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.errors import LaunchError

folder = sys.argv[1]
HELPER = '''
import triton, triton.language as tl
FACTOR = tl.constexpr({factor})
@triton.jit
def scaled(x):
    return x * FACTOR {helper}
'''
KERNEL = '''
import triton, triton.language as tl
import {name}_helper
from {name}_helper import scaled
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, {name}_helper.scaled(tl.load(x + at, mask=at < n)) {kernel}, mask=at < n)
'''
sys.path.insert(0, folder)
sys.dont_write_bytecode = True

def spec(factor="2.0", helper="", kernel="", target=(9, 0), block=64):
    for name, text in (("m_helper", HELPER), ("m", KERNEL)):
        with open(f"{folder}/{name}.py", "w") as file:
            file.write(text.format(name="m", factor=factor, helper=helper, kernel=kernel))
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    import linecache
    linecache.clearcache()
    import m
    types = (("x", "*fp32"), ("y", "*fp32"), ("n", "i32"))
    return KernelSpec(m.double, types, (("BLOCK", block),))

def step(target=(9, 0), **changes):
    reset_counters()
    made = spec(**changes)
    error = ""
    try:
        digest, code = code_cache.kernel_code(made, target)
    except LaunchError as refused:
        error = str(refused)
    now = dataclasses.asdict(counters())
    now["error"] = error
    return {name: value for name, value in now.items() if value}

results = {"compiled": step(), "memory": step()}
code_cache.forget()
with compiler_forbidden():
    results["disk"] = step()
    results["memory again"] = step()
    results["helper edited"] = step(helper="+ 1.0")
    results["constant edited"] = step(factor="3.0")
    results["kernel edited"] = step(kernel="+ 1.0")
    results["other target"] = step(target=(8, 0))
    results["other constant"] = step(block=128)
    real, triton.__version__ = triton.__version__, "3.6.99"
    results["other compiler"] = step()
    triton.__version__ = real
    results["undone"] = step()
print(json.dumps(results))
"""


@pytest.mark.L0
def test_levels_and_what_makes_a_miss(child_environment: dict[str, str], tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", STEPS, str(tmp_path)],
        capture_output=True,
        text=True,
        env=child_environment,
    )
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    assert results.pop("compiled") == {"compiles": 1, "writes": 1, "disk_misses": {"absent": 1}}
    assert results.pop("memory") == {"memory_hits": 1}
    assert results.pop("disk") == {"disk_hits": 1}
    assert results.pop("memory again") == {"memory_hits": 1}
    assert results.pop("undone") == {"memory_hits": 1}
    assert len(results) == 6
    for name, result in results.items():
        assert "the compiler is forbidden" in result.pop("error"), name
        assert result == {"disk_misses": {"absent": 1}}, name


def digests(graph: tw.Graph, target: tuple[int, int] = (9, 0)) -> list[str]:
    from tilewright.engines.compiled.code_cache import key_of
    from tilewright.engines.triton import normalization

    plan = normalization.plan(graph, (), 4)
    return [key_of(kernel.spec, target).digest() for kernel in plan.kernels]


@pytest.mark.L0
def test_a_runtime_total_is_not_in_the_key_and_plan_time_facts_are() -> None:
    # Keys are made under the interpreter too; rows and epsilon are run-time arguments.
    assert digests(norm(rows=8)) == digests(norm(rows=4096))
    assert len({*digests(norm()), *digests(norm(width=512)), *digests(norm(), (8, 0))}) == 3


@pytest.mark.L0
def test_the_compiler_is_forbidden_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    seen: list[Any] = []
    with compiler_forbidden(), compiler_forbidden():
        thread = threading.Thread(target=lambda: seen.append(is_compiler_forbidden()))
        thread.start()
        thread.join()
        with pytest.raises(LaunchError, match=r"'k' for sm_90 .* \(looked up: torn\)"):
            require_compiler("k", (9, 0), "torn")
    assert seen == [True] and not is_compiler_forbidden()
    for value, is_forbidden in (("1", True), ("yes", True), ("0", False), ("", False)):
        monkeypatch.setenv("TILEWRIGHT_FORBID_COMPILER", value)
        assert is_compiler_forbidden() is is_forbidden


@pytest.mark.L0
def test_a_disabled_store_is_counted_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tilewright.artifact.code import KernelCode
    from tilewright.engines.compiled import code_cache
    from tilewright.engines.triton import normalization

    made = KernelCode("norm_forward", b"code", 128, 0, (9, 0))
    monkeypatch.setattr(code_cache, "compile_kernel", lambda spec, target: made)
    monkeypatch.setattr(code_cache, "_memory", {})
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    spec = normalization.plan(norm(), (), 4).kernels[0].spec
    assert code_cache.kernel_code(spec, (9, 0))[1] == made
    now = counters()
    assert now.disk_misses == {"disabled": 1} and now.compiles == 1 and now.writes == 0
    # A store that cannot be written costs the compilation and nothing else.
    monkeypatch.setenv("TILEWRIGHT_CACHE", "1")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "below"))
    code_cache.forget()
    assert code_cache.kernel_code(spec, (9, 0))[1] == made
    now = counters()
    assert now.disk_misses == {"disabled": 1, "unreadable": 1} and now.compiles == 2
    assert now.write_failures == {"ENOTDIR": 1}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.L0
def test_the_command_lists_verifies_and_clears(
    capsys: pytest.CaptureFixture[str],
    make_key: Callable[..., Any],
    make_code: Callable[..., Any],
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out, _ = run(capsys, "cache", "list", "--json")
    assert code == 0 and json.loads(out)["entries"] == []
    for warps in (4, 8):
        manifest = {"triton": "3.7.1", "target": "sm_90"}
        store.save(make_key(warps=warps), make_code(warps), manifest)
    code, out, _ = run(capsys, "cache", "list", "--json")
    document = json.loads(out)
    assert {entry["kernel"] for entry in document["entries"]} == {"kernel_4", "kernel_8"}
    assert document["folder"] == str(store.folder) and document["bytes"] > 8192
    assert all(entry["manifest"]["target"] == "sm_90" for entry in document["entries"])
    code, out, _ = run(capsys, "cache", "list")
    assert code == 0 and "kernel_4" in out and "sm_90" in out
    assert run(capsys, "cache", "verify")[0] == 0
    path = store.path_of(make_key(warps=8))
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = run(capsys, "cache", "verify", "--json")
    document = json.loads(out)
    assert code == 1 and document["good"] == 1
    assert [(bad["file"], bad["wrong"]) for bad in document["damaged"]] == [(path.name, "torn")]
    code, out, _ = run(capsys, "cache", "verify")
    assert code == 1 and f"{path.name}: torn" in out
    code, out, _ = run(capsys, "cache", "clear", "--json")
    assert code == 0 and json.loads(out)["removed"] == 2 and store.files() == []
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    code, out, _ = run(capsys, "cache", "list")
    assert code == 0 and "disabled" in out


@pytest.mark.L0
def test_what_compile_refuses(
    capsys: pytest.CaptureFixture[str], graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = run(capsys, "compile", graph_file, "--target", "sm_75")
    assert code == 4 and "sm_75" in error and "takes exactly" in error
    product = tw.Graph("product", "bfloat16", "float32")
    product.matmul(product.tensor((8, 8)), product.tensor((8, 8))).set_output(True)
    product.validate()
    other = graph_file.with_name("product.json")
    other.write_text(json_form.to_json(product))
    code, _, error = run(capsys, "compile", other, "--target", "sm_90")
    assert code == 4 and "matmul" in error
    other.write_text("{}")
    assert run(capsys, "compile", other, "--target", "sm_90")[0] == 3
    assert run(capsys, "compile", other.with_name("no"), "--target", "sm_90")[0] == 2
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, _, error = run(capsys, "compile", graph_file, "--target", "sm_90")
    assert code == 4 and "TRITON_INTERPRET" in error
    monkeypatch.delenv("TRITON_INTERPRET")
    with compiler_forbidden():
        code, _, error = run(capsys, "compile", graph_file, "--target", "sm_90")
    assert code == 5 and "sm_90 is not in the store (looked up: absent)" in error
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    code, _, error = run(capsys, "compile", graph_file, "--target", "sm_90")
    assert code == 2 and "disabled" in error
    for wrong in (["--target", "H200"], []):
        with pytest.raises(SystemExit) as stopped:
            main(["compile", str(graph_file), *wrong])
        assert stopped.value.code == 2


@pytest.mark.L0
def test_code_that_cannot_be_stored_is_a_file_error(
    capsys: pytest.CaptureFixture[str],
    graph_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewright.artifact.code import KernelCode
    from tilewright.engines.compiled import code_cache

    made = KernelCode("norm_forward", b"code", 128, 0, (9, 0))
    monkeypatch.setattr(code_cache, "compile_kernel", lambda spec, target: made)
    monkeypatch.setattr(code_cache, "_memory", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "below"))
    code, out, error = run(capsys, "compile", graph_file, "--target", "sm_90")
    assert code == 2 and out == "" and "ENOTDIR" in error
