"""From an attention operation and its buffers to the operands and options of the plain functions.

Lengths, pages, dropout, bounds and score programs are read here, for all attention kinds alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import pointwise
from tilewright.oracle.attention_problem import (
    Block,
    HeadSource,
    MaskedDropout,
    SeededDropout,
)
from tilewright.oracle.formats import to_float64
from tilewright.oracle.layout import ragged_lengths

__all__ = ["options_of", "paged_source", "scalar"]

Inputs = Mapping[str, torch.Tensor]


def scalar(inputs: Inputs, port: str, default: float = 1.0) -> float:
    """The number on a one-element port, or the default of an absent one."""
    if port not in inputs:
        return default
    return float(to_float64(inputs[port]).reshape(-1)[0])


def _integer(inputs: Inputs, port: str) -> int:
    return int(inputs[port].reshape(-1)[0])


def _field(operation: Any, *names: str) -> Any:
    """The first of these attributes that is set."""
    for name in names:
        value = getattr(operation, name, None)
        if value is not None:
            return value
    return None


def _lengths(operation: Any, inputs: Inputs, side: str) -> list[int] | None:
    """Actual lengths: given, from their running sums, or from ragged offsets."""
    if f"seq_len_{side}" in inputs:
        return [int(entry) for entry in inputs[f"seq_len_{side}"].reshape(-1).tolist()]
    if f"cu_seq_len_{side}" in inputs:
        sums = [int(entry) for entry in inputs[f"cu_seq_len_{side}"].reshape(-1).tolist()]
        return [after - before for before, after in itertools.pairwise(sums)]
    port = "q" if side == "q" else "k"
    if f"{port}.ragged_offset" in inputs:
        return ragged_lengths(operation.inputs[port], inputs[f"{port}.ragged_offset"])
    return None


def _dropout(operation: Any, inputs: Inputs) -> SeededDropout | MaskedDropout | None:
    probability = getattr(operation, "dropout_probability", None)
    if probability is not None and "dropout_seed" in inputs:
        return SeededDropout(
            float(probability),
            _integer(inputs, "dropout_seed"),
            _integer(inputs, "dropout_offset") if "dropout_offset" in inputs else 0,
        )
    if "dropout_mask" in inputs:
        return MaskedDropout(inputs["dropout_mask"], scalar(inputs, "dropout_scale"))
    return None


def options_of(operation: Any, inputs: Inputs) -> dict[str, Any]:
    """Keyword options of `attention.forward` for an operation of any attention kind.

    `attn_scale` None is 1 here, as in the graph API (the plain functions default to D ** -0.5).
    """
    causal_bottom = bool(_field(operation, "use_causal_mask_bottom_right"))
    causal = bool(_field(operation, "use_causal_mask")) or causal_bottom
    alignment = getattr(_field(operation, "diagonal_alignment"), "name", "TOP_LEFT")
    right = _field(operation, "diagonal_band_right_bound", "right_bound")
    left = _field(operation, "diagonal_band_left_bound", "sliding_window_length", "left_bound")
    number = getattr(operation, "attn_scale", None)
    return {
        "scale": scalar(inputs, "attn_scale", 1.0 if number is None else float(number)),
        "left_bound": left,
        "right_bound": 0 if causal else right,
        "bottom_right": causal_bottom or alignment == "BOTTOM_RIGHT",
        "block_mask": inputs.get("block_mask"),
        "seq_len_q": _lengths(operation, inputs, "q"),
        "seq_len_kv": _lengths(operation, inputs, "kv"),
        "bias": inputs.get("bias"),
        "alibi": bool(_field(operation, "use_alibi_mask")),
        "sink": inputs.get("sink_token"),
        "dropout": _dropout(operation, inputs),
        **_score_programs(operation, inputs),
    }


def paged_source(
    container: torch.Tensor, table: torch.Tensor, lengths: list[int], max_rows: int
) -> HeadSource:
    """Keys or values whose tokens lie in pages.

    Token t of batch index b lies in row t % page_size of page `table[b, 0, t // page_size, 0]` of
    the container (pages, heads, page_size, D). Only tokens below the length are looked up, so
    that unused table entries and free rows may hold anything; the rest read as 0.
    """
    page_size = container.shape[2]

    def read(batch: int, head: int) -> torch.Tensor:
        rows = torch.zeros(
            (max_rows, container.shape[3]), dtype=torch.float64, device=container.device
        )
        for token in range(0, min(lengths[batch], max_rows), page_size):
            count = min(page_size, lengths[batch] - token, max_rows - token)
            page = int(table[batch, 0, token // page_size, 0])
            rows[token : token + count] = to_float64(container[page, head, :count])
        return rows

    dim = (table.shape[0], container.shape[1], max_rows, container.shape[3])
    return HeadSource(dim, container.device, read)


def kv_sources(
    operation: Any, inputs: Inputs, options: Mapping[str, Any]
) -> tuple[torch.Tensor | HeadSource, torch.Tensor | HeadSource]:
    """k and v, through their page tables if they have any."""
    sources: list[torch.Tensor | HeadSource] = []
    for port in ("k", "v"):
        table = inputs.get(f"paged_attention_{port}_table")
        if table is None:
            sources.append(inputs[port])
            continue
        capacity = table.shape[2] * inputs[port].shape[2]
        max_rows = int(_field(operation, "paged_attention_max_seq_len_kv") or capacity)
        lengths = options["seq_len_kv"] or [max_rows] * table.shape[0]
        sources.append(paged_source(inputs[port], table, lengths, max_rows))
    return sources[0], sources[1]


def _score_programs(operation: Any, inputs: Inputs) -> dict[str, Any]:
    """`score_mod` and `score_mod_gradient` of the operation's score programs."""
    program = getattr(operation, "score_mod", None)
    if program is None:
        return {}
    run = _block_program(operation, inputs, program)

    def forward(scores: torch.Tensor, block: Block) -> torch.Tensor:
        return run({id(program.input): scores}, block)

    gradient_program = getattr(operation, "score_mod_bprop", None)
    if gradient_program is not None:
        run_gradient = _block_program(operation, inputs, gradient_program)

        def gradient(d_scores: torch.Tensor, scores: torch.Tensor, block: Block) -> torch.Tensor:
            given = {
                id(gradient_program.gradient): d_scores,
                id(gradient_program.input): scores,
            }
            return run_gradient(given, block)
    else:

        def gradient(d_scores: torch.Tensor, scores: torch.Tensor, block: Block) -> torch.Tensor:
            # The derivative of an arbitrary pointwise program: float64 autograd of its forward.
            with torch.enable_grad():
                leaf = scores.detach().requires_grad_(True)
                result = forward(leaf, block)
                if not result.requires_grad:
                    return torch.zeros_like(d_scores)
                (found,) = torch.autograd.grad(result, leaf, d_scores, allow_unused=True)
            return torch.zeros_like(d_scores) if found is None else found

    return {"score_mod": forward, "score_mod_gradient": gradient}


def _block_program(
    operation: Any, inputs: Inputs, program: Any
) -> Callable[[Mapping[int, torch.Tensor], Block], torch.Tensor]:
    """A function that runs a score program on one block of scores.

    Tensors of the program broadcast to (B, Hq, Sq, Skv); of each the block's part is taken, and
    gen_index counts from the block's place in the whole.
    """
    external = {
        id(record): inputs[port]
        for port, record in operation.inputs.items()
        if port.startswith("score_mod_")
    }

    def part(record: Any, values: Mapping[int, torch.Tensor], block: Block) -> torch.Tensor:
        if id(record) in values:
            return values[id(record)]
        tensor = external[id(record)]
        whole = tensor.reshape(*([1] * (4 - tensor.dim())), *tensor.shape)
        batch = block.batch if whole.shape[0] > 1 else 0
        head = block.head if whole.shape[1] > 1 else 0
        rows = slice(block.start, block.end) if whole.shape[2] > 1 else slice(0, 1)
        return to_float64(whole[batch, head, rows])

    def run(given: Mapping[int, torch.Tensor], block: Block) -> torch.Tensor:
        values = dict(given)
        for step in program.operations:
            ports = [step.inputs[port] for port in ("in0", "in1", "in2") if port in step.inputs]
            operands = [part(record, values, block) for record in ports]
            if step.mode == "gen_index":
                result = _block_index(step, operands[0], ports[0].dim, block)
            else:
                result = pointwise.evaluate(step.mode, operands, pointwise.parameters_of(step))
            values[id(step.outputs["out"])] = result
        result = to_float64(part(program.output, values, block))
        scores = next(iter(given.values()))
        return result.expand(scores.shape)

    return run


def _block_index(
    step: Any, operand: torch.Tensor, dim: tuple[int, ...], block: Block
) -> torch.Tensor:
    """gen_index over an axis of (B, Hq, Sq, Skv), of the block's rows and columns."""
    axis = step.axis % 4
    origin = (block.batch, block.head, block.start, 0)[axis] if dim[axis] > 1 else 0
    if axis < 2:
        return torch.full_like(operand, float(origin))
    count = torch.arange(operand.shape[axis - 2], device=operand.device) + origin
    shaped = count[:, None] if axis == 2 else count[None, :]
    return shaped.expand(operand.shape).to(torch.float64)
