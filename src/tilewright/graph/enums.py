"""The enums of the public graph vocabulary, under its own lower-case names."""

from __future__ import annotations

import enum


class heur_mode(enum.Enum):
    """Which ranking to use when plans are created."""

    A = "A"
    B = "B"
    FALLBACK = "FALLBACK"
    OPENSOURCE = "OPENSOURCE"


class build_plan_policy(enum.Enum):
    """Build the first plan that works, or all of them."""

    HEURISTICS_CHOICE = "HEURISTICS_CHOICE"
    ALL = "ALL"


class norm_forward_phase(enum.Enum):
    """TRAINING saves the statistics that a backward needs; INFERENCE does not."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"
    NOT_SET = "NOT_SET"


class reduction_mode(enum.Enum):
    """What a reduction computes over the axes that the output has as 1."""

    ADD = "ADD"
    MUL = "MUL"
    MIN = "MIN"
    MAX = "MAX"
    AMAX = "AMAX"
    AVG = "AVG"
    NORM1 = "NORM1"
    NORM2 = "NORM2"
    MUL_NO_ZEROS = "MUL_NO_ZEROS"
    NOT_SET = "NOT_SET"


class diagonal_alignment(enum.Enum):
    """The corner of the score matrix that the diagonal runs through."""

    TOP_LEFT = "TOP_LEFT"
    BOTTOM_RIGHT = "BOTTOM_RIGHT"


class attention_implementation(enum.Enum):
    """How an engine may lower attention."""

    AUTO = "AUTO"
    COMPOSITE = "COMPOSITE"
    UNIFIED = "UNIFIED"


class tensor_reordering(enum.Enum):
    """A storage order that strides cannot express."""

    NONE = "NONE"
    INT8x32 = "INT8x32"
    F16x16 = "F16x16"
    F8_128x4 = "F8_128x4"


class moe_grouped_matmul_mode(enum.Enum):
    """Which side of a grouped product is indexed."""

    NONE = "NONE"
    GATHER = "GATHER"
    SCATTER = "SCATTER"
    COMBINE = "COMBINE"


class reshape_mode(enum.Enum):
    """VIEW_ONLY demands that no element moves; LOGICAL permits a copy."""

    VIEW_ONLY = "VIEW_ONLY"
    LOGICAL = "LOGICAL"


class scalar_type(enum.Enum):
    """Where a scalar's value comes from."""

    HOST = "HOST"
    DEVICE = "DEVICE"


class behavior_note(enum.Enum):
    """What a plan does beside computing; plans can be selected or barred by these."""

    RUNTIME_COMPILATION = "RUNTIME_COMPILATION"
    REQUIRES_FILTER_INT8x32_REORDER = "REQUIRES_FILTER_INT8x32_REORDER"
    REQUIRES_BIAS_INT8x32_REORDER = "REQUIRES_BIAS_INT8x32_REORDER"
    SUPPORTS_CUDA_GRAPH_NATIVE_API = "SUPPORTS_CUDA_GRAPH_NATIVE_API"
    ALLOCATES_TEMPORARIES = "ALLOCATES_TEMPORARIES"


class numeric_note(enum.Enum):
    """How a plan's arithmetic may differ; plans can be selected or barred by these."""

    TENSOR_CORE = "TENSOR_CORE"
    DOWN_CONVERT_INPUTS = "DOWN_CONVERT_INPUTS"
    REDUCED_PRECISION_REDUCTION = "REDUCED_PRECISION_REDUCTION"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    FLOAT32_COMPUTE = "FLOAT32_COMPUTE"


class knob_type(enum.IntEnum):
    """Performance-only choices. Numbers and names are append-only."""

    TILE_M = 0
    TILE_N = 1
    TILE_K = 2
    STAGES = 3
    WARPS = 4
    SPLIT_K = 5
    ROW_BLOCK = 6
