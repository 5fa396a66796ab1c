"""What attention operations fill in: dims, strides and data types that the user left open."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation, operation_kinds
from tilewright.graph.operations.attention_base import AttentionBase, AttentionExtents
from tilewright.graph.operations.attention_fp8 import SdpaFp8Backward
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0

HALF, BF16, FLOAT, INT32 = DataType.HALF, DataType.BFLOAT16, DataType.FLOAT, DataType.INT32
E4M3 = DataType.FP8_E4M3
B, HQ, HKV, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 64, 32

BHSD, BSHD, SBHD = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)


def strides_of(dim: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Packed strides with the axes in memory order ``order``, slowest first."""
    strides = [0] * len(dim)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= dim[axis]
    return tuple(strides)


def graph_of(io: DataType = HALF) -> DeclaredGraph:
    return DeclaredGraph(io_data_type=io, intermediate_data_type=FLOAT)


def operands(
    graph: DeclaredGraph, order: tuple[int, ...] = BHSD, type: DataType | None = None
) -> dict[str, Tensor]:
    dims = {"q": (B, HQ, SQ, D), "k": (B, HKV, SKV, D), "v": (B, HKV, SKV, DV)}
    return {
        name: graph.tensor(dim, strides_of(dim, order), type, name=name)
        for name, dim in dims.items()
    }


def validated(graph: DeclaredGraph) -> AttentionBase:
    operation = graph.operations[0]
    for tensor in operation.outputs.values():
        tensor.set_output(True)
    graph.validate()
    assert isinstance(operation, AttentionBase)
    return operation


@pytest.mark.parametrize("order", [BHSD, BSHD, SBHD])
def test_output_follows_the_axis_order_of_q(order: tuple[int, ...]) -> None:
    graph = graph_of()
    graph.sdpa(**operands(graph, order), generate_stats=True)
    outputs = validated(graph).outputs
    assert outputs["O"].dim == (B, HQ, SQ, DV)
    assert outputs["O"].stride == strides_of((B, HQ, SQ, DV), order)
    assert outputs["O"].data_type is HALF
    assert outputs["Stats"].dim == (B, HQ, SQ, 1)
    assert outputs["Stats"].stride == (HQ * SQ, SQ, 1, 1)
    assert outputs["Stats"].data_type is FLOAT


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, False),
        ({"is_inference": True}, False),
        ({"is_inference": False}, True),
        ({"generate_stats": True}, True),
        ({"generate_stats": False}, False),
        ({"is_inference": True, "generate_stats": False}, False),
        ({"is_inference": False, "generate_stats": True}, True),
    ],
)
def test_stats_exist_if_asked_for(flags: dict[str, bool], expected: bool) -> None:
    graph = graph_of()
    output, stats = graph.sdpa(**operands(graph), **flags)
    assert output is not None
    assert (stats is not None) is expected
    assert ("Stats" in validated(graph).outputs) is expected


def test_what_the_user_set_is_kept() -> None:
    graph = graph_of()
    output, stats = graph.sdpa(**operands(graph), generate_stats=True)
    assert output is not None and stats is not None
    output.set_data_type(BF16).set_dim((B, HQ, SQ, DV)).set_stride((9999, 640, 64, 1))
    stats.set_stride((1, 2, 8, 1)).set_data_type(DataType.DOUBLE)
    validated(graph)
    assert output.stride == (9999, 640, 64, 1)
    assert output.data_type is BF16
    assert stats.stride == (1, 2, 8, 1)
    assert stats.data_type is DataType.DOUBLE


def test_declared_outputs_are_filled() -> None:
    graph = graph_of()
    seed, offset = (graph.tensor((1, 1, 1, 1), data_type=INT32) for _ in range(2))
    declared = {name: graph.tensor(name=name) for name in ("rng_dump", "score_max")}
    graph.sdpa(**operands(graph), dropout=(0.25, seed, offset), **declared)
    operation = validated(graph)
    assert declared["rng_dump"].dim == (B, HQ, SQ, SKV)
    assert declared["score_max"].dim == (B, HQ, SQ, 1)
    assert {t.data_type for t in declared.values()} == {FLOAT}
    assert all(operation.outputs[name] is tensor for name, tensor in declared.items())
    assert all(tensor.is_output for tensor in declared.values())
    assert operation.dropout_probability == 0.25
    assert operation.inputs["dropout_seed"] is seed
    assert operation.inputs["dropout_offset"] is offset


def test_dropout_by_mask_and_scale() -> None:
    graph = graph_of()
    mask = graph.tensor((1, 1, SQ, SKV), data_type=DataType.UINT8)
    scale = graph.tensor((1, 1, 1, 1), data_type=FLOAT)
    graph.sdpa(**operands(graph), dropout=(mask, scale))
    operation = validated(graph)
    assert operation.dropout_probability is None
    assert operation.inputs["dropout_mask"] is mask
    assert operation.inputs["dropout_scale"] is scale


@pytest.mark.parametrize(("given", "attribute"), [(0.125, 0.125), (2, 2.0), (None, None)])
def test_a_number_as_scale_is_an_attribute(given: Any, attribute: float | None) -> None:
    graph = graph_of()
    graph.sdpa(**operands(graph), attn_scale=given)
    operation = validated(graph)
    assert operation.attn_scale == attribute
    assert "attn_scale" not in operation.inputs


def test_a_tensor_as_scale_is_a_port() -> None:
    graph = graph_of()
    scale = graph.tensor_scalar(0.5)
    graph.sdpa(**operands(graph), attn_scale=scale)
    operation = validated(graph)
    assert operation.attn_scale is None
    assert operation.inputs["attn_scale"] is scale


def test_paged_extents_come_from_the_table_and_the_declared_length() -> None:
    graph = graph_of()
    q = graph.tensor((B, HQ, 1, D))
    k, v = graph.tensor((100, HKV, 16, D)), graph.tensor((90, HKV, 8, DV))
    tables = [graph.tensor((B, 1, pages, 1), data_type=INT32) for pages in (3, 6)]
    graph.sdpa(
        *(q, k, v),
        paged_attention_k_table=tables[0],
        paged_attention_v_table=tables[1],
        paged_attention_max_seq_len_kv=41,
    )
    operation = validated(graph)
    assert operation.extents() == AttentionExtents(B, HQ, HKV, 1, 41, D, DV)
    assert operation.outputs["O"].dim == (B, HQ, 1, DV)


@pytest.mark.parametrize("stride", [1, 3])
def test_rank_one_lengths_get_four_axes(stride: int) -> None:
    graph = graph_of()
    lengths = graph.tensor((B,), (stride,), INT32)
    sums = graph.tensor((B + 1,), (stride,), INT32)
    graph.sdpa(**operands(graph), use_padding_mask=True, seq_len_q=lengths, cu_seq_len_kv=sums)
    validated(graph)
    assert (lengths.dim, lengths.stride) == ((B, 1, 1, 1), (stride, 1, 1, 1))
    assert (sums.dim, sums.stride) == ((B + 1, 1, 1, 1), (stride, 1, 1, 1))


def test_ragged_output_is_the_users_choice() -> None:
    graph = graph_of()
    offset = graph.tensor((B + 1, 1, 1, 1), data_type=INT32)
    lengths = graph.tensor((B, 1, 1, 1), data_type=INT32)
    given = operands(graph, BSHD)
    given["q"].set_ragged_offset(offset)
    output, stats = graph.sdpa(
        **given,
        use_padding_mask=True,
        seq_len_q=lengths,
        seq_len_kv=lengths,
        generate_stats=True,
    )
    assert output is not None and stats is not None
    output.set_ragged_offset(offset)
    validated(graph)
    assert output.ragged_offset is offset
    assert output.stride == strides_of((B, HQ, SQ, DV), BSHD)
    assert stats.ragged_offset is None


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_a_ragged_output_has_distinct_elements(axis: int) -> None:
    graph = graph_of()
    offset = graph.tensor((B + 1, 1, 1, 1), data_type=INT32)
    lengths = graph.tensor((B, 1, 1, 1), data_type=INT32)
    output, _ = graph.sdpa(
        **operands(graph, BSHD),
        use_padding_mask=True,
        seq_len_q=lengths,
        seq_len_kv=lengths,
        generate_stats=False,
    )
    assert output is not None
    stride = list(strides_of((B, HQ, SQ, DV), BSHD))
    stride[axis] = 0
    output.set_ragged_offset(offset).set_dim((B, HQ, SQ, DV)).set_stride(stride)
    with pytest.raises(GraphError, match="whose elements overlap"):
        validated(graph)


def gradients(graph: DeclaredGraph, **changes: Any) -> list[Tensor]:
    rows = {"o": (B, HQ, SQ, DV), "dO": (B, HQ, SQ, DV), "stats": (B, HQ, SQ, 1)}
    given = operands(graph, BSHD) | {
        name: graph.tensor(dim, data_type=FLOAT if name == "stats" else None, name=name)
        for name, dim in rows.items()
    }
    return graph.sdpa_backward(**{**given, **changes})


def test_gradients_are_like_their_tensors() -> None:
    graph = graph_of()
    bias = graph.tensor((1, HQ, SQ, SKV), data_type=FLOAT)
    sink = graph.tensor((1, HQ, 1, 1), data_type=FLOAT)
    padded = graph.tensor((B, HKV, SKV, D), (4000, 64, 256, 1))
    extra = {"dBias": graph.tensor(data_type=FLOAT), "dSink_token": graph.tensor(data_type=FLOAT)}
    found = gradients(graph, k=padded, bias=bias, sink_token=sink, **extra)
    operation = validated(graph)
    for gradient, source in zip(found, ("q", "k", "v"), strict=True):
        assert gradient.dim == operation.inputs[source].dim
        assert gradient.stride == operation.inputs[source].stride
        assert gradient.data_type is HALF
    assert extra["dBias"].dim == bias.dim
    assert extra["dSink_token"].dim == sink.dim
    assert operation.outputs["dBias"] is extra["dBias"]


def test_the_gradient_of_an_expanded_view_is_dense() -> None:
    graph = graph_of()
    expanded = graph.tensor((B, HKV, SKV, D), (SKV * D, 0, D, 1))
    found = gradients(graph, k=expanded)
    validated(graph)
    assert found[1].dim == expanded.dim
    assert sorted(found[1].stride) == sorted(strides_of(expanded.dim, BHSD))


def test_a_backward_takes_the_inverse_dropout_scale() -> None:
    graph = graph_of()
    mask = graph.tensor((B, HQ, SQ, SKV))
    scales = [graph.tensor((1, 1, 1, 1), data_type=FLOAT) for _ in range(2)]
    gradients(graph, dropout=(mask, *scales))
    assert validated(graph).inputs["dropout_scale_inv"] is scales[1]


def test_fp8_outputs_and_their_order() -> None:
    graph = graph_of(E4M3)
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor((1, 1, 1, 1), data_type=FLOAT) for name in names}
    found = graph.sdpa_fp8(**operands(graph), **scales, left_bound=3, right_bound=1)
    assert found[1] is None
    operation = validated(graph)
    assert [found[0], *found[2:]] == [operation.outputs[p] for p in ("O", "Amax_S", "Amax_O")]
    assert operation.outputs["O"].data_type is E4M3
    for port in ("Amax_S", "Amax_O"):
        assert operation.outputs[port].dim == (1, 1, 1, 1)
        assert operation.outputs[port].data_type is FLOAT
    assert (operation.left_bound, operation.right_bound) == (3, 1)


def test_fp8_gradients_and_their_order() -> None:
    graph = graph_of(E4M3)
    scales = {
        name: graph.tensor((1, 1, 1, 1), data_type=FLOAT)
        for name in SdpaFp8Backward.required
        if "scale" in name
    }
    assert len(scales) == 12
    rows = {name: graph.tensor((B, HQ, SQ, DV)) for name in ("o", "dO")}
    stats = graph.tensor((B, HQ, SQ, 1), data_type=FLOAT)
    found = graph.sdpa_fp8_backward(**operands(graph), **rows, stats=stats, **scales)
    operation = validated(graph)
    ports = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
    assert found == [operation.outputs[port] for port in ports]
    assert {t.data_type for t in found[:3]} == {E4M3}
    assert {(t.dim, t.data_type) for t in found[3:]} == {((1, 1, 1, 1), FLOAT)}


@pytest.mark.parametrize("padded", [False, True])
def test_mxfp8_takes_exact_and_tile_padded_scales(padded: bool) -> None:
    graph = graph_of(E4M3)
    dims = {
        "descale_q": (B, HQ, 128, 4) if padded else (B, HQ, SQ, 2),
        "descale_k": (B, HKV, 128, 4) if padded else (B, HKV, SKV, 2),
        "descale_v": (B, HKV, 4, 128) if padded else (B, HKV, 1, DV),
    }
    scales = {n: graph.tensor(dim, data_type=DataType.FP8_E8M0) for n, dim in dims.items()}
    found = graph.sdpa_mxfp8(**operands(graph), **scales, generate_stats=True)
    assert found[0] is not None
    found[0].set_data_type(BF16)
    operation = validated(graph)
    assert found == [operation.outputs[port] for port in ("O", "Stats", "Amax_O")]
    assert operation.outputs["O"].dim == (B, HQ, SQ, DV)
    assert operation.outputs["O"].data_type is BF16


@pytest.mark.parametrize(
    "kind",
    [
        *("sdpa", "sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward"),
        *("sdpa_mxfp8", "sdpa_mxfp8_backward"),
    ],
)
def test_kinds_are_registered(kind: str) -> None:
    record = operation_kinds()[kind]
    assert issubclass(record, AttentionBase)
    assert record.kind == kind


@pytest.mark.parametrize(("rows", "keys"), [(0, SKV), (SQ, 0), (0, 0)])
def test_empty_sequences_are_legal(rows: int, keys: int) -> None:
    graph = graph_of()
    q = graph.tensor((B, HQ, rows, D))
    k, v = graph.tensor((B, HKV, keys, D)), graph.tensor((B, HKV, keys, DV))
    graph.sdpa(q, k, v, generate_stats=True)
    assert validated(graph).outputs["O"].dim == (B, HQ, rows, DV)


def test_attention_reads_what_an_earlier_operation_makes() -> None:
    graph = graph_of()
    weights = graph.tensor((B, HQ, D, D))
    given = operands(graph)
    product: Tensor = graph.matmul(given.pop("q"), weights)
    product.set_data_type(HALF)
    output, _ = graph.sdpa(q=product, **given)
    assert output is not None
    output.set_output(True)
    graph.validate()
    assert output.dim == (B, HQ, SQ, DV)
    attention: Operation = graph.operations[1]
    assert attention.inputs["q"] is product
