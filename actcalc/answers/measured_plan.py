"""The cheapest recompute plan of layers measured from a module of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar

from actcalc.answers.plan import ANY, RunPlan
from actcalc.errors import SpecError
from actcalc.plan.budget import parse_bytes
from actcalc.plan.emit.measured import emitted_layers
from actcalc.plan.figures import (
    ChangeFigure,
    PointFigure,
    RivalFigure,
    StageFigure,
    certificate_lines,
    cost_fields,
    frontier_points,
    layers_figure,
    rival_figure,
)
from actcalc.plan.measured.planner import LayerPlanner, module_option
from actcalc.plan.named import Fit, Row, mixes
from actcalc.plan.settings import PlanSettings
from actcalc.solve.beside import Beside
from actcalc.solve.options import Option
from actcalc.solve.plans import gap_of
from actcalc.solve.stage import Way, line, peak

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

_MOST_MIXED = 512
"""Most layers for which mixes of two policies are looked at: the table grows with their number."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerPlan(RunPlan):
    """The cheapest plan of equal measured layers on one GPU, for one micro-batch.

    The keys are those of a run's plan; ``model`` says what was measured, ``framework`` which
    PyTorch ran it, and ``layout`` and ``workload`` are empty: the module brought its own sizes.
    """

    schema_name: ClassVar[str] = "actcalc/plan-layer/1"


def plan_measured(
    layer: MeasuredLayer,
    budget: int | None,
    settings: PlanSettings | None = None,
    *,
    count: int = 1,
    points: int = 0,
    emit: str | None = None,
) -> LayerPlan:
    """Plan ``count`` equal measured layers within ``budget`` bytes for their activations.

    Without a budget it is the least with the cheapest plan (for ``points`` of the frontier).
    ``emit`` adds the best plan of a target: ``torch`` alone can run a module of the user's own.

    Raises:
        SpecError: no budget and no points, a file without ops, or settings without meaning.
    """
    if emit not in (None, "torch"):
        raise SpecError(
            f"--emit {emit} has no settings for a module of your own", "use --emit torch"
        )
    planner = LayerPlanner(layer, count, settings)
    if budget is None and not points:
        raise SpecError("no memory to plan for", "give --memory, e.g. --memory 2GB")
    budget = planner.free if budget is None else budget
    result = _figures(planner, budget, points)
    if emit is None:
        return result
    return replace(result, emitted=emitted_layers(planner, budget))


def _figures(planner: LayerPlanner, budget: int, points: int) -> LayerPlan:
    settings, costs, layer = planner.settings, planner.costs, planner.layer
    plan = planner.plan(budget)
    feasible, cost, bound = plan.feasible, plan.cost, plan.lower_bound
    smallest = None
    if not feasible:
        exact = settings.method == "optimal"
        smallest = planner.smallest if exact else plan.smallest_budget_bytes
    return LayerPlan(
        model={
            "name": layer.name,
            "class": layer.cls,
            "parameters": layer.params,
            "layers": planner.count,
            "precision": layer.dtype,
        },
        title=layer.name,
        microbatches=1,
        layout={},
        workload={},
        device=None,
        headroom_ratio=None,
        framework=f"torch {layer.torch_version}",
        memory_bytes=budget,
        activations_only=True,
        memory_model=settings.memory_model,
        semantics=settings.semantics,
        method=settings.method,
        same_on_all_stages=False,
        offload=False,
        feasible=feasible,
        optimal=feasible and cost == bound,
        **cost_fields(costs, cost),
        lower_bound=None if bound is None or not feasible else costs.value(bound),
        gap_ratio=gap_of(cost, bound) if feasible else None,
        stored_bytes=plan.stored_bytes,
        peak_bytes=plan.peak_bytes,
        smallest_memory_bytes=smallest,
        forward_cost=layer.forward_flops * planner.count,
        certificate=certificate_lines(costs, [plan]) if feasible else (),
        stages=(
            StageFigure(
                stage=0,
                feasible=feasible,
                in_flight=(1,),
                stored_bytes=plan.stored_bytes,
                host_bytes=0,
                rest_bytes=0,
                peak_bytes=plan.peak_bytes,
                smallest_memory_bytes=smallest,
                **cost_fields(costs, cost),
                layers=tuple(layers_figure(group, costs) for group in plan.groups),
            ),
        ),
        rivals=_rivals(planner, budget, cost) if feasible else (),
        changes=() if feasible else _changes(planner),
        frontier=_frontier(planner, points) if points else (),
        named=_singles(planner, ANY, cost) if points else (),
        notes=_notes(planner),
    )


def _rivals(planner: LayerPlanner, budget: int, cost: int | None) -> tuple[RivalFigure, ...]:
    """None, each module that frees something, full; and the best mix of two of them."""
    singles = [chosen for chosen in planner.modules if len(chosen) <= 1]
    options = [module_option(planner.ops, chosen) for chosen in singles]
    names = [option.payload.policy for option in options]
    fits = []
    for name, option in zip(names, options, strict=True):
        peak = _peak(planner, [option] * planner.count)
        price = option.cost * planner.count
        fits.append(Fit((name,), price, peak) if peak <= budget else Fit((name,), None, None))
    if 1 < planner.count <= _MOST_MIXED:
        beside = Beside() if planner.settings.memory_model == "stored+working" else None
        row = Row([_way(planner, o) for o in options], [o.working for o in options], planner.count)
        price_of, peak_of = mixes([row], len(options), line(1), beside, (1,))
        fitting = [
            (int(price_of[row, column]), int(peak_of[row, column]), row, column)
            for row, column in zip(*(peak_of <= budget).nonzero(), strict=True)
        ]
        if fitting:
            price, peak, row, column = min(fitting)
            first, second = list(permutations(range(len(options)), 2))[row]
            fits.append(Fit((names[first], names[second]), price, peak, (int(column),)))
    return tuple(rival_figure(fit, planner.costs, cost) for fit in fits)


def _singles(planner: LayerPlanner, budget: int, cost: int | None) -> tuple[RivalFigure, ...]:
    return tuple(one for one in _rivals(planner, budget, cost) if not one.counts)


def _way(planner: LayerPlanner, option: Option) -> Way:
    works = 0 if planner.settings.memory_model == "stored" else option.working
    return Way(option.stored, option.stored, option.stored + works, option.cost)


def _peak(planner: LayerPlanner, options: Sequence[Option]) -> int:
    if planner.settings.memory_model == "stored+working":
        return sum(option.stored for option in options) + max(o.working for o in options)
    found: int = peak(line(1), [[_way(planner, option) for option in options]])
    return found


def _changes(planner: LayerPlanner) -> tuple[ChangeFigure, ...]:
    """What other settings would bring the smallest memory to, smallest first."""
    settings = planner.settings
    others: list[tuple[str, PlanSettings]] = []
    if settings.method != "optimal":
        others.append(("--method optimal", replace(settings, method="optimal")))
    if settings.semantics == "module":
        others.append(("--semantics minimal", replace(settings, semantics="minimal")))
    found = [
        ChangeFigure(
            change=change,
            smallest_memory_bytes=LayerPlanner(planner.layer, planner.count, other).smallest,
        )
        for change, other in others
    ]
    least = planner.smallest if settings.method == "optimal" else None
    useful = [one for one in found if least is None or one.smallest_memory_bytes < least]
    return tuple(sorted(useful, key=lambda one: one.smallest_memory_bytes))


def _frontier(planner: LayerPlanner, points: int) -> tuple[PointFigure, ...]:
    return frontier_points(
        planner.smallest,
        planner.free,
        points,
        lambda budget: (planner.plan(budget),),
        planner.costs,
    )


def _notes(planner: LayerPlanner) -> tuple[str, ...]:
    notes = [
        "The budget is for the layers' activations alone (--activations-only is implied); what all "
        "layers share is not counted."
    ]
    minimal = planner.settings.semantics == "minimal"
    fixed = [
        name
        for name, op in zip(planner.ops.names, planner.layer.ops, strict=True)
        if not op.rerunnable
    ]
    if fixed and minimal:
        notes.append(
            f"Never re-run, since a second run could differ: {', '.join(dict.fromkeys(fixed))}."
        )
    if minimal and any(op.random for op in planner.layer.ops):
        notes.append("Random ops re-run with the generator's state of the first run.")
    if planner.ops.changes_input:
        notes.append("The layer changes its input in place: a checkpoint around all of it fails.")
    return tuple(notes)


_LEAST_BARE = 1024
"""Measured layers may be small: only a number that could count gigabytes lacks its unit."""


def plan_layer_command(
    layer: MeasuredLayer,
    memory: str | None,
    *,
    layers: int | None,
    memory_model: Any,
    semantics: Any,
    method: Any,
    points: int,
    emit: str | None,
) -> LayerPlan:
    """The plan the command line asks for; raises ``SpecError`` as :func:`plan_measured`."""
    settings = PlanSettings(memory_model=memory_model, semantics=semantics, method=method)
    return plan_measured(
        layer,
        None if memory is None else parse_bytes(memory, bare=_LEAST_BARE),
        settings,
        count=1 if layers is None else layers,
        points=points,
        emit=emit,
    )
