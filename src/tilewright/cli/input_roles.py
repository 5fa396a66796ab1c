"""What values make sense for an input, by the operation ports that read it.

Data is normal with deviation 1, weights are scaled so that products stay near 1, and whatever a
port restricts (a mask, a variance, a table, a factor) is drawn inside its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tilewright.cli.draws import Draws
from tilewright.dtypes import DataType
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

# Draws numbers of a shape for a tensor on a port of an operation.
Rule = Callable[[Draws, Tensor, Operation, Sequence[int]], torch.Tensor]
Use = tuple[Operation, str]

EPSILON = 1e-5
_MOMENTUM = 0.1
_ROPE_BASE = 10_000.0
_KEEP_PROBABILITY = 0.75
# Softmax probabilities reach 1; these powers of two keep them below 448 and 57344.
_PROBABILITY_SCALES = {DataType.FP8_E4M3: 2.0**8, DataType.FP8_E5M2: 2.0**14}
_OUTPUT_SCALE = 2.0
_GRADIENT_SCALE = 0.5


def draw_values(
    draws: Draws, tensor: Tensor, uses: Sequence[Use], shape: Sequence[int]
) -> torch.Tensor:
    """Numbers of ``shape`` for an input that the operations of ``uses`` read."""
    for operation, port in uses:
        rule = _rule_of(operation, port)
        if rule is not None:
            return rule(draws, tensor, operation, shape)
    return _data(draws, tensor, shape)


def _rule_of(operation: Operation, port: str) -> Rule | None:
    kind = operation.kind
    if kind == "pointwise":
        return _pointwise_rule(getattr(operation, "mode", ""), port)
    if kind == "reduction":
        return _near_one if getattr(operation.mode, "name", "").startswith("MUL") else None  # type: ignore[attr-defined]
    for pattern, rules in _RULES:
        if kind.startswith(pattern) and port in rules:
            return rules[port]
    return None


def _data(draws: Draws, tensor: Tensor, shape: Sequence[int]) -> torch.Tensor:
    data_type = tensor.data_type
    if data_type is DataType.BOOLEAN:
        return draws.integers(shape, 0, 2)
    if data_type is DataType.FP8_E8M0:
        return torch.exp2(draws.integers(shape, -3, 4).to(torch.float32))
    if data_type.is_integer:
        # Small, so that sums of products stay exact in float32.
        return draws.integers(shape, 0 if data_type is DataType.UINT8 else -5, 6)
    return draws.normal(shape)


def _constant(value: float) -> Rule:
    return lambda draws, tensor, operation, shape: torch.full(tuple(shape), value)


def _uniform(low: float, high: float) -> Rule:
    return lambda draws, tensor, operation, shape: draws.uniform(shape, low, high)


def _integers(low: int, high: int) -> Rule:
    return lambda draws, tensor, operation, shape: draws.integers(shape, low, high)


def _near_one(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    if tensor.data_type.is_integer:
        return draws.integers(shape, 1, 3)
    return draws.signed(shape, 0.9, 1.1)


def _small(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    return draws.normal(shape, 0.1)


# -- products ---------------------------------------------------------------------------------


def _right_factor(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    if not tensor.data_type.is_floating or tensor.data_type.bits < 16:
        return _data(draws, tensor, shape)
    return draws.normal(shape, max(tensor.dim[-2], 1) ** -0.5)


def _filter(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    if tensor.data_type.bits < 16:
        return _data(draws, tensor, shape)
    return draws.normal(shape, max(math.prod(tensor.dim[1:]), 1) ** -0.5)


def _group_offsets(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    """First rows of the groups: from 0 up, and where there is one more entry, all rows last."""
    entries = math.prod(shape)
    index = operation.inputs.get("token_index")
    rows = operation.inputs["token"].dim[1] if index is None else math.prod(index.dim)
    groups = operation.inputs.get("weight")
    experts = groups.dim[0] if groups is not None else entries - 1
    offsets = torch.sort(draws.integers((entries,), 0, rows + 1)).values
    offsets[:1] = 0
    if entries == experts + 1:
        offsets[-1:] = rows
    return offsets.reshape(tuple(shape))


def _token_index(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    count = math.prod(shape)
    is_scatter = getattr(operation.mode, "name", "") == "SCATTER"  # type: ignore[attr-defined]
    tokens = operation.inputs["token"].dim[1]
    if is_scatter:
        out = next(iter(operation.outputs.values()))
        # Distinct rows: two writers of one row would leave the result to chance.
        return draws.permutation(max(out.dim[1], count))[:count].reshape(tuple(shape))
    return draws.integers(shape, 0, max(tokens, 1))


# -- attention and rope -----------------------------------------------------------------------


def _attention_scale(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    return torch.full(tuple(shape), max(operation.inputs["q"].dim[3], 1) ** -0.5)


def _block_mask(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    """Each bit is 1 with probability 3/4."""
    return draws.integers(shape, 0, 256) | draws.integers(shape, 0, 256)


def _page_table(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    """Distinct pages where there are enough of them, in random order."""
    port = "k" if operation.inputs.get("paged_attention_k_table") is tensor else "v"
    pages, entries = operation.inputs[port].dim[0], math.prod(shape)
    if pages >= entries:
        return draws.permutation(pages)[:entries].reshape(tuple(shape))
    return draws.integers(shape, 0, max(pages, 1))


def _probability_scale(power: int) -> Rule:
    def rule(
        draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
    ) -> torch.Tensor:
        scale = _PROBABILITY_SCALES.get(operation.inputs["v"].data_type, 1.0)
        return torch.full(tuple(shape), scale**power)

    return rule


def _angles(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    """position * base^(-2 i / R) over the last two axes; both halves equal where there are two."""
    if len(shape) < 2:
        return draws.uniform(shape, -math.pi, math.pi)
    rows, columns = shape[-2:]
    source = next(iter(operation.inputs.values()))
    rotated = getattr(operation, "rope_dim", 0) or source.dim[-1]
    pairs = max(rotated // 2, 1)
    index = torch.arange(columns, dtype=torch.float64) % pairs
    positions = torch.arange(rows, dtype=torch.float64)
    angles = positions[:, None] * _ROPE_BASE ** (-index / pairs)[None, :]
    return angles.expand(tuple(shape)).clone()


_DROPOUT: dict[str, Rule] = {
    "dropout_seed": _integers(0, 2**31),
    "dropout_offset": _integers(0, 2**16),
    "dropout_mask": lambda draws, tensor, operation, shape: (
        draws.uniform(shape, 0.0, 1.0) < _KEEP_PROBABILITY
    ).to(torch.float32),
    "dropout_scale": _constant(1 / _KEEP_PROBABILITY),
    "dropout_scale_inv": _constant(_KEEP_PROBABILITY),
}
_FACTOR = _uniform(0.5, 1.5)


def _block_factor(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    """Positive block scales: powers of two where the type holds nothing else."""
    if tensor.data_type is DataType.FP8_E8M0:
        return torch.exp2(draws.integers(shape, -2, 3).to(torch.float32))
    return draws.uniform(shape, 0.25, 2.0)


_ATTENTION: dict[str, Rule] = {
    **_DROPOUT,
    "attn_scale": _attention_scale,
    "block_mask": _block_mask,
    "paged_attention_k_table": _page_table,
    "paged_attention_v_table": _page_table,
}
_FP8_ATTENTION: dict[str, Rule] = {
    "scale_s": _probability_scale(1),
    "descale_s": _probability_scale(-1),
    "scale_o": _constant(_OUTPUT_SCALE),
    "descale_o": _constant(1 / _OUTPUT_SCALE),
    "scale_dP": _constant(_GRADIENT_SCALE),
    "descale_dP": _constant(1 / _GRADIENT_SCALE),
    **dict.fromkeys(
        ("descale_q", "descale_k", "descale_v", "descale_dO", "scale_dQ", "scale_dK", "scale_dV"),
        _FACTOR,
    ),
}
_MXFP8_FORWARD: dict[str, Rule] = dict.fromkeys(
    ("descale_q", "descale_k", "descale_v"), _block_factor
)
# Blocks of x and of x_T run along different axes: with one scale for the whole tensor the two hold
# the same numbers, as the operation demands.
MXFP8_BACKWARD_SCALES = {"q": 0.5, "k": 2.0, "v": 0.5, "dO": 2.0}
_MXFP8_BACKWARD: dict[str, Rule] = {
    f"descale_{port}{suffix}": _constant(scale)
    for port, scale in MXFP8_BACKWARD_SCALES.items()
    for suffix in ("", "_T")
}
_NORMALIZATION: dict[str, Rule] = {
    "epsilon": _constant(EPSILON),
    "momentum": _constant(_MOMENTUM),
    "scale": _uniform(0.5, 1.5),
    "mean": _small,
    "inv_variance": _uniform(0.5, 1.5),
    "in_running_mean": _small,
    "in_running_var": _uniform(0.5, 1.5),
}
# The first entry whose prefix the kind has and whose ports hold the port decides.
_RULES: tuple[tuple[str, dict[str, Rule]], ...] = (
    ("sdpa_fp8", _FP8_ATTENTION),
    ("sdpa_mxfp8_backward", _MXFP8_BACKWARD),
    ("sdpa_mxfp8", _MXFP8_FORWARD),
    ("sdpa", _ATTENTION),
    ("matmul", {"B": _right_factor}),
    ("conv_", {"weight": _filter, "filter": _filter}),
    (
        "moe_grouped_matmul",
        {
            "weight": _right_factor,
            "first_token_offset": _group_offsets,
            "token_index": _token_index,
            "token_ks": _integers(0, 1),
        },
    ),
    ("rope", {"freqs": _angles}),
    ("block_scale_dequantize", {"descale": _block_factor}),
    *(
        (kind, _NORMALIZATION)
        for kind in ("layernorm", "instancenorm", "adalayernorm", "rmsnorm", "batchnorm")
    ),
)


# -- pointwise --------------------------------------------------------------------------------

_POSITIVE = _uniform(0.25, 4.0)


def _away_from_zero(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    if tensor.data_type.is_integer:
        return draws.integers(shape, 1, 6)
    return draws.signed(shape, 0.5, 2.0)


def _with_ties(
    draws: Draws, tensor: Tensor, operation: Operation, shape: Sequence[int]
) -> torch.Tensor:
    """Multiples of a half in [-2, 2], so that equal pairs occur."""
    if not tensor.data_type.is_floating:
        return _data(draws, tensor, shape)
    return draws.integers(shape, -4, 5) / 2


_POINTWISE: dict[tuple[str, str], Rule] = {
    **{(mode, "in0"): _POSITIVE for mode in ("log", "sqrt", "rsqrt", "pow")},
    ("reciprocal", "in0"): _away_from_zero,
    ("div", "in1"): _away_from_zero,
    ("mod", "in1"): _away_from_zero,
    # Clear of the poles at odd multiples of pi / 2.
    ("tan", "in0"): _uniform(-1.2, 1.2),
    ("binary_select", "in2"): _integers(0, 2),
}


def _pointwise_rule(mode: str, port: str) -> Rule | None:
    if mode.startswith("cmp_"):
        return _with_ties
    if mode.startswith("logical_"):
        return _integers(0, 2)
    return _POINTWISE.get((mode, port))
