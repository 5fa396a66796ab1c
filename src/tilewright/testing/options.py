"""Settings of the pytest plugin: what the project's ini file says, what the command line says.

Nothing here changes a run. An option exists on the command line only where the project turned
something on in its ini file, so that an installed plugin takes no option name from a suite that
does not use it.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 1500.0
OPT_OUT = "TILEWRIGHT_NO_ISOLATION"
DEVICES = "TILEWRIGHT_DEVICES"

_INI: tuple[tuple[str, Any, Any, str], ...] = (
    ("tilewright_levels", "bool", False, "each test takes one level mark, L0 to L4; default L0"),
    ("tilewright_isolation", "bool", False, "run in a replaceable worker; probe, deadline, count"),
    ("tilewright_audit", "args", [], "folders whose test-bearing files must be collected"),
    ("tilewright_package", "string", "", "folder of the package under test, as in src/name"),
    ("tilewright_deadline_s", "string", str(DEADLINE_S), "seconds that a test may take, 0 = any"),
    ("tilewright_allocator", "string", "", "PYTORCH_CUDA_ALLOC_CONF, set before torch is imported"),
    ("tilewright_import_first", "args", [], "modules to import first, in this order, if installed"),
)


@dataclass(frozen=True)
class Settings:
    """What the project asked for; ``any`` is false in a project that asked for nothing."""

    levels: bool
    isolation: bool
    audited: tuple[str, ...]
    package: Path | None
    deadline_s: float
    allocator: str
    import_first: tuple[str, ...]

    @property
    def any(self) -> bool:
        """True if the project uses the plugin."""
        return bool(
            self.levels
            or self.isolation
            or self.audited
            or self.package
            or self.allocator
            or self.import_first
        )


def declare_ini(parser: pytest.Parser) -> None:
    """Add the ini options."""
    for name, kind, default, text in _INI:
        parser.addini(name, f"tilewright.testing: {text}", type=kind, default=default)


def declare_options(parser: pytest.Parser) -> None:
    """Add the command line's options."""
    group = parser.getgroup("tilewright", "tests of GPU kernels (tilewright.testing)")
    group.addoption(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="Time that one test may take with its set-up, tear-down and probe; 0 is no limit",
    )
    group.addoption(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="Seed of the per-test generators, 0 if not given; 'random' draws and prints one",
    )
    group.addoption("--perf", action="store_true", help="Run tests marked perf too")
    group.addoption(
        "--dryrun", action="store_true", help="Set each test up, print its case, do not call it"
    )
    group.addoption(
        "--repro",
        type=repro,
        metavar="DICT",
        help="Run exactly the printed case, as in --repro \"{'test': 'test_a.py::test_b', ...}\"",
    )
    group.addoption(
        "--dim",
        action="append",
        type=dim,
        default=[],
        metavar="NAME=VALUE",
        help="Let tests take this dimension instead of their own; may be repeated",
    )


def read(config: pytest.Config) -> Settings:
    """Read the ini options.

    Raises:
        pytest.UsageError: for a value that cannot be read.
    """
    text = str(config.getini("tilewright_deadline_s"))
    try:
        deadline_s = seconds(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"tilewright_deadline_s: {error}") from None
    package = str(config.getini("tilewright_package"))
    return Settings(
        levels=bool(config.getini("tilewright_levels")),
        isolation=bool(config.getini("tilewright_isolation")),
        audited=tuple(config.getini("tilewright_audit")),
        package=config.rootpath / package if package else None,
        deadline_s=deadline_s,
        allocator=str(config.getini("tilewright_allocator")),
        import_first=tuple(config.getini("tilewright_import_first")),
    )


def seconds(text: str) -> float:
    """A number of seconds from 0 up, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 up")
    return value


def seed(text: str) -> int | None:
    """An int from 0 up, or None for 'random', for argparse."""
    if text == "random":
        return None
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer from 0 up nor 'random'")
    return value


def dim(text: str) -> tuple[str, int]:
    """NAME=VALUE with an integer value, for argparse."""
    match = re.fullmatch(r"([A-Za-z_]\w*)=(-?\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like s_q=128")
    return match[1], int(match[2])


def repro(text: str) -> Mapping[str, Any]:
    """A printed case: a Python dict of literals with 'test' and 'seed', for argparse."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if (
        not isinstance(value, dict)
        or not all(isinstance(key, str) for key in value)
        or not isinstance(value.get("test"), str)
        or "::" not in value["test"]
        or not isinstance(value.get("seed"), int)
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a printed case: a dict with 'test', a node id, and 'seed', an int"
        )
    return value
