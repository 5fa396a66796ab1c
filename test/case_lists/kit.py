"""The test system and its references."""

from __future__ import annotations

from case_lists.case import (
    COMPARE,
    KERNELS,
    ON_GPU,
    PLANS,
    PLUGIN,
    REPORTS,
    Case,
    P,
)

KIT: tuple[Case, ...] = (
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
)
