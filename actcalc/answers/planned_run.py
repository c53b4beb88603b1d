"""A run under the cheapest policy that fits, to be written as a file of it."""

from __future__ import annotations

from dataclasses import replace

from actcalc.answers.plan import budget_of
from actcalc.errors import SpecError
from actcalc.plan.emit.targets import megatron_policies
from actcalc.plan.named import Rivals
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings, default_model
from actcalc.specs.run import Run

TARGETS = ("fsdp", "axolotl", "yaml")
"""Files of a whole run that a plan is written as; recompute settings alone have targets of their
own (:mod:`actcalc.plan.emit.targets`)."""


def planned_run(run: Run, memory: str | None, target: str) -> Run | None:
    """The run under the cheapest policy of ``target``'s that fits the budget; None if none does.

    FSDP's and axolotl's files re-run every layer or none; a run file takes every policy there is.
    Raises ``SpecError`` without a budget.
    """
    budget = budget_of(run, memory)
    if budget is None:
        raise SpecError("no memory to plan for", "give --memory 70GiB, or a --device")
    model = default_model("optimal", offload=False, activations_only=False)
    planner = RunPlanner(run, PlanSettings(memory_model=model))
    names: tuple[str, ...] = ("none", "full")
    if target == "yaml":
        names = (*names, *megatron_policies(planner))
        if run.framework.per_op_policy:
            names = (*names, "op")
    fit = Rivals(planner).best_of(names, budget)
    return None if fit is None else replace(run, policies=(fit.names[0],))
