"""The session's handle keeps its stream whatever a test does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.L0

Suite = Callable[..., Any]


def test_a_rebound_stream_is_restored(suite: Suite) -> None:
    code = """
        import pytest
        from tilewright.launch.handles import get_stream, set_stream

        @pytest.fixture(scope="module", autouse=True)
        def own_stream(session_handle): set_stream(session_handle, 11)

        @pytest.fixture
        def broken(handle):
            set_stream(handle, 22)
            raise RuntimeError("set-up")
        @pytest.fixture
        def skipping(handle):
            set_stream(handle, 33)
            pytest.skip("set-up")

        def test_fails(handle):
            set_stream(handle, 44)
            assert 0
        def test_1(handle): assert get_stream(handle) == 11
        def test_broken(broken): pass
        def test_2(handle): assert get_stream(handle) == 11
        def test_skipping(skipping): pass
        def test_3(handle): assert get_stream(handle) == 11
        def test_unbinds(handle): set_stream(handle, None)
        def test_4(handle, session_handle):
            assert get_stream(handle) == 11 and handle is session_handle
    """
    ran = suite({"test_a.py": code}, "-n0")
    assert ran.outcomes == {"collected": 8, "passed": 5, "failed": 2, "skipped": 1}, ran.text


@pytest.mark.needs_gpus(1)
def test_on_a_gpu_the_handle_has_a_stream_of_its_own(suite: Suite) -> None:
    code = """
        import torch
        from tilewright.launch.handles import get_stream, set_stream

        def test_rebinds(handle):
            assert handle.device.type == "cuda"
            own = get_stream(handle)
            assert own not in (None, 0, torch.cuda.current_stream(handle.device).cuda_stream)
            globals()["own"] = own
            other = torch.cuda.Stream(handle.device)
            set_stream(handle, other)
            assert get_stream(handle) == other.cuda_stream != own
            torch.zeros(1, device=handle.device)
            assert 0
        def test_finds_it_back(handle): assert get_stream(handle) == own
    """
    ran = suite({"test_a.py": code}, "-n0")
    assert ran.outcomes == {"collected": 2, "passed": 1, "failed": 1}, ran.text
    assert ran.lines_with("assert 0")
