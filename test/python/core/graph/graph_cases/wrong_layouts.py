"""Wrong graphs: what no operation is about, and moves."""

from __future__ import annotations

from graph_cases.case import Wrong
from tilewright.graph.enums import (
    reshape_mode,
)
from tilewright.graph.graph import DeclaredGraph

HUGE = 2**62

LAYOUTS: Wrong = {
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
}
