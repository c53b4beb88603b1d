"""The plan of a planning problem on a graph of the user's own, as a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from actcalc.solve.plans import Plan
from actcalc.solve.problem import Problem
from actcalc.specs.result import Result


@dataclass(frozen=True, kw_only=True, repr=False)
class ProblemPlan(Result):
    """The plan of a planning problem on a graph of the user's own; costs in its own unit."""

    schema_name: ClassVar[str] = "actcalc/plan-problem/1"

    feasible: bool
    """Whether a plan fits."""
    optimal: bool
    """Whether no plan that fits costs less."""
    cost: int | None
    """Cost of all layers, in the problem's unit."""
    lower_bound: int | None
    """No plan that fits costs less."""
    gap_ratio: float | None
    """Share of the cost that is not proven: (cost - bound) / cost; 0: no plan costs less."""
    stored_bytes: int | None
    """Bytes stored, all micro-batches in flight."""
    peak_bytes: int | None
    """Peak by the problem's model, with its constant bytes."""
    budget_bytes: int
    """The problem's budget."""
    peak_model: str
    """How the peak is counted."""
    method: str
    """optimal, sqrt or greedy."""
    smallest_memory_bytes: int | None
    """The least budget with a plan; given where none fits."""
    certificate: dict[str, Any] | None
    """Method of the proof, what its relaxation alone bounds, partial plans looked at."""
    groups: tuple[dict[str, Any], ...]
    """Consecutive layers that run alike, in order."""


def plan_problem(problem: Problem, method: str = "optimal") -> ProblemPlan:
    """Plan a problem of the user's own, exactly or by a method to compare with."""
    from actcalc.solve import greedy, solve, sqrt

    solvers: Mapping[str, Any] = {"optimal": solve, "sqrt": sqrt, "greedy": greedy}
    plan: Plan = solvers[method](problem)
    return ProblemPlan(
        feasible=plan.feasible,
        optimal=plan.optimal,
        cost=plan.cost,
        lower_bound=plan.lower_bound,
        gap_ratio=plan.gap_ratio,
        stored_bytes=plan.stored_bytes,
        peak_bytes=plan.peak_bytes,
        budget_bytes=plan.budget_bytes,
        peak_model=plan.peak_model,
        method=method,
        smallest_memory_bytes=plan.smallest_budget_bytes,
        certificate=asdict(plan.certificate) if plan.certificate else None,
        groups=tuple(
            {
                "layer_type": group.layer_type,
                "count": group.count,
                "segment": group.segment,
                "recompute": group.recompute,
                "kept": group.kept,
                "stored_bytes": group.stored_bytes,
                "working_bytes": group.working_bytes,
                "cost": group.cost,
            }
            for group in plan.groups
        ),
    )
