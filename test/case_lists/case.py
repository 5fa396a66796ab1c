"""A case, and where tests lie."""

from __future__ import annotations

from dataclasses import dataclass

P = "test/python"
PLUGIN = f"{P}/core/testing/plugin"
COMPARE = f"{P}/core/testing/compare"
BINDER = f"{P}/core/launch/test_binder.py"
DIRECT = f"{P}/core/launch/test_direct_calls.py"
APART = f"{P}/core/launch/test_direct_calls_apart.py"
FAMILIES = f"{P}/core/launch/test_compiled_families_on_gpu.py"
RECORDS = f"{P}/core/artifact/test_plan_records.py"
DEVICES = f"{P}/core/planning/test_synthetic_devices.py"
PLANS = f"{P}/core/planning/test_plans.py"
SDPA = f"{P}/sdpa/torch/test_sdpa_functions.py"
PACKED = f"{P}/sdpa/torch/test_sdpa_sequence_functions.py"
SEQUENCES = f"{P}/sdpa/aten/test_attention_sequences.py"
ROPE = f"{P}/rope/triton/test_triton_rope"
CHAINS = f"{P}/pointwise/triton/test_triton_pointwise"
TRITON = f"{P}/norm/triton"
ATTENTION = f"{P}/sdpa/triton/test_triton_attention.py"
ATTENTION_PAIRS = f"{P}/sdpa/triton/test_triton_attention_pairs.py"
HOPPER = f"{P}/sdpa/hopper/test_hopper_attention"
HOPPER_PAGES = f"{P}/sdpa/hopper/test_hopper_pages_on_gpu.py"
HOPPER_PAIRS = f"{P}/sdpa/hopper/test_hopper_attention_pairs.py"
HOPPER_SEQUENCES = f"{P}/sdpa/hopper/test_hopper_sequences_on_gpu.py"
HOPPER_BACKWARD_SEQUENCES = f"{P}/sdpa/hopper/test_hopper_backward_sequences_on_gpu.py"
RAGGED = f"{P}/sdpa/triton/test_triton_ragged_on_gpu.py"
MAPS = f"{P}/core/launch/test_tensor_maps.py"
ATTENTION_BACKWARD = f"{P}/sdpa/triton/test_triton_attention_backward"
ATTENTION_ON_GPU = f"{P}/sdpa/triton/test_triton_attention_on_gpu.py"
ON_GPU = f"{P}/norm/triton/test_triton_norms_on_gpu.py"
REPORTS = f"{P}/sdpa/triton/test_reports_on_kernels.py"
KERNELS = f"{P}/sdpa/triton/test_attention_on_kernels.py"
REPEATS = f"{P}/sdpa/triton/test_attention_repeats_on_gpu.py"
SIZES = f"{P}/sdpa/triton/test_triton_attention_sizes.py"


@dataclass(frozen=True)
class Case:
    """One case, in words, and the tests (path, or path::function) that hold it."""

    id: str
    words: str
    tests: tuple[str, ...]
