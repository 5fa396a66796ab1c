"""Which test holds which case: the source of docs/cases.md.

    python test/cases.py > docs/cases.md

A case is a trap that has caught a library before. Ids are stable, since reviews cite them; a case
that no test holds yet is listed with none. That every test named here exists is checked by
test/python/core/docs/test_cases_page.py.
"""

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


CASES: tuple[Case, ...] = (
    Case(
        "T1",
        "levels L0 to L4; an unmarked test is an error",
        (f"{PLUGIN}/test_collection_audit.py",),
    ),
    Case(
        "T2",
        "a crash, a hang or a dead context ends one worker, not the run",
        (f"{PLUGIN}/test_isolation.py", f"{PLUGIN}/test_isolation_alone.py"),
    ),
    Case("T3", "the device is probed after each test", (f"{PLUGIN}/test_probe.py",)),
    Case(
        "T4",
        "a deadline a test, kept by a watchdog that needs no interpreter lock",
        (
            f"{PLUGIN}/test_isolation.py",
            f"{PLUGIN}/test_probe.py::test_the_deadline_covers_the_probe",
        ),
    ),
    Case(
        "T5",
        "allocator settings precede torch's import",
        (f"{PLUGIN}/test_options.py::test_the_allocator_is_set_before_torch_is_imported",),
    ),
    Case("T6", "a rebound stream is restored exactly", (f"{PLUGIN}/test_handle.py",)),
    Case("T7", "options: dry run, repro, seed, perf, dimensions", (f"{PLUGIN}/test_options.py",)),
    Case("T8", "exclusive use of a device across workers", (f"{PLUGIN}/test_locks.py",)),
    Case(
        "T9",
        "a test that no run collects is an error",
        (f"{PLUGIN}/test_collection_audit.py::test_tests_that_no_run_collects_are_an_error",),
    ),
    Case(
        "T10",
        "the tree under test is the edited one, in children too",
        (
            f"{PLUGIN}/test_collection_audit.py::test_a_child_interpreter_imports_the_tree_under_test",
        ),
    ),
    Case(
        "T11",
        "copies of the source leave bytecode out",
        (
            f"{PLUGIN}/test_draws.py::test_a_source_copy_leaves_bytecode_out_while_it_comes_and_goes",
        ),
    ),
    Case("T12", "a test is seen to fail without its fix", (f"{PLUGIN}/test_red.py",)),
    Case(
        "T13",
        "a collection error fails the run",
        (f"{PLUGIN}/test_options.py::test_a_collection_error_fails_the_run",),
    ),
    Case(
        "T14",
        "draws come from the test's own generator",
        (
            f"{P}/core/testing/data/test_data_cases.py::test_the_global_generator_does_not_matter",
            f"{PLUGIN}/test_draws.py::test_a_case_with_one_global_draw_is_found",
        ),
    ),
    Case(
        "T15",
        "out of memory is a skip around the storage allocation alone",
        (
            f"{PLUGIN}/test_large_storage.py",
            f"{P}/core/launch/test_large_products_on_gpu.py",
        ),
    ),
    Case(
        "T16",
        "an expected failure names its plan and is strict",
        (f"{PLUGIN}/test_draws.py::test_an_expected_failure_is_of_its_plan_alone",),
    ),
    Case(
        "T17",
        "a retired path's counter is held at zero",
        (f"{PLUGIN}/test_taken_paths.py",),
    ),
    Case(
        "T18",
        "ranking is tested with stub engines and stub devices",
        (
            f"{PLANS}::test_plans_are_listed_named_and_ranked",
            f"{P}/sdpa/triton/test_triton_attention_cost.py",
        ),
    ),
    Case(
        "T19",
        "a test resets its device graphs itself",
        (f"{ON_GPU}::test_replay_reads_buffers_as_they_are",),
    ),
    Case(
        "T20",
        "a delayed consumer is still pending when it is looked at",
        (f"{ON_GPU}::test_a_given_stream_is_used_and_the_current_one_otherwise",),
    ),
    Case(
        "T21",
        "the parent asks for the GPU; a child's failure stays a failure",
        (f"{PLUGIN}/test_gpu_children.py",),
    ),
    Case(
        "R1",
        "a recurrent reference works by heads and bounds its memory",
        (f"{P}/linear_attention/oracle/test_oracle_linear_attention_memory.py",),
    ),
    Case(
        "R2",
        "an attention reference works head by head within a stated memory",
        (f"{P}/sdpa/oracle/test_oracle_attention_memory.py",),
    ),
    Case(
        "R3",
        "tolerances scale with the tensor",
        (
            f"{COMPARE}/test_compare_scaling.py::test_gradients_of_grouped_heads_outgrow_a_fixed_bound",
        ),
    ),
    Case(
        "R4",
        "a tight bound needs a float64 reference",
        (
            f"{COMPARE}/test_compare_scaling.py::test_a_causal_row_with_one_key_shows_why_a_tight_bound_needs_float64",
            f"{KERNELS}::test_a_row_with_one_key_is_its_value_where_tf32_is_on",
        ),
    ),
    Case(
        "R5", "an 8-bit rounding to the other side is proved", (f"{COMPARE}/test_compare_fp8.py",)
    ),
    Case("R6", "exact ties round to even", (f"{P}/core/testing/data/test_data_ties.py",)),
    Case(
        "R7",
        "a gated product's failure is told from its product's",
        (f"{COMPARE}/test_compare_glu.py",),
    ),
    Case(
        "R8",
        "visible keys, query by query",
        (
            f"{COMPARE}/test_compare_visible.py",
            f"{P}/sdpa/oracle/test_oracle_sdpa_graph.py::test_visible_keys_of_every_mask_query_by_query",
            f"{REPORTS}::test_2_the_alignment_of_a_causal_mask",
            f"{REPORTS}::test_3_a_window_counts_the_query_itself",
        ),
    ),
    Case(
        "G1",
        "views are bound in declared order, never by shape",
        (f"{BINDER}::test_a_buffer_is_read_in_the_declared_axis_order_even_when_shapes_agree",),
    ),
    Case(
        "G2",
        "plans are listed, named, selected, barred, replayed; ids are append-only",
        (
            f"{PLANS}::test_ids_and_names_are_append_only",
            f"{PLANS}::test_a_plan_is_selected_and_run",
            f"{PLANS}::test_engine_and_knobs_replay",
            f"{PLANS}::test_barring_by_name_workspace_and_notes",
            f"{PLANS}::test_autotune_selects_and_returns_a_replayable_record",
            f"{P}/sdpa/triton/test_triton_attention_autotune.py",
        ),
    ),
    Case(
        "G3",
        "admission asks for the exact device",
        (f"{PLANS}::test_admission_asks_for_the_exact_device", DEVICES),
    ),
    Case(
        "G4",
        "an override reaches the executor or raises before any write",
        (
            f"{P}/core/planning/test_overrides.py::test_an_override_reaches_the_executor",
            f"{P}/core/planning/test_overrides.py::test_an_override_raises_before_any_write",
        ),
    ),
    Case(
        "G5",
        "a graph and a function decline alike",
        (f"{P}/core/ops/test_functions_and_graphs_decline_alike.py",),
    ),
    Case(
        "G6",
        "a retired entry is gone everywhere",
        (f"{P}/core/imports/test_retired_names.py",),
    ),
    Case(
        "G7",
        "functions and modules of one name in every import order",
        (f"{P}/core/imports/test_lazy_names.py",),
    ),
    Case(
        "B1",
        "addresses beyond 32 bits, with a decoy at the narrow one",
        (
            f"{P}/sdpa/aten/test_attention_memory.py::test_page_index_beyond_32_bits",
            f"{P}/sdpa/aten/test_attention_memory.py::test_token_stride_beyond_32_bits",
            f"{FAMILIES}::test_wide_strides_read_and_write_no_decoy",
            f"{ON_GPU}::test_row_strides_beyond_32_bits_are_addressed",
            f"{ATTENTION_ON_GPU}::test_strides_beyond_32_bits_are_addressed",
            f"{ATTENTION_ON_GPU}::test_a_page_far_away_is_found",
            f"{MAPS}::test_the_driver_is_told_the_innermost_axis_first_and_wide_steps_whole",
            f"{HOPPER}_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
            f"{ATTENTION_BACKWARD}_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
            f"{TRITON}/test_triton_norm_layouts_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
            f"{ROPE}.py::test_strides_beyond_32_bits",
            f"{ROPE}_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
            f"{CHAINS}.py::test_strides_beyond_32_bits",
            f"{CHAINS}_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
            f"{RAGGED}::test_sequences_that_start_beyond_32_bits",
            f"{P}/sdpa/triton/test_triton_attention_metadata.py::test_steps_beyond_32_bits",
        ),
    ),
    Case(
        "B2",
        "index products beyond 32 bits without a wide stride",
        (
            f"{P}/core/launch/test_large_products_on_gpu.py",
            f"{CHAINS}_on_gpu.py::test_more_elements_than_32_bits_count",
        ),
    ),
    Case(
        "B3",
        "a singleton axis may have any stride",
        (
            f"{BINDER}::test_a_singleton_axis_may_have_any_stride",
            f"{HOPPER}.py::test_a_stride_that_is_never_stepped_does_not_count",
            f"{KERNELS}::test_axes_that_are_never_stepped_may_have_any_stride",
        ),
    ),
    Case(
        "B4",
        "what a buffer owns bounds what is touched",
        (
            f"{BINDER}::test_ragged_capacity_is_what_the_buffer_owns",
            f"{BINDER}::test_strided_lengths_are_refused_not_misread",
            f"{BINDER}::test_dlpack_numpy_and_bare_pointers_bind",
            f"{DIRECT}::test_both_ways_agree_on_whatever_comes",
            f"{SEQUENCES}::test_a_sequence_beyond_its_buffer_is_refused",
        ),
    ),
    Case(
        "B5",
        "page tables of keys and of values are independent",
        (
            f"{PACKED}::test_paged_keys_equal_dense_ones",
            f"{ATTENTION}::test_a_sample_of_all_pairs",
            f"{ATTENTION_ON_GPU}::test_replay_reads_lengths_and_tables_as_they_are",
            f"{P}/sdpa/triton/test_triton_attention_functions.py::test_caches_are_read_by_the_kernels",
            f"{P}/sdpa/triton/test_triton_attention_decode.py::test_lengths_at_every_edge",
        ),
    ),
    Case(
        "B6",
        "the workspace overlaps no operand; disjoint slices pass",
        (
            f"{BINDER}::test_the_workspace_may_not_overlap_an_operand",
            f"{APART}::test_several_kernels_and_their_workspace",
            f"{BINDER}::test_an_output_may_not_overlap_another_operand",
            f"{BINDER}::test_interleaved_views_of_one_buffer_do_not_overlap",
        ),
    ),
    Case(
        "B7",
        "scalar results over operands are found before any copy",
        (f"{P}/core/launch/test_aliases_of_scalars.py",),
    ),
    Case(
        "B8",
        "a refusal comes before any write",
        (f"{BINDER}::test_a_refusal_names_the_tensor_and_leaves_every_buffer_untouched",),
    ),
    Case(
        "B9",
        "optional operands agree with the declaration",
        (f"{BINDER}::test_optional_operands_agree_with_the_declaration",),
    ),
    Case(
        "B10",
        "a plan cache tells layouts apart",
        (
            f"{SDPA}::test_the_cache_tells_layouts_apart",
            f"{P}/norm/torch/test_norm_functions.py::test_layouts_and_the_cache",
        ),
    ),
    Case(
        "B11",
        "odd head sizes keep the scale",
        (
            f"{SDPA}::test_padding_a_head_keeps_the_scale",
            ATTENTION_PAIRS,
        ),
    ),
    Case(
        "B12",
        "compact declarations are made true",
        (f"{SDPA}::test_lengths_and_sinks_may_be_views",),
    ),
    Case(
        "B13",
        "work goes to the operands' device and its stream; the caller's device is restored",
        (
            f"{APART}::test_work_goes_to_the_operands_device_and_its_stream",
            f"{APART}::test_the_short_way_leaves_another_current_device_to_the_binder",
            f"{P}/core/launch/test_two_devices.py",
            f"{P}/core/launch/test_streams.py",
        ),
    ),
    Case(
        "B14",
        "a function's workspace is its plan's, on the stream of the work",
        (
            f"{P}/core/launch/test_streams_on_gpu.py::test_the_whole_of_a_function_is_on_its_stream",
            f"{P}/core/launch/test_workspace_tripwire.py",
            f"{P}/core/ops/test_workspaces.py",
        ),
    ),
    Case(
        "B15",
        "concurrent calls on several streams",
        (
            f"{FAMILIES}::test_several_streams_at_once",
            f"{ON_GPU}::test_concurrent_frames_on_several_streams",
            f"{ATTENTION_ON_GPU}::test_concurrent_frames_on_several_streams",
            f"{HOPPER}_on_gpu.py::test_concurrent_frames_on_several_streams",
            f"{P}/sdpa/triton/test_attention_beside_another_process.py",
        ),
    ),
    Case(
        "B16",
        "replay reads operands as they are",
        (
            f"{FAMILIES}::test_replay_reads_operands_as_they_are",
            f"{P}/core/launch/test_cuda_graphs_on_gpu.py",
            f"{ON_GPU}::test_replay_reads_buffers_as_they_are",
            f"{ATTENTION_ON_GPU}::test_replay_reads_lengths_and_tables_as_they_are",
            f"{ATTENTION_BACKWARD}_on_gpu.py::test_replay_reads_operands_as_they_are",
            f"{HOPPER}_on_gpu.py::test_replay_reads_buffers_as_they_are_and_rebinding_uses_others",
            f"{HOPPER_SEQUENCES}::test_lengths_are_read_at_each_launch",
            f"{HOPPER_BACKWARD_SEQUENCES}::test_lengths_are_read_at_each_launch",
            f"{BINDER}::test_frames_are_bound_once_and_read_buffers_as_they_are",
        ),
    ),
    Case(
        "B17",
        "shapes change within a plan's bounds with the compiler forbidden",
        (
            f"{FAMILIES}::test_another_number_of_rows_needs_no_compiler",
            f"{P}/sdpa/triton/test_triton_attention_keys.py",
        ),
    ),
    Case(
        "B18",
        "a call site has the compiled kernel's arguments",
        (
            f"{TRITON}/test_triton_norms_compile.py::test_every_kernel_compiles_for_four_targets_and_is_called_as_compiled",
            f"{ATTENTION}::test_every_kernel_compiles_for_four_targets_and_is_called_as_compiled",
            f"{P}/sdpa/triton/test_triton_attention_compile.py",
            f"{ROPE}.py::test_every_kernel_compiles_for_four_targets_without_approximations",
            f"{CHAINS}.py::test_generated_kernels_compile_for_four_targets",
        ),
    ),
    Case(
        "B19",
        "holes of packed results are zero from functions, untouched from graphs",
        (
            f"{PACKED}::test_origins_and_holes_of_packed_sequences",
            f"{RAGGED}::test_holes_of_the_capacity_are_zero_and_nothing_waits",
            f"{ATTENTION}::test_a_sample_of_all_pairs",
        ),
    ),
    Case(
        "B20",
        "alignment of tensor maps: batch strides, axes never stepped, each operand's width",
        (
            f"{MAPS}::test_what_no_map_describes",
            f"{MAPS}::test_alignment_counts_the_batch_stride_only_where_it_is_stepped",
            f"{MAPS}::test_an_address_that_no_map_takes_is_refused_before_the_driver",
            f"{HOPPER}.py::test_a_decline_names_the_tensor_and_the_rule",
        ),
    ),
    Case(
        "B21",
        "lengths, sums, starts, tables and sinks of any step and type",
        (
            f"{P}/sdpa/triton/test_triton_attention_metadata.py",
            f"{SDPA}::test_lengths_and_sinks_may_be_views",
        ),
    ),
    Case(
        "B22",
        "the host never waits",
        (
            f"{FAMILIES}::test_a_launch_neither_allocates_nor_waits",
            f"{ON_GPU}::test_neither_bind_nor_launch_waits_or_allocates",
            f"{ATTENTION_ON_GPU}::test_neither_bind_nor_launch_waits_or_allocates",
            f"{ATTENTION_BACKWARD}_on_gpu.py::test_neither_bind_nor_launch_waits_or_allocates",
            f"{RAGGED}::test_holes_of_the_capacity_are_zero_and_nothing_waits",
        ),
    ),
    Case(
        "A1",
        "built in one process, run in another with the compiler forbidden",
        (
            f"{P}/core/artifact/test_artifact_on_gpu.py",
            f"{RECORDS}::test_a_second_process_imports_no_triton",
            f"{P}/core/artifact/test_artifact_compile.py::test_another_process_finds_what_one_compiled",
        ),
    ),
    Case(
        "A2",
        "keys hold plan-time facts only",
        (
            f"{P}/core/artifact/test_artifact_key.py",
            f"{CHAINS}_keys.py",
            f"{RECORDS}::test_names_are_not_in_the_key_and_facts_are",
        ),
    ),
    Case(
        "A3",
        "a disabled, full, read-only, shared or damaged store",
        (
            f"{P}/core/artifact/test_artifact_store.py",
            f"{P}/core/artifact/test_artifact_processes.py",
            f"{RECORDS}::test_a_damaged_record_is_a_miss",
        ),
    ),
    Case(
        "A4",
        "another target is compiled for by name; what cannot run here is absent",
        (
            f"{P}/core/artifact/test_artifact_compile.py::test_what_compile_refuses",
            f"{P}/core/artifact/test_artifact_compile.py::test_levels_and_what_makes_a_miss",
            f"{DEVICES}::test_a_graph_on_a_future_device_is_planned_without_compiled_kernels",
            f"{DEVICES}::test_a_compiler_without_the_target_declines",
        ),
    ),
    Case(
        "A5",
        "a helper in a module of its own is part of the source's identity",
        (f"{P}/core/artifact/test_artifact_compile.py::test_levels_and_what_makes_a_miss",),
    ),
    Case(
        "O1",
        "attention: heads, masks, bias, sink, dropout, soft cap, sizes, layouts",
        (
            f"{P}/sdpa/aten/test_attention_forward.py",
            f"{P}/sdpa/aten/test_attention_backward.py",
            f"{P}/sdpa/aten/test_attention_against_oracle.py",
            ATTENTION,
            f"{P}/sdpa/triton/test_triton_attention_specialized.py",
            f"{P}/sdpa/triton/test_triton_attention_level_on_gpu.py",
            f"{P}/sdpa/triton/test_triton_attention_skips.py",
            ATTENTION_PAIRS,
            f"{P}/sdpa/aten/test_attention_finite_differences.py",
            f"{P}/sdpa/torch/test_sdpa_finite_differences.py",
            f"{HOPPER}_on_gpu.py::test_every_band_at_every_extent",
            f"{HOPPER_PAGES}::test_scales_and_caps_that_are_tensors",
            f"{HOPPER_PAIRS}::test_every_pair_of_features",
            f"{HOPPER}_on_gpu.py::test_head_sizes_between_the_kernels",
            f"{HOPPER}_on_gpu.py::test_sinks_join_the_denominator",
            f"{HOPPER}_on_gpu.py::test_what_a_hidden_key_or_value_holds_reaches_no_row",
            f"{ATTENTION_BACKWARD}.py",
            f"{ATTENTION_BACKWARD}_on_gpu.py::test_large_cases",
            f"{P}/sdpa/triton/test_triton_attention_bias.py",
            SIZES,
            KERNELS,
            REPEATS,
            f"{P}/sdpa/hopper/test_hopper_backward_pairs.py",
        ),
    ),
    Case(
        "O2",
        "ragged attention, empty sequences, both orders of Stats",
        (
            f"{PACKED}::test_packed_sequences_equal_a_reference_each",
            f"{PACKED}::test_origins_and_holes_of_packed_sequences",
            f"{SEQUENCES}::test_ragged_backward",
            f"{HOPPER_SEQUENCES}::test_sequences_of_their_own_lengths",
            f"{P}/sdpa/triton/test_triton_attention_packed.py",
            f"{P}/sdpa/triton/test_triton_attention_packed_on_gpu.py",
            f"{HOPPER_BACKWARD_SEQUENCES}::test_sequences_of_their_own_lengths",
            ATTENTION_PAIRS,
            f"{KERNELS}::test_packed_operands_that_are_cut_out_of_others",
            f"{REPEATS}::test_a_sequence_does_not_depend_on_those_beside_it",
        ),
    ),
    Case(
        "O3",
        "decoding, with Stats and a merge that keeps the base",
        (
            f"{P}/sdpa/torch/test_sdpa_decode_function.py",
            f"{P}/sdpa/torch/test_merge_states.py::test_merging_states",
            f"{ATTENTION}::test_split_keys",
            f"{P}/sdpa/triton/test_triton_attention_decode.py",
            f"{P}/sdpa/triton/test_triton_attention_joined_on_gpu.py",
            f"{P}/sdpa/triton/test_triton_attention_functions.py",
            f"{KERNELS}::test_programs_of_few_queries_stay_and_take_run_after_run",
        ),
    ),
    Case(
        "O4",
        "paged keys and values, page sizes, unused entries",
        (
            f"{PACKED}::test_paged_keys_equal_dense_ones",
            f"{SEQUENCES}::test_paged_keys_and_values",
            ATTENTION_PAIRS,
            f"{ATTENTION_ON_GPU}::test_nan_beyond_lengths_and_in_free_slots_stays_there",
            f"{HOPPER_PAGES}::test_pages",
            f"{HOPPER_PAGES}::test_a_replay_reads_tables_and_lengths_as_they_are",
            f"{HOPPER_PAGES}::test_what_a_hidden_token_of_a_page_holds_reaches_no_row",
            f"{SIZES}::test_pages",
        ),
    ),
    Case(
        "O5",
        "8-bit attention with scales and amax",
        (
            f"{P}/sdpa/aten/test_attention_eight_bit.py",
            f"{P}/sdpa/aten/test_attention_mxfp8.py",
            f"{P}/sdpa/hopper/test_hopper_fp8.py",
            f"{P}/sdpa/hopper/test_hopper_fp8_on_gpu.py",
            f"{P}/sdpa/hopper/test_hopper_fp8_contract_on_gpu.py",
            f"{FAMILIES}::test_wide_strides_read_and_write_no_decoy",
        ),
    ),
    Case(
        "O6",
        "block scales: formats, layouts, attention",
        (f"{P}/block_scale/aten", f"{P}/block_scale/torch"),
    ),
    Case(
        "O7",
        "a gate on attention's output leaves Stats alone",
        (
            f"{SDPA}::test_gate_describes_the_output_and_not_the_statistics",
            f"{P}/sdpa/triton/test_triton_attention_functions.py::test_a_gate_is_one_kernel_behind",
            f"{P}/sdpa/triton/test_triton_attention_gate.py",
            f"{P}/sdpa/triton/test_triton_attention_gate_pairs.py",
        ),
    ),
    Case(
        "O8",
        "RoPE: exact, large angles, signed zero, non-finite",
        (
            f"{P}/rope/torch/test_rope_function.py",
            f"{P}/rope/aten",
            f"{P}/rope/triton",
        ),
    ),
    Case(
        "O9",
        "products with epilogues, block scales, groups",
        (
            f"{P}/matmul/aten/test_aten_matmul_epilogues.py",
            f"{P}/matmul/torch/test_linear_function.py",
            f"{P}/moe/aten",
        ),
    ),
    Case(
        "O10",
        "convolution in three directions; causal, with its decoding step",
        (
            f"{P}/conv/aten/test_aten_convolution.py",
            f"{P}/causal_conv/torch/test_conv1d_causal_function.py",
        ),
    ),
    Case(
        "O11",
        "normalizations, backward, residual, quantized results",
        (
            f"{P}/norm/aten/test_aten_normalization.py",
            f"{P}/batchnorm/aten/test_aten_batchnorm.py",
            f"{P}/norm/torch/test_norm_functions.py",
            TRITON,
        ),
    ),
    Case(
        "O14",
        "pointwise, reductions, shapes, generated statistics",
        (
            f"{P}/pointwise/aten/test_aten_pointwise.py",
            f"{P}/reduction/aten/test_aten_reduction.py",
            f"{P}/shape/aten/test_aten_shape.py",
            f"{P}/pointwise/triton",
            f"{P}/core/fuzz/test_random_chains.py",
        ),
    ),
    Case(
        "F1",
        "operators with fakes, opcheck, torch.compile",
        (f"{P}/core/compile/test_operators.py", f"{P}/core/compile/test_compiled_functions.py"),
    ),
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


def page() -> str:
    """The text of docs/cases.md."""
    held = sum(bool(case.tests) for case in CASES)
    lines = [
        "# Cases and the tests that hold them",
        "",
        "Generated: `python test/cases.py > docs/cases.md`. Each case is a trap that has caught a",
        f"library before; {held} of the {len(CASES)} here are held by a test. Tests run at L0",
        "unless their mark says otherwise; those `on_gpu` skip, with that reason, without a GPU.",
        "",
        "| case | what must hold | tests |",
        "|---|---|---|",
    ]
    for case in CASES:
        tests = "<br>".join(f"`{test.removeprefix('test/python/')}`" for test in case.tests)
        lines.append(f"| {case.id} | {case.words} | {tests or 'none yet'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
