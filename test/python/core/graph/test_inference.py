"""Right graphs: the dim, stride and data type that validation infers for each output."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tilewright.dtypes import DataType
from tilewright.graph.enums import (
    moe_grouped_matmul_mode,
    norm_forward_phase,
    reduction_mode,
    reshape_mode,
)
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor, packed_strides

pytestmark = pytest.mark.L0
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
HALF, FLOAT = DataType.HALF, DataType.FLOAT
NHWC = (288, 1, 48, 8)  # of IMAGE, channels last
IMAGE = (2, 8, 6, 6)
Layout = tuple[tuple[int, ...], tuple[int, ...], DataType]


def new_graph() -> DeclaredGraph:
    return DeclaredGraph(io_data_type="HALF", intermediate_data_type="FLOAT")


def results(declare: Callable[[DeclaredGraph], object]) -> list[Layout | None]:
    """The layouts of what ``declare`` returns, bound and validated; absent outputs are None."""
    graph = new_graph()
    made = declare(graph)
    tensors: Iterable[Tensor | None] = made if isinstance(made, list | tuple) else [made]
    tensors = list(tensors)
    for tensor in tensors:
        if tensor is not None:
            tensor.set_output(True)
    graph.validate()
    return [None if t is None else (t.dim, t.stride, t.data_type) for t in tensors]


def packed(*dim: int, data_type: DataType = HALF) -> Layout:
    return (dim, packed_strides(dim), data_type)


def norm(kind: str, phase: norm_forward_phase, dim: tuple[int, ...], scale: tuple[int, ...]):
    def declare(g: DeclaredGraph) -> object:
        return getattr(g, kind)(phase, g.tensor(dim), g.tensor(scale), epsilon=1e-5, bias=None)

    return declare


def moe(mode: str, rows: int):
    def declare(g: DeclaredGraph) -> object:
        offsets = g.tensor((4, 1, 1), data_type="INT32")
        index = None if mode == "NONE" else g.tensor((1, rows, 1), data_type="INT32")
        token, weight = g.tensor((1, 10, 8)), g.tensor((3, 8, 16))
        return g.moe_grouped_matmul(
            token, weight, offsets, index, mode=moe_grouped_matmul_mode[mode]
        )

    return declare


CASES: dict[str, tuple[Callable[[DeclaredGraph], object], list[Layout | None]]] = {
    "matmul": (lambda g: g.matmul(g.tensor((4, 5)), g.tensor((5, 6))), [packed(4, 6)]),
    "matmul: batch broadcasts": (
        lambda g: g.matmul(g.tensor((3, 1, 4, 5)), g.tensor((1, 2, 5, 6))),
        [packed(3, 2, 4, 6)],
    ),
    "matmul: no inner extent": (
        lambda g: g.matmul(g.tensor((4, 0)), g.tensor((0, 6))),
        [packed(4, 6)],
    ),
    "conv: channels last follows": (
        lambda g: g.conv_fprop(g.tensor(IMAGE, NHWC), g.tensor((16, 8, 3, 3)), padding=1),
        [((2, 16, 6, 6), (576, 1, 96, 16), HALF)],
    ),
    "conv: one channel, channels last": (
        lambda g: g.conv_fprop(g.tensor((2, 1, 6, 6), (36, 1, 6, 1)), g.tensor((4, 1, 3, 3))),
        [((2, 4, 4, 4), (64, 1, 16, 4), HALF)],
    ),
    "conv: one by one image, channels last": (
        lambda g: g.conv_fprop(
            g.tensor((2, 8, 1, 1), (8, 1, 8, 8)), g.tensor((4, 8, 3, 3)), padding=2
        ),
        [((2, 4, 3, 3), (36, 1, 12, 4), HALF)],
    ),
    "conv: one by one image, packed": (
        lambda g: g.conv_fprop(g.tensor((2, 8, 1, 1)), g.tensor((4, 8, 3, 3)), padding=2),
        [packed(2, 4, 3, 3)],
    ),
    "conv: a slice of a channels-last image gives a packed result": (
        lambda g: g.conv_fprop(g.tensor((2, 4, 6, 6), NHWC), g.tensor((4, 4, 1, 1))),
        [((2, 4, 6, 6), (144, 1, 24, 4), HALF)],
    ),
    "conv: an expanded image gives a packed result": (
        lambda g: g.conv_fprop(g.tensor(IMAGE, (0, 36, 6, 1)), g.tensor((4, 8, 1, 1))),
        [packed(2, 4, 6, 6)],
    ),
    "conv: a stride that is set stays": (
        lambda g: (
            g.conv_fprop(g.tensor((1, 8, 4, 4)), g.tensor((2, 8, 1, 1)))
            .set_dim((1, 2, 4, 4))
            .set_stride((99, 40, 8, 2))
        ),
        [((1, 2, 4, 4), (99, 40, 8, 2), HALF)],
    ),
    "conv: no image": (
        lambda g: g.conv_fprop(g.tensor((0, 8, 6, 6)), g.tensor((4, 8, 3, 3))),
        [packed(0, 4, 4, 4)],
    ),
    "dgrad: channels last follows the loss": (
        lambda g: g.conv_dgrad(
            g.tensor((2, 4, 6, 6), (144, 1, 24, 4)), g.tensor((4, 8, 1, 1))
        ).set_dim(IMAGE),
        [(IMAGE, NHWC, HALF)],
    ),
    "wgrad: channels last follows the image": (
        lambda g: g.conv_wgrad(g.tensor(IMAGE, NHWC), g.tensor((2, 4, 4, 4))).set_dim((4, 8, 3, 3)),
        [((4, 8, 3, 3), (72, 1, 24, 8), HALF)],
    ),
    "genstats": (lambda g: g.genstats(g.tensor(IMAGE)), [packed(1, 8, 1, 1), packed(1, 8, 1, 1)]),
    "reduction": (
        lambda g: g.reduction(g.tensor(IMAGE, NHWC), reduction_mode.MAX).set_dim((2, 8, 1, 6)),
        [((2, 8, 1, 6), (48, 1, 48, 8), HALF)],
    ),
    "reshape: a view of packed axes": (
        lambda g: g.reshape(g.tensor((4, 6), data_type="INT8")).set_dim((2, 2, 6)),
        [packed(2, 2, 6, data_type=DataType.INT8)],
    ),
    "reshape: a view of a pitched matrix": (
        lambda g: g.reshape(g.tensor((4, 6), (10, 1))).set_dim((2, 2, 3, 2)),
        [((2, 2, 3, 2), (20, 10, 2, 1), HALF)],
    ),
    "reshape: a copy of a transposed matrix": (
        lambda g: g.reshape(g.tensor((4, 6), (1, 4)), reshape_mode=reshape_mode.LOGICAL).set_dim(
            (24,)
        ),
        [packed(24)],
    ),
    "slice": (
        lambda g: g.slice(g.tensor(IMAGE), [slice(1, None), slice(-3, -1), (0, 6, 4)]),
        [packed(1, 2, 2, 6)],
    ),
    "slice: channels last, packed again": (
        lambda g: g.slice(g.tensor(IMAGE, NHWC), [slice(None), slice(0, 4)]),
        [((2, 4, 6, 6), (144, 1, 24, 4), HALF)],
    ),
    "slice: nothing": (lambda g: g.slice(g.tensor((4, 4)), [slice(2, 2)]), [packed(0, 4)]),
    "slice: by no slices": (lambda g: g.slice(g.tensor((4, 4))), [packed(4, 4)]),
    "transpose: the memory stays": (
        lambda g: g.transpose(g.tensor((2, 3, 4)), [2, 0, 1]),
        [((4, 2, 3), (1, 12, 4), HALF)],
    ),
    "concatenate": (
        lambda g: g.concatenate([g.tensor((2, 3), data_type="INT32")] * 2, axis=-1),
        [packed(2, 6, data_type=DataType.INT32)],
    ),
    "concatenate: channels last": (
        lambda g: g.concatenate([g.tensor(IMAGE, NHWC), g.tensor((2, 0, 6, 6))], axis=1),
        [(IMAGE, NHWC, HALF)],
    ),
    "layernorm: training": (
        norm("layernorm", TRAINING, (4, 10, 32), (1, 1, 32)),
        [packed(4, 10, 32), packed(4, 10, 1), packed(4, 10, 1)],
    ),
    "layernorm: inference": (
        norm("layernorm", INFERENCE, (4, 10, 32), (1, 10, 32)),
        [packed(4, 10, 32), None, None],
    ),
    "layernorm: over everything": (
        norm("layernorm", TRAINING, (32,), (32,)),
        [packed(32), packed(1), packed(1)],
    ),
    "instancenorm": (
        norm("instancenorm", TRAINING, IMAGE, (1, 8, 1, 1)),
        [packed(*IMAGE), packed(2, 8, 1, 1), packed(2, 8, 1, 1)],
    ),
    "adalayernorm": (
        norm("adalayernorm", TRAINING, (4, 10, 32), (4, 1, 32)),
        [packed(4, 10, 32), packed(4, 10, 1), packed(4, 10, 1)],
    ),
    "rmsnorm": (
        norm("rmsnorm", TRAINING, (4, 10, 32), (1, 1, 32)),
        [packed(4, 10, 32), packed(4, 10, 1)],
    ),
    "rmsnorm: inference": (
        norm("rmsnorm", INFERENCE, (4, 10, 32), (1, 1, 32)),
        [packed(4, 10, 32), None],
    ),
    "rmsnorm_backward: no bias": (
        lambda g: g.rmsnorm_backward(
            *(g.tensor(d) for d in ((4, 32), (4, 32), (1, 32), (4, 1))), has_dbias=False
        ),
        [packed(4, 32), packed(1, 32), None],
    ),
    "layernorm_backward": (
        lambda g: g.layernorm_backward(
            *(g.tensor(d) for d in ((4, 32), (4, 32), (1, 32), (4, 1), (4, 1)))
        ),
        [packed(4, 32), packed(1, 32), packed(1, 32)],
    ),
    "batchnorm: no running statistics": (
        lambda g: g.batchnorm(
            g.tensor(IMAGE, NHWC),
            g.tensor((1, 8, 1, 1)),
            g.tensor((1, 8, 1, 1)),
            None,
            None,
            1e-5,
            None,
        ),
        [(IMAGE, NHWC, HALF), packed(1, 8, 1, 1), packed(1, 8, 1, 1), None, None],
    ),
    "batchnorm: running statistics": (
        lambda g: g.batchnorm(
            g.tensor((4, 8)), *(g.tensor((1, 8)) for _ in range(4)), epsilon=1e-5, momentum=0.1
        ),
        [packed(4, 8), *[packed(1, 8)] * 4],
    ),
    "block_scale_quantize: MXFP8": (
        lambda g: [
            t.set_data_type(d)
            for t, d in zip(
                g.block_scale_quantize(g.tensor((4, 70)), 32),
                ("FP8_E4M3", "FP8_E8M0"),
                strict=True,
            )
        ],
        [
            packed(4, 70, data_type=DataType.FP8_E4M3),
            packed(4, 3, data_type=DataType.FP8_E8M0),
        ],
    ),
    "block_scale_quantize: along rows, transposed": (
        lambda g: [
            t.set_data_type("FP8_E4M3")
            for t in g.block_scale_quantize(g.tensor((2, 64, 6)), 16, axis=1, transpose=True)
        ],
        [
            packed(2, 6, 64, data_type=DataType.FP8_E4M3),
            packed(2, 6, 4, data_type=DataType.FP8_E4M3),
        ],
    ),
    "block_scale_quantize: tiles are whole": (
        lambda g: [
            t.set_data_type("FP8_E4M3").set_reordering_type(r)
            for t, r in zip(
                g.block_scale_quantize(g.tensor((2, 130, 80)), 16),
                ("NONE", "F8_128x4"),
                strict=True,
            )
        ],
        [
            packed(2, 130, 80, data_type=DataType.FP8_E4M3),
            packed(2, 256, 8, data_type=DataType.FP8_E4M3),
        ],
    ),
    "block_scale_quantize: tiles down the columns": (
        lambda g: [
            t.set_data_type("FP8_E4M3").set_reordering_type(r)
            for t, r in zip(
                g.block_scale_quantize(g.tensor((2, 80, 130)), 16, axis=1),
                ("NONE", "F8_128x4"),
                strict=True,
            )
        ],
        [
            packed(2, 80, 130, data_type=DataType.FP8_E4M3),
            ((2, 8, 256), (2048, 1, 8), DataType.FP8_E4M3),
        ],
    ),
    "block_scale_dequantize": (
        lambda g: g.block_scale_dequantize(
            g.tensor((4, 64), data_type="FP4_E2M1"), g.tensor((4, 4), data_type="FP8_E4M3"), 16
        ),
        [packed(4, 64)],
    ),
    "block_scale_dequantize: square blocks": (
        lambda g: g.block_scale_dequantize(
            g.tensor((2, 200, 256), data_type="FP8_E4M3"),
            g.tensor((2, 2, 2), data_type="FLOAT"),
            [128, 128],
        ),
        [packed(2, 200, 256)],
    ),
    "moe: in place": (moe("NONE", 0), [packed(1, 10, 16)]),
    "moe: gather": (moe("GATHER", 14), [packed(1, 14, 16)]),
    "moe: scatter": (moe("SCATTER", 10), [packed(1, 10, 16)]),
    "moe_bwd: column major, an expert an offset": (
        lambda g: g.moe_grouped_matmul_bwd(
            g.tensor((1, 10, 16)), g.tensor((1, 10, 8)), g.tensor((3, 1, 1), data_type="INT32")
        ),
        [((3, 8, 16), (128, 1, 8), HALF)],
    ),
    "moe_bwd: the end is given": (
        lambda g: g.moe_grouped_matmul_bwd(
            g.tensor((1, 10, 16)), g.tensor((1, 10, 8)), g.tensor((4, 1, 1), data_type="INT64")
        ).set_dim((3, 8, 16)),
        [((3, 8, 16), (128, 1, 8), HALF)],
    ),
    "rope: the memory order stays": (
        lambda g: g.rope(g.tensor((2, 4, 10, 32), (1280, 32, 128, 1)), g.tensor((1, 1, 10, 16))),
        [((2, 4, 10, 32), (1280, 32, 128, 1), HALF)],
    ),
    "rope_backward": (
        lambda g: g.rope_backward(g.tensor((2, 4, 10, 32)), g.tensor((2, 1, 10, 8)), rope_dim=8),
        [packed(2, 4, 10, 32)],
    ),
    "pointwise: broadcast of both sides": (
        lambda g: g.add(g.tensor((4, 1, 3)), g.tensor((2, 1))),
        [packed(4, 2, 3)],
    ),
    "pointwise: memory order of the full operand": (
        lambda g: g.bias(g.tensor(IMAGE, NHWC), g.tensor((1, 8, 1, 1))),
        [(IMAGE, NHWC, HALF)],
    ),
    "pointwise: a scalar does not add axes": (
        lambda g: g.mul(g.tensor_scalar(2.0), g.tensor((4, 3))),
        [packed(4, 3)],
    ),
    "pointwise: scalars alone": (
        lambda g: g.mul(g.tensor_scalar(2.0), g.tensor_scalar(3.0)),
        [packed(1, 1, 1, 1)],
    ),
    "pointwise: a larger output repeats": (
        lambda g: g.identity(g.tensor((1, 3))).set_dim((4, 3)),
        [packed(4, 3)],
    ),
    "pointwise: comparisons have the graph's type": (
        lambda g: g.cmp_lt(g.tensor((4,)), g.tensor((4,))),
        [packed(4)],
    ),
    "pointwise: gen_index is INT32": (
        lambda g: g.gen_index(g.tensor((4, 3)), axis=-1),
        [packed(4, 3, data_type=DataType.INT32)],
    ),
    "pointwise: gen_index of another type": (
        lambda g: g.gen_index(g.tensor((4, 3)), axis=0).set_data_type("FLOAT"),
        [packed(4, 3, data_type=FLOAT)],
    ),
    "pointwise: no elements": (
        lambda g: g.add(g.tensor((0, 3)), g.tensor((1, 3))),
        [packed(0, 3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_inferred(case: str) -> None:
    declare, expected = CASES[case]
    assert results(declare) == expected


def test_what_the_user_sets_is_kept() -> None:
    graph = new_graph()
    out = graph.exp(graph.tensor((2, 3)))
    out.set_output(True).set_data_type("BFLOAT16").set_stride((1, 2))
    graph.validate()
    assert (out.dim, out.stride, out.data_type) == ((2, 3), (1, 2), DataType.BFLOAT16)


def test_types_come_from_the_role_and_then_from_the_operands() -> None:
    graph = new_graph()
    x = graph.tensor((4,), data_type="BFLOAT16")
    inner = graph.exp(x)
    out = graph.exp(inner).set_output(True)
    graph.validate()
    assert (inner.data_type, out.data_type) == (FLOAT, HALF)
    bare = DeclaredGraph()
    result = bare.exp(bare.tensor((4,), data_type="BFLOAT16")).set_output(True)
    bare.validate()
    assert result.data_type is DataType.BFLOAT16


def test_epsilon_beside_doubles_keeps_its_digits() -> None:
    graph = DeclaredGraph(io_data_type="DOUBLE")
    x = graph.tensor((4, 8))
    x.set_data_type("DOUBLE")
    graph.rmsnorm(TRAINING, x, graph.tensor((1, 8)), epsilon=1e-5)
    (operation,) = graph.operations
    assert operation.inputs["epsilon"].data_type is DataType.DOUBLE
