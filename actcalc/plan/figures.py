"""What is said of a plan: its stages, policies beside it, changes, points, text to paste."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actcalc.errors import SpecError
from actcalc.plan.named import Fit
from actcalc.plan.options import ARRIVAL, Costs, ModuleChoice
from actcalc.solve.plans import Plan, PlanGroup
from actcalc.specs.numbers import percent

NAMES = {"seconds": "cost_seconds", "flops": "cost_flops"}


@dataclass(frozen=True, kw_only=True)
class LayersFigure:
    """Consecutive layers of a stage that run alike; figures are of one layer, one micro-batch."""

    kind: str
    """What the layers are: dense, moe, sliding, ..."""
    count: int
    """How many there are."""
    recompute: tuple[str, ...]
    """Ops that run again in backward."""
    kept: tuple[str, ...]
    """Tensors stored from forward to backward (the layer's input aside)."""
    offloaded: tuple[str, ...] = ()
    """Tensors in host memory between forward and backward."""
    policy: str | None
    """The wrapped modules, where whole modules are planned; null for single ops."""
    segment: int
    """Layers that are re-run together from one stored input; 1 where each stands alone."""
    stored_bytes: int
    """Bytes stored by one layer (or one segment)."""
    offloaded_bytes: int = 0
    """Bytes one layer moves to host memory and back."""
    working_bytes: int
    """Bytes it makes again, or brings back, while it runs backward."""
    cost_seconds: float | None
    """Forward seconds run again by one layer (or one segment)."""
    cost_flops: int | None
    """The same in FLOPs over all ranks, without a device."""


@dataclass(frozen=True, kw_only=True)
class StageFigure:
    """One pipeline stage: the plan of its layers and the memory of one of its GPUs."""

    stage: int
    """Which, from 0."""
    feasible: bool
    """Whether a plan fits."""
    in_flight: tuple[int, ...]
    """Micro-batches it holds, for each of its chunks of layers."""
    stored_bytes: int | None
    """Activations it stores, all micro-batches in flight."""
    host_bytes: int = 0
    """Activations it has in host memory, all micro-batches in flight."""
    rest_bytes: int
    """What else lives in its memory at the peak; without a plan, at most (0 where the budget is for
    activations alone)."""
    forward_cost: float | int = 0
    """One forward of its layers, in the unit of the cost."""
    peak_bytes: int | None
    """Its peak by the memory model."""
    smallest_memory_bytes: int | None
    """The least memory with a plan; given where none fits."""
    cost_seconds: float | None
    """Forward seconds it runs again for one micro-batch."""
    cost_flops: int | None
    """The same in FLOPs over all ranks, without a device."""
    layers: tuple[LayersFigure, ...]
    """Its layers in order."""


@dataclass(frozen=True, kw_only=True)
class RivalFigure:
    """A named policy, or the best mix of two, with the same memory."""

    name: str
    """What it is."""
    cost_seconds: float | None
    """Its re-run seconds for one micro-batch; null where none fits."""
    cost_flops: int | None
    """The same in FLOPs over all ranks, without a device."""
    peak_bytes: int | None
    """Its peak on the fullest stage."""
    cost_per_plan_cost_ratio: float | None
    """Its cost over the plan's; null where either is missing or the plan costs nothing."""
    counts: tuple[int, ...]
    """Layers of each stage that take the first policy of a mix."""


@dataclass(frozen=True, kw_only=True)
class ChangeFigure:
    """Something to change when nothing fits."""

    change: str
    """What, as it is written on the command line."""
    smallest_memory_bytes: int
    """The least memory with a plan after it."""
    gpus: int = 1
    """GPUs that the run then takes (1 of a measured layer)."""


@dataclass(frozen=True, kw_only=True)
class PointFigure:
    """One point of the frontier: a budget and the cheapest plan within it."""

    memory_bytes: int
    """The budget."""
    peak_bytes: int
    """The plan's peak."""
    cost_seconds: float | None
    """Its re-run seconds for one micro-batch."""
    cost_flops: int | None
    """The same in FLOPs over all ranks, without a device."""


@dataclass(frozen=True, kw_only=True)
class EmittedFigure:
    """The best plan a target can express, ready to paste."""

    target: str
    """megatron, torch, torchtitan, deepspeed or transformers."""
    text: str
    """What to paste."""
    plan: str
    """The plan in words."""
    feasible: bool
    """Whether the target can express a plan that fits."""
    cost_seconds: float | None
    """Its re-run seconds for one micro-batch."""
    cost_flops: int | None
    """The same in FLOPs over all ranks, without a device."""
    peak_bytes: int | None
    """Its peak on the fullest stage."""
    cost_per_optimum_cost_ratio: float | None
    """Its cost over the optimum; null where either is missing or the optimum costs nothing."""
    notes: tuple[str, ...]
    """What to mind."""


def cost_fields(costs: Costs, cost: int | None) -> dict[str, Any]:
    """``cost_seconds`` and ``cost_flops`` of a cost in the planner's units; one of them null."""
    value = None if cost is None else costs.value(cost)
    return {name: value if unit == costs.unit else None for unit, name in NAMES.items()}


def layers_figure(group: PlanGroup, costs: Costs) -> LayersFigure:
    """One run of equal layers of a plan, as a figure."""
    choice = group.payload
    recompute, kept, policy = group.recompute, group.kept, None
    offloaded = group.offloaded
    if isinstance(choice, ModuleChoice):
        recompute, kept, policy = choice.recompute, choice.kept, choice.policy
        offloaded = choice.offloaded
    elif group.segment > 1:
        policy = "full"
    return LayersFigure(
        kind=group.layer_type,
        count=group.count,
        recompute=tuple(op for op in recompute if op != ARRIVAL),
        kept=kept,
        offloaded=offloaded,
        policy=policy,
        segment=group.segment,
        stored_bytes=group.stored_bytes,
        offloaded_bytes=group.moved_bytes,
        working_bytes=group.working_bytes,
        **cost_fields(costs, group.cost),
    )


def certificate_lines(costs: Costs, plans: Sequence[Plan]) -> tuple[str, ...]:
    """The proof in words; equal stages share one."""
    found = {plan.certificate: None for plan in plans if plan.certificate}
    states = sum(c.states for c in found)
    relaxed = sum(
        plan.certificate.relaxation_bound if plan.certificate else plan.lower_bound or 0
        for plan in plans
    )
    total = sum(plan.cost or 0 for plan in plans)
    if not costs.value(total):
        return ("Proven: it costs nothing.",)
    bound = sum(plan.lower_bound or 0 for plan in plans)
    if total == bound:
        head = "Proven: no plan of this kind that fits costs less."
    else:
        head = f"Not proven best: the bound is {percent(bound / total)} of the cost."
    if not found:
        return (head,)
    if relaxed >= total:
        return (head,)
    share = relaxed / total
    methods = ", ".join(dict.fromkeys(c.method for c in found))
    unit = "ns" if costs.unit == "seconds" else "FLOPs"
    return (
        head,
        f"The relaxation alone bounds the cost at {100 * share:.4g} % of it; every plan in between "
        f"was ruled out ({states:,} partial plans; {methods}; exact integers of bytes and {unit}).",
    )


def rival_figure(fit: Fit, costs: Costs, cost: int | None) -> RivalFigure:
    """A named policy (or mix of two) beside a plan that costs ``cost``."""
    best = None if cost is None else costs.value(cost)
    own = None if fit.cost is None else costs.value(fit.cost)
    return RivalFigure(
        name=" and ".join(fit.names),
        **cost_fields(costs, fit.cost),
        peak_bytes=fit.peak_bytes,
        cost_per_plan_cost_ratio=own / best if own is not None and best else None,
        counts=fit.counts,
    )


def frontier_points(
    low: int,
    high: int,
    points: int,
    plan: Callable[[int], Sequence[Plan]],
    costs: Costs,
) -> tuple[PointFigure, ...]:
    """``points`` budgets from ``low`` to ``high``, evenly spaced, each with its plan of all stages.

    Raises ``SpecError`` for a number of points out of range.
    """
    if not 2 <= points <= 1000:
        raise SpecError(f"--points {points}", "give 2 to 1000")
    found = []
    for i in range(points):
        budget = low + (high - low) * i // (points - 1)
        plans = plan(budget)
        if all(one.feasible for one in plans):
            found.append(
                PointFigure(
                    memory_bytes=budget,
                    peak_bytes=max(one.peak_bytes or 0 for one in plans),
                    **cost_fields(costs, sum(one.cost or 0 for one in plans)),
                )
            )
    return tuple(found)
