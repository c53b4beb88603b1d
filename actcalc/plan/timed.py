"""Seconds of a step under a plan, whose layers each run other ops again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from actcalc.cost.roofline import NOTHING, LayerTime, Roofline
from actcalc.cost.step import StepTime, step_time
from actcalc.layers.core.graph import Graph
from actcalc.plan.options import ModuleChoice
from actcalc.plan.planner import RunPlanner
from actcalc.policy.rules import NONE
from actcalc.solve.plans import Plan, PlanGroup


def planned_step(planner: RunPlanner, plans: Sequence[Plan], roofline: Roofline) -> StepTime:
    """One step with every stage under its plan, which is feasible."""
    more = []
    for stage, plan in zip(planner.stages, plans, strict=True):
        again = _again(planner, plan, roofline, [g for chunk in stage.graphs for g in chunk])
        more.append([sum(islice(again, len(chunk)), NOTHING) for chunk in stage.graphs])
    return step_time(NONE, roofline, more=more)


def _again(
    planner: RunPlanner, plan: Plan, roofline: Roofline, graphs: Sequence[Graph]
) -> Iterator[LayerTime]:
    """What each layer of a stage runs again, in order."""
    at = 0
    for group in plan.groups:
        for graph in graphs[at : at + group.count]:
            # the cost is that of one layer, or of a chain of layers that re-run together
            seconds = float(planner.costs.value(group.cost)) / group.segment
            spent = roofline.spent(graph)
            host = sum(spent[name].forward for name in _names(group, graph) if name in spent)
            yield LayerTime(0.0, seconds, seconds, 0.0, host_backward=host)
        at += group.count


def _names(group: PlanGroup, graph: Graph) -> Sequence[str]:
    """Names of the ops that one layer of a group runs again."""
    if group.segment > 1:
        return [op.name for op in graph.ops]
    choice = group.payload
    return choice.recompute if isinstance(choice, ModuleChoice) else group.recompute
