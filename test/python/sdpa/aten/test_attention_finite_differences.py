"""Attention's gradients on the ATen engine against finite differences of its own forward.

In float64, a feature at a time, so that the oracle's backward is not the only witness. The loss is
sum(O * dO); each operand is moved along random directions, and the central difference of the loss
must be the gradient times the direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tilewright as tw

Tensor = torch.Tensor
STEP = 1e-5
# Second-order error STEP^2 times a third derivative of a few hundred, and rounding of the loss
# (1e-16 of its terms) over STEP.
TOLERANCE = 2e-8
DIRECTIONS = 3
BATCH, ROWS, KEYS, DEPTH, DEPTH_V = 2, 7, 9, 6, 5


@dataclass(frozen=True)
class Feature:
    """What is declared beside q, k and v; ``heads`` are query heads and key heads."""

    heads: tuple[int, int] = (2, 2)
    masks: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, ...] | None = None
    sink: bool = False
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    block_mask: bool = False
    soft_cap: float | None = None
    program: bool = False
    dropout: str | None = None
    rows: int = ROWS
    keys: int = KEYS


BOTTOM_RIGHT = tw.diagonal_alignment.BOTTOM_RIGHT
FEATURES = {
    "plain": Feature(),
    "causal": Feature(masks={"use_causal_mask": True}),
    "bottom_right": Feature(masks={"use_causal_mask_bottom_right": True}),
    "rows_that_see_nothing": Feature(
        masks={"use_causal_mask_bottom_right": True}, rows=9, keys=4, sink=True
    ),
    "window": Feature(masks={"use_causal_mask": True, "sliding_window_length": 3}),
    "band_bottom_right": Feature(
        masks={
            "diagonal_band_left_bound": 3,
            "diagonal_band_right_bound": 2,
            "diagonal_alignment": BOTTOM_RIGHT,
        }
    ),
    "band": Feature(masks={"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 2}),
    "gqa": Feature(heads=(6, 2)),
    "mqa_causal": Feature(heads=(3, 1), masks={"use_causal_mask": True}),
    "bias": Feature(bias=(BATCH, 2, ROWS, KEYS)),
    "bias_of_keys": Feature(bias=(1, 1, 1, KEYS)),
    "bias_of_rows": Feature(bias=(BATCH, 1, ROWS, 1), masks={"use_causal_mask": True}, sink=True),
    "alibi": Feature(heads=(3, 3), masks={"use_alibi_mask": True, "use_causal_mask": True}),
    "sink": Feature(sink=True, masks={"use_causal_mask": True}),
    "soft_cap": Feature(soft_cap=1.5),
    "score_program": Feature(program=True, masks={"use_causal_mask": True}),
    "padding": Feature(lengths=((7, 4), (5, 9))),
    "padding_bottom_right": Feature(
        lengths=((7, 2), (5, 9)), masks={"use_causal_mask_bottom_right": True}
    ),
    "empty_sequence": Feature(lengths=((0, 7), (9, 0)), sink=True),
    "dropout": Feature(dropout="philox"),
    "dropout_mask": Feature(dropout="mask"),
    "block_mask": Feature(block_mask=True, rows=130, keys=140),
    "all_of_them": Feature(
        heads=(4, 2),
        masks={"use_causal_mask_bottom_right": True, "use_alibi_mask": True},
        bias=(1, 4, ROWS, KEYS),
        sink=True,
        soft_cap=2.0,
        lengths=((7, 5), (8, 9)),
        dropout="philox",
    ),
}
L0 = ("plain", "soft_cap", "all_of_them")


class Problem:
    """Operands of a feature, its loss, and its gradients."""

    def __init__(self, feature: Feature, seed: int) -> None:
        self.feature = feature
        self.generator = torch.Generator().manual_seed(seed)
        heads, heads_kv = feature.heads
        rows, keys = feature.rows, feature.keys
        self.operands = {
            "q": self.normal(BATCH, heads, rows, DEPTH),
            "k": self.normal(BATCH, heads_kv, keys, DEPTH),
            "v": self.normal(BATCH, heads_kv, keys, DEPTH_V),
        }
        if feature.bias is not None:
            self.operands["bias"] = self.normal(*feature.bias)
        if feature.sink:
            self.operands["sink_token"] = self.normal(1, heads, 1, 1)
        self.fixed: dict[str, Tensor] = {}
        if feature.lengths is not None:
            for name, lengths in zip(("seq_len_q", "seq_len_kv"), feature.lengths, strict=True):
                self.fixed[name] = torch.tensor(lengths, dtype=torch.int32).view(-1, 1, 1, 1)
        if feature.block_mask:
            # Two tiles of keys, of which each row tile of a head sees one or both.
            bits = torch.randint(1, 4, (BATCH, heads, 2, 1), generator=self.generator)
            self.fixed["block_mask"] = bits.to(torch.uint8)
        if feature.dropout == "mask":
            kept = torch.randint(0, 2, (BATCH, 1, rows, keys), generator=self.generator)
            self.fixed["dropout_mask"] = kept.double()
            self.fixed["dropout_scale"] = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)
        self.d_o = self.normal(BATCH, heads, rows, DEPTH_V)
        self.forward_graph = self._declared()
        self.backward_graph = self._declared(is_backward=True)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _declared(self, *, is_backward: bool = False) -> Any:
        feature, rows = self.feature, self.feature.rows
        graph = tw.Graph(
            io_data_type="float64", compute_data_type="float64", handle=tw.create_handle("cpu")
        )
        passed: dict[str, Any] = {
            name: graph.tensor(tensor.shape, tensor.stride(), tensor.dtype, name=name)
            for name, tensor in {**self.operands, **self.fixed}.items()
        }
        options: dict[str, Any] = {
            "attn_scale": 0.7,
            "use_padding_mask": feature.lengths is not None,
            **feature.masks,
        }
        if feature.soft_cap is not None:
            options["score_mod"] = _soft_cap(feature.soft_cap)
        elif feature.program:
            options["score_mod"] = _program
        if feature.dropout == "philox":
            options["dropout"] = (0.3, *(graph.tensor_scalar(word) for word in (11, 5)))
        elif feature.dropout == "mask":
            options["dropout"] = (passed.pop("dropout_mask"), passed.pop("dropout_scale"))
        row_dim = (BATCH, feature.heads[0], rows)
        if is_backward:
            for name in ("o", "dO"):
                passed[name] = graph.tensor((*row_dim, DEPTH_V), name=name)
            passed["stats"] = graph.tensor((*row_dim, 1), name="stats")
            for name, source in (("dBias", "bias"), ("dSink_token", "sink_token")):
                if source in passed:
                    options[name] = graph.tensor(name=name)
            made = graph.sdpa_backward(**passed, **options)
        else:
            made = graph.sdpa(**passed, generate_stats=True, **options)
        operation = graph.operations[-1]
        for name, tensor in operation.outputs.items():
            tensor.set_output(True).set_name(name).set_data_type("float64")
        assert len(made) <= len(operation.outputs)
        graph.build()
        assert graph.selected_engine == "aten"
        return graph

    def forward(self, operands: dict[str, Tensor]) -> dict[str, Tensor]:
        return _run(self.forward_graph, {**operands, **self.fixed})

    def loss(self, operands: dict[str, Tensor]) -> float:
        return (self.forward(operands)["O"] * self.d_o).sum().item()

    def gradients(self) -> dict[str, Tensor]:
        left = self.forward(self.operands)
        pack = {**self.operands, **self.fixed, "dO": self.d_o}
        made = _run(self.backward_graph, {**pack, "o": left["O"], "stats": left["Stats"]})
        names = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}
        return {name: made[names[name]] for name in self.operands}

    def check(self) -> None:
        gradients = self.gradients()
        for name, value in self.operands.items():
            for _ in range(DIRECTIONS):
                direction = self.normal(*value.shape)
                ends = [
                    self.loss({**self.operands, name: value + sign * STEP * direction})
                    for sign in (1.0, -1.0)
                ]
                found = (ends[0] - ends[1]) / (2.0 * STEP)
                expected = (gradients[name] * direction).sum().item()
                size = max(1.0, abs(expected), math.sqrt(value.numel()))
                assert abs(found - expected) <= TOLERANCE * size, (name, found, expected)


def _run(graph: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    outputs = {
        tensor.name: torch.full(tensor.dim, torch.nan, dtype=torch.float64)
        for tensor in graph.operations[-1].outputs.values()
    }
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8)
    graph.execute({**inputs, **outputs}, workspace)
    return outputs


def _soft_cap(cap: float) -> Any:
    def score_mod(graph: Any, score: Any) -> Any:
        # Constants of the declaration are float32: powers of two and their halves are exact.
        small = graph.div(score, graph.tensor_scalar(cap))
        return graph.mul(graph.tanh(small), graph.tensor_scalar(cap))

    return score_mod


def _program(graph: Any, score: Any) -> Any:
    """No soft cap: of the score and of where it is."""
    place = graph.sub(graph.gen_index(score, 3), graph.gen_index(score, 2))
    weight = graph.cos(graph.add(place, graph.gen_index(score, 1)))
    return graph.add(graph.mul(score, weight), graph.sigmoid(graph.mul(score, score)))


@pytest.mark.L0
@pytest.mark.parametrize("name", L0)
def test_a_few_features(name: str) -> None:
    Problem(FEATURES[name], seed=1).check()


@pytest.mark.L1
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in L0])
def test_each_feature(name: str) -> None:
    Problem(FEATURES[name], seed=2).check()


@pytest.mark.L0
def test_a_wrong_gradient_is_found() -> None:
    problem = Problem(FEATURES["causal"], seed=3)
    right = problem.gradients()
    problem.gradients = lambda: {**right, "k": right["k"] * (1.0 + 1e-5)}  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="k"):
        problem.check()
