"""Long sweeps: a sample of their cases in every run, all of them in CI (marker ``sweep``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

CASES = 5
"""Cases of one test that every run has, where it has more."""

ALL = True
"""Whether this run has the long sweeps; conftest.py says so before tests are collected."""


def examples(number: int) -> int:
    """Examples that Hypothesis tries: so many in a run of all sweeps, else a quarter."""
    return number if ALL else number // 4


def sampled(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Parameters of a test: those in ``keep`` in every run, the others as a sweep."""
    return [v if v in keep else pytest.param(v, marks=pytest.mark.sweep) for v in values]


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark as a sweep all but ``CASES`` of each test's cases, evenly spread.

    Of a test that is marked ``each`` all cases stay: they are quick, and a step of a recipe
    that was forgotten shows in any of them.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not (item.get_closest_marker("sweep") or item.get_closest_marker("each")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        last = len(cases) - 1
        kept = {round(i * last / (CASES - 1)) for i in range(CASES)}
        for i, item in enumerate(cases):
            if last >= CASES and i not in kept:
                item.add_marker(pytest.mark.sweep)
