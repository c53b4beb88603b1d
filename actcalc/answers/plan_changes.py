"""What to change where no plan fits: each remedy planned, and the states that fill the GPU.

Re-running can only lower what layers store; the remedies (:mod:`actcalc.plan.remedies`) act on the
states too. Every change is planned, none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.plan.changes import changed_run, difference, words
from actcalc.plan.cheapest import POLICY
from actcalc.plan.figures import ChangeFigure
from actcalc.plan.planner import RunPlanner
from actcalc.plan.remedies import REMEDIES, WITH_MORE_GPUS
from actcalc.plan.settings import default_model
from actcalc.solve.clock import room_for_more
from actcalc.specs.run import Run

FLAGS = {"training.offload": "--offload-states"}
"""Flags that plan spells otherwise than memory."""


@dataclass(frozen=True, kw_only=True)
class PlanStates:
    """How the weights of a planned run are trained, and what that keeps on its fullest stage."""

    training: dict[str, Any]
    """Fields of ``specs.Training``."""
    recipe: dict[str, Any]
    """Bytes per parameter of each copy."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    weights_bytes: int
    """Weights."""
    gradients_bytes: int
    """Gradients."""
    optimizer_bytes: int
    """Optimizer states, master weights among them."""

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def states_of(run: Run) -> PlanStates:
    """The states that ``run`` keeps beside its activations, on the stage that keeps most."""
    report = memory_run(replace(run, policies=("none",)))
    most = max(
        report.stages,
        key=lambda one: one.weights_bytes + one.gradients_bytes + one.optimizer_bytes,
    )
    return PlanStates(
        training=report.training,
        recipe=report.recipe,
        layout=report.layout,
        workload=report.workload,
        weights_bytes=most.weights_bytes,
        gradients_bytes=most.gradients_bytes,
        optimizer_bytes=most.optimizer_bytes,
    )


UNTRIED = "The time limit left no room to plan further changes (--time-limit SECONDS)."
"""What is said where not every change was looked at."""


def planned_changes(planner: RunPlanner) -> tuple[tuple[ChangeFigure, ...], bool]:
    """What each change alone would bring the smallest memory to, smallest first.

    And whether all were looked at: the time of plans may leave no room for some.
    """
    settings, run = planner.settings, planner.run
    found: list[ChangeFigure] = []
    least = planner.smallest

    def note(change: str, changed: RunPlanner) -> None:
        if changed.smallest < least:
            figure = ChangeFigure(
                change=change,
                smallest_memory_bytes=changed.smallest,
                gpus=changed.run.layout.devices,
            )
            found.append(figure)

    if settings.method != "optimal":
        # What a comparison method needs is not what the exact one needs: nothing else is planned.
        note("--method optimal", RunPlanner(run, replace(settings, method="optimal")))
        return tuple(found), True
    if settings.semantics == "module" and room_for_more():
        note("--semantics minimal", RunPlanner(run, replace(settings, semantics="minimal")))
    plain = replace(settings, method="optimal", same_on_all_stages=False)
    if not settings.offload and room_for_more():
        with suppress(SpecError):
            moved = default_model("optimal", offload=True, activations_only=False)
            note("--offload", RunPlanner(run, replace(plain, offload=True, memory_model=moved)))
    whole = True
    for change, changed in _changed_runs(planner):
        if not room_for_more():
            whole = False
            break
        with suppress(SpecError):
            note(change, RunPlanner(changed, plain))
    return tuple(sorted(found, key=lambda figure: figure.smallest_memory_bytes)), whole


def _changed_runs(planner: RunPlanner) -> Iterator[tuple[str, Run]]:
    """Runs with one remedy each, the mildest of its options or every stage of sharding, and the
    flags that make it; not all need be possible."""
    staged, run = planner.staged, planner.run
    for remedy in (*REMEDIES, *WITH_MORE_GPUS):
        if remedy.axis == POLICY or not remedy.offered(run.framework):
            continue
        options = remedy.options(staged)
        for change in options if remedy.axis == "sharding" else options[:1]:
            with suppress(SpecError):
                changed = changed_run(run, staged.global_batch, change)
                yield " ".join(words(difference(run, changed), FLAGS)), changed
