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
recurrence; both directions bound their memory by running independent chunks of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.memory import reference_memory

__all__ = ["LinearAttentionResult", "backward", "forward"]

CHUNK_BYTES = 256 * 2**20
"""Bound on the states that a chunk of heads keeps for its gradients."""

_ADVICE = "give a smaller head_chunk, or a smaller case"


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
    output = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    state_dim = (len(sequences.bounds), v.shape[2], k.shape[3], v.shape[3])
    final = torch.zeros(state_dim, dtype=torch.float64, device=v.device)
    factor = k.shape[3] ** -0.5 if scale is None else scale
    with reference_memory("linear attention, forward", _ADVICE):
        for heads in _chunks(operands, head_chunk):
            part = {name: _select(name, t, heads, v.shape[2]) for name, t in operands.items()}
            result = _recurrence(part, sequences, factor)
            output[:, :, heads] = result.output
            final[:, heads] = result.final_state
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
) -> dict[str, torch.Tensor]:
    """Gradients by name: q, k, v, and g, beta, initial_state if they are given; float64.

    Args:
        d_output: (B, T, HV, V).
        d_final_state: (N, HV, K, V), of a loss that reads the final state; None is 0.

    The other arguments are those of `forward`. Gradients of q and k sum over the value heads that
    read them.
    """
    operands = _operands(q, k, v, g, beta, initial_state)
    sequences = _Sequences.of(q.shape[0], q.shape[1], cu_seqlens)
    gradients = {name: torch.zeros_like(tensor) for name, tensor in operands.items()}
    factor = k.shape[3] ** -0.5 if scale is None else scale
    with reference_memory("linear attention, backward", _ADVICE):
        for heads in _chunks(operands, head_chunk):
            leaves = {
                name: _select(name, t, heads, v.shape[2]).detach().requires_grad_(True)
                for name, t in operands.items()
            }
            with torch.enable_grad():
                result = _recurrence(leaves, sequences, factor)
                loss = (result.output * to_float64(d_output[:, :, heads])).sum()
                if d_final_state is not None:
                    loss = loss + (result.final_state * to_float64(d_final_state[:, heads])).sum()
            names = list(leaves)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    _select(name, gradients[name], heads, v.shape[2]).copy_(gradient)
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
    return {name: to_float64(t) for name, t in given.items() if t is not None}


def _chunks(operands: Mapping[str, torch.Tensor], head_chunk: int | None) -> Iterator[slice]:
    """Slices of value heads, in whole groups of those that share a query head."""
    q, v = operands["q"], operands["v"]
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    if head_chunk is None:
        # Autograd keeps about four tensors of the state's size a token.
        each = max(4 * 8 * q.shape[0] * q.shape[1] * q.shape[3] * v.shape[3], 1)
        head_chunk = CHUNK_BYTES // each
    step = max(head_chunk // group, 1) * group
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def _select(name: str, tensor: torch.Tensor, heads: slice, value_heads: int) -> torch.Tensor:
    """The part of an operand that a chunk of value heads reads, as a view."""
    if name in ("q", "k"):
        group = value_heads // tensor.shape[2]
        return tensor[:, :, heads.start // group : heads.stop // group]
    if name == "initial_state":
        return tensor[:, heads]
    return tensor[:, :, heads]


def _recurrence(
    part: Mapping[str, torch.Tensor], sequences: _Sequences, scale: float
) -> LinearAttentionResult:
    q, k, v = part["q"], part["k"], part["v"]
    g, beta, initial = part.get("g"), part.get("beta"), part.get("initial_state")
    heads = v.shape[2]
    reads = torch.arange(heads, device=v.device) // (heads // q.shape[2])
    outputs: dict[int, list[torch.Tensor]] = {index: [] for index in range(q.shape[0])}
    finals = []
    for number, (batch, start, end) in enumerate(sequences.bounds):
        if initial is None:
            state = v.new_zeros((heads, k.shape[3], v.shape[3]))
        else:
            state = initial[number]
        for token in range(start, end):
            key, value = k[batch, token][reads], v[batch, token]
            if g is not None:
                decay = torch.exp(g[batch, token])
                state = state * decay.reshape(heads, -1, 1)
            if beta is not None:
                recalled = torch.einsum("hkv,hk->hv", state, key)
                value = beta[batch, token].unsqueeze(-1) * (value - recalled)
            state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
            query = q[batch, token][reads]
            outputs[batch].append(scale * torch.einsum("hkv,hk->hv", state, query))
        finals.append(state)
    empty = v.new_zeros((0, heads, v.shape[3]))
    rows = [torch.stack(tokens) if tokens else empty for tokens in outputs.values()]
    return LinearAttentionResult(torch.stack(rows), torch.stack(finals))
