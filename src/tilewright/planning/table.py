"""The static engine table. Ids, names and knob names are append-only: stored plans cite them."""

from __future__ import annotations

from tilewright.dtypes import DataType
from tilewright.planning.rows import (
    BLOCK_SCALED,
    FLOATS,
    FP8,
    INDICES,
    INTEGERS,
    CapabilityRow,
)
from tilewright.records import record


@record(frozen=True)
class EngineEntry:
    """One engine: its fixed id and name, where its code is, and what its rows admit.

    ``module`` is None while an engine has no code; ``priority`` orders engines whose cost
    estimates cannot be compared, lower first.
    """

    engine_id: int
    name: str
    module: str | None
    priority: int
    rows: tuple[CapabilityRow, ...]
    summary: str


_ATEN_ROWS = (
    CapabilityRow(("matmul",), FLOATS | FP8 | INTEGERS),
    CapabilityRow(("conv_fprop", "conv_dgrad", "conv_wgrad"), FLOATS | FP8),
    CapabilityRow(("genstats",), FLOATS | FP8),
    CapabilityRow(("reduction",), FLOATS | FP8 | INTEGERS),
    CapabilityRow(
        ("pointwise",), FLOATS | FP8 | INTEGERS, INDICES, note="comparisons give 0 and 1"
    ),
    CapabilityRow(
        ("reshape", "slice", "transpose", "concatenate"), FLOATS | FP8 | INTEGERS, INDICES
    ),
    CapabilityRow(
        (
            "layernorm",
            "layernorm_backward",
            "rmsnorm",
            "rmsnorm_backward",
            "instancenorm",
            "instancenorm_backward",
            "adalayernorm",
            "adalayernorm_backward",
            "batchnorm",
            "batchnorm_inference",
            "batchnorm_backward",
        ),
        FLOATS | FP8,
    ),
    CapabilityRow(("block_scale_quantize", "block_scale_dequantize"), FLOATS | BLOCK_SCALED),
    CapabilityRow(("moe_grouped_matmul", "moe_grouped_matmul_bwd"), FLOATS | FP8, INDICES),
    CapabilityRow(("rope", "rope_backward"), FLOATS | FP8),
    CapabilityRow(("sdpa", "sdpa_backward"), FLOATS, INDICES),
    CapabilityRow(("sdpa_fp8", "sdpa_fp8_backward"), FLOATS | FP8, INDICES),
    CapabilityRow(("sdpa_mxfp8", "sdpa_mxfp8_backward"), FLOATS | BLOCK_SCALED, INDICES),
)

# Exactly the targets that every kernel is compiled for in the tests.
_TRITON_TARGETS = frozenset({(8, 0), (9, 0), (10, 0), (12, 0)})
_TRITON_ROWS = (
    CapabilityRow(
        (
            "rmsnorm",
            "layernorm",
            "adalayernorm",
            "instancenorm",
            "instancenorm_backward",
            "batchnorm",
            "batchnorm_inference",
            "batchnorm_backward",
        ),
        FLOATS,
        compute_capabilities=_TRITON_TARGETS,
        note="strides that join to two axes of rows and two of columns",
    ),
    CapabilityRow(
        (
            "rmsnorm",
            "layernorm",
            "adalayernorm",
            "instancenorm",
            "batchnorm",
            "batchnorm_inference",
        ),
        FLOATS | FP8,
        # The first with conversions of FP8_E4M3.
        compute_capabilities=_TRITON_TARGETS - {(8, 0)},
    ),
    CapabilityRow(
        ("rmsnorm_backward", "layernorm_backward", "adalayernorm_backward"),
        FLOATS,
        compute_capabilities=_TRITON_TARGETS,
        note="up to 65536 elements a row",
    ),
    CapabilityRow(
        ("rope", "rope_backward"),
        FLOATS,
        compute_capabilities=_TRITON_TARGETS,
        note="up to 4096 rotated elements a head",
    ),
    CapabilityRow(
        ("pointwise", "reduction", "reshape", "transpose", "slice"),
        FLOATS | INTEGERS,
        INDICES,
        compute_capabilities=_TRITON_TARGETS,
        note="any graph of these that one index walks, as one kernel",
    ),
    CapabilityRow(
        ("pointwise", "reduction", "reshape", "transpose", "slice"),
        FLOATS | FP8 | INTEGERS,
        INDICES,
        # The first with conversions of FP8_E4M3.
        compute_capabilities=_TRITON_TARGETS - {(8, 0)},
    ),
    CapabilityRow(
        ("sdpa", "sdpa_backward"),
        FLOATS,
        INDICES,
        compute_capabilities=_TRITON_TARGETS,
        note="head sizes up to 256, no DOUBLE operands; with an output gate behind it; backward: "
        "soft caps only",
    ),
    # The operations of a score program are asked for one by one.
    CapabilityRow(("pointwise",), FLOATS, INDICES, compute_capabilities=_TRITON_TARGETS),
)

_HOPPER_ROWS = (
    CapabilityRow(
        ("sdpa",),
        frozenset({DataType.HALF, DataType.BFLOAT16, DataType.FLOAT}),
        INDICES,
        devices=frozenset({"cuda"}),
        compute_capabilities=frozenset({(9, 0)}),
        note="16-bit q, k, v, O; head sizes to 256; bands, GQA, lengths, ragged, pages, sinks, "
        "soft caps, Stats",
    ),
    # The operations of a soft cap are asked for one by one.
    CapabilityRow(
        ("pointwise",),
        frozenset({DataType.HALF, DataType.BFLOAT16, DataType.FLOAT}),
        devices=frozenset({"cuda"}),
        compute_capabilities=frozenset({(9, 0)}),
        note="soft caps within attention",
    ),
    CapabilityRow(
        ("sdpa_fp8",),
        frozenset({DataType.FP8_E4M3, DataType.HALF, DataType.BFLOAT16, DataType.FLOAT}),
        INDICES,
        devices=frozenset({"cuda"}),
        compute_capabilities=frozenset({(9, 0)}),
        note="E4M3, dense, head sizes to 128; O in E4M3 or 16 bits; right bounds, GQA, lengths",
    ),
    CapabilityRow(
        ("sdpa_backward",),
        frozenset({DataType.HALF, DataType.BFLOAT16, DataType.FLOAT}),
        INDICES,
        devices=frozenset({"cuda"}),
        compute_capabilities=frozenset({(9, 0)}),
        note="16-bit; head sizes to 256; bands, GQA, lengths, ragged, sinks; dQ in a fixed order, "
        "up to 128 in none unless asked for",
    ),
)

ENGINE_TABLE: tuple[EngineEntry, ...] = (
    EngineEntry(
        0,
        "aten",
        "tilewright.engines.aten.engine",
        90,
        _ATEN_ROWS,
        "torch's own functions, any device",
    ),
    EngineEntry(
        1,
        "triton",
        "tilewright.engines.triton.engine",
        30,
        _TRITON_ROWS,
        "Triton kernels, SM80 and newer",
    ),
    EngineEntry(
        2, "hopper", "tilewright.engines.hopper.engine", 10, _HOPPER_ROWS, "Gluon kernels, SM90"
    ),
    EngineEntry(3, "cudnn", None, 20, (), "native cuDNN through its backend"),
)


def engine_by_id(engine_id: int) -> EngineEntry | None:
    """The entry with this id, or None."""
    return next((entry for entry in ENGINE_TABLE if entry.engine_id == engine_id), None)


def engine_by_name(name: str) -> EngineEntry | None:
    """The entry with this name, or None."""
    return next((entry for entry in ENGINE_TABLE if entry.name == name), None)
