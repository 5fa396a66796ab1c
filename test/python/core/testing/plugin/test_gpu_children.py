"""The parent asks for the GPU; a child that fails, or leaves early, is a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewright.testing import children

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]

TESTS = """
    import pytest
    from tilewright.testing import children

    @pytest.fixture(autouse=True)
    def device(monkeypatch):
        monkeypatch.setattr(children, "device_capability", lambda: (9, 0))

    def test_runs(run_gpu_python):
        assert run_gpu_python("import sys; print(sys.argv[1:])", "a", "b") == "['a', 'b']\\n"

    def test_of_this_architecture(run_gpu_python):
        assert run_gpu_python("print(1)", capabilities=[(9, 0), (10, 0)]) == "1\\n"

    def test_of_another_architecture(run_gpu_python):
        run_gpu_python("raise SystemExit('ran')", capabilities=[(8, 0), (12, 0)])

    def test_fails(run_gpu_python):
        run_gpu_python("assert 1 == 2")

    def test_fails_with_what_looks_like_a_skip(run_gpu_python):
        run_gpu_python("import pytest; pytest.skip('needs another GPU')")

    def test_leaves_early(run_gpu_python):
        run_gpu_python("import sys; print('skipped: needs another GPU'); sys.exit(0)")

    def test_is_killed(run_gpu_python):
        run_gpu_python("import os; os.kill(os.getpid(), 9)")
"""


def test_the_parent_asks_and_the_child_fails(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEVICES", "0")
    ran = suite({"test_a.py": TESTS})
    assert ran.status == int(pytest.ExitCode.TESTS_FAILED), ran.text
    assert ran.outcomes == {"collected": 7, "passed": 2, "failed": 4, "skipped": 1}, ran.text
    assert ran.failed() == [
        "test_a.py::test_fails",
        "test_a.py::test_fails_with_what_looks_like_a_skip",
        "test_a.py::test_leaves_early",
        "test_a.py::test_is_killed",
    ]
    told = "skipped: needs a GPU of compute capability 8.0, 12.0, this one has 9.0"
    assert ran.lines_with(told), ran.text
    assert ran.lines_with("exited with status 0 before the end of its code")
    assert ran.lines_with("exited with status -9")


def test_without_a_gpu_no_child_is_started(suite: Suite) -> None:
    ran = suite({"test_a.py": TESTS}, "-k", "fails or killed")
    assert ran.outcomes == {"collected": 3, "skipped": 3}, ran.text
    assert ran.lines_with("3 skipped: needs 1 GPU, this run may use 0")


@pytest.mark.needs_gpus(1)
def test_a_child_on_the_gpu(run_gpu_python: Callable[..., str]) -> None:
    capability = children.device_capability()
    code = """
import torch
print(*torch.cuda.get_device_capability(), torch.ones(2).cuda().sum().item())
"""
    printed = run_gpu_python(code, capabilities=[capability])
    assert printed == f"{capability[0]} {capability[1]} 2.0\n"
    with pytest.raises(pytest.skip.Exception):
        run_gpu_python(code, capabilities=[(capability[0] + 1, 0)])
