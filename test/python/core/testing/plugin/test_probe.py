"""The probe of the device context, with a stand-in for torch."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from tilewright.testing import probe

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]
FAILURES = int(pytest.ExitCode.TESTS_FAILED)

# A stand-in for torch whose context a test can end, put in place by a conftest.
STAND_IN = """
    import sys, types
    class Cuda:
        dead = False
        pending = False
        probes = 0
        def is_initialized(self): return True
        def device_count(self): return 1
        def synchronize(self, device):
            self.probes += 1
            if self.pending:
                self.pending = False
                raise RuntimeError("CUDA error: invalid argument")
            if self.dead:
                raise RuntimeError("CUDA error: an illegal memory access\\nmore")
    torch = types.ModuleType("torch")
    torch.cuda = Cuda()
    sys.modules["torch"] = torch
"""
POISON = """
    import pytest, torch
    def test_before(): pass
    def test_passes_and_poisons(): torch.cuda.dead = True
    def test_after(): assert not torch.cuda.dead
    def test_fails_and_poisons():
        torch.cuda.dead = True
        assert 1 == 2
    def test_after_that(): assert not torch.cuda.dead
    def test_poisons_and_skips():
        torch.cuda.dead = True
        pytest.skip("too late")
    @pytest.mark.xfail
    def test_poisons_where_a_failure_is_expected():
        torch.cuda.dead = True
        assert 1 == 2
    @pytest.fixture
    def late():
        yield
        torch.cuda.dead = True
    def test_poisons_at_tear_down(late): pass
    def test_last(): assert not torch.cuda.dead
"""


def test_a_poisoned_context_ends_its_worker_and_fails_its_test(suite: Suite) -> None:
    ran = suite({"conftest.py": STAND_IN, "test_a.py": POISON})
    assert ran.status == FAILURES, ran.text
    assert ran.outcomes == {"collected": 9, "passed": 4, "failed": 5}, ran.text
    # The test whose tear-down poisons passed before; pytest calls that an error beside it.
    assert ran.counts == {"passed": 5, "failed": 4, "errors": 1}, ran.text
    assert sorted(ran.failed()) == [
        "test_a.py::test_fails_and_poisons",
        "test_a.py::test_passes_and_poisons",
        "test_a.py::test_poisons_and_skips",
        "test_a.py::test_poisons_where_a_failure_is_expected",
    ]
    assert ran.lines_with("ERROR test_a.py::test_poisons_at_tear_down")
    assert ran.lines_with("the context of CUDA device 0 is dead: CUDA error: an illegal memory")


def test_a_dead_context_with_no_worker_stops_the_run(suite: Suite) -> None:
    ran = suite({"conftest.py": STAND_IN, "test_a.py": POISON}, "-s")
    assert ran.status == FAILURES, ran.text
    assert ran.counts == {"passed": 1, "failed": 1}, ran.text
    (line,) = ran.lines_with("No worker process to replace")
    assert "after test_a.py::test_passes_and_poisons: the context of CUDA device 0 is dead" in line


def test_an_error_left_behind_fails_its_test_but_not_the_process(suite: Suite) -> None:
    code = """
        import torch
        def test_leaves_an_error(): torch.cuda.pending = True
        def test_after(): assert torch.cuda.probes > 2
    """
    ran = suite({"conftest.py": STAND_IN, "test_a.py": code})
    assert ran.outcomes == {"collected": 2, "passed": 1, "failed": 1}, ran.text
    assert ran.lines_with("left an error on CUDA device 0 that it did not look at")
    assert "replacing crashed worker" not in ran.text


def test_the_deadline_covers_the_probe(suite: Suite) -> None:
    code = """
        import ctypes, torch
        def stuck(device): ctypes.PyDLL(None).pause()
        def test_launches_what_never_ends(): torch.cuda.synchronize = stuck
        def test_after(): pass
    """
    ran = suite({"conftest.py": STAND_IN, "test_a.py": code}, "--deadline=1")
    assert ran.outcomes == {"collected": 2, "passed": 1, "crashed": 1}, ran.text
    assert ran.failed() == ["test_a.py::test_launches_what_never_ends"]
    assert ran.lines_with("it passed its deadline of 0:00:01")


def test_no_context_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: False,
        device_count=lambda: touched.append("count"),
        synchronize=lambda device: touched.append(device),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert probe.look().health is probe.Health.ALIVE
    monkeypatch.delitem(sys.modules, "torch")
    assert probe.look().health is probe.Health.ALIVE
    assert touched == []


def test_only_devices_with_a_context_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 3, synchronize=asked.append
    )
    internals = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda device: device == 1)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, _C=internals))
    assert probe.look().health is probe.Health.ALIVE
    assert asked == [1]
