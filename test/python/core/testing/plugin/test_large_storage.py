"""Running out of memory is a skip around the large storage alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.testing import allocate_or_skip

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]
# More than an address space has.
TOO_LARGE = 2**60

TESTS = f"""
    import pytest, torch

    def test_has_room(large_storage):
        storage = large_storage(2**20, device="cpu")
        assert storage.dtype is torch.uint8 and storage.shape == (2**20,)

    def test_has_none(large_storage):
        large_storage({TOO_LARGE}, device="cpu")
        raise AssertionError("went on")

    def test_runs_out_afterwards(large_storage):
        large_storage(16, device="cpu")
        # As a launch does that makes a temporary.
        torch.empty({TOO_LARGE}, dtype=torch.uint8)

    def test_device_runs_out_afterwards(large_storage):
        large_storage(16, device="cpu")
        raise torch.OutOfMemoryError("CUDA out of memory")

    def test_asserts_afterwards(large_storage):
        assert large_storage(16, device="cpu").numel() == 17
"""


def test_what_runs_out_of_memory_elsewhere_fails(suite: Suite) -> None:
    ran = suite({"test_a.py": TESTS}, "-n0")
    assert ran.status == int(pytest.ExitCode.TESTS_FAILED), ran.text
    assert ran.outcomes == {"collected": 5, "passed": 1, "failed": 3, "skipped": 1}, ran.text
    assert ran.failed() == [
        "test_a.py::test_runs_out_afterwards",
        "test_a.py::test_device_runs_out_afterwards",
        "test_a.py::test_asserts_afterwards",
    ]
    assert ran.lines_with("1 skipped: 1.07e+09 GiB are not free on cpu")
    assert ran.lines_with("large storage: 4 of 5 tests that asked had theirs")


def test_a_run_in_which_none_had_room_says_that_it_showed_nothing(suite: Suite) -> None:
    code = """
        import pytest
        from tilewright.testing import large_storage as module

        @pytest.fixture(autouse=True)
        def full(monkeypatch):
            monkeypatch.setattr(module, "allocate_or_skip", lambda *a: pytest.skip("no room"))

        def test_has_none(large_storage):
            large_storage(16)
            raise AssertionError("went on")
    """
    ran = suite({"test_a.py": code}, "-n0")
    assert ran.status == 0, ran.text
    assert ran.lines_with(
        "0 of 1 tests that asked had theirs; what they are for has not been shown"
    )


def test_another_error_of_the_allocation_is_no_skip() -> None:
    with pytest.raises(RuntimeError, match="negative"):
        allocate_or_skip(-1, "cpu")


def test_a_device_without_memory_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(pytest.skip.Exception, match="2 GiB are not free on cuda:1"):
        allocate_or_skip(2**31, "cuda:1")
