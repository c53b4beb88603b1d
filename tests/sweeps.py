"""Long sweeps: a sample of their cases in every run, all of them in CI (marker ``sweep``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

CASES = 3
"""Cases of one test that every run has, where it has more."""

ALL = True
"""Whether this run has the long sweeps; conftest.py says so before tests are collected."""


def examples(number: int) -> int:
    """Examples that Hypothesis tries: so many in a run of all sweeps, else a quarter."""
    return number if ALL else number // 4


def sampled(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Parameters of a test: those in ``keep`` in every run, the others as a sweep."""
    return [v if v in keep else pytest.param(v, marks=pytest.mark.sweep) for v in values]


LONG: Mapping[str, tuple[str, ...]] = {
    "cost/test_compare_device": ("test_no_policy_fits",),
    "cost/test_mfu": (
        "test_calibration",
        "test_calibration_finds_planted_shares",
        "test_calibration_is_never_worse_than_before_or_a_single_share",
        "test_what_cannot_fit_is_said_first",
    ),
    "hardening/test_bounds": (
        "test_files",
        "test_problems_are_planned_as_well_as_time_allows",
        "test_the_time_limit_is_kept",
        "test_what_took_minutes",
    ),
    "hardening/test_forged": ("test_files_of_every_format",),
    "hardening/test_streams": (
        "test_a_good_answer_is_one_whatever_becomes_of_notes",
        "test_a_reader_that_reads_nothing_is_no_error",
        "test_an_answer_that_cannot_be_written_is_an_error",
        "test_what_is_measured_is_saved_whole",
    ),
    "io/test_hub_fuzz": ("test_mutated_configurations",),
    "io/test_shell": ("test_what_never_ends_is_refused",),
    "io/test_writers": ("test_reading_back_gives_the_same_run",),
    "memory/test_integers": ("test_runs",),
    "memory/test_schedule": ("test_in_flight_and_moments_equal_a_plain_count_over_the_whole_step",),
    "plan/test_advice_lines": (
        "test_a_plan_within_a_budget_of_ones_own_needs_no_device",
        "test_machines_are_told_by_advise_alone",
        "test_plan_says_how_many_gpus_a_change_takes",
        "test_the_cheapest_that_fits_stands_under_does_not_fit",
        "test_the_flags_said_are_flags_of_the_command",
    ),
    "plan/test_advise": (
        "test_a_remedy_is_the_run_that_its_flags_make",
        "test_flash_attention_is_not_offered_where_the_gpu_does_not_run_it",
        "test_planned_recompute_is_named_where_it_is_faster",
        "test_the_command_of_a_combination_fits",
        "test_what_spare_memory_buys_fits_and_no_more_does",
    ),
    "plan/test_bridge": (
        "test_budgets_are_kept_and_costs_fall",
        "test_emitted_plans_fit_and_are_never_below_the_optimum",
        "test_flops_count_first_and_bytes_break_ties",
        "test_infeasible_says_what_would_do",
        "test_the_rest_of_the_gpu_is_that_of_memory",
    ),
    "plan/test_emit_torchtitan": ("test_the_best_of_all_settings",),
    "plan/test_offload": ("test_never_worse_than_without",),
    "plan/test_stage_problem": ("test_out_of_time_is_said",),
    "published/test_calibration_apart": ("test_ranges_are_those_of_the_benchmark",),
    "published/test_deepseek_v3": ("test_every_part_of_it_is_needed",),
    "published/test_megatron": ("test_llama_closed_form",),
    "published/test_memory_accuracy": (
        "test_every_case_is_judged_or_left_out_for_a_reason",
        "test_published_active_bytes",
        "test_published_allocations",
        "test_the_range_of_a_peak_is_that_of_the_benchmark",
        "test_what_the_allocator_reserves",
        "test_what_the_driver_shows",
    ),
    "published/test_paper_times": ("test_table5_iteration_time",),
    "published/test_step_times": ("test_every_run_is_judged",),
    "published/test_transformers": ("test_any_run_is_described_or_refused",),
    "search/test_find": ("test_a_file_holds_every_row_best_first",),
    "search/test_rows": ("test_random_rows_are_single_runs",),
    "test_charts": (
        "test_every_chart_compiles_and_names_its_units",
        "test_every_chart_keeps_its_width",
    ),
    "test_frameworks": (
        "test_a_misspelt_profile_is_refused",
        "test_every_trait_is_read",
        "test_no_profile_is_recognised_by_its_name",
    ),
    "test_journeys": ("test_a_journey_ends_with_its_answer",),
    "test_library": (
        "test_a_call_answers_what_its_command_prints",
        "test_a_data_frame_is_the_main_table_of_csv",
        "test_a_function_is_measured",
        "test_calls_keep_their_names_beside_packages_of_the_same",
    ),
    "test_output": (
        "test_a_reader_that_leaves_early_is_no_error",
        "test_names_wrap_and_numbers_are_never_cut",
        "test_the_header_says_what_images_and_completions_there_are",
    ),
    "test_plan_cli": (
        "test_csv_carries_an_infeasible_answer",
        "test_infeasible_exits_with_one",
        "test_paste",
        "test_the_columns_of_csv_do_not_depend_on_the_run",
        "test_training_changes_the_rest_of_the_gpu",
        "test_what_to_change_acts_on_the_larger_part",
    ),
    "test_report": (
        "test_a_browser_shows_it_without_a_complaint",
        "test_a_run_that_does_not_fit_says_so_first",
        "test_it_says_what_the_commands_say",
    ),
    "test_reports": (
        "test_K2_51_says_no_and_how_many_gpus",
        "test_K2_52_says_whether_and_what_to_change",
        "test_K2_53_says_what_interleaving_adds",
    ),
    "test_schemas": ("test_measurements",),
    "test_terminals": (
        "test_a_stream_that_is_not_utf_8_gets_ascii",
        "test_one_unit_a_column_and_one_style_of_percent",
        "test_what_machines_read_is_the_same_in_every_encoding",
    ),
}
"""Tests that take seconds, by file: sweeps, every case of them."""


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark as a sweep the tests of ``LONG``, and all but ``CASES`` of each other's, evenly spread.

    Of a test that is marked ``each`` all cases stay: they are quick, and a step of a recipe
    that was forgotten shows in any of them.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not (item.get_closest_marker("sweep") or item.get_closest_marker("each")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        path, _, function = name.partition("::")
        if function in LONG.get(path.removeprefix("tests/").removesuffix(".py"), ()):
            for item in cases:
                item.add_marker(pytest.mark.sweep)
            continue
        last = len(cases) - 1
        kept = {round(i * last / (CASES - 1)) for i in range(CASES)}
        for i, item in enumerate(cases):
            if last >= CASES and i not in kept:
                item.add_marker(pytest.mark.sweep)
