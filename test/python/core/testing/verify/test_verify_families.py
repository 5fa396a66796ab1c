"""Broken twins of the families beside attention, norms and products; stored artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.artifact.store import Store
from tilewright.cli import verify as command
from tilewright.testing.detectors import Outcome
from tilewright.testing.verify import adapters
from tilewright.testing.verify.artifacts import examine_artifacts
from tilewright.testing.verify.families import FAMILIES, GROUPS

pytestmark = pytest.mark.L0
Verify = Callable[..., Any]
ADAPTERS = "tilewright.testing.verify.adapters"


def test_the_command_knows_every_family_and_case() -> None:
    assert set(command._FAMILIES) == {*FAMILIES, *GROUPS}
    for family in FAMILIES.values():
        names = [case.name for case in family.cases]
        assert len(names) == len(set(names)), family.name
        assert any(case.is_detected for case in family.cases), family.name


def half_scale(q: Any, k: Any, v: Any, do: Any) -> Any:
    dq, dk, dv = adapters.torch_attention_backward(q, k, v, do)
    return dq, dk * q.shape[-1] ** 0.5, dv


def last_of_group(q: Any, k: Any, v: Any, do: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    dq = adapters.torch_attention_backward(q, k, v, do)[0]
    last = slice(group - 1, None, group)
    _, dk, dv = adapters.torch_attention_backward(q[:, last], k, v, do[:, last])
    return dq, dk, dv


def next_sequence(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **options: Any) -> Any:
    lengths = cu_k.diff()
    turned = torch.cat([k[cu_k[1] :], k[: cu_k[1]]]), torch.cat([v[cu_k[1] :], v[: cu_k[1]]])
    prefix = torch.cat([cu_k[:1], lengths.roll(-1).cumsum(0)])
    return adapters.torch_attention_ragged(q, *turned, cu_q, prefix, **options)


def keys_table_for_values(
    q: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any, *, v_table: Any = None
) -> Any:
    return adapters.torch_attention_paged(q, k_pages, v_pages, table, lengths)


def one_token_more(q: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any) -> Any:
    return adapters.torch_attention_paged(q, k_pages, v_pages, table, lengths + 1)


def without_inner(dy: Any, x: Any, weight: Any, *, inverse: Any) -> Any:
    return dy * weight * inverse, adapters.torch_rms_norm_backward(dy, x, weight)[1]


def first_rows(dy: Any, x: Any, weight: Any) -> Any:
    dx, _ = adapters.torch_rms_norm_backward(dy, x, weight)
    flat = [t.reshape(-1, t.shape[-1])[:12] for t in (dy, x)]
    return dx, adapters.torch_rms_norm_backward(*flat, weight)[1]


def next_group(x: Any, weights: Any, starts: Any) -> Any:
    return adapters.torch_grouped_matmul(x, weights.roll(-1, 0), starts)


def turned_taps(x: Any, weight: Any, **options: Any) -> Any:
    return adapters.torch_convolution(x, weight.flip(2, 3), **options)


def without_last(mode: str, x: Any, *, axes: Any) -> Any:
    return adapters.torch_reduction(mode, x[..., :-1], axes=axes)


BROKEN = [
    (half_scale, "attention_backward", "grouped heads", "dk lacks the scale"),
    (last_of_group, "attention_backward", "grouped heads", "of one head of each group"),
    (
        next_sequence,
        "attention_ragged",
        "uneven lengths, an empty sequence",
        "each sequence reads the keys of the next one",
    ),
    (keys_table_for_values, "attention_paged", "two tables", "by the table of the keys"),
    (one_token_more, "attention_paged", "bfloat16", "one token past the length is read"),
    (without_inner, "rms_norm_backward", "rows of 19", "dx lacks what x does"),
    (first_rows, "rms_norm_backward", "rows of 19", "sums over the first 12 rows alone"),
    (next_group, "grouped_matmul", "three groups, one empty", "weights of the next one"),
    (turned_taps, "convolution", "3 x 3, padded", "the taps are turned round"),
    (without_last, "reduction", "add, the last axis", "the last 1 of the last axis are left out"),
]


@pytest.mark.parametrize(
    ("broken", "family", "case", "guess"), BROKEN, ids=[entry[0].__name__ for entry in BROKEN]
)
def test_a_broken_twin_is_found_and_named(
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[..., Any],
    family: str,
    case: str,
    guess: str,
) -> None:
    monkeypatch.setattr(adapters, "broken_twin", broken, raising=False)
    ran = verify(family, "--target", f"{ADAPTERS}:broken_twin", "--case", case)
    assert ran.code == 1
    (wrong,) = [check for check in ran.checks("broken") if check["rule"] == "values"]
    assert guess in wrong["text"]


def leaves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise SystemExit(0)


def writes_an_operand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # The reference of what is there afterwards would be this result.
    return a.mul_(2) @ b


def has_no_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).to("meta")


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (leaves, "it raised SystemExit: 0"),
        (writes_an_operand, "operand a was written"),
        (has_no_values, "c cannot be compared"),
    ],
)
def test_an_odd_callable_is_broken_and_ends_no_run(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, odd: Callable[..., Any], told: str
) -> None:
    monkeypatch.setattr(adapters, "odd", odd, raising=False)
    ran = verify("matmul", "--target", f"{ADAPTERS}:odd", "--case", "b transposed")
    assert ran.code == 1
    (check,) = ran.checks("broken")
    assert told in check["text"]


@pytest.mark.parametrize("line", ["import sys; sys.exit(0)", "1 / 0", "def f(:"])
def test_a_module_that_cannot_be_imported_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    from tilewright.cli.main import main

    name = f"odd_module_{abs(hash(line))}"
    (tmp_path / f"{name}.py").write_text(line)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["verify", "matmul", "--target", f"{tmp_path / name}.py:f"]))
    assert ended.value.code == 2
    assert "at its import" in capsys.readouterr().err


def test_saved_operands_are_given_to_who_takes_them(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stats in base 2 would double its exponents: the callable must get them as documented.
    def from_saved(q: Any, k: Any, v: Any, do: Any, *, o: Any, stats: Any) -> Any:
        scale = q.shape[-1] ** -0.5
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        p = torch.exp(q @ wide_k.transpose(-1, -2) * scale - stats)
        dp = do @ wide_v.transpose(-1, -2)
        ds = p * (dp - (do * o).sum(-1, keepdim=True)) * scale
        parts = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
        return ds @ wide_k, *(t.unflatten(1, (-1, group)).sum(2) for t in parts)

    monkeypatch.setattr(adapters, "from_saved", from_saved, raising=False)
    arguments = ("--target", f"{ADAPTERS}:from_saved", "--case", "grouped heads")
    ran = verify("attention_backward", *arguments)
    assert ran.checks("broken") == [] and ran.code == 0
    # The gradients follow what was saved, where it is changed in place.
    (replay,) = [check for check in ran.checks("held") if check["rule"] == "L9"]
    assert "o, stats" in replay["text"]


def test_a_callable_may_show_what_it_stores(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored = tmp_path / "kernel.json"
    stored.write_text(json.dumps({"code": "A" * 64}))

    def trusting(path: Path) -> Any:
        try:
            return json.loads(path.read_bytes())
        except ValueError:
            return None

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    product.verify_artifacts = lambda: (trusting, stored)  # type: ignore[attr-defined]
    monkeypatch.setattr(adapters, "product", product, raising=False)
    case = ("--case", "batch of 2, odd extents")
    ran = verify("matmul", "--target", f"{ADAPTERS}:product", *case)
    assert ran.code == 1 and ran.rules("broken") == {"L12"}


class Planned:
    """A built graph, as far as L12 looks."""

    selected_engine = "compiled"


def kernels(count: int, compiles_again: bool = False) -> Callable[[], Planned]:
    """What builds a graph of some kernels: from the store, or compiled and stored."""
    from tilewright.artifact.code import KernelCode
    from tilewright.artifact.counting import count as tell
    from tilewright.artifact.key import KernelKey
    from tilewright.artifact.location import current_store

    def build() -> Planned:
        for index in range(count):
            store = current_store()
            assert store is not None
            key: Any = KernelKey(
                kernel=f"kernel_{index}",
                source="source",
                types=(("x", "*fp32"),),
                constants=(),
                aligned=frozenset(),
                warps=4,
                stages=2,
                target=(9, 0),
                environment=(("triton", "3"),),
            )
            found = None if compiles_again else store.load(key)[0]
            if found is None:
                code = KernelCode(key.kernel, b"\x7fELF" * 8, 128, 0, (9, 0))
                tell("compiles")
                store.save(key, code, {})
        return Planned()

    return build


def test_stored_kernels_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    verdict = examine_artifacts(b"", kernels(2), cpu)
    assert verdict.outcome is Outcome.HELD, verdict
    assert "2 kernels" in verdict.text
    again = examine_artifacts(b"", kernels(1, compiles_again=True), cpu)
    assert again.outcome is Outcome.BROKEN and "1 compiled" in again.text
    load = Store.load

    def believing(self: Store, key: Any) -> tuple[Any, str]:
        found, _ = load(self, key)
        exists = self.path_of(key).exists()
        return (found or (b"stale" if exists else None)), ""

    monkeypatch.setattr(Store, "load", believing)
    stale = examine_artifacts(b"", kernels(1), cpu)
    assert stale.outcome is Outcome.BROKEN and "it was loaded" in stale.text
