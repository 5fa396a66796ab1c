"""Keys hold what the code specializes on, all of it and nothing else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.artifact.environment import _files_digest, environment
from tilewright.artifact.key import KernelKey

pytestmark = pytest.mark.L0

MakeKey = Callable[..., KernelKey]

CHANGES: list[dict[str, Any]] = [
    {"kernel": "other"},
    {"source": "1" * 64},
    {"types": (("x", "*fp16"), ("rows", "i64"))},
    {"types": (("rows", "i64"), ("x", "*bf16"))},
    {"constants": (("WIDTH", 65),)},
    {"constants": (("WIDTH", 64.0),)},
    {"constants": (("WIDTH", "64"),)},
    {"constants": (("WIDTH", True),)},
    {"constants": (("WIDTH", 1),)},
    {"constants": (("WIDTH", None),)},
    {"constants": (("WIDTH", -0.0),)},
    {"constants": (("WIDTH", 0.0),)},
    {"constants": (("WIDTH", (1, 2)),)},
    {"constants": (("WIDTH", ("1", 2)),)},
    {"constants": (("HEIGHT", 64),)},
    {"aligned": frozenset()},
    {"aligned": frozenset({"x", "rows"})},
    {"warps": 8},
    {"stages": 2},
    {"max_registers": 168},
    {"target": (8, 0)},
    {"environment": (("tilewright", "0"), ("triton", "3.7.2"))},
]


def test_every_fact_makes_another_key(make_key: MakeKey) -> None:
    digests = [make_key(**change).digest() for change in ({}, *CHANGES)]
    assert len(set(digests)) == len(digests)


def test_each_field_is_among_the_changes() -> None:
    # A field that is added has to be in the digest, and in the list above.
    changed = {name for change in CHANGES for name in change}
    assert changed == {field.name for field in dataclasses.fields(KernelKey)}


def test_there_is_no_place_for_a_pointer_a_stream_or_a_total() -> None:
    # Whoever adds a field has to say here that it is a fact of the plan.
    assert [field.name for field in dataclasses.fields(KernelKey)] == [
        "kernel",
        "source",
        "types",
        "constants",
        "aligned",
        "warps",
        "stages",
        "target",
        "environment",
        "max_registers",
    ]


def test_the_order_of_constants_does_not_matter(make_key: MakeKey) -> None:
    reordered = make_key(constants=tuple(reversed(make_key().constants)))
    assert reordered.digest() == make_key().digest()


def test_a_constant_without_an_exact_text_is_refused(make_key: MakeKey) -> None:
    with pytest.raises(TypeError, match=r"constant 'F' is .* of type object"):
        make_key(constants=(("F", object()),)).digest()


def facts(compiler: str = "json", version: str = "1", **settings: str) -> dict[str, str]:
    return dict(environment(compiler, version, settings))


def test_the_environment_has_the_versions_and_the_compilers_files(tmp_path: Path) -> None:
    from tilewright import __version__

    found = facts()
    assert found["tilewright"] == __version__ and found["json"] == "1"
    assert found["json files"].startswith("found ")
    assert facts("torch")["torch files"].startswith("recorded ")
    assert facts("no_such_package")["no_such_package files"] == "absent"
    assert facts(A="1")["setting A"] == "1"


def test_variables_that_reach_the_code_are_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "ptxas"
    tool.write_bytes(b"one")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "anywhere")
    first = facts()
    assert first["variable TRITON_DEFAULT_FP_FUSION"] == "0"
    assert not any("TRITON_CACHE_DIR" in name for name in first)
    # Another assembler at the same place is another environment, the same one elsewhere is not.
    tool.write_bytes(b"other")
    assert facts() != first
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"one")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(elsewhere))
    assert facts() == first


def test_another_installation_of_the_compiler_is_another_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def installed(name: str, recorded: str | None, content: bytes = b"1") -> str:
        folder = tmp_path / name
        package = folder / "made_up_compiler"
        package.mkdir(parents=True)
        (package / "__init__.py").write_bytes(content)
        os.utime(package / "__init__.py", (1, 1))
        if recorded is not None:
            info = folder / "made_up_compiler-1.0.dist-info"
            info.mkdir()
            lines = (f"made_up_compiler/__init__.py,sha256={recorded},1", "../../bin/x,sha256=0,1")
            (info / "RECORD").write_text("\n".join(lines))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            _files_digest.cache_clear()
            return facts("made_up_compiler")["made_up_compiler files"]

    try:
        first = installed("first", "abc")
        assert first.startswith("recorded ") and installed("same", "abc") == first
        assert installed("edited", "abd") != first
        # Built in place, with nothing recorded: names, sizes and times tell.
        found = installed("found", None)
        assert found.startswith("found ") and installed("again", None) == found
        assert installed("longer", None, b"12") != found
    finally:
        _files_digest.cache_clear()
