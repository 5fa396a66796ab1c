"""Cases are rebuilt bit by bit from their repro, in another process and whatever it has drawn."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch

from tilewright.errors import OracleError
from tilewright.oracle import formats
from tilewright.testing import data
from tilewright.testing.data.draws import Draws, cast
from tilewright.testing.data.guards import POISON

pytestmark = pytest.mark.L0


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_case(seed: int = 0) -> list[data.DataCase]:
    """One case of every maker and profile."""
    g = _generator(seed)
    cases = [data.ragged(g, profile=name, dtype="bfloat16") for name in data.RAGGED_PROFILES]
    cases += [data.paged_cache(g, unused=name) for name in data.UNUSED_ENTRIES]
    cases += data.layouts(g, dim=(2, 1, 5, 8), dtype=torch.float16)
    cases += [data.values(g, dim=(5, 7), profile=name) for name in data.VALUE_PROFILES]
    cases += [data.attention_values(g, profile=name) for name in data.ATTENTION_PROFILES]
    for element in ("FP4_E2M1", "FP8_E4M3", "FP8_E5M2"):
        cases.append(data.format_ties(g, element_type=element))
        cases.append(data.block_scale_ties(g, element_type=element))
    return cases


_REBUILD = """
import json, sys
import torch
torch.manual_seed(987654321)
torch.rand(17)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(2)
from tilewright.testing.data import from_repro
import hashlib
for repro in json.loads(sys.stdin.read()):
    case = from_repro(repro)
    for name in sorted(case.tensors):
        t = case.tensors[name]
        raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        layout = (tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype))
        print(case.kind, name, layout, hashlib.sha256(raw).hexdigest())
"""


def _lines(cases: list[data.DataCase]) -> list[str]:
    found = []
    for case in cases:
        for name in sorted(case.tensors):
            t = case.tensors[name]
            raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            layout = (tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype))
            found.append(f"{case.kind} {name} {layout} {hashlib.sha256(raw).hexdigest()}")
    return found


def test_a_fresh_process_rebuilds_every_case_bit_by_bit() -> None:
    cases = every_case()
    sent = json.dumps([case.repro for case in cases])
    finished = subprocess.run(
        [sys.executable, "-c", _REBUILD], input=sent, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == _lines(cases)


def test_these_bits_are_the_same_on_every_machine() -> None:
    """Pinned: a release that draws other numbers for an old repro breaks everybody's repros."""
    cases = [
        data.rebuild(case.kind, 1000003 * index, case.parameters)
        for index, case in enumerate(every_case())
    ]
    total = hashlib.sha256("\n".join(_lines(cases)).encode()).hexdigest()
    assert total == "ac5b20908efd939eee6d5bddab02ef883c1e670ffb96e8b0eebc58240774cac4"


def test_the_global_generator_does_not_matter() -> None:
    """Row T14: shift the global generators, require the same case."""

    def every_tensor() -> dict[str, torch.Tensor]:
        return {
            f"{index} {name}": tensor
            for index, case in enumerate(every_case())
            for name, tensor in case.tensors.items()
        }

    data.assert_unmoved_by_global_state(every_tensor)


def test_the_detector_sees_hidden_draws() -> None:
    before = torch.get_rng_state(), random.getstate()

    def torch_draw() -> dict[str, torch.Tensor]:
        return {"x": torch.randn(3)}

    def python_draw() -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([random.random()])}

    def numpy_draw() -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(numpy.random.rand(2))}

    def by_state() -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([torch.initial_seed()])}

    for broken, message in (
        (torch_draw, "global generator of torch"),
        (python_draw, "global generator of random"),
        (numpy_draw, "global generator of numpy"),
        (by_state, "x under another global state: bits differ"),
    ):
        with pytest.raises(OracleError, match=message):
            data.assert_unmoved_by_global_state(broken)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_each_call_draws_anew_and_equal_generators_draw_alike() -> None:
    g = _generator(5)
    one, two = data.values(g, dim=(4, 4)), data.values(g, dim=(4, 4))
    assert one.seed != two.seed
    assert not torch.equal(one["x"], two["x"])
    assert torch.equal(data.values(_generator(5), dim=(4, 4))["x"], one["x"])


def test_a_repro_is_plain_json_and_survives_a_round_trip() -> None:
    for case in every_case():
        sent: dict[str, Any] = json.loads(json.dumps(case.repro))
        again = data.from_repro(sent)
        assert again.repro == case.repro
        assert dict(again.facts) == dict(case.facts)


def test_broken_repros_are_refused() -> None:
    good = data.values(_generator(), dim=(3,)).repro
    for change, message in (
        ({"digest": "0" * 64}, "another release"),
        ({"version": 99}, "version 99"),
        ({"kind": "no_such"}, "expected one of"),
        ({"parameters": {"dim": [3]}}, "parameters of values"),
        ({"seed": good["seed"] + 1}, "digest"),
        ({"extra": 1}, "expected the keys"),
    ):
        with pytest.raises(data.ReproError, match=message):
            data.from_repro({**good, **change})
    with pytest.raises(data.ReproError, match="list"):
        data.from_repro([])  # type: ignore[arg-type]


def test_cases_are_frozen() -> None:
    case = data.values(_generator(), dim=(3,))
    with pytest.raises(AttributeError):
        case.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        case.tensors["x"] = torch.zeros(3)  # type: ignore[index]
    with pytest.raises(TypeError):
        case.parameters["dim"] = []  # type: ignore[index]


def test_draws_do_not_depend_on_their_order_or_size() -> None:
    draws = Draws(42)
    a = draws.normal("a", (6,))
    draws.integers("b", (100,), 0, 10)
    assert torch.equal(draws.normal("a", (12,))[:6], a)
    assert not torch.equal(Draws(43).normal("a", (6,)), a)
    assert not torch.equal(draws.normal("c", (6,)), a)


def test_draws_are_distributed_as_they_say() -> None:
    draws = Draws(7)
    bell = draws.normal("bell", (20000,))
    assert bell.dtype == torch.float64
    assert abs(bell.mean().item()) < 0.03
    assert abs(bell.std().item() - 1.0) < 0.03
    assert 3.0 < bell.abs().max().item() < 4.9
    counts = draws.integers("n", (7000,), 3, 10).bincount(minlength=10)
    assert counts[:3].sum() == 0
    assert counts[3:].min() > 850
    spread = draws.uniform("u", (5000,), -2.0, 2.0)
    assert spread.min() >= -2.0
    assert spread.max() < 2.0
    assert abs(spread.mean().item()) < 0.1
    assert sorted(draws.permutation("p", 50).tolist()) == list(range(50))
    with pytest.raises(ValueError, match="range"):
        draws.integers("n", (1,), 5, 5)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_casts_round_once_to_even(dtype: torch.dtype) -> None:
    draws = Draws(9)
    numbers = draws.normal("x", (500,)) * torch.exp2(draws.integers("e", (500,), -30, 30).double())
    numbers[:4] = torch.tensor([0.0, -0.0, float("nan"), 1.0 + 2.0**-24 + 2.0**-50])
    target = formats.format_of(dtype)
    assert target is not None
    got = formats.to_float64(cast(numbers, dtype))
    want = formats.round_to(numbers, target)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(torch.signbit(got[:2]), torch.tensor([False, True]))
    if target.specials == "ieee":
        ends = torch.tensor([float("inf"), -float("inf")]).double()
        assert torch.equal(formats.to_float64(cast(ends, dtype)), ends)


def test_guards_surround_every_operand() -> None:
    for case in every_case():
        for name, guarded in case.guarded(guard_bytes=64).items():
            original = case[name]
            assert guarded.view.shape == original.shape
            assert guarded.view.stride() == original.stride()
            same = original.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(guarded.view.contiguous().view(-1).view(torch.uint8), same)
            assert guarded.view.data_ptr() % 256 == 0
            outside = guarded.raw[~guarded.mask]
            assert bool((outside == POISON).all())
            start = guarded.view.data_ptr() - guarded.raw.data_ptr()
            ends = guarded.mask.nonzero()
            assert start >= 64
            if len(ends):
                assert len(guarded.mask) - int(ends[-1]) > 64
            guarded.check(read_only=True)


def test_guards_see_writes_before_between_and_after() -> None:
    x = torch.arange(12.0).reshape(3, 4)[:, :3]
    guarded = data.guard(x, name="x")
    first = guarded.view.data_ptr() - guarded.raw.data_ptr()
    for offset in (-1, 12, 44, 44 + 200):
        kept = guarded.raw[first + offset].item()
        guarded.raw[first + offset] = 1
        assert guarded.changed() == [offset]
        with pytest.raises(OracleError, match=f"x: 1 bytes outside.*offsets {offset} from"):
            guarded.check()
        guarded.raw[first + offset] = kept
    guarded.view[1, 1] = 5.5
    guarded.check()
    with pytest.raises(OracleError, match="read-only"):
        guarded.check(read_only=True)
    output = data.guard(x, poisoned=True)
    assert bool(output.view.isnan().all())
    with pytest.raises(ValueError, match="guard_bytes"):
        data.guard(x, guard_bytes=-1)


def test_reading_past_an_operand_gives_nan() -> None:
    x = data.values(_generator(), dim=(4, 8))
    guarded = x.guarded()["x"]
    too_far = guarded.raw[: guarded.raw.numel() // 4 * 4].view(torch.float32)
    start = (guarded.view.data_ptr() - guarded.raw.data_ptr()) // 4
    assert bool(too_far[start + 32 : start + 64].isnan().all())
    assert bool(too_far[start - 32 : start].isnan().all())


def test_generators_on_a_device_are_refused() -> None:
    class Elsewhere:
        device = torch.device("cuda")

    with pytest.raises(ValueError, match="CPU"):
        data.values(Elsewhere(), dim=(3,))  # type: ignore[arg-type]
