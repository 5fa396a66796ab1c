"""The strategy: graphs of one to four operations over every family and kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from fuzzing import attention, elementwise, norms, products
from fuzzing.drawing import Case, Drawing, Value
from tilewright.errors import GraphError

Family = Callable[[Drawing, Value | None], None]

# A family's entry appears as often as the graphs should have it.
FAMILIES: tuple[Family, ...] = (
    *(elementwise.pointwise,) * 6,
    *(elementwise.reduction,) * 2,
    elementwise.genstats,
    elementwise.reshape,
    elementwise.slice_,
    elementwise.transpose,
    elementwise.concatenate,
    elementwise.rope,
    elementwise.rope_backward,
    *(products.matmul,) * 2,
    products.conv_fprop,
    products.conv_dgrad,
    products.conv_wgrad,
    products.moe_grouped_matmul,
    products.moe_grouped_matmul_bwd,
    products.block_scale_quantize,
    products.block_scale_dequantize,
    norms.layernorm,
    norms.rmsnorm,
    norms.instancenorm,
    norms.adalayernorm,
    norms.layernorm_backward,
    norms.rmsnorm_backward,
    norms.instancenorm_backward,
    norms.adalayernorm_backward,
    norms.batchnorm,
    norms.batchnorm_inference,
    norms.batchnorm_backward,
    *(attention.sdpa,) * 4,
    *(attention.sdpa_backward,) * 3,
    *(attention.sdpa_fp8,) * 2,
    attention.sdpa_fp8_backward,
    attention.sdpa_mxfp8,
    attention.sdpa_mxfp8_backward,
)


@st.composite
def graphs(draw: Callable[..., Any]) -> Case:
    """A declared graph, not validated; or the refusal that declaring it met."""
    d = Drawing(draw(st.randoms(use_true_random=False)))
    d.case.flat = d.chance(30)
    try:
        for _ in range(d.pick((1, 1, 1, 2, 2, 3, 4))):
            source = d.values[-1] if d.values and d.chance(75) else None
            d.pick(FAMILIES)(d, source)
    except GraphError as error:
        d.case.error = error
        return d.case
    _end_with_outputs(d)
    return d.case


def _end_with_outputs(d: Drawing) -> None:
    """What no operation reads becomes an output, mostly, and one does in any case."""
    read = {id(t) for op in d.graph.operations for t in op.inputs.values()}
    ends = [t for op in d.graph.operations for t in op.outputs.values() if id(t) not in read]
    for tensor in ends[:-1]:
        if tensor.is_virtual and d.chance(80):
            tensor.set_output(True)
    ends[-1].set_output(True)
