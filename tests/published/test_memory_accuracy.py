"""Predicted memory beside measured: Megatron's continuous integration and published runs."""

from __future__ import annotations

from functools import cache
from statistics import median

import yaml

from tests.conftest import ROOT
from tests.published.memory_cases import BIG, Case, ci_cases, published_cases


@cache
def judged() -> tuple[Case, ...]:
    return tuple(case for case in ci_cases() if not case.left_out)


def test_every_case_is_judged_or_left_out_for_a_reason() -> None:
    every = tuple(ci_cases())
    assert len(every) == 201
    assert len(judged()) >= 188
    reasons = {case.left_out for case in every if case.left_out}
    assert all("not published" in r for r in reasons)


def test_peak_of_large_runs() -> None:
    errors = {case.name: case.error for case in judged() if case.measured > BIG}
    assert len(errors) >= 11
    assert median(map(abs, errors.values())) <= 0.02


def test_no_large_run_is_far_off_without_its_cause() -> None:
    far = [c for c in judged() if c.measured > BIG and abs(c.error) > 0.15]
    assert [c.name for c in far if not c.cause] == []


def test_small_runs_are_within_absolute_bounds() -> None:
    small = [c for c in judged() if 0 < c.measured <= BIG]
    assert len(small) >= 177
    assert [c.name for c in small if abs(c.predicted - c.measured) > 0.7e9] == []


def test_resident_states() -> None:
    known = [c for c in judged() if c.resident_measured]
    off = [
        case.name
        for case in known
        if abs(case.resident_predicted - case.resident_measured)
        > 0.05 * case.resident_measured + 0.3e9
    ]
    assert [name for name in off if not any(c.cause for c in known if c.name == name)] == []


def test_cases_that_were_added_later() -> None:
    """Other cases of the same source, within the bounds of those above, or with their cause."""
    found = [case for case in ci_cases("megatron_ci_more.json") if not case.left_out]
    assert len(found) == 19
    plain = [case for case in found if not case.cause]
    assert len(plain) >= 17
    assert median(abs(case.error) for case in plain) <= 0.02
    for case in plain:
        apart = abs(case.predicted - case.measured)
        assert apart <= (0.15 * case.measured if case.measured > BIG else 0.7e9), case.name
    for case in found:
        apart = abs(case.resident_predicted - case.resident_measured)
        assert apart <= 0.05 * case.resident_measured + 0.3e9, case.name


def test_published_allocations() -> None:
    found = [case for case in published_cases() if not case.left_out]
    assert len(found) >= 40
    assert [c.name for c in found if not -0.45 < c.error < 0.5] == []
    assert [c.name for c in found if abs(c.error) > 0.15 and not c.cause] == []


def test_published_active_bytes() -> None:
    """torchtune's ladder of techniques on one GPU: what is active, from full precision to QLoRA."""
    ladder = [c for c in published_cases() if c.metric == "active"]
    assert len(ladder) == 6
    assert median(abs(case.error) for case in ladder) <= 0.05
    assert max(abs(case.error) for case in ladder) <= 0.15


def test_what_the_allocator_reserves() -> None:
    """Replayed, not fitted; within the goal for figures that were not used in development."""
    reserved = [c for c in published_cases() if c.metric == "reserved"]
    assert len(reserved) == 12
    assert median(abs(case.error) for case in reserved) <= 0.07
    assert abs(median(case.error for case in reserved)) <= 0.03
    assert [c.name for c in reserved if abs(c.error) > 0.15 and not c.cause] == []


def test_what_the_driver_shows() -> None:
    device = [c for c in published_cases() if c.metric == "device"]
    assert len(device) == 18
    assert median(abs(case.error) for case in device) <= 0.07
    # a V100's context, of no source but the page of five of these figures, is that of other devices
    assert abs(median(case.error for case in device)) <= 0.035


def test_the_range_of_a_peak_is_that_of_the_benchmark() -> None:
    """``python -m benchmarks.accuracy --errors > presets/accuracy/memory.yaml``."""
    from benchmarks.accuracy import errors_yaml

    kept = yaml.safe_load((ROOT / "presets" / "accuracy" / "memory.yaml").read_text("utf-8"))
    found = yaml.safe_load(errors_yaml())
    assert found == kept
    assert found["allocated"]["runs"] >= 17
