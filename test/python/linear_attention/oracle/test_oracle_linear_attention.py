"""Linear attention references: by hand, closed forms, chunks of heads, sequences, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.oracle import assert_close, linear_attention
from tilewright.oracle.memory import ReferenceMemoryError, reference_memory

pytestmark = pytest.mark.L0

_TOL = 1e-11


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _operands(
    batch: int = 2, tokens: int = 5, heads: int = 2, value_heads: int = 4, per_row: bool = False
) -> dict[str, torch.Tensor]:
    k = _randn(batch, tokens, heads, 3, seed=2)
    gates = (batch, tokens, value_heads, *((3,) if per_row else ()))
    return {
        "q": _randn(batch, tokens, heads, 3, seed=1),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": _randn(batch, tokens, value_heads, 2, seed=3),
        "g": -_randn(*gates, seed=4).abs(),
        "beta": torch.sigmoid(_randn(batch, tokens, value_heads, seed=5)),
        "initial_state": _randn(batch, value_heads, 3, 2, seed=6),
    }


def test_the_delta_rule_by_hand() -> None:
    """One head of size one: S = 2, decays by half, moves half of the way from 1 to 5."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    found = linear_attention.forward(
        3 * one,
        one,
        5 * one,
        g=torch.log(0.5 * one[..., 0]),
        beta=0.5 * one[..., 0],
        initial_state=2 * one,
        scale=2.0,
    )
    # S = 1 + 0.5 * (5 - 1) = 3; o = 2 * 3 * 3.
    assert found.final_state.item() == pytest.approx(3.0, abs=1e-14)
    assert found.output.item() == pytest.approx(18.0, abs=1e-13)


def test_without_decay_and_beta_it_is_causal_attention_without_softmax() -> None:
    o = _operands(heads=4)
    found = linear_attention.forward(o["q"], o["k"], o["v"], scale=1.0)
    scores = torch.einsum("bihk,bjhk->bhij", o["q"], o["k"]).tril()
    assert_close(found.output, torch.einsum("bhij,bjhv->bihv", scores, o["v"]), tol=_TOL)


def test_a_constant_decay_is_retention() -> None:
    o = _operands(heads=4)
    slopes = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)
    g = -slopes.expand(2, 5, 4)
    found = linear_attention.forward(o["q"], o["k"], o["v"], g=g, scale=1.0)
    steps = (torch.arange(5)[:, None] - torch.arange(5)[None, :]).double()
    decay = torch.exp(-slopes[:, None, None] * steps).tril()
    scores = torch.einsum("bihk,bjhk->bhij", o["q"], o["k"]) * decay
    assert_close(found.output, torch.einsum("bhij,bjhv->bihv", scores, o["v"]), tol=_TOL)


def test_a_decay_a_row_equal_to_one_a_head_is_the_same() -> None:
    o = _operands()
    rows = o["g"].unsqueeze(-1).expand(2, 5, 4, 3)
    for got, want in zip(
        linear_attention.forward(**{**o, "g": rows}), linear_attention.forward(**o), strict=True
    ):
        assert_close(got, want, tol=_TOL)


def test_full_steps_store_what_orthogonal_keys_ask_for() -> None:
    """With beta 1, no decay and orthonormal keys, the last write of each key is read back."""
    keys = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 1]].reshape(1, 4, 1, 3)
    values = _randn(1, 4, 1, 2)
    ones = torch.ones(1, 4, 1, dtype=torch.float64)
    found = linear_attention.forward(keys, keys, values, beta=ones, scale=1.0)
    assert_close(found.output, values, tol=_TOL)
    assert_close(found.final_state[0, 0], values[0, [0, 3, 2], 0], tol=_TOL)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("head_chunk", [1, 2, 3, 4])
def test_chunks_of_heads_equal_the_whole(per_row: bool, head_chunk: int) -> None:
    o = _operands(per_row=per_row, heads=2, value_heads=6)
    d_output, d_final = _randn(2, 5, 6, 2, seed=7), _randn(2, 6, 3, 2, seed=8)
    whole = linear_attention.forward(**o, head_chunk=6)
    part = linear_attention.forward(**o, head_chunk=head_chunk)
    for got, want in zip(part, whole, strict=True):
        assert_close(got, want, tol=_TOL)
    arguments: dict[str, Any] = {"d_output": d_output, "d_final_state": d_final, **o}
    gradients = linear_attention.backward(**arguments, head_chunk=6)
    assert set(gradients) == set(o)
    for name, gradient in linear_attention.backward(**arguments, head_chunk=head_chunk).items():
        assert_close(gradient, gradients[name], tol=_TOL, name=name)


def test_packed_sequences_with_an_empty_one_equal_sequences_alone() -> None:
    o = _operands(batch=1, tokens=7)
    o["initial_state"] = _randn(3, 4, 3, 2, seed=6)
    sums = torch.tensor([0, 3, 3, 7])
    d_output, d_final = _randn(1, 7, 4, 2, seed=7), _randn(3, 4, 3, 2, seed=8)
    found = linear_attention.forward(**o, cu_seqlens=sums, head_chunk=2)
    gradients = linear_attention.backward(
        **o, d_output=d_output, d_final_state=d_final, cu_seqlens=sums, head_chunk=2
    )
    for number, (start, end) in enumerate(((0, 3), (3, 3), (3, 7))):
        one = {name: t[:, start:end] for name, t in o.items() if name != "initial_state"}
        one["initial_state"] = o["initial_state"][number : number + 1]
        alone = linear_attention.forward(**one)
        assert_close(found.output[:, start:end], alone.output, tol=_TOL)
        assert_close(found.final_state[number : number + 1], alone.final_state, tol=_TOL)
        back = linear_attention.backward(
            **one,
            d_output=d_output[:, start:end],
            d_final_state=d_final[number : number + 1],
        )
        for name in ("q", "k", "v", "g", "beta"):
            assert_close(gradients[name][:, start:end], back[name], tol=_TOL, name=name)
        state = gradients["initial_state"][number : number + 1]
        assert_close(state, back["initial_state"], tol=_TOL)
    assert torch.equal(found.final_state[1], o["initial_state"][1])
    assert torch.equal(gradients["initial_state"][1], d_final[1])


def test_gradients_by_differences() -> None:
    o = _operands(batch=1, tokens=4, heads=1, value_heads=2)
    d_output, d_final = _randn(1, 4, 2, 2, seed=7), _randn(1, 2, 3, 2, seed=8)

    def loss() -> float:
        found = linear_attention.forward(**o)
        return float((found.output * d_output).sum() + (found.final_state * d_final).sum())

    gradients = linear_attention.backward(**o, d_output=d_output, d_final_state=d_final)
    for name, tensor in o.items():
        flat = tensor.reshape(-1)
        for index in range(0, flat.numel(), 3):
            kept, ends = flat[index].item(), []
            for step in (1e-6, -1e-6):
                flat[index] = kept + step
                ends.append(loss())
            flat[index] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert slope == pytest.approx(gradients[name].reshape(-1)[index].item(), abs=1e-7)


def test_refusals() -> None:
    o = _operands(heads=3)
    with pytest.raises(ValueError, match="heads"):
        linear_attention.forward(**o)
    with pytest.raises(ValueError, match="batch of 1"):
        linear_attention.forward(**_operands(), cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_reported_as_the_references(failure: Exception) -> None:
    with (
        pytest.raises(ReferenceMemoryError, match=r"the reference toy ran out.*smaller case"),
        reference_memory("toy", "take a smaller case"),
    ):
        raise failure


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes"), reference_memory("toy", "-"):
        raise RuntimeError("shapes do not fit")
