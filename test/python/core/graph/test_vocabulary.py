"""The operation methods: names, argument names, defaults, and what a call records."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import operation_kinds
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES, PointwiseKind

pytestmark = pytest.mark.L0

# Method -> its positional arguments in order, before compute_data_type and name.
ARGUMENTS = {
    "matmul": "A B",
    "conv_fprop": "image weight padding stride dilation",
    "conv_dgrad": "loss filter padding stride dilation",
    "conv_wgrad": "image loss padding stride dilation",
    "genstats": "input",
    "reduction": "input mode",
    "slice": "input slices",
    "transpose": "input permutation",
    "layernorm": "norm_forward_phase input scale bias epsilon",
    "instancenorm": "norm_forward_phase input scale bias epsilon",
    "adalayernorm": "norm_forward_phase input scale bias epsilon",
    "rmsnorm": "norm_forward_phase input scale bias epsilon",
    "layernorm_backward": "grad input scale mean inv_variance",
    "instancenorm_backward": "grad input scale mean inv_variance",
    "adalayernorm_backward": "grad input scale mean inv_variance",
    "rmsnorm_backward": "grad input scale inv_variance has_dbias",
    "batchnorm": ("input scale bias in_running_mean in_running_var epsilon momentum peer_stats"),
    "batchnorm_inference": "input mean inv_variance scale bias",
    "batchnorm_backward": "grad input scale mean inv_variance peer_stats",
    "block_scale_dequantize": "input descale block_size is_negative_scale",
    "block_scale_quantize": "input block_size axis transpose",
    "moe_grouped_matmul": "token weight first_token_offset token_index token_ks mode",
    "moe_grouped_matmul_bwd": "doutput token first_token_offset",
    "rope": "input freqs output_scale rope_dim",
    "rope_backward": "dY freqs output_scale rope_dim",
    "relu": "input negative_slope lower_clip upper_clip",
    "leaky_relu": "input negative_slope",
    "swish": "input swish_beta",
    "gen_index": "input axis",
    "relu_backward": "loss input negative_slope lower_clip upper_clip",
    "leaky_relu_backward": "loss input negative_slope",
}
# These have name in another place in the vocabulary.
OTHERS = {
    "reshape": "input name reshape_mode compute_data_type",
    "concatenate": "inputs axis in_place_index name compute_data_type",
}
words = str.split
UNARY = words(
    "abs ceil cos elu erf exp floor gelu gelu_approx_tanh identity log logical_not neg reciprocal "
    "rsqrt sigmoid sin softplus sqrt tan tanh"
)
BINARY = words("add sub mul div add_square logical_and logical_or")
EXTREMES = words("max min mod pow")
COMPARE = words("cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le")
BACKWARD = words("relu leaky_relu swish elu gelu gelu_approx_tanh sigmoid softplus tanh")


def parameters(method: str) -> list[str]:
    return list(inspect.signature(getattr(DeclaredGraph, method)).parameters)[1:]


@pytest.mark.parametrize("method", ARGUMENTS)
def test_positional_arguments_are_the_vocabularys(method: str) -> None:
    wanted = ARGUMENTS[method].split()
    assert parameters(method)[: len(wanted) + 1] == [*wanted, "compute_data_type"]


@pytest.mark.parametrize("method", OTHERS)
def test_moves_have_their_own_order(method: str) -> None:
    assert parameters(method) == OTHERS[method].split()


def test_every_kind_but_pointwise_has_its_method() -> None:
    for kind in operation_kinds().keys() - {"pointwise"}:
        named = inspect.signature(getattr(DeclaredGraph, kind)).parameters
        assert {"name", "compute_data_type"} <= set(named), kind
        assert named["name"].default == "" and named["compute_data_type"].default is None


def test_the_modes_are_the_vocabularys() -> None:
    backward = [f"{mode}_backward" for mode in BACKWARD]
    others = words("bias scale binary_select gen_index relu leaky_relu swish")
    assert set(POINTWISE_MODES) == {
        *UNARY, *BINARY, *EXTREMES, *COMPARE, *backward, *others
    }  # fmt: skip
    kinds = {mode: row.kind for mode, row in POINTWISE_MODES.items()}
    assert {m for m in kinds if kinds[m] is PointwiseKind.COMPARE} == set(COMPARE)
    assert {m for m in kinds if kinds[m] is PointwiseKind.BACKWARD} == set(backward)


def operands(graph: DeclaredGraph, mode: str) -> dict[str, object]:
    given: dict[str, object] = {
        argument: graph.tensor((4,), name=argument) for argument in POINTWISE_MODES[mode].arguments
    }
    if mode.startswith("leaky_relu"):
        given["negative_slope"] = 0.1
    if mode == "gen_index":
        given["axis"] = 0
    return given


@pytest.mark.parametrize("mode", POINTWISE_MODES)
def test_every_mode_is_declared_by_its_method(mode: str) -> None:
    """By keywords in reverse order, so each name is checked to reach its own port."""
    graph = DeclaredGraph(io_data_type="FLOAT")
    given = operands(graph, mode)
    reverse = dict(reversed([*given.items(), ("name", "op"), ("compute_data_type", "FLOAT")]))
    out = getattr(graph, mode)(**reverse)
    out.set_output(True)
    graph.validate()
    (operation,) = graph.operations
    assert (operation.kind, operation.mode, operation.name) == ("pointwise", mode, "op")
    assert operation.compute_data_type is DataType.FLOAT
    names = [operation.inputs[f"in{i}"].name for i in range(POINTWISE_MODES[mode].arity)]
    assert names == list(POINTWISE_MODES[mode].arguments)
    assert out.name == "op::out"


@pytest.mark.parametrize("mode", POINTWISE_MODES)
def test_every_mode_takes_its_operands_by_position(mode: str) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    getattr(graph, mode)(*operands(graph, mode).values()).set_output(True)
    graph.validate()


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("relu", {"negative_slope": 0.5, "lower_clip": -1.0, "upper_clip": 6}),
        ("relu_backward", {"negative_slope": 0.5, "lower_clip": -1.0, "upper_clip": 6}),
        ("leaky_relu", {"negative_slope": 0.25}),
        ("leaky_relu_backward", {"negative_slope": 0.25}),
        ("swish", {"swish_beta": 2.0}),
        ("swish_backward", {"swish_beta": 2.0}),
        ("elu", {"elu_alpha": 2.0}),
        ("elu_backward", {"elu_alpha": 2.0}),
        ("softplus", {"softplus_beta": 2.0}),
        ("softplus_backward", {"softplus_beta": 2.0}),
        ("gen_index", {"axis": -1}),
    ],
)
def test_parameters_reach_the_record(mode: str, given: dict[str, float]) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    getattr(graph, mode)(**{**operands(graph, mode), **given})
    (operation,) = graph.operations
    attributes = operation.attributes()
    assert {name: attributes[name] for name in given} == given
    assert set(given) == set(POINTWISE_MODES[mode].parameters)
    assert all(type(attributes[name]) in (float, int) for name in given)


def test_absent_outputs_are_none_and_lists_keep_their_length() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x, scale = graph.tensor((4, 8)), graph.tensor((1, 8))
    made = graph.layernorm("INFERENCE", x, scale, None, 1e-5)  # type: ignore[arg-type]
    assert [tensor is None for tensor in made] == [False, True, True]
    made = graph.batchnorm(x, scale, scale, None, None, 1e-5, None)
    assert [tensor is None for tensor in made] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"padding": 1}, ((1, 1), (1, 1))),
        ({"padding": [1, 2]}, ((1, 2), (1, 2))),
        ({"pre_padding": (1, 2), "post_padding": (0, 3)}, ((1, 2), (0, 3))),
        ({"post_padding": [2]}, ((0, 0), (2, 2))),
        ({}, ((0, 0), (0, 0))),
    ],
)
def test_padding_in_every_spelling(
    spelling: dict[str, object], expected: tuple[tuple[int, ...], ...]
) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    image, weight = graph.tensor((1, 2, 8, 8)), graph.tensor((2, 2, 3, 3))
    graph.conv_fprop(image, weight, **spelling).set_output(True)  # type: ignore[arg-type]
    graph.validate()
    attributes = graph.operations[0].attributes()
    assert (attributes["pre_padding"], attributes["post_padding"]) == expected


@pytest.mark.parametrize(
    "slices",
    [
        [slice(1, 3), slice(None, None, 2)],
        [(1, 3), (0, None, 2)],
        ((1, 3, 1), [None, None, 2]),
    ],
)
def test_slices_in_every_spelling(slices: list[object]) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    graph.slice(graph.tensor((4, 4)), slices).set_output(True)  # type: ignore[arg-type]
    graph.validate()
    assert graph.operations[0].attributes()["slices"] == ((1, 3, 1), (0, None, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.matmul(g.tensor((4, 4)), g.tensor((4, 4)), compute_data_type="WIDE"),
        lambda g: g.exp(g.tensor((4,)), compute_data_type=3),
    ],
)
def test_an_unknown_compute_type_is_refused(call: Callable[[DeclaredGraph], object]) -> None:
    with pytest.raises(GraphError, match="compute_data_type: data type: got"):
        call(DeclaredGraph(io_data_type="FLOAT"))
