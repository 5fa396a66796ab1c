"""Grouped products of a mixture of experts, forward and weight gradient.

token (1, T, K), weight (E, K, N), first_token_offset (E or E + 1, 1, 1) integers: group e is
the rows from offset e to offset e + 1 (to the last row for the last group, if there are E
offsets). Forward, on row i of group e:

    NONE:    out[i] = token[i] weight[e]
    GATHER:  out[i] = token[token_index[i]] weight[e]
    SCATTER: out[token_index[i]] = token[i] weight[e], or with token_ks
             out[token_index[i] top_k + token_ks[i]]: slot token_ks[i] of the token's top_k

Rows in no group are 0. Backward: dweight[e] = the sum over rows i of group e of token[i]^T
doutput[i]. On a CPU the offsets are read and each group is one product. On other devices
nothing may be read on the host, so every group's product runs over all rows and a mask keeps
its own: right, and E times the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.matmul import product_dtype
from tilewright.engines.aten.normalization import require_dim
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor as TensorRecord

Tensor = torch.Tensor
# For each group: its index and the (first, end) rows, or a column mask of them.
Groups = Callable[[Tensor], Iterator[tuple[int, Any]]]

_MODES = ("NONE", "GATHER", "SCATTER")


@implements_dense("moe_grouped_matmul")
def prepare_moe_grouped_matmul(operation: Any, device: torch.device) -> Kernel:
    """The grouped product of token and weight into (1, T, N)."""
    token, weight = operation.inputs["token"], operation.inputs["weight"]
    out = operation.outputs[_only(operation.outputs)]
    mode = getattr(operation.mode, "name", operation.mode)
    _check_forward(operation, mode, out)
    experts, rows = weight.dim[0], _row_count(operation, mode)
    groups = _grouping(operation.inputs["first_token_offset"], experts, rows, device)
    dtype = product_dtype(token, weight, out)
    load_token = casts.loader(token, dtype, device)
    load_weight = casts.loader(weight, dtype, device)
    store, port = casts.storer(out), _only(operation.outputs)
    multiply = _multiply_on_host if device.type == "cpu" else _multiply_on_device
    columns, out_rows = weight.dim[2], out.dim[1]
    slots = int(operation.top_k) if "token_ks" in operation.inputs else 0

    def run(inputs: Operands, outputs: Operands) -> None:
        tokens, weights = load_token(inputs["token"])[0], load_weight(inputs["weight"])
        index = None
        if mode != "NONE":
            index = inputs["token_index"].reshape(-1).to(torch.int64)
            if slots:
                index = index * slots + inputs["token_ks"].reshape(-1)
        members = groups(inputs["first_token_offset"])
        result = tokens.new_zeros(out_rows, columns)
        multiply(tokens, weights, members, index, mode, result)
        store(outputs[port], result.unsqueeze(0))

    return run


def _multiply_on_host(
    tokens: Tensor,
    weights: Tensor,
    groups: Iterator[tuple[int, Any]],
    index: Tensor | None,
    mode: str,
    result: Tensor,
) -> None:
    """Each group's rows by its weight. Indices of rows in no group are never used."""
    for expert, members in groups:
        if index is None:
            torch.matmul(tokens[members], weights[expert], out=result[members])
        elif mode == "GATHER":
            gathered = tokens.index_select(0, index[members])
            torch.matmul(gathered, weights[expert], out=result[members])
        else:
            result.index_copy_(0, index[members], torch.matmul(tokens[members], weights[expert]))


def _multiply_on_device(
    tokens: Tensor,
    weights: Tensor,
    groups: Iterator[tuple[int, Any]],
    index: Tensor | None,
    mode: str,
    result: Tensor,
) -> None:
    """All rows by each weight, masked; rows in no group read row 0 and write a spare row."""
    masks = [mask for _, mask in groups]
    if not masks:
        return
    in_a_group = torch.stack(masks).any(0)
    if index is not None and mode == "GATHER":
        tokens = tokens.index_select(0, torch.where(in_a_group.squeeze(1), index, 0))
    product = tokens.new_zeros(tokens.shape[0], result.shape[1])
    for mask, weight in zip(masks, weights, strict=True):
        product = torch.where(mask, torch.matmul(tokens, weight), product)
    if index is None or mode == "GATHER":
        result.copy_(product)
        return
    spare = result.shape[0]
    target = result.new_zeros(spare + 1, result.shape[1])
    target.index_copy_(0, torch.where(in_a_group.squeeze(1), index, spare), product)
    result.copy_(target[:spare])


@implements_dense("moe_grouped_matmul_bwd")
def prepare_moe_grouped_matmul_bwd(operation: Any, device: torch.device) -> Kernel:
    """dweight (E, K, N) of doutput (1, T, N) and token (1, T, K)."""
    gradient, token = operation.inputs["doutput"], operation.inputs["token"]
    out = operation.outputs["dweight"]
    for record, last in ((token, out.dim[1]), (gradient, out.dim[2])):
        require_dim(record, (1, token.dim[1], last), f"rows of dweight {out.dim}")
    experts = out.dim[0]
    groups = _grouping(operation.inputs["first_token_offset"], experts, token.dim[1], device)
    dtype = product_dtype(gradient, token, out)
    load_gradient = casts.loader(gradient, dtype, device)
    load_token = casts.loader(token, dtype, device)
    store = casts.storer(out)

    def run(inputs: Operands, outputs: Operands) -> None:
        gradients, tokens = load_gradient(inputs["doutput"])[0], load_token(inputs["token"])[0]
        for expert, members in groups(inputs["first_token_offset"]):
            if isinstance(members, slice):
                product = torch.matmul(tokens[members].t(), gradients[members])
            else:
                # Both sides are masked: a stray NaN in another group's row times 0 is NaN.
                own = torch.where(members, tokens, 0.0)
                product = torch.matmul(own.t(), torch.where(members, gradients, 0.0))
            store(outputs["dweight"][expert], product)

    return run


def _grouping(offsets: TensorRecord, experts: int, rows: int, device: torch.device) -> Groups:
    """How the rows of each group are found from the bound offsets."""
    count = offsets.dim[0] if offsets.dim else 0
    if count not in (experts, experts + 1) or any(extent != 1 for extent in offsets.dim[1:]):
        raise NotSupportedError(
            f"tensor {offsets.label()} has dim {offsets.dim}; expected ({experts} or "
            f"{experts + 1}, 1, 1), an offset a group and perhaps the end"
        )
    if not offsets.data_type.is_integer:
        raise NotSupportedError(
            f"tensor {offsets.label()} has data type {offsets.data_type.name}; offsets are integers"
        )

    def on_host(operand: Tensor) -> Iterator[tuple[int, slice]]:
        bounds = operand.reshape(-1).tolist()
        if count == experts:
            bounds.append(rows)
        for expert in range(experts):
            first, end = max(bounds[expert], 0), min(bounds[expert + 1], rows)
            yield expert, slice(first, max(end, first))

    def on_device(operand: Tensor) -> Iterator[tuple[int, Tensor]]:
        bounds = operand.reshape(-1)
        row = torch.arange(rows, device=operand.device).unsqueeze(1)
        for expert in range(experts):
            inside = row >= bounds[expert]
            if expert + 1 < count:
                inside = inside & (row < bounds[expert + 1])
            yield expert, inside

    return on_host if device.type == "cpu" else on_device


def _check_forward(operation: Any, mode: str, out: TensorRecord) -> None:
    token, weight = operation.inputs["token"], operation.inputs["weight"]
    if mode not in _MODES:
        raise NotSupportedError(
            f"moe_grouped_matmul mode {mode}; the ATen engine has {', '.join(_MODES)}"
        )
    top_k = int(getattr(operation, "top_k", 0))
    if "token_ks" in operation.inputs and (mode != "SCATTER" or top_k < 1):
        raise NotSupportedError(
            f"moe_grouped_matmul input 'token_ks' with mode {mode}, top_k {top_k}; it takes mode "
            "SCATTER and a top_k of at least 1"
        )
    if mode == "SCATTER" and top_k > 1 and "token_ks" not in operation.inputs:
        raise NotSupportedError(
            f"moe_grouped_matmul SCATTER with top_k {top_k} and no token_ks; the row of slot k of "
            "a token is not known without it"
        )
    if len(token.dim) != 3 or len(weight.dim) != 3 or token.dim[::2] != (1, weight.dim[1]):
        raise NotSupportedError(
            f"tensor {token.label()} has dim {token.dim}; expected (1, T, {weight.dim[1:2]}) for "
            f"the weight {weight.dim}"
        )
    index = operation.inputs.get("token_index")
    if (index is None) is not (mode == "NONE"):
        raise NotSupportedError(
            f"moe_grouped_matmul mode {mode} with token_index "
            f"{'absent' if index is None else 'given'}; GATHER and SCATTER take it, NONE does not"
        )
    rows = _row_count(operation, mode)
    if len(out.dim) != 3 or (out.dim[0], out.dim[2]) != (1, weight.dim[2]):
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; expected (1, T, {weight.dim[2]})"
        )
    if mode != "SCATTER" and out.dim[1] != rows:
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; the grouped product has {rows} rows"
        )
    if mode == "SCATTER" and index is not None and math.prod(index.dim) != token.dim[1]:
        raise NotSupportedError(
            f"tensor {index.label()} has dim {index.dim}; SCATTER takes one index for each of the "
            f"{token.dim[1]} rows of {token.label()}"
        )


def _row_count(operation: Any, mode: str) -> int:
    """Rows of the product: one for each index in GATHER, one a token otherwise."""
    if mode == "GATHER":
        return math.prod(operation.inputs["token_index"].dim)
    rows: int = operation.inputs["token"].dim[1]
    return rows


def _only(ports: Any) -> str:
    """The name of the single port."""
    (port,) = ports
    return str(port)
