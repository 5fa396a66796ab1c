"""Linear attention with a recurrent state, one token after another, a chunk of heads at a time.

For each sequence and value head, with the state S (K, V), log decays g_t and step sizes beta_t:

    S  <- exp(g_t) S                                  (one decay a head, or one a row of S)
    u_t = beta_t (v_t - S^T k_t)                      the delta rule; without beta, u_t = v_t
    S  <- S + k_t u_t^T
    o_t = scale * S^T q_t

The gated delta rule has beta and one decay a head (Yang, Kautz, Hatamizadeh 2024,
arXiv:2412.06464), Kimi delta attention beta and a decay a row (arXiv:2510.26692), retention and
lightning attention no beta and a constant decay a head (arXiv:2307.08621, arXiv:2401.04658).

Value head h reads query and key head h // (HV / H). Gradients are float64 autograd of this
recurrence. Memory is bounded twice: independent chunks of heads run one after another, and a
chunk's backward keeps the state at the start of each segment of tokens alone, running a segment
again for its gradients (Griewank 1992; Chen, Xu, Zhang, Guestrin 2016, arXiv:1604.06174).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.memory import reference_memory

__all__ = ["LinearAttentionResult", "backward", "forward"]

CHUNK_BYTES = 256 * 2**20
"""Bound on the states that a chunk of heads keeps at once; a chunk has at least one head."""

_ADVICE = "give a smaller head_chunk, or a smaller case"
# Tensors of the state's size that autograd keeps for each token of a segment, about.
_KEPT = 4


class LinearAttentionResult(NamedTuple):
    """`output` (B, T, HV, V) and `final_state` (N, HV, K, V), N sequences, float64."""

    output: torch.Tensor
    final_state: torch.Tensor


@dataclass(frozen=True)
class _Sequences:
    """Where each sequence lies: (batch index, first token, one past the last)."""

    bounds: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(batch: int, tokens: int, cu_seqlens: torch.Tensor | None) -> _Sequences:
        if cu_seqlens is None:
            return _Sequences(tuple((index, 0, tokens) for index in range(batch)))
        if batch != 1:
            raise ValueError(f"cu_seqlens: packed sequences have a batch of 1, not {batch}")
        sums = [int(entry) for entry in cu_seqlens.reshape(-1).tolist()]
        return _Sequences(tuple((0, start, end) for start, end in itertools.pairwise(sums)))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_chunk: int | None = None,
) -> LinearAttentionResult:
    """Outputs and final states of the recurrence.

    Args:
        q, k: (B, T, H, K).
        v: (B, T, HV, V), HV a multiple of H.
        g: Log decays (B, T, HV), one a head, or (B, T, HV, K), one a row of the state; None is 0.
        beta: (B, T, HV); None leaves the delta rule out.
        scale: Factor on the output; None is K ** -0.5.
        initial_state: (N, HV, K, V); None is 0.
        cu_seqlens: N + 1 running sums of the lengths of sequences packed along T, with B = 1.
        head_chunk: Value heads at a time; all heads that share a query head stay together.
    """
    operands = _operands(q, k, v, g, beta, initial_state)
    sequences = _Sequences.of(q.shape[0], q.shape[1], cu_seqlens)
    state_dim = (len(sequences.bounds), v.shape[2], k.shape[3], v.shape[3])
    factor = k.shape[3] ** -0.5 if scale is None else scale
    with reference_memory("linear attention, forward", _ADVICE), torch.no_grad():
        output = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
        final = torch.zeros(state_dim, dtype=torch.float64, device=v.device)
        for heads in _chunks(operands, head_chunk, _segment(q.shape[1], None)):
            for number, (batch, start, end) in enumerate(sequences.bounds):
                state = _first_state(operands, number, heads)
                for low, high in _segments(start, end, _segment(q.shape[1], None)):
                    part = _part(operands, batch, low, high, heads)
                    rows, state = _recurrence(part, state, factor)
                    output[batch, low:high, heads] = rows
                final[number, heads] = state
    return LinearAttentionResult(output, final)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_output: torch.Tensor,
    *,
    d_final_state: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_chunk: int | None = None,
    token_segment: int | None = None,
) -> dict[str, torch.Tensor]:
    """Gradients by name: q, k, v, and g, beta, initial_state if they are given; float64.

    Args:
        d_output: (B, T, HV, V).
        d_final_state: (N, HV, K, V), of a loss that reads the final state; None is 0.
        token_segment: Tokens whose states are kept at once; None balances them with the states
            kept at the segments' starts.

    The other arguments are those of `forward`. Gradients of q and k sum over the value heads that
    read them.
    """
    operands = _operands(q, k, v, g, beta, initial_state)
    sequences = _Sequences.of(q.shape[0], q.shape[1], cu_seqlens)
    factor = k.shape[3] ** -0.5 if scale is None else scale
    segment = _segment(q.shape[1], token_segment)
    with reference_memory("linear attention, backward", _ADVICE):
        gradients = {
            name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in operands.items()
        }
        for heads in _chunks(operands, head_chunk, segment):
            for number, (batch, start, end) in enumerate(sequences.bounds):
                if d_final_state is None:
                    d_state = torch.zeros_like(_first_state(operands, number, heads))
                else:
                    d_state = to_float64(d_final_state[number, heads])
                spans = list(_segments(start, end, segment))
                states = _segment_states(operands, number, batch, heads, spans, factor)
                for (low, high), state in zip(reversed(spans), reversed(states), strict=True):
                    d_rows = to_float64(d_output[batch, low:high, heads])
                    part = _part(operands, batch, low, high, heads)
                    found, d_state = _segment_gradients(part, state, d_rows, d_state, factor)
                    for name, gradient in found.items():
                        chosen = _heads_of(name, operands, heads)
                        gradients[name][batch, low:high, chosen] = gradient
                if "initial_state" in gradients:
                    gradients["initial_state"][number, heads] = d_state
    return gradients


def _operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"v: {v.shape[2]} heads must be a multiple of q's {q.shape[2]}")
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    return {name: t.detach() for name, t in given.items() if t is not None}


def _segment(tokens: int, given: int | None) -> int:
    """Tokens a segment: those kept by autograd weigh as much as the states at all starts."""
    return max(given or math.isqrt(tokens // _KEPT), 1)


def _segments(start: int, end: int, segment: int) -> Iterator[tuple[int, int]]:
    for low in range(start, end, segment):
        yield low, min(low + segment, end)


def _chunks(
    operands: Mapping[str, torch.Tensor], head_chunk: int | None, segment: int
) -> Iterator[slice]:
    """Slices of value heads, in whole groups of those that share a query head."""
    q, v = operands["q"], operands["v"]
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    if head_chunk is None:
        kept = _KEPT * segment + q.shape[1] // segment
        head_chunk = CHUNK_BYTES // max(8 * kept * q.shape[3] * v.shape[3], 1)
    step = max(head_chunk // group, 1) * group
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def _heads_of(name: str, operands: Mapping[str, torch.Tensor], heads: slice) -> slice:
    """The heads of an operand that a chunk of value heads reads."""
    if name not in ("q", "k"):
        return heads
    group = operands["v"].shape[2] // operands["q"].shape[2]
    return slice(heads.start // group, heads.stop // group)


def _part(
    operands: Mapping[str, torch.Tensor], batch: int, low: int, high: int, heads: slice
) -> dict[str, torch.Tensor]:
    """What tokens low .. high - 1 of a chunk of heads read, (tokens, heads, ...) in float64."""
    return {
        name: to_float64(tensor[batch, low:high, _heads_of(name, operands, heads)])
        for name, tensor in operands.items()
        if name != "initial_state"
    }


def _first_state(operands: Mapping[str, torch.Tensor], number: int, heads: slice) -> torch.Tensor:
    """The state (heads, K, V) that a sequence starts from."""
    if "initial_state" in operands:
        return to_float64(operands["initial_state"][number, heads])
    k, v = operands["k"], operands["v"]
    dim = (heads.stop - heads.start, k.shape[3], v.shape[3])
    return torch.zeros(dim, dtype=torch.float64, device=v.device)


def _segment_states(
    operands: Mapping[str, torch.Tensor],
    number: int,
    batch: int,
    heads: slice,
    spans: Sequence[tuple[int, int]],
    scale: float,
) -> list[torch.Tensor]:
    """The state at the start of each segment of a sequence."""
    states: list[torch.Tensor] = []
    with torch.no_grad():
        state = _first_state(operands, number, heads)
        for low, high in spans:
            states.append(state)
            if len(states) < len(spans):
                _, state = _recurrence(_part(operands, batch, low, high, heads), state, scale)
    return states


def _segment_gradients(
    part: Mapping[str, torch.Tensor],
    state: torch.Tensor,
    d_rows: torch.Tensor,
    d_state: torch.Tensor,
    scale: float,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of a segment's operands, and of the state it started from."""
    leaves = {name: tensor.detach().requires_grad_(True) for name, tensor in part.items()}
    first = state.detach().requires_grad_(True)
    with torch.enable_grad():
        rows, last = _recurrence(leaves, first, scale)
    found = torch.autograd.grad((rows, last), [*leaves.values(), first], (d_rows, d_state))
    return dict(zip(leaves, found[:-1], strict=True)), found[-1]


def _recurrence(
    part: Mapping[str, torch.Tensor], state: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (tokens, heads, V) of some tokens from a state on, and the state after them."""
    q, k, v = part["q"], part["k"], part["v"]
    g, beta = part.get("g"), part.get("beta")
    heads = v.shape[1]
    reads = torch.arange(heads, device=v.device) // (heads // q.shape[1])
    queries, keys = scale * q[:, reads].unsqueeze(2), k[:, reads].unsqueeze(3)
    decays = None if g is None else torch.exp(g).reshape(v.shape[0], heads, -1, 1)
    rows = []
    for token in range(v.shape[0]):
        key, value = keys[token], v[token].unsqueeze(1)
        if decays is not None:
            state = state * decays[token]
        if beta is not None:
            recalled = torch.matmul(key.transpose(1, 2), state)
            value = beta[token].reshape(heads, 1, 1) * (value - recalled)
        state = torch.baddbmm(state, key, value)
        rows.append(torch.matmul(queries[token], state).squeeze(1))
    return torch.stack(rows), state
