"""A record is a frozen dataclass in all that is used of one; defining it makes no code."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from tilewright.records import record

pytestmark = pytest.mark.L0


def classes(decorate: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """The same three classes by either decorator."""

    @decorate(frozen=True)
    class Point:
        """A point."""

        kind: ClassVar[str] = "point"
        x: int
        y: int = 0
        tags: tuple[str, ...] = field(default_factory=tuple)

    @decorate(frozen=True, kw_only=True, eq=False)
    class Base:
        name: str = ""

    @decorate(frozen=True, kw_only=True, eq=False)
    class Derived(Base):
        size: int

    return Point, Base, Derived


BOTH = pytest.mark.parametrize("decorate", [dataclasses.dataclass, record])


@BOTH
def test_values_defaults_and_positions(decorate: Any) -> None:
    point, base, derived = classes(decorate)
    made = point(1, tags=("a",))
    assert (made.x, made.y, made.tags, made.kind) == (1, 0, ("a",), "point")
    assert point(1, 2).y == 2 and derived(size=3).name == "" and derived(size=3, name="n").size == 3
    assert repr(made).endswith("Point(x=1, y=0, tags=('a',))")
    assert [spec.name for spec in dataclasses.fields(derived)] == ["name", "size"]
    assert dataclasses.replace(made, y=5) == point(1, 5, ("a",))
    assert dataclasses.asdict(made) == {"x": 1, "y": 0, "tags": ("a",)}
    assert point.__doc__ == "A point." and dataclasses.is_dataclass(base)


@BOTH
def test_equality_and_hash(decorate: Any) -> None:
    point, base, derived = classes(decorate)
    other = classes(decorate)[0]
    assert point(1, 2) == point(1, 2) and hash(point(1, 2)) == hash(point(1, 2))
    assert point(1, 2) != point(2, 1) and point(1) != other(1) and point(1) != (1, 0, ())
    assert base(name="a") != base(name="a") and len({derived(size=1), derived(size=1)}) == 2


@BOTH
def test_nothing_can_be_changed(decorate: Any) -> None:
    made = classes(decorate)[0](1)
    for change in (
        lambda: setattr(made, "x", 2),
        lambda: setattr(made, "new", 2),
        lambda: delattr(made, "x"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert made.x == 1 and copy.deepcopy(made) == made == copy.copy(made)


@BOTH
@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1, 2, (), 4), {}), ((1,), {"x": 1}), ((1,), {"z": 1})]
)
def test_wrong_arguments_are_refused(decorate: Any, values: Any, named: Any) -> None:
    point, _, derived = classes(decorate)
    with pytest.raises(TypeError):
        point(*values, **named)
    with pytest.raises(TypeError):
        derived("name", 3)


@record(frozen=True)
class Picklable:
    """At the top of a module, as pickle wants it."""

    x: int


def test_a_record_is_pickled_by_its_values() -> None:
    if __name__ in __import__("sys").modules:
        assert pickle.loads(pickle.dumps(Picklable(3))) == Picklable(3)
    with pytest.raises(TypeError, match="frozen is False"):
        record(frozen=False)  # type: ignore[call-overload]


def test_no_code_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = builtins.exec
    monkeypatch.setattr(builtins, "exec", lambda *given: (made.append(given), real(*given))[1])
    classes(record)
    assert not made
    classes(dataclasses.dataclass)
    assert made, "the check sees the code that dataclasses make"
