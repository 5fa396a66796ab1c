"""An fp8 flip is accepted with a proof and with nothing less; each pretender is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tilewright
from tilewright.errors import OracleError
from tilewright.oracle import attention, formats
from tilewright.oracle.attention_fp8 import Rounding
from tilewright.testing.compare import assert_close
from tilewright.testing.compare_fp8 import Flip, assert_close_fp8
from tilewright.testing.fp8_flip import (
    MIDPOINT_SHARE,
    Intermediates,
    backward_intermediates,
    explain_row,
    flip_steps,
    forward_intermediates,
)

pytestmark = pytest.mark.L0

_B, _H, _SQ, _SKV, _D = 2, 2, 24, 12, 8
_SCALE_S = 256.0
_DESCALE_V = 0.5
# What one code times one element of v is worth in the output.
_UNIT = _DESCALE_V / _SCALE_S
_TOL = 2.0**-8


def _eight_bits(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64) * 2.0
    return formats.encode(values, "FP8_E4M3").to(torch.uint8).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class _Problem:
    """Causal (bottom-right) fp8 attention: the reference, its intermediate, and its codes."""

    v: torch.Tensor
    expected: torch.Tensor
    seen: Intermediates
    codes: torch.Tensor

    def output(self, codes: torch.Tensor) -> torch.Tensor:
        """What a kernel that rounded P to these codes stores, in float16."""
        exact = _UNIT * torch.matmul(codes, formats.to_float64(self.v))
        return formats.round_to(exact, "HALF").to(torch.float16)

    def check(self, actual: torch.Tensor, **changes: Any) -> tuple[Flip, ...]:
        arguments: dict[str, Any] = {
            "operand": self.v,
            "flip_unit": _UNIT,
            "intermediates": self.seen,
            "fp8_dtype": torch.float8_e4m3fn,
            "tol": _TOL,
            "name": "O",
        }
        return assert_close_fp8(actual, self.expected, **{**arguments, **changes}).flips


@pytest.fixture(scope="module")
def problem() -> _Problem:
    q, k = (_eight_bits(_B, _H, n, _D, seed=s) for s, n in ((1, _SQ), (2, _SKV)))
    v = _eight_bits(_B, _H, _SKV, _D, seed=3)
    options: dict[str, Any] = {"scale": 0.05, "right_bound": 0}
    seen = forward_intermediates(q, k, v, scale_s=_SCALE_S, **options)
    rounding = Rounding(torch.float8_e4m3fn, _SCALE_S, 1.0 / _SCALE_S)
    found = attention.forward(
        q, k, formats.to_float64(v) * _DESCALE_V, **options, weights_map=rounding
    )
    codes = formats.round_to(seen.values, "FP8_E4M3")
    return _Problem(v, found.output, seen, codes)


def _moves(problem: _Problem, at: tuple[int, ...], steps: int = 1) -> torch.Tensor:
    """The codes with one moved across its midpoint, `steps` codes further."""
    step, _ = flip_steps(problem.seen.values, "FP8_E4M3")
    codes = problem.codes.clone()
    codes[at] += steps * step[at]
    return codes


def _visible_effect(problem: _Problem) -> torch.Tensor:
    """Positions whose flip moves their row by clearly more than the tolerance."""
    step, _ = flip_steps(problem.seen.values, "FP8_E4M3")
    largest = formats.to_float64(problem.v).abs().amax(-1)[:, :, None, :]
    top = max(problem.expected.abs().max().item(), 1.0)
    return (step.abs() * _UNIT * largest > 1.5 * _TOL * top) & (problem.codes > 0)


def _positions(problem: _Problem, near: bool) -> list[tuple[int, ...]]:
    """Visible positions near a midpoint, alone so in their row; or ones in rows with none near."""
    _, distance = flip_steps(problem.seen.values, "FP8_E4M3")
    close = problem.seen.visible & (distance <= MIDPOINT_SHARE)
    count = close.sum(-1, keepdim=True)
    clear = problem.seen.visible & (distance > 2 * MIDPOINT_SHARE)
    wanted = close & (count == 1) if near else clear & (count == 0)
    return [tuple(p) for p in (wanted & _visible_effect(problem)).nonzero().tolist()]


def test_the_intermediates_are_what_the_reference_rounds(problem: _Problem) -> None:
    exact = _UNIT * torch.matmul(problem.codes, formats.to_float64(problem.v))
    assert (exact - problem.expected).abs().max() < 1e-13
    assert problem.check(problem.output(problem.codes)) == ()


def test_one_proved_flip_is_accepted_and_named(problem: _Problem) -> None:
    positions = _positions(problem, near=True)
    assert len(positions) >= 5
    for at in positions:
        flips = problem.check(problem.output(_moves(problem, at)))
        assert flips == (Flip(at[:3], at[3]),)  # type: ignore[arg-type]


def test_flips_of_several_rows_are_proved_one_by_one(problem: _Problem) -> None:
    step, _ = flip_steps(problem.seen.values, "FP8_E4M3")
    positions = {at[:3]: at for at in _positions(problem, near=True)}
    codes = problem.codes.clone()
    for at in positions.values():
        codes[at] += step[at]
    assert len(problem.check(problem.output(codes))) == len(positions) > 3


def test_a_flip_far_from_a_midpoint_is_refused(problem: _Problem) -> None:
    for at in _positions(problem, near=False)[:10]:
        with pytest.raises(OracleError, match="no position of this row lies near a midpoint"):
            problem.check(problem.output(_moves(problem, at)))


def test_the_share_of_a_spacing_is_one_in_thirty_two(problem: _Problem) -> None:
    """The same row, its value put just inside and just outside of the share."""
    at = _positions(problem, near=True)[0]
    spacing = abs(flip_steps(problem.seen.values, "FP8_E4M3")[0][at].item())
    code = problem.codes[at].item()
    other = _moves(problem, at)[at].item()
    toward = 1.0 if code < other else -1.0
    for share, accepted in ((0.99 / 32, True), (1.01 / 32, False)):
        values = problem.seen.values.clone()
        # On the reference's side of the midpoint, so that it still rounds to its code.
        values[at] = (code + other) / 2.0 - toward * share * spacing
        changed = {"intermediates": replace(problem.seen, values=values)}
        actual = problem.output(_moves(problem, at))
        if accepted:
            assert problem.check(actual, **changed) == (Flip(at[:3], at[3]),)  # type: ignore[arg-type]
        else:
            with pytest.raises(OracleError, match="near a midpoint"):
                problem.check(actual, **changed)


def _with_midpoint_at(
    problem: _Problem, source: tuple[int, ...], target: tuple[int, ...], visible: bool
) -> Intermediates:
    """The near-midpoint value of one position put at another; the source is put on its code."""
    values, seen = problem.seen.values.clone(), problem.seen.visible.clone()
    values[target] = values[source]
    values[source] = problem.codes[source]
    seen[target] = visible
    return Intermediates(values, seen)


def test_a_masked_key_is_no_proof(problem: _Problem) -> None:
    """The only value near a midpoint belongs to a key that the row does not see."""
    at = next(p for p in _positions(problem, near=True) if p[2] < _SKV - 1)
    actual = problem.output(_moves(problem, at))
    masked = replace(problem.seen, visible=problem.seen.visible.clone())
    masked.visible[at] = False
    with pytest.raises(OracleError, match="near a midpoint"):
        problem.check(actual, intermediates=masked)
    # A hidden twin of the right key, with the same operand, does not serve either.
    hidden = (*at[:3], _SKV - 1)
    assert not problem.seen.visible[hidden]
    moved = _with_midpoint_at(problem, at, hidden, visible=False)
    v = formats.to_float64(problem.v).clone()
    v[at[0], at[1], _SKV - 1] = v[at[0], at[1], at[3]]
    with pytest.raises(OracleError, match="near a midpoint"):
        problem.check(actual, intermediates=moved, operand=v)
    # Shown, it would: the refusal is the mask's alone.
    shown = _with_midpoint_at(problem, at, hidden, visible=True)
    assert problem.check(actual, intermediates=shown, operand=v) == (
        Flip(at[:3], _SKV - 1),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("axis", [0, 1], ids=["other batch", "other head"])
def test_another_batch_or_head_is_no_proof(problem: _Problem, axis: int) -> None:
    tried = 0
    for at in _positions(problem, near=True):
        elsewhere = list(at)
        elsewhere[axis] = 1 - elsewhere[axis]
        moved = _with_midpoint_at(problem, at, tuple(elsewhere), visible=True)
        with pytest.raises(OracleError, match=r"near a midpoint"):
            problem.check(problem.output(_moves(problem, at)), intermediates=moved)
        tried += 1
    assert tried >= 5


def test_another_row_is_no_proof(problem: _Problem) -> None:
    at = next(p for p in _positions(problem, near=True) if p[2] + 1 < _SQ)
    moved = _with_midpoint_at(problem, at, (at[0], at[1], at[2] + 1, at[3]), visible=True)
    with pytest.raises(OracleError, match="near a midpoint"):
        problem.check(problem.output(_moves(problem, at)), intermediates=moved)


def test_two_flips_in_a_row_are_refused(problem: _Problem) -> None:
    step, _ = flip_steps(problem.seen.values, "FP8_E4M3")
    effect, tried = _visible_effect(problem), 0
    for at in _positions(problem, near=True):
        others = [c for c in effect[at[:3]].nonzero().reshape(-1).tolist() if c != at[3]]
        for other in others[:2]:
            second = (*at[:3], other)
            # The second lies at a midpoint as well, so that each alone would be proved.
            values = problem.seen.values.clone()
            pair = problem.codes[second] + step[second] / 2.0
            values[second] = pair - torch.sign(step[second]) * step[second].abs() / 64.0
            seen = replace(problem.seen, values=values)
            codes = _moves(problem, at)
            assert problem.check(problem.output(codes), intermediates=seen)
            codes[second] += step[second]
            with pytest.raises(OracleError, match="the likeliest flip"):
                problem.check(problem.output(codes), intermediates=seen)
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("steps", [2, -1, 3])
def test_a_step_to_a_code_that_is_not_adjacent_is_refused(problem: _Problem, steps: int) -> None:
    for at in _positions(problem, near=True)[:6]:
        with pytest.raises(OracleError, match="the likeliest flip"):
            problem.check(problem.output(_moves(problem, at, steps)))


def test_a_flip_of_half_its_size_is_refused(problem: _Problem) -> None:
    """As of a kernel with a wrong descale: the count or the rest gives it away."""
    at = _positions(problem, near=True)[0]
    actual = problem.output(_moves(problem, at))
    with pytest.raises(OracleError, match="the likeliest flip"):
        problem.check(actual, flip_unit=_UNIT / 4.0)
    with pytest.raises(OracleError, match="the likeliest flip"):
        problem.check(actual, flip_unit=-_UNIT)


def test_the_rest_must_be_output_rounding_even_within_the_tolerance(problem: _Problem) -> None:
    """A flip, and an error under the tolerance beside it: the tolerance alone would take it."""
    at = _positions(problem, near=True)[0]
    actual = problem.output(_moves(problem, at))
    assert problem.check(actual)
    also = actual.clone()
    also[at[:3]][:] += 0.5 * _TOL * torch.tensor([1.0, -1.0] * (_D // 2))
    with pytest.raises(OracleError, match="the likeliest flip"):
        problem.check(also)


def test_a_row_without_a_flip_is_still_compared(problem: _Problem) -> None:
    actual = problem.output(problem.codes)
    actual[1, 0, 3, 2] += 0.5
    with pytest.raises(OracleError, match=r"row \(1, 0, 3\)(.|\n)*at \(1, 0, 3, 2\)"):
        problem.check(actual)
    actual[1, 0, 3, 2] = float("nan")
    with pytest.raises(OracleError, match="NaN"):
        problem.check(actual)


def test_packed_outputs_and_unequal_heads_keep_the_plain_bound(problem: _Problem) -> None:
    at = _positions(problem, near=True)[0]
    actual = problem.output(_moves(problem, at))
    assert problem.check(actual)
    packed, reference = (t.transpose(1, 2).reshape(-1, _H, _D) for t in (actual, problem.expected))
    arguments: dict[str, Any] = {
        "flip_unit": _UNIT,
        "intermediates": problem.seen,
        "fp8_dtype": "FP8_E4M3",
    }
    with pytest.raises(OracleError, match=r"1 of|of \d+ elements"):
        assert_close_fp8(packed, reference, operand=problem.v, tol=_TOL, **arguments)
    with pytest.raises(OracleError, match="elements"):
        problem.check(actual, operand=problem.v[:, :1])
    # What the plain bound takes passes there.
    clean = problem.output(problem.codes)
    assert problem.check(clean, operand=problem.v[:, :1]) == ()
    assert assert_close_fp8(packed, reference, operand=problem.v, tol=0.1, **arguments).flips == ()


def test_shapes_and_references_that_prove_nothing_are_refused(problem: _Problem) -> None:
    actual = problem.output(problem.codes)
    with pytest.raises(ValueError, match="intermediates has shape"):
        problem.check(actual, intermediates=problem.seen.transposed())
    with pytest.raises(ValueError, match="operand has shape"):
        problem.check(actual, operand=problem.v[..., :4])
    with pytest.raises(ValueError, match="float64"):
        replace(problem, expected=problem.expected.float()).check(actual)


def test_steps_and_distances_by_hand() -> None:
    numbers = [17.0, 16.9, 17.1, -17.1, 0.0, 448.0, 500.0, 2.0**-10]
    values = torch.tensor(numbers, dtype=torch.float64)
    step, distance = flip_steps(values, "FP8_E4M3")
    # Between 16 and 18: 17 is the midpoint and goes to 16, even.
    assert step.tolist()[:4] == [2.0, 2.0, -2.0, 2.0]
    assert distance.tolist()[:4] == pytest.approx([0.0, 0.05, 0.05, 0.05])
    assert step[4] == 2.0**-9
    assert distance[4] == 0.5
    assert torch.isinf(distance[5:7]).all()
    assert distance[7] == 0.0


@pytest.mark.parametrize("which", ["dQ", "dK", "dV"])
def test_gradients_have_their_own_intermediates(which: str) -> None:
    """dQ sums over keys, dK and dV over queries: rows, operands and intermediates follow."""
    q, k, v, d_o = (_eight_bits(1, 2, 16, _D, seed=s) for s in (1, 2, 3, 4))
    options: dict[str, Any] = {"scale": 0.05, "right_bound": 0}
    scale_s, scale_dp = 256.0, 64.0
    p, d_s = backward_intermediates(q, k, v, d_o, scale_s=scale_s, scale_dP=scale_dp, **options)
    expected = attention.backward(
        q,
        k,
        v,
        d_o,
        weights_map=Rounding("FP8_E4M3", scale_s, 1 / scale_s),
        d_scores_map=Rounding("FP8_E4M3", scale_dp, 1 / scale_dp),
        **options,
    )
    want, seen, operand, unit = {
        "dQ": (expected.d_q, d_s, k, 1 / scale_dp),
        "dK": (expected.d_k, d_s.transposed(), q, 1 / scale_dp),
        "dV": (expected.d_v, p.transposed(), d_o, 1 / scale_s),
    }[which]
    codes = formats.round_to(seen.values, "FP8_E4M3")
    exact = unit * torch.matmul(codes, formats.to_float64(operand))
    assert (exact - want).abs().max() < 1e-10
    step, distance = flip_steps(seen.values, "FP8_E4M3")
    near = seen.visible & (distance <= MIDPOINT_SHARE)
    weight = torch.where(near, step.abs(), 0.0)
    at = divmod(int(weight.reshape(-1).argmax()), weight.shape[-1])
    row, position = at
    head, line = divmod(row, 16)
    codes[0, head, line, position] += step[0, head, line, position]
    actual = (unit * torch.matmul(codes, formats.to_float64(operand))).float()
    found = assert_close_fp8(
        actual,
        want,
        operand=operand,
        flip_unit=unit,
        intermediates=seen,
        fp8_dtype="FP8_E4M3",
        name=which,
    )
    assert Flip((0, head, line), position) in found.flips
    assert len(found.flips) == 1


def _explain(difference: list[float], output_type: str, limit: float, **changes: Any) -> Any:
    """One visible position with the code 16 and the other code 18, worth [0.25, -0.5]."""
    arguments: dict[str, Any] = {
        "expected": torch.tensor([1.0, 1.0], dtype=torch.float64),
        "values": torch.tensor([16.99], dtype=torch.float64),
        "visible": torch.tensor([True]),
        "operand": torch.tensor([[1.0, -2.0]], dtype=torch.float64),
        "flip_unit": 0.125,
        "fp8_dtype": "FP8_E4M3",
        "output_type": output_type,
        "limit": limit,
    }
    moved = torch.tensor(difference, dtype=torch.float64)
    return explain_row(moved, **{**arguments, **changes})


def test_each_of_the_three_ways_is_needed() -> None:
    exact = [0.25, -0.5]
    assert _explain(exact, "HALF", 0.01).position == 0
    # The rest is within the rounding of a coarse output, and not within the tolerance.
    assert _explain([0.30, -0.5], "FP8_E4M3", 0.1).position == 0
    assert _explain([0.30, -0.5], "FP8_E4M3", 0.04).position is None
    # The rest is within a wide tolerance, and not within the rounding of the output.
    assert _explain([0.30, -0.5], "HALF", 0.1).position is None
    # Both hold, since the flip itself is small beside them, but it would take 1.6 or 0.4 of it.
    for count, accepted in ((1.4, True), (1.6, False), (0.6, True), (0.4, False)):
        moved = [count * 0.25 / 32, -count * 0.5 / 32]
        found = _explain(moved, "FP8_E4M3", 0.1, flip_unit=0.125 / 32)
        assert (found.position == 0) == accepted
    assert "counts 0.4 flips" in found.reason
    # An operand of zeros moves nothing, and so explains nothing.
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    assert _explain([0.0, 0.0], "HALF", 0.1, operand=zeros).position is None


def test_a_plan_of_the_library_holds_without_a_flip_or_with_a_proved_one() -> None:
    q, k, v = (_eight_bits(1, 2, 256, 16, seed=s) for s in (1, 2, 3))
    graph = tilewright.Graph(io_data_type="FP8_E4M3", intermediate_data_type="FLOAT")
    scales = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), 1.0)
    scales |= {"scale_s": _SCALE_S, "descale_s": 1.0 / _SCALE_S}
    buffers = {"q": q, "k": k, "v": v}
    buffers |= {name: torch.full((1, 1, 1, 1), number) for name, number in scales.items()}
    records = {name: graph.tensor_like(t) for name, t in buffers.items()}
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **records, attn_scale=0.1, use_causal_mask=True, generate_stats=False
    )
    made = {o: torch.empty(1, 2, 256, 16)}
    made |= {amax: torch.empty(1, 1, 1, 1) for amax in (amax_s, amax_o)}
    for tensor in made:
        tensor.set_output(True).set_data_type("FLOAT")
    graph.build()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
    graph.execute({**{records[name]: t for name, t in buffers.items()}, **made}, workspace)
    options: dict[str, Any] = {"scale": 0.1, "right_bound": 0}
    rounding = Rounding("FP8_E4M3", _SCALE_S, 1.0 / _SCALE_S)
    proof: dict[str, Any] = {
        "operand": v,
        "flip_unit": 1.0 / _SCALE_S,
        "intermediates": forward_intermediates(q, k, v, scale_s=_SCALE_S, **options),
        "fp8_dtype": "FP8_E4M3",
        "tol": 1e-5,
    }
    expected = attention.forward(q, k, v, weights_map=rounding, **options).output
    # Among 65,000 probabilities one or two may lie that close to a midpoint.
    assert len(assert_close_fp8(made[o], expected, **proof).flips) < 8
    # A softmax with the error of a fast exponential takes the other code here and there.
    seen: Intermediates = proof["intermediates"]
    generator = torch.Generator().manual_seed(5)
    noise = torch.rand(seen.values.shape, generator=generator, dtype=torch.float64) - 0.5
    codes = formats.round_to(seen.values * (1.0 + 2.0**-14 * noise), "FP8_E4M3")
    actual = (torch.matmul(codes, formats.to_float64(v)) / _SCALE_S).float()
    found = {
        (*flip.row, flip.position) for flip in assert_close_fp8(actual, expected, **proof).flips
    }
    changed = (codes != formats.round_to(seen.values, "FP8_E4M3")).nonzero().tolist()
    assert len(found) >= 5
    assert found <= {tuple(position) for position in changed}
    with pytest.raises(OracleError):
        assert_close(actual, expected, tol=1e-5)
