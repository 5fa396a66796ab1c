"""Reports from the field."""

from __future__ import annotations

from case_lists.case import (
    ATTENTION_BACKWARD,
    ATTENTION_ON_GPU,
    PACKED,
    PLUGIN,
    REPORTS,
    SDPA,
    Case,
    P,
)

REPORTS_HELD: tuple[Case, ...] = (
    Case(
        "report 1",
        "rows that a mask leaves empty",
        (
            f"{SDPA}::test_rows_that_see_nothing_are_zero_with_zero_gradient",
            f"{REPORTS}::test_1_rows_that_a_mask_leaves_empty",
        ),
    ),
    Case(
        "report 2",
        "causal alignment of unequal lengths",
        (
            f"{P}/sdpa/aten/test_attention_forward.py::test_causal_alignment_shows_the_reported_keys",
            f"{REPORTS}::test_2_the_alignment_of_a_causal_mask",
        ),
    ),
    Case(
        "report 3",
        "a window counts the query itself",
        (
            f"{P}/sdpa/aten/test_attention_forward.py::test_sliding_window_counts_the_query_itself",
            f"{REPORTS}::test_3_a_window_counts_the_query_itself",
        ),
    ),
    Case(
        "report 4",
        "large negative scores keep gradients finite",
        (
            f"{SDPA}::test_large_negative_scores_under_a_mask_have_finite_gradients",
            f"{REPORTS}::test_4_large_negative_scores",
            f"{REPORTS}::test_4_large_negative_scores_under_a_boolean_mask",
        ),
    ),
    Case(
        "report 5",
        "short segments of grouped heads",
        (
            f"{PACKED}::test_packed_sequences_equal_a_reference_each",
            f"{REPORTS}::test_5_short_segments_of_grouped_heads",
        ),
    ),
    Case(
        "report 6",
        "keys of no query get no gradient",
        (
            f"{PACKED}::test_keys_of_no_query_get_exactly_zero_gradient",
            f"{REPORTS}::test_6_keys_of_no_query_get_no_gradient",
        ),
    ),
    Case(
        "report 7",
        "a cache with NaN beyond its used part",
        (
            f"{SDPA}::test_padding_by_lengths_ignores_what_lies_beyond",
            f"{PACKED}::test_paged_keys_equal_dense_ones",
            f"{REPORTS}::test_7_a_cache_that_is_used_in_part",
            f"{REPORTS}::test_7_free_slots_of_a_last_page_and_padding_pages",
        ),
    ),
    Case(
        "report 8",
        "merging empty states",
        (
            f"{P}/sdpa/torch/test_merge_states.py::test_merging_states",
            f"{P}/sdpa/triton/test_triton_attention_functions.py::test_states_of_two_caches_merge",
        ),
    ),
    Case(
        "report 9",
        "Stats agree, and a loss on Stats has its gradient",
        (
            f"{SDPA}::test_masks_and_gradients",
            f"{REPORTS}::test_9_statistics_agree_and_a_loss_on_them_has_its_gradient",
        ),
    ),
    Case(
        "report 10",
        "a page index whose offset passes 32 bits",
        (
            f"{P}/sdpa/aten/test_attention_memory.py::test_page_index_beyond_32_bits",
            f"{REPORTS}::test_10_a_page_whose_offset_passes_32_bits",
            f"{ATTENTION_ON_GPU}::test_a_page_far_away_is_found",
        ),
    ),
    Case(
        "report 11",
        "a token stride whose offset passes 31 bits",
        (
            f"{P}/sdpa/aten/test_attention_memory.py::test_token_stride_beyond_32_bits",
            f"{REPORTS}::test_11_a_token_stride_whose_offset_passes_31_bits",
            f"{ATTENTION_BACKWARD}_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
        ),
    ),
    Case(
        "report 12",
        "weight gradients of mixed types sum in float32",
        (f"{P}/norm/torch/test_norm_functions.py::test_weight_gradients_accumulate_in_float32",),
    ),
    Case(
        "report 13",
        "RoPE of fewer key heads, tables with a batch",
        (f"{P}/rope/torch/test_rope_function.py::test_values_and_gradients",),
    ),
    Case(
        "report 14",
        "causal convolution of one and two tokens",
        (f"{P}/causal_conv/torch/test_conv1d_causal_function.py",),
    ),
    Case(
        "report 15",
        "blocks of zeros, tiny amax, saturating casts",
        (f"{P}/block_scale/torch/test_quantize_functions.py", f"{P}/block_scale/aten"),
    ),
    Case(
        "report 16",
        "dropout differs from call to call and replays",
        (f"{SDPA}::test_dropout_replays_by_seed_and_offset",),
    ),
    Case(
        "report 17",
        "a passing test may have poisoned the device",
        (f"{PLUGIN}/test_probe.py::test_a_poisoned_context_ends_its_worker_and_fails_its_test",),
    ),
)
