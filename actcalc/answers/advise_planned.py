"""Recomputation planned layer by layer, where that is faster than any policy with a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actcalc.answers.command_words import replaced
from actcalc.cost.roofline import roofline_of
from actcalc.cost.rounding import growth
from actcalc.errors import SpecError
from actcalc.plan.advice import Advice
from actcalc.plan.changes import Change, difference, words
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.plan.timed import planned_step
from actcalc.solve.clock import limited

_SECONDS = 2.0
"""How long one plan is looked for."""


@dataclass(frozen=True, kw_only=True)
class PlannedFigure:
    """The run with its recomputation planned within the device's memory."""

    changes: tuple[str, ...]
    """What else is changed: the flags, none where the plan alone is enough."""
    command: str
    """The command that prints the plan, and with --emit the framework's settings."""
    total_bytes: int
    """What the fullest stage then needs in all: it fits."""
    slowdown_ratio: float
    """Time for as many tokens over that of the run as it is, less one."""
    step_seconds: float
    """One step of it."""


def planned_figure(
    advice: Advice, given: Sequence[str], efficiency: Mapping[str, float] | None
) -> PlannedFigure | None:
    """The fastest plan that fits, alone or beside what the cheapest combination changes too.

    None where the run fits as it is, or no plan is faster than the combination.
    """
    if advice.fits or advice.seconds is None:
        return None
    known = advice.combination
    bases: list[Change] = [{}]
    if known is not None and known.keeps == "training":
        bases.append({path: value for path, value in known.change.items() if path != "policy"})
    found = [_planned(advice, base, given, efficiency) for base in bases]
    best = min((one for one in found if one), key=lambda one: one.slowdown_ratio, default=None)
    if best is None or known is None or known.seconds is None:
        return best
    return best if best.slowdown_ratio < growth(known.seconds, advice.seconds) else None


def _planned(
    advice: Advice, base: Change, given: Sequence[str], efficiency: Mapping[str, float] | None
) -> PlannedFigure | None:
    own = advice.trials
    try:
        planner = RunPlanner(own.changed({**base, "policy": "none"}), PlanSettings())
        with limited(_SECONDS):
            plans = planner.plan(advice.budget)
        if not all(plan.feasible for plan in plans):
            return None
        step = planned_step(planner, plans, roofline_of(planner.staged, efficiency)).total
    except SpecError:
        return None
    seconds = step * own.gpu_seconds_per_token(planner.staged)
    made = words(difference(own.run, own.changed(base)))
    return PlannedFigure(
        changes=tuple(made),
        command=" ".join(["actcalc", "plan", *_unnamed(replaced(given, made))]),
        total_bytes=max(plan.peak_bytes or 0 for plan in plans),
        slowdown_ratio=growth(seconds, advice.seconds or seconds),
        step_seconds=step,
    )


def _unnamed(line: Sequence[str]) -> list[str]:
    """The words of a run without the policy that they name."""
    kept = list(line)
    while "--policy" in kept:
        at = kept.index("--policy")
        del kept[at : at + 2]
    return kept
