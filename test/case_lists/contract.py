"""Declaring, planning, binding, launching, and compiled code."""

from __future__ import annotations

from case_lists.case import (
    APART,
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_ON_GPU,
    ATTENTION_PAIRS,
    BINDER,
    CHAINS,
    DEVICES,
    DIRECT,
    FAMILIES,
    HOPPER,
    HOPPER_BACKWARD_SEQUENCES,
    HOPPER_SEQUENCES,
    KERNELS,
    MAPS,
    ON_GPU,
    PACKED,
    PLANS,
    RAGGED,
    RECORDS,
    ROPE,
    SDPA,
    SEQUENCES,
    TRITON,
    Case,
    P,
)

CONTRACT: tuple[Case, ...] = (
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
            f"{HOPPER}_contract_on_gpu.py::test_strides_beyond_32_bits_are_addressed",
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
            f"{HOPPER}_contract_on_gpu.py::test_concurrent_frames_on_several_streams",
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
            f"{HOPPER}_contract_on_gpu.py::test_replay_reads_buffers_as_they_are_and_rebinding_uses_others",
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
            f"{P}/core/artifact/test_kernel_source.py",
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
)
