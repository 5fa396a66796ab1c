"""Wrong graphs of every family but attention, each with the message that it must get."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tilewright.errors import GraphError, TilewrightError
from tilewright.graph.enums import (
    moe_grouped_matmul_mode,
    norm_forward_phase,
    reduction_mode,
    reshape_mode,
)
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import operation_kinds
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
HUGE = 2**62
IMAGE = (2, 8, 6, 6)


class Case:
    """A graph under declaration; ``t`` declares an input by name and extents."""

    def __init__(self) -> None:
        self.g = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")

    def t(self, name: str, *dim: int, **more: object) -> Tensor:
        return self.g.tensor(dim, name=name, **more)  # type: ignore[arg-type]

    def channels(self, *names: str) -> list[Tensor]:
        return [self.t(name, 1, 8, 1, 1) for name in names]

    def norm(self, kind: str, *dims: tuple[int, ...], phase: object = TRAINING, **more: object):
        """A forward normalization of input, scale and bias with these dims."""
        operands = [self.t(n, *d) for n, d in zip(("x", "scale", "bias"), dims, strict=False)]
        operands += [None] * (3 - len(operands))
        epsilon = more.pop("epsilon", 1e-5)
        return getattr(self.g, kind)(phase, *operands, epsilon=epsilon, name="n", **more)

    def norm_backward(self, kind: str, *dims: tuple[int, ...]):
        names = ("grad", "x", "scale", "mean", "inv")
        operands = [self.t(n, *d) for n, d in zip(names, dims, strict=False)]
        return getattr(self.g, f"{kind}_backward")(*operands, name="n")

    def batchnorm(self, **changes: object):
        scale, bias, mean, var = self.channels("scale", "bias", "mean", "var")
        given = {
            "input": self.t("x", *IMAGE),
            "scale": scale,
            "bias": bias,
            "in_running_mean": mean,
            "in_running_var": var,
            "epsilon": 1e-5,
            "momentum": 0.1,
            **changes,
        }
        return self.g.batchnorm(name="bn", **given)

    def quantized(self, *data_types: str) -> Tensor:
        y, scale = self.g.block_scale_quantize(self.t("x", 4, 64), 32, name="q")
        for tensor, data_type in zip((y, scale), data_types, strict=True):
            tensor.set_data_type(data_type)
        return y

    def moe(self, mode: str = "NONE", **changes: object) -> Tensor:
        given = {
            "token": self.t("token", 1, 10, 8),
            "weight": self.t("weight", 3, 8, 16),
            "first_token_offset": self.t("offsets", 3, 1, 1, data_type="INT32"),
            **changes,
        }
        return self.g.moe_grouped_matmul(mode=moe_grouped_matmul_mode[mode], name="moe", **given)


Declare = Callable[[Case], object]
WRONG: dict[str, tuple[Declare, str]] = {
    # The graph
    "graph: no operation": (lambda c: None, "graph 'test_graph' has no operation"),
    "graph: no output": (
        lambda c: c.g.relu(c.t("x", 4)) and None,
        "graph 'test_graph' has no output; call set_output(True) on a tensor",
    ),
    "graph: input without dim": (
        lambda c: c.g.relu(c.g.tensor(name="x")),
        "tensor 'x' has no dim; declare it or call set_dim",
    ),
    "graph: stride of another rank": (
        lambda c: c.g.relu(c.g.tensor((2, 3), (1,), name="x")),
        "tensor 'x' has dim (2, 3) and stride (1,); expected one stride an axis",
    ),
    "graph: negative extent": (
        lambda c: c.g.relu(c.t("x", 2, -3)),
        "tensor 'x' has dim (2, -3); expected no negative extent",
    ),
    "graph: negative stride": (
        lambda c: c.g.relu(c.g.tensor((2, 3), (3, -1), name="x")),
        "tensor 'x' has stride (3, -1); expected no negative stride",
    ),
    "graph: rank 9": (
        lambda c: c.g.relu(c.t("x", *[1] * 9)),
        "tensor 'x' has rank 9; expected at most 8",
    ),
    "graph: span beyond 64 bits": (
        lambda c: c.g.relu(c.t("x", HUGE, 4)),
        "its span in bytes does not fit 64 bits",
    ),
    "graph: inferred span beyond 64 bits": (
        lambda c: c.g.add(c.t("a", 2**31, 1), c.t("b", 1, 2**31)),
        "its span in bytes does not fit 64 bits",
    ),
    "graph: overlapping output": (
        lambda c: c.g.relu(c.t("x", 4, 4), name="r").set_stride((1, 1)),
        "tensor 'r::out' has dim (4, 4) and stride (1, 1), whose elements overlap",
    ),
    "graph: virtual input": (
        lambda c: c.g.relu(c.t("x", 4, is_virtual=True)),
        "tensor 'x' is virtual but no operation makes it",
    ),
    "graph: input marked as output": (
        lambda c: c.g.relu(c.t("x", 4).set_output(True)),
        "tensor 'x' is an output but no operation makes it",
    ),
    "graph: no data type": (
        lambda c: setattr(c, "g", DeclaredGraph()) or c.g.relu(c.g.tensor((4,), name="x")),
        "tensor 'x' has no data type; set it, or give the graph an io_data_type",
    ),
    "graph: tensor of another graph": (
        lambda c: c.g.relu(DeclaredGraph().tensor((4,), name="x")),
        "pointwise: in0: tensor 'x' belongs to another graph",
    ),
    "graph: a number as tensor": (
        lambda c: c.g.add(c.t("x", 4), 1.0),
        "pointwise: in1 is float; expected a graph tensor",
    ),
    "graph: uid twice": (
        lambda c: (c.t("x", 4, uid=3), c.t("y", 4, uid=3)),
        "tensor 'y': uid 3 is taken by tensor 'x'; a uid names one tensor of a graph",
    ),
    "graph: negative uid": (
        lambda c: c.t("x", 4).set_uid(-2),
        "tensor 'x': uid is -2; expected an int >= 0",
    ),
    "graph: unknown data type": (
        lambda c: c.t("x", 4, data_type="FLOAT7"),
        "tensor 'x': data type: got 'FLOAT7'; accepted are FLOAT, DOUBLE",
    ),
    "graph: fractional extent": (
        lambda c: c.g.tensor((2.5,), name="x"),
        "tensor 'x': dim is (2.5,); expected a sequence of integers",
    ),
    "graph: pass by value with two elements": (
        lambda c: c.g.relu(c.t("x", 2, is_pass_by_value=True)),
        "tensor 'x' is passed by value and has dim (2,); expected one element",
    ),
    "graph: alignment of 24": (
        lambda c: c.g.relu(c.t("x", 4, alignment_value=24)),
        "tensor 'x' has alignment 24; expected a power of two in bytes, or 0",
    ),
    "graph: ragged offset of another length": (
        lambda c: c.g.relu(
            c.t("x", 3, 4).set_ragged_offset(c.t("offset", 3, 1, data_type="INT32"))
        ),
        "tensor 'offset' has dim (3, 1); expected (4, 1, ...): a ragged offset of tensor 'x'",
    ),
    "graph: ragged offset of floats": (
        lambda c: c.g.relu(c.t("x", 3, 4).set_ragged_offset(c.t("offset", 4, 1))),
        "tensor 'offset' has data type FLOAT; expected INT32 or INT64",
    ),
    "graph: a name as ragged offset": (
        lambda c: c.t("x", 3, 4).set_ragged_offset("offset"),
        "tensor 'x': ragged_offset is str; expected a graph tensor",
    ),
    "graph: unknown reordering": (
        lambda c: c.t("x", 4, reordering_type="F8"),
        "tensor 'x': reordering_type is 'F8'; accepted are NONE, INT8x32",
    ),
    "graph: a scalar that is a word": (
        lambda c: c.g.tensor_scalar("one"),
        "tensor_scalar: value is 'one'; expected a number",
    ),
    **{
        f"graph: {value!r} in {name}": (
            lambda c, value=value, name=name: c.g.mul(c.t("x", 4), c.g.tensor_scalar(value, name)),
            f"has value {value!r}; expected one that its data type {name} holds",
        )
        for value, name in (
            (1e39, "FLOAT"),
            (65536, "HALF"),
            (300, "INT8"),
            (-1, "UINT8"),
            (2**31, "INT32"),
            (float("nan"), "INT32"),
            (float("inf"), "INT64"),
        )
    },
    # Products
    "matmul: rank 1": (
        lambda c: c.g.matmul(c.t("A", 4), c.t("B", 4, 4)),
        "matmul: tensor 'A' (A) has rank 1; expected 2 to 8: a matrix, with leading batch axes",
    ),
    "matmul: different ranks": (
        lambda c: c.g.matmul(c.t("A", 2, 4, 4), c.t("B", 4, 4), name="p"),
        "matmul 'p': tensor 'B' (B) has rank 2; expected 3: A and B have the same rank",
    ),
    "matmul: inner extents": (
        lambda c: c.g.matmul(c.t("A", 4, 5), c.t("B", 4, 5)),
        "tensor 'B' (B) has dim (4, 5); expected 5 rows: the inner extents of A (4, 5) and B agree",
    ),
    "matmul: batch": (
        lambda c: c.g.matmul(c.t("A", 4, 2, 2), c.t("B", 3, 2, 2)),
        "its batch axes do not broadcast with A's (4, 2, 2)",
    ),
    "matmul: output dim": (
        lambda c: c.g.matmul(c.t("A", 4, 5), c.t("B", 5, 6), name="p").set_dim((4, 7)),
        "tensor 'p::C' (C) has dim (4, 7); expected (4, 6)",
    ),
    "moe: token batch": (
        lambda c: c.moe(token=c.t("token", 2, 5, 8)),
        "tensor 'token' (token) has dim (2, 5, 8); expected 1 on axis 0",
    ),
    "moe: inner extents": (
        lambda c: c.moe(weight=c.t("w", 3, 9, 16)),
        "tensor 'w' (weight) has dim (3, 9, 16); expected 8 on axis 1",
    ),
    "moe: offsets": (
        lambda c: c.moe(first_token_offset=c.t("o", 5, 1, 1, data_type="INT32")),
        "tensor 'o' (first_token_offset) has dim (5, 1, 1); expected (3 or 4, 1, 1)",
    ),
    "moe: fractional offsets": (
        lambda c: c.moe(first_token_offset=c.t("o", 3, 1, 1)),
        "tensor 'o' (first_token_offset) has data type FLOAT; expected one of INT32, INT64",
    ),
    "moe: gather without index": (
        lambda c: c.moe("GATHER"),
        "moe_grouped_matmul 'moe': input 'token_index' is missing; mode GATHER takes it",
    ),
    "moe: index without gather": (
        lambda c: c.moe(token_index=c.t("i", 1, 4, 1, data_type="INT32")),
        "tensor 'i' (token_index) is given in mode NONE",
    ),
    "moe: scatter of too few": (
        lambda c: c.moe("SCATTER", token_index=c.t("i", 1, 4, 1, data_type="INT32")),
        "tensor 'i' (token_index) has dim (1, 4, 1); expected (1, 10, 1)",
    ),
    "moe: negative top_k": (lambda c: c.moe(top_k=-1), "top_k is -1; expected at least 0"),
    "moe: output rows": (
        lambda c: c.moe().set_dim((1, 11, 16)),
        "tensor 'moe::out' (out) has dim (1, 11, 16); expected (1, 10, 16)",
    ),
    "moe_bwd: rows": (
        lambda c: c.g.moe_grouped_matmul_bwd(
            c.t("dy", 1, 9, 16), c.t("token", 1, 10, 8), c.t("o", 3, 1, 1, data_type="INT32")
        ),
        "tensor 'dy' (doutput) has dim (1, 9, 16); expected 10 on axis 1",
    ),
    # Convolutions
    "conv: no spatial axis": (
        lambda c: c.g.conv_fprop(c.t("x", 2, 8), c.t("w", 4, 8)),
        "conv_fprop: tensor 'x' (image) has rank 2; expected 3 to 5",
    ),
    "conv: different ranks": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3)),
        "tensor 'w' (weight) has rank 3; expected 4",
    ),
    "conv: channels": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 3, 3, 3)),
        "tensor 'w' (weight) has dim (4, 3, 3, 3); expected a divisor of 8 on axis 1",
    ),
    "conv: groups": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 6, 2, 3, 3)),
        "tensor 'w' (weight) has dim (6, 2, 3, 3); expected a multiple of 4 on axis 0",
    ),
    "conv: empty filter": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 0, 3)),
        "tensor 'w' (weight) has dim (4, 8, 0, 3); expected at least 1 on each spatial axis",
    ),
    "conv: filter larger than the image": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), dilation=[1, 3]),
        "with dilation (1, 3) it is larger than the padded image (2, 8, 6, 6) on axis 3",
    ),
    "conv: entries of stride": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), stride=[1, 1, 1]),
        "stride is (1, 1, 1); expected 2 entries, one a spatial axis of rank 4",
    ),
    "conv: stride 0": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), stride=[1, 0]),
        "stride is (1, 0); expected at least 1 on each axis",
    ),
    "conv: negative padding": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), padding=-1),
        "pre_padding is (-1, -1); expected at least 0 on each axis",
    ),
    "conv: fractional dilation": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), dilation=[1.5, 1]),
        "conv_fprop: attribute 'dilation' is 1.5; expected an integer",
    ),
    "conv: both paddings": (
        lambda c: c.g.conv_fprop(
            c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), padding=1, post_padding=[1, 1]
        ),
        "conv_fprop: padding is given beside pre_padding or post_padding",
    ),
    "conv: output dim": (
        lambda c: c.g.conv_fprop(c.t("x", *IMAGE), c.t("w", 4, 8, 3, 3), name="c").set_dim(IMAGE),
        "tensor 'c::out' (out) has dim (2, 8, 6, 6); expected (2, 4, 4, 4)",
    ),
    "dgrad: no dim": (
        lambda c: c.g.conv_dgrad(c.t("dy", 2, 4, 4, 4), c.t("w", 4, 8, 3, 3), name="c"),
        "conv_dgrad 'c': tensor 'c::out' (out) has no dim; call set_dim",
    ),
    "dgrad: image that gives another loss": (
        lambda c: c.g.conv_dgrad(c.t("dy", 2, 4, 4, 4), c.t("w", 4, 8, 3, 3)).set_dim((2, 8, 9, 6)),
        "tensor 'dy' (loss) has dim (2, 4, 4, 4); expected (2, 4, 7, 4)",
    ),
    "dgrad: image of another rank": (
        lambda c: c.g.conv_dgrad(c.t("dy", 2, 4, 4, 4), c.t("w", 4, 8, 3, 3)).set_dim((2, 8, 6)),
        "tensor 'w' (filter) has rank 4; expected 3",
    ),
    "wgrad: no dim": (
        lambda c: c.g.conv_wgrad(c.t("x", *IMAGE), c.t("dy", 2, 4, 4, 4)),
        "(out) has no dim; call set_dim: several filter extents give one loss",
    ),
    "wgrad: filter that gives another loss": (
        lambda c: c.g.conv_wgrad(c.t("x", *IMAGE), c.t("dy", 2, 4, 4, 4)).set_dim((4, 8, 5, 3)),
        "tensor 'dy' (loss) has dim (2, 4, 4, 4); expected (2, 4, 2, 4)",
    ),
    # Reductions and statistics
    "reduction: no dim": (
        lambda c: c.g.reduction(c.t("x", 4, 4), reduction_mode.ADD),
        "(out) has no dim; call set_dim: extent 1 marks the reduced axes",
    ),
    "reduction: no mode": (
        lambda c: c.g.reduction(c.t("x", 4, 4)).set_dim((4, 1)),
        "reduction: mode is NOT_SET; accepted are ADD, MUL, MIN",
    ),
    "reduction: unknown mode": (
        lambda c: c.g.reduction(c.t("x", 4, 4), "SUM"),
        "reduction: attribute 'mode' is 'SUM'; accepted are ADD, MUL",
    ),
    "reduction: part of an axis": (
        lambda c: c.g.reduction(c.t("x", 4, 4), reduction_mode.ADD).set_dim((4, 2)),
        "(out) has dim (4, 2); expected 1 or the extent of (4, 4) on each axis",
    ),
    "reduction: another rank": (
        lambda c: c.g.reduction(c.t("x", 4, 4), reduction_mode.ADD).set_dim((4,)),
        "(out) has dim (4,); expected 1 or the extent of (4, 4) on each axis",
    ),
    "genstats: rank 1": (
        lambda c: c.g.genstats(c.t("x", 4))[0],
        "genstats: tensor 'x' (input) has rank 1; expected 2 to 8: N, C and more axes",
    ),
    "genstats: integers": (
        lambda c: c.g.genstats(c.t("x", 4, 4, data_type="INT32"))[0],
        "tensor 'x' (input) has data type INT32; expected one of FLOAT, DOUBLE",
    ),
    "genstats: sum of another dim": (
        lambda c: c.g.genstats(c.t("x", *IMAGE), name="s")[0].set_dim((1, 1, 6, 6)),
        "tensor 's::SUM' (SUM) has dim (1, 1, 6, 6); expected (1, 8, 1, 1)",
    ),
    # Moves
    "reshape: no dim": (
        lambda c: c.g.reshape(c.t("x", 4, 4)),
        "reshape: tensor #2 (out) has no dim; call set_dim with the new shape",
    ),
    "reshape: other number of elements": (
        lambda c: c.g.reshape(c.t("x", 4, 4)).set_dim((4, 5)),
        "(out) has dim (4, 5); expected 16 elements, as tensor 'x' of dim (4, 4) has",
    ),
    "reshape: negative extents": (
        lambda c: c.g.reshape(c.t("x", 4, 4)).set_dim((-4, -4)),
        "(out) has dim (-4, -4); expected 16 elements",
    ),
    "reshape: view that would move elements": (
        lambda c: c.g.reshape(c.g.tensor((4, 4), (1, 4), name="x")).set_dim((16,)),
        "tensor 'x' (input) has dim (4, 4) and stride (1, 4); no strides express it as (16,)",
    ),
    "reshape: view of an expanded operand": (
        lambda c: c.g.reshape(c.g.tensor((4, 4, 2), (0, 2, 1), name="x")).set_dim((4, 8)),
        "has dim (4, 4, 2) and stride (0, 2, 1), which is expanded; its view as (4, 8) would name",
    ),
    "reshape: view with other strides": (
        lambda c: c.g.reshape(c.t("x", 2, 8)).set_dim((8, 2)).set_stride((1, 8)),
        "(out) has stride (1, 8); expected (2, 1): a VIEW_ONLY reshape keeps every element",
    ),
    "reshape: another type": (
        lambda c: (
            c.g.reshape(c.t("x", 4), reshape_mode=reshape_mode.LOGICAL)
            .set_dim((2, 2))
            .set_data_type("HALF")
        ),
        "(out) has data type HALF; expected one of FLOAT: reshape moves the elements of 'x'",
    ),
    "transpose: an axis twice": (
        lambda c: c.g.transpose(c.t("x", 2, 3), [0, 0]),
        "transpose: permutation is (0, 0); expected each of 0 to 1 once: the axes of tensor 'x'",
    ),
    "transpose: too few axes": (
        lambda c: c.g.transpose(c.t("x", 2, 3), [0]),
        "permutation is (0,); expected each of 0 to 1 once",
    ),
    "transpose: output dim": (
        lambda c: c.g.transpose(c.t("x", 2, 3), [1, 0], name="p").set_dim((2, 3)),
        "tensor 'p::out' (out) has dim (2, 3); expected (3, 2)",
    ),
    "slice: beyond the end": (
        lambda c: c.g.slice(c.t("x", 4, 4), [slice(0, 5)]),
        "slice: slice 0 is from 0 to 5; expected a range within 0 to 4",
    ),
    "slice: backwards": (
        lambda c: c.g.slice(c.t("x", 4, 4), [slice(None), slice(3, 1)]),
        "slice 1 is from 3 to 1; expected a range within 0 to 4",
    ),
    "slice: before the start": (
        lambda c: c.g.slice(c.t("x", 4, 4), [slice(-5, None)]),
        "slice 0 is from -5 to None; expected a range within 0 to 4",
    ),
    "slice: step 0": (
        lambda c: c.g.slice(c.t("x", 4, 4), [(0, 4, 0)]),
        "slice 0 has step 0; expected at least 1",
    ),
    "slice: too many": (
        lambda c: c.g.slice(c.t("x", 4), [slice(0, 1), slice(0, 1)]),
        "slices has 2 entries; expected at most 1, one an axis of tensor 'x' of dim (4,)",
    ),
    "slice: a number": (
        lambda c: c.g.slice(c.t("x", 4), [3]),
        "slice: got 3; expected a slice, or (start, stop) or with a step",
    ),
    "slice: fractional": (
        lambda c: c.g.slice(c.t("x", 4), [slice(0.5, 2)]),
        "slice: attribute 'slices' is 0.5; expected an integer",
    ),
    "concatenate: nothing": (
        lambda c: c.g.concatenate([], axis=0),
        "concatenate: inputs are none; expected input_0, input_1, ... without a gap",
    ),
    "concatenate: one tensor, no list": (
        lambda c: c.g.concatenate(c.t("x", 4), axis=0),
        "concatenate: inputs is Tensor; expected a list of tensors",
    ),
    "concatenate: another axis differs": (
        lambda c: c.g.concatenate([c.t("x", 4, 2), c.t("y", 4, 3)], axis=0),
        "tensor 'y' (input_1) has dim (4, 3); expected that of tensor 'x' (4, 2) on every axis "
        "but 0",
    ),
    "concatenate: other types": (
        lambda c: c.g.concatenate([c.t("x", 4), c.t("y", 4, data_type="HALF")], axis=0),
        "tensor 'y' (input_1) has data type HALF; expected FLOAT: concatenated tensors have one",
    ),
    "concatenate: axis": (
        lambda c: c.g.concatenate([c.t("x", 4, 2)], axis=2),
        "axis is 2; expected -2 to 1: tensor 'x' has rank 2",
    ),
    "concatenate: in_place_index": (
        lambda c: c.g.concatenate([c.t("x", 4), c.t("y", 4)], axis=0, in_place_index=2),
        "in_place_index is 2; expected 0 to 1: an input",
    ),
    "concatenate: output dim": (
        lambda c: c.g.concatenate([c.t("x", 4), c.t("y", 4)], axis=0, name="p").set_dim((9,)),
        "tensor 'p::out' (out) has dim (9,); expected (8,)",
    ),
    # Normalizations
    "norm: no phase": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8), phase=norm_forward_phase.NOT_SET)[0],
        "layernorm 'n': norm_forward_phase is NOT_SET; accepted are TRAINING, INFERENCE",
    ),
    "norm: a word as phase": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8), phase="TRAIN")[0],
        "layernorm: attribute 'norm_forward_phase' is 'TRAIN'; accepted are TRAINING, INFERENCE",
    ),
    "layernorm: scale of another rank": (
        lambda c: c.norm("layernorm", (4, 8), (8,))[0],
        "tensor 'scale' (scale) has dim (8,); expected 1 or the extent of (4, 8) on each axis",
    ),
    "layernorm: scale that does not fit": (
        lambda c: c.norm("layernorm", (4, 8), (1, 4))[0],
        "tensor 'scale' (scale) has dim (1, 4); expected 1 or the extent of (4, 8)",
    ),
    "layernorm: scale that varies nowhere": (
        lambda c: c.norm("layernorm", (4, 8), (1, 1))[0],
        "tensor 'scale' (scale) has dim (1, 1); expected the extent of the input (4, 8) on an axis",
    ),
    "layernorm: bias of another dim": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8), (1, 1))[0],
        "tensor 'bias' (bias) has dim (1, 1); expected (1, 8): bias has the scale's dim",
    ),
    "layernorm: mean of another dim": (
        lambda c: c.norm("layernorm", (4, 8), (1, 8))[1].set_dim((1, 8)),
        "tensor 'n::mean' (mean) has dim (1, 8); expected (4, 1)",
    ),
    "layernorm: integers": (
        lambda c: c.g.layernorm(
            INFERENCE, c.t("x", 4, 8, data_type="INT8"), c.t("s", 1, 8), None, 0.1
        )[0],
        "tensor 'x' (input) has data type INT8; expected one of FLOAT, DOUBLE",
    ),
    "rmsnorm: no epsilon": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=None)[0],
        "rmsnorm 'n': the required input 'epsilon' is missing",
    ),
    "rmsnorm: negative epsilon": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=-1.0)[0],
        "(epsilon) has value -1.0; expected at least 0",
    ),
    "rmsnorm: NaN epsilon": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=math.nan)[0],
        "(epsilon) has value nan; expected at least 0",
    ),
    "rmsnorm: epsilon of eight elements": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8), epsilon=c.t("eps", 1, 8))[0],
        "tensor 'eps' (epsilon) has dim (1, 8); expected one element: epsilon is a scalar",
    ),
    "rmsnorm: output dim": (
        lambda c: c.norm("rmsnorm", (4, 8), (1, 8))[0].set_dim((8, 4)),
        "tensor 'n::Y' (Y) has dim (8, 4); expected (4, 8): Y has the input's dim",
    ),
    "instancenorm: no spatial axis": (
        lambda c: c.norm("instancenorm", (4, 8), (1, 8))[0],
        "tensor 'x' (input) has rank 2; expected 3 to 8: N, C and spatial axes",
    ),
    "instancenorm: scale of the spatial axes": (
        lambda c: c.norm("instancenorm", IMAGE, (1, 1, 6, 6))[0],
        "tensor 'scale' (scale) has dim (1, 1, 6, 6); expected (1, 8, 1, 1): one value a channel",
    ),
    "adalayernorm: scale of another batch": (
        lambda c: c.norm("adalayernorm", (4, 10, 8), (3, 1, 8))[0],
        "tensor 'scale' (scale) has dim (3, 1, 8); expected 1 or the extent of (4, 10, 8)",
    ),
    "layernorm_backward: gradient": (
        lambda c: c.norm_backward("layernorm", (4, 9), (4, 8), (1, 8), (4, 1), (4, 1))[0],
        "tensor 'grad' (grad) has dim (4, 9); expected (4, 8): the gradient of Y",
    ),
    "instancenorm_backward: statistics": (
        lambda c: c.norm_backward(
            "instancenorm", IMAGE, IMAGE, (1, 8, 1, 1), (1, 8, 1, 1), (1, 8, 1, 1)
        )[0],
        "tensor 'mean' (mean) has dim (1, 8, 1, 1); expected (2, 8, 1, 1)",
    ),
    "adalayernorm_backward: DScale": (
        lambda c: c.norm_backward(
            "adalayernorm", (4, 5, 8), (4, 5, 8), (4, 1, 8), (4, 5, 1), (4, 5, 1)
        )[1].set_dim((1, 1, 8)),
        "tensor 'n::DScale' (DScale) has dim (1, 1, 8); expected (4, 1, 8)",
    ),
    "rmsnorm_backward: inv_variance": (
        lambda c: c.g.rmsnorm_backward(
            c.t("g", 4, 8), c.t("x", 4, 8), c.t("s", 1, 8), c.t("inv", 4, 8), has_dbias=False
        )[0],
        "tensor 'inv' (inv_variance) has dim (4, 8); expected (4, 1)",
    ),
    "batchnorm: running statistics in part": (
        lambda c: c.batchnorm(in_running_var=None)[0],
        "batchnorm 'bn': input 'in_running_var' is missing beside in_running_mean, momentum",
    ),
    "batchnorm: momentum alone": (
        lambda c: c.batchnorm(in_running_mean=None, in_running_var=None)[0],
        "input 'in_running_mean' is missing beside momentum",
    ),
    "batchnorm: momentum above 1": (
        lambda c: c.batchnorm(momentum=1.5)[0],
        "(momentum) has value 1.5; expected 0 to 1",
    ),
    "batchnorm: scale of the wrong axis": (
        lambda c: c.batchnorm(scale=c.t("s", 8, 1, 1, 1))[0],
        "tensor 's' (scale) has dim (8, 1, 1, 1); expected (1, 8, 1, 1): scale is one value",
    ),
    "batchnorm: peer of integers": (
        lambda c: c.batchnorm(peer_stats=[c.t("peer", 1, 8, 1, 1, data_type="INT32")])[0],
        "tensor 'peer' (peer_stats_0) has data type INT32; expected one of FLOAT",
    ),
    "batchnorm_inference: rank 1": (
        lambda c: c.g.batchnorm_inference(c.t("x", 8), *(c.t(n, 8) for n in "mvsb")),
        "tensor 'x' (input) has rank 1; expected 2 to 8: N, C and more axes",
    ),
    "batchnorm_backward: gradient": (
        lambda c: c.g.batchnorm_backward(
            c.t("g", 2, 8, 6), c.t("x", *IMAGE), *c.channels("s", "m", "v")
        )[0],
        "tensor 'g' (grad) has dim (2, 8, 6); expected (2, 8, 6, 6)",
    ),
    # Block-scaled formats
    "quantize: no block size": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 64), 0)[0],
        "block_scale_quantize: block_size is 0; expected at least 1",
    ),
    "quantize: axis": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 64), 32, axis=2)[0],
        "axis is 2; expected -2 to 1: tensor 'x' has rank 2",
    ),
    "quantize: types not set": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 64), 32, name="q")[0],
        "tensor 'q::Y' (Y) has data type FLOAT; expected one of FP8_E4M3, FP8_E5M2, FP4_E2M1",
    ),
    "quantize: scale of halves": (
        lambda c: c.quantized("FP8_E4M3", "HALF"),
        "tensor 'q::scale' (scale) has data type HALF; expected one of FP8_E8M0, FP8_E4M3, FLOAT",
    ),
    "quantize: scale dim": (
        lambda c: c.g.block_scale_quantize(c.t("x", 4, 65), 32, name="q")[1].set_dim((4, 2)),
        "tensor 'q::scale' (scale) has dim (4, 2); expected (4, 3): one entry a block of 32",
    ),
    "quantize: tiles along a batch axis": (
        lambda c: c.g.block_scale_quantize(c.t("x", 64, 4, 4), 32, axis=0, name="q")[
            1
        ].set_reordering_type("F8_128x4"),
        "tensor 'q::scale' (scale) has reordering F8_128x4 and blocks run along axis 0",
    ),
    "quantize: transposed vector": (
        lambda c: c.g.block_scale_quantize(c.t("x", 64), 32, transpose=True)[0],
        "tensor 'x' (input) has dim (64,); expected two axes or more",
    ),
    "dequantize: descale dim": (
        lambda c: c.g.block_scale_dequantize(
            c.t("x", 4, 64, data_type="FP8_E4M3"), c.t("d", 4, 3), 32
        ),
        "tensor 'd' (descale) has dim (4, 3); expected (4, 2): one entry a block of (32,)",
    ),
    "dequantize: too many block sizes": (
        lambda c: c.g.block_scale_dequantize(
            c.t("x", 64, data_type="FP8_E4M3"), c.t("d", 2), [32, 32]
        ),
        "block_size is (32, 32); expected positive numbers, one or up to one an axis of tensor 'x'",
    ),
    "dequantize: wide elements": (
        lambda c: c.g.block_scale_dequantize(c.t("x", 4, 64), c.t("d", 4, 2), 32),
        "tensor 'x' (input) has data type FLOAT; expected one of FP8_E4M3",
    ),
    # Rotary embedding
    "rope: rank 3": (
        lambda c: c.g.rope(c.t("x", 4, 8, 16), c.t("f", 1, 8, 16)),
        "rope: tensor 'x' (input) has rank 3; expected 4: (B, H, S, D)",
    ),
    "rope: odd rope_dim": (
        lambda c: c.g.rope(c.t("x", 2, 4, 8, 16), c.t("f", 1, 1, 8, 16), rope_dim=7),
        "rope_dim is 7; expected an even number of at most 16, or 0 for all",
    ),
    "rope: rope_dim beyond D": (
        lambda c: c.g.rope(c.t("x", 2, 4, 8, 16), c.t("f", 1, 1, 8, 16), rope_dim=18),
        "rope_dim is 18; expected an even number of at most 16, or 0 for all",
    ),
    "rope: angles of another length": (
        lambda c: c.g.rope(c.t("x", 2, 4, 8, 16), c.t("f", 1, 1, 9, 16)),
        "tensor 'f' (freqs) has dim (1, 1, 9, 16); expected (2 or 1, 1, 8 or 1, 16 or 8)",
    ),
    "rope_backward: integer angles": (
        lambda c: c.g.rope_backward(
            c.t("dy", 2, 4, 8, 16), c.t("f", 1, 1, 8, 16, data_type="INT32")
        ),
        "tensor 'f' (freqs) has data type INT32; expected one of FLOAT, DOUBLE",
    ),
    # Pointwise
    "pointwise: operands that do not broadcast": (
        lambda c: c.g.add(c.t("a", 4, 3), c.t("b", 4, 2)),
        "pointwise add: tensor 'b' has dim (4, 2); expected 1 or the extent of (4, 3)",
    ),
    "pointwise: output smaller than the operands": (
        lambda c: c.g.add(c.t("a", 4, 3), c.t("b", 1, 3), name="s").set_dim((1, 3)),
        "pointwise add 's': tensor 's::out' (out) has dim (1, 3); tensor 'a' (in0, a) of dim "
        "(4, 3) does not broadcast to it",
    ),
    "pointwise: exponential of integers": (
        lambda c: c.g.exp(c.t("x", 4, data_type="INT32")),
        "tensor 'x' (input) has data type INT32; expected a floating type: exp gives fractions",
    ),
    "pointwise: gradient of another dim": (
        lambda c: c.g.relu_backward(c.t("loss", 1, 4), c.t("x", 4, 4)),
        "tensor 'loss' (in0) has dim (1, 4); expected (4, 4): the gradient has the dim of the",
    ),
    "pointwise: mask that does not broadcast": (
        lambda c: c.g.binary_select(c.t("a", 4), c.t("b", 4), c.t("mask", 3)),
        "tensor 'mask' has dim (3,); expected 1 or the extent of (4,) on each axis",
    ),
    "pointwise: a missing mask": (
        lambda c: c.g.binary_select(c.t("a", 4), c.t("b", 4), None),
        "operand 'mask' (in2) is missing; binary_select takes input0, input1, mask",
    ),
    "pointwise: clips that cross": (
        lambda c: c.g.relu(c.t("x", 4), lower_clip=2.0, upper_clip=1.0),
        "lower_clip is 2.0 and upper_clip 1.0; expected lower_clip <= upper_clip",
    ),
    "pointwise: NaN slope": (
        lambda c: c.g.leaky_relu(c.t("x", 4), math.nan),
        "pointwise leaky_relu: negative_slope is nan; expected a number",
    ),
    "pointwise: softplus_beta 0": (
        lambda c: c.g.softplus(c.t("x", 4), softplus_beta=0.0),
        "softplus_beta is 0.0; expected a positive number: softplus divides by it",
    ),
    "pointwise: index of an axis that is not there": (
        lambda c: c.g.gen_index(c.t("x", 4, 4), axis=2),
        "pointwise gen_index: axis is 2; expected -2 to 1: tensor 'x' has rank 2",
    ),
}


def message_of(declare: Declare) -> str:
    """What validating the declared graph says; the declared tensor is its output."""
    case = Case()
    with pytest.raises(GraphError) as caught:
        result = declare(case)
        if isinstance(result, Tensor):
            result.set_output(True)
        case.g.validate()
    assert isinstance(caught.value, TilewrightError) and isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_graph_gets_its_message(case: str) -> None:
    declare, message = WRONG[case]
    assert message in message_of(declare)


def test_the_table_reaches_every_family_and_repeats_nothing() -> None:
    assert len(WRONG) >= 60
    messages = [message for _, message in WRONG.values()]
    # Two spans beyond 64 bits, declared and inferred, say the same.
    assert len(set(messages)) >= len(messages) - 2
    refused = " ".join(message_of(declare) for declare, _ in WRONG.values())
    attention = {kind for kind in operation_kinds() if kind.startswith("sdpa")}
    missing = [k for k in sorted(operation_kinds().keys() - attention) if k not in refused]
    assert missing == []


def test_a_wrong_graph_stays_open_and_can_be_mended() -> None:
    case = Case()
    out = case.g.reduction(case.t("x", 4, 4), reduction_mode.ADD)
    out.set_output(True)
    with pytest.raises(GraphError):
        case.g.validate()
    out.set_dim((4, 1))
    case.g.validate()
    assert case.g.is_validated


def test_an_operation_that_reads_a_later_result_is_refused() -> None:
    """Operations run in declaration order; the methods cannot declare this, JSON can."""
    case = Case()
    first = case.g.exp(case.t("x", 4), name="first")
    second = case.g.exp(first, name="second")
    second.set_output(True)
    case.g.operations.reverse()
    with pytest.raises(GraphError) as caught:
        case.g.validate()
    assert (
        "pointwise exp 'second': tensor 'first::out' (in0) is read before pointwise exp 'first' "
        "makes it; operations run in declaration order"
    ) in str(caught.value)


def test_a_tensor_with_two_producers_is_refused() -> None:
    case = Case()
    case.g.exp(case.t("x", 4), name="first").set_output(True)
    case.g.operations.append(case.g.operations[0])
    with pytest.raises(GraphError, match=r"is already made by pointwise exp 'first'"):
        case.g.validate()


def test_a_validated_graph_is_closed() -> None:
    case = Case()
    out = case.g.exp(case.t("x", 4), name="e").set_output(True)
    case.g.validate()
    case.g.validate()
    for change in (
        lambda: out.set_dim((4,)),
        lambda: case.t("late", 4),
        lambda: case.g.exp(out),
    ):
        with pytest.raises(GraphError, match=r"is validated and can no longer change"):
            change()
