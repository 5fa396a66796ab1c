"""The sentence example: its data, its comparisons, and one run of the whole."""

from __future__ import annotations

import collections
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", exc_type=ModuleNotFoundError)
pytest.importorskip("matplotlib", exc_type=ModuleNotFoundError)

ROOT = Path(__file__).resolve().parents[4]


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(f"examples.minilm.{name}")
    finally:
        sys.path.remove(str(ROOT))


model, compare, timing = load("model"), load("compare"), load("timing")


def unit_rows(*shape: int) -> torch.Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.L0
def test_the_sentences_are_two_hundred_on_twenty_subjects() -> None:
    sentences = model.read_sentences(ROOT / "examples" / "sentences.txt")
    assert set(collections.Counter(s.subject for s in sentences).values()) == {10}
    assert len({s.subject for s in sentences}) == 20
    assert len({s.text for s in sentences}) == 200
    words = [len(s.text.split()) for s in sentences]
    assert min(words) == 2 and 110 <= max(words) <= 125


@pytest.mark.L0
def test_a_sentence_before_the_first_subject_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("A sentence.\n", encoding="utf-8")
    with pytest.raises(ValueError, match="before the first"):
        model.read_sentences(path)


@pytest.mark.L0
def test_rankings_of_the_same_embeddings_are_the_same() -> None:
    rows = unit_rows(12, 5)
    check = compare.check_rankings(rows, rows.clone())
    assert (check.same, check.ties, check.wrong) == (12, 0, 0)
    assert check.closest_margin > compare.TIE


@pytest.mark.L0
@pytest.mark.parametrize(("gap", "verdict"), [(4e-7, "ties"), (1e-4, "wrong")])
def test_a_reversed_order_counts_by_its_gap(gap: float, verdict: str) -> None:
    """Sentence 0 sees 1 and 2 at cosines that differ by the gap, and the other way round."""

    def rows(first: float, second: float) -> torch.Tensor:
        return torch.tensor(
            [
                [1.0, 0.0, 0.0],
                [first, (1 - first**2) ** 0.5, 0.0],
                [second, 0.0, (1 - second**2) ** 0.5],
            ],
            dtype=torch.float64,
        )

    check = compare.check_rankings(rows(0.5, 0.5 + gap), rows(0.5 + gap, 0.5))
    assert check.same < 3
    assert (check.ties > 0, check.wrong > 0) == (verdict == "ties", verdict == "wrong")


@pytest.mark.L0
def test_time_is_told_apart_by_operation() -> None:
    class Slow(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            end = timing.clock() + 0.05
            while timing.clock() < end:
                pass
            return super().forward(x)

    network = torch.nn.Sequential(Slow(4, 4), torch.nn.LayerNorm(4), torch.nn.Sequential())
    clocks = timing._ModuleClock(network)
    with clocks:
        network(torch.zeros(1, 4))
    assert clocks.seconds["linear"] >= 0.05
    assert clocks.seconds["norm"] + clocks.seconds["other"] < 0.05
    assert not network[0]._forward_hooks and not network[0]._forward_pre_hooks


@pytest.mark.L0
def test_sweeps_that_were_disturbed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the times are half as long again, for one variant alone: it is as fast."""
    now, calls = [0.0], collections.Counter()

    def embed(name: str, batch: int) -> None:
        calls[name, batch] += 1
        disturbed = name == "ours" and calls[name, batch] % 12 < 6
        now[0] += (batch + 1) * (1.5 if disturbed else 1.0)

    monkeypatch.setattr(timing, "clock", lambda: now[0])
    monkeypatch.setattr(timing, "embed", embed)
    variants = [model.Variant(name, name, 0) for name in ("theirs", "ours")]
    timed = timing.measure(variants, [0, 1, 2], lambda part: None)
    assert timed.repeats == timing.MAX_REPEATS
    assert timed.ratio("ours", "theirs") == pytest.approx(1.0)


@pytest.mark.L1
def test_the_whole_example_passes_and_writes_its_report(tmp_path: Path) -> None:
    try:
        model.find_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    report = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "examples.minilm", "--report", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout
    text = report.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.split("base64,")[0]
