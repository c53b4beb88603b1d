"""Whole training steps, traced with the frameworks' own code: peaks by kind of run."""

from __future__ import annotations

from functools import cache
from statistics import median

import pytest

from tests.published.step_peaks import CASES, STATED, Traced, traced

found = cache(traced)


def test_what_no_command_said_is_stated() -> None:
    assert {name for name, case in CASES.items() if "outside" in case} == set(STATED)
    assert len(CASES) == 59


@pytest.mark.parametrize("name", CASES)
def test_a_traced_step_s_peak(name: str) -> None:
    step = found(name)
    assert abs(step.error) <= 0.01
    assert abs(step.resident_predicted / step.resident - 1) <= 0.003


def test_groups_of_traced_steps(capsys: pytest.CaptureFixture[str]) -> None:
    kinds: dict[str, list[Traced]] = {}
    for name in CASES:
        kinds.setdefault(found(name).kind, []).append(found(name))
    with capsys.disabled():
        for kind, steps in kinds.items():
            sizes = [abs(step.error) for step in steps]
            print(
                f"\n{kind:8} {len(steps):3} steps: median {median(sizes):.2%}, "
                f"largest {max(sizes):.2%}, bias {median(s.error for s in steps):+.2%}",
                end="",
            )
        print()
    for steps in kinds.values():
        assert median(abs(step.error) for step in steps) <= 0.002
