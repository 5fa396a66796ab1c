"""Per-test draws, expected failures of a plan, source copies: the parts used from a test."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tilewright.testing import expected, tree
from tilewright.testing.draws import Draws, check_ignores_global_state

pytestmark = pytest.mark.L0


def test_a_generator_is_of_its_test_and_seed() -> None:
    def draw(test: str, seed: int) -> list[int]:
        made = Draws(test, seed)
        return torch.randint(2**31, (8,), generator=made.generator).tolist()

    assert draw("a", 0) == draw("a", 0)
    assert draw("a", 0) != draw("b", 0)
    assert draw("a", 0) != draw("a", 1)


def test_a_generator_is_pinned() -> None:
    """The same on every machine and release, or printed cases of old runs mean nothing."""
    assert Draws("test_a.py::test_b", 3).number == 2346977402783809174


def test_a_replayed_value_shifts_no_other() -> None:
    def values(given: dict[str, int] | None = None) -> list[int]:
        made = Draws("a", 0, given=given)
        return [made.value(name, lambda r: r.randrange(10**9)) for name in ("x", "y", "z")]

    plain = values()
    assert len(set(plain)) == 3
    assert values({"y": 5}) == [plain[0], 5, plain[2]]


def test_a_dimension_is_of_the_case_then_of_the_options_then_the_tests() -> None:
    assert Draws("a", 0).dim("d", 64) == 64
    assert Draws("a", 0, dims={"d": 32}).dim("d", 64) == 32
    assert Draws("a", 0, dims={"d": 32}, given={"d": 16}).dim("d", 64) == 16


def test_a_part_that_cannot_be_printed_is_refused() -> None:
    with pytest.raises(TypeError, match="'x' of a case is no Python literal"):
        Draws("a", 0).value("x", lambda r: r)


def test_a_case_from_its_own_generator_passes() -> None:
    def build() -> dict[str, object]:
        made = Draws("a", 0)
        return {"q": torch.rand(4, generator=made.generator), "heads": made.random.random()}

    before = torch.get_rng_state()
    check_ignores_global_state(build)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_case_with_one_global_draw_is_found() -> None:
    """The mask is not drawn from the test's generator, though everything else is."""

    def build() -> dict[str, object]:
        made = Draws("a", 0)
        return {"q": torch.rand(4, generator=made.generator), "mask": torch.rand(4) < 0.5}

    with pytest.raises(AssertionError, match="'mask'"):
        check_ignores_global_state(build)
    import random

    with pytest.raises(AssertionError, match=r"case\[0\]"):
        check_ignores_global_state(lambda: [random.random()])


def test_this_tests_generator_is_its_own(draws: Draws, generator: torch.Generator) -> None:
    assert draws.generator is generator
    assert draws.test.endswith("test_draws.py::test_this_tests_generator_is_its_own")


def run_expecting(selected: str, error: BaseException | None) -> None:
    with expected.xfail_plan(selected, plan="aten[]", raises=AssertionError, reason="rounds twice"):
        if error is not None:
            raise error


def test_an_expected_failure_is_of_its_plan_alone() -> None:
    with pytest.raises(pytest.xfail.Exception, match=r"plan aten\[\]: rounds twice"):
        run_expecting("aten[]", AssertionError())
    with pytest.raises(AssertionError):
        run_expecting("triton[]", AssertionError())
    run_expecting("triton[]", None)


def test_an_expected_failure_is_strict_and_names_its_exception() -> None:
    with pytest.raises(pytest.fail.Exception, match="passed, but was expected"):
        run_expecting("aten[]", None)
    with pytest.raises(ValueError, match="other"):
        run_expecting("aten[]", ValueError("other"))
    with (
        pytest.raises(ValueError, match="hides bugs"),
        expected.xfail_plan("a", plan="a", raises=Exception, reason="r"),
    ):
        pass


def test_a_source_copy_leaves_bytecode_out_while_it_comes_and_goes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    cache = source / "pack/__pycache__"
    cache.mkdir(parents=True)
    (source / "pack/a.py").write_text("")
    stop = threading.Event()

    def rename() -> None:
        # What an interpreter that writes its cache does.
        while not stop.is_set():
            (cache / "a.pyc.123").write_bytes(b"0" * 1000)
            (cache / "a.pyc.123").replace(cache / "a.pyc")

    other = threading.Thread(target=rename)
    other.start()
    try:
        for index in range(20):
            target = tree.copy_source(source, tmp_path / str(index))
            assert [path.name for path in target.rglob("*") if path.is_file()] == ["a.py"]
    finally:
        stop.set()
        other.join()
