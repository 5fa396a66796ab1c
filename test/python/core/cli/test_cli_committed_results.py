"""The committed measurements tell what they measured, and keep what the project promises."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).resolve().parents[4] / "benchmark"
RESULTS = BENCHMARK / "results/cpu"


def read(name: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The header's entries and the rows of a table."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    header = dict(line[2:].split(": ", 1) for line in comments)
    return header, list(csv.DictReader(lines[len(comments) :]))


def memory_benchmark() -> ModuleType:
    path = BENCHMARK / "attention_memory.py"
    spec = importlib.util.spec_from_file_location("attention_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.L0
@pytest.mark.parametrize("name", ["launch.csv", "attention_memory.csv"])
def test_a_table_tells_device_versions_and_command(name: str) -> None:
    header, rows = read(name)
    assert {"device", "versions", "command"} <= set(header)
    assert "torch" in header["versions"]
    assert rows


@pytest.mark.L0
def test_launch_overhead_and_attention_time_are_as_promised() -> None:
    _, rows = read("launch.csv")
    promised = {row["case"].split()[0]: row for row in rows if row["promise"]}
    assert set(promised) == {"graph.execute", "frame.launch", "1x8x1024x64"}
    for case in ("graph.execute", "frame.launch"):
        assert float(promised[case]["overhead_us"]) <= 15
    assert float(promised["1x8x1024x64"]["ratio"]) <= 1.05
    assert {row["kept"] for row in promised.values()} == {"yes"}
    assert (RESULTS / "launch.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.L0
def test_windowed_attention_adds_little_memory() -> None:
    _, rows = read("attention_memory.csv")
    [ours] = [row for row in rows if row["call"].startswith("tilewright")]
    assert float(ours["added_mb"]) <= memory_benchmark().LIMIT_MB == 300


@pytest.mark.L1
def test_windowed_attention_adds_little_memory_here() -> None:
    module = memory_benchmark()
    found = module.measure("ours")
    assert (found["after"] - found["before"]) / 1e6 <= module.LIMIT_MB
