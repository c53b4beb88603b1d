"""Step times of published runs: the median error over all, and a cause for every outlier."""

from __future__ import annotations

import re
from statistics import median

import pytest

from tests.published.step_times import CAUSES, OUTLIER, ROWS, cause_of, outcomes


@pytest.fixture(scope="module")
def found():
    return outcomes()


def _median(chosen):
    return median(abs(one.error) for one in chosen)


def test_every_run_is_judged(found):
    assert len(found) == len(ROWS) >= 200
    assert {one.row["device"] for one in found} >= {
        "a100-80gb", "a100-40gb", "h100-80gb", "h200", "gb200", "v100-16gb",
    }  # fmt: skip
    assert sum(one.row["tier"] == 1 for one in found) >= 40


def test_median_error(found):
    assert _median(found) <= 0.15


@pytest.mark.parametrize("device", ["a100-80gb", "a100-40gb", "h100-80gb", "gb200"])
def test_median_error_by_device(found, device):
    """No device carries the others."""
    assert _median(one for one in found if one.row["device"] == device) <= 0.2


def test_runs_whose_configuration_is_known(found):
    known = [one for one in found if one.known]
    assert len(known) >= 25
    assert _median(known) <= 0.15
    assert _median(one for one in found if one.row["tier"] == 1) <= 0.15


def test_every_outlier_has_one_cause(found):
    for one in found:
        cause_of(one)
        names = [key for key in CAUSES if re.match(key, one.row["id"])]
        assert len(names) <= 1, one.row["id"]
    assert sum(abs(one.error) > OUTLIER for one in found) <= 0.15 * len(found)


@pytest.mark.parametrize("key", CAUSES)
def test_every_cause_is_needed(found, key):
    assert any(re.match(key, one.row["id"]) and abs(one.error) > OUTLIER for one in found)


def test_long_sequences_show_which_kernel_ran(found):
    """Attention dominates these: with FlashAttention-2 assumed they would be a third too fast."""
    long = [one for one in found if one.row["id"].startswith("llmf") and one.row["seq"] >= 16384]
    assert len(long) >= 20
    assert _median(long) <= 0.12
