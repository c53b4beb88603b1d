"""The cheapest recompute plan of layers measured from a module of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any, ClassVar

from actcalc.answers.plan import (
    ChangeFigure,
    PointFigure,
    RivalFigure,
    RunPlan,
    StageFigure,
    certificate_lines,
    cost_fields,
    frontier_points,
    layers_figure,
    rival_figure,
)
from actcalc.errors import SpecError
from actcalc.plan.budget import parse_bytes
from actcalc.plan.measured.ops import MeasuredOps, measured_ops, plan_layer_of
from actcalc.plan.named import Fit, Layers, columns, mixes
from actcalc.plan.options import Costs, ModuleChoice
from actcalc.plan.planner import PlanSettings
from actcalc.solve.heuristics import greedy, sqrt
from actcalc.solve.knapsack import Option, OptionSet
from actcalc.solve.problem import MAX_LAYERS, PeakModel, Problem
from actcalc.solve.segments import Chain
from actcalc.solve.stack import (
    LayerGroup,
    Plan,
    layer_options,
    smallest_budget,
    solve_groups,
)
from actcalc.solve.timeline import timeline_peak

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

_DEPTH = 2
"""Modules nested deeper are not wrapped by plans of whole modules."""
_MOST_MODULES = 10
"""Modules that plans of whole modules choose from; of more, those that free most."""
_MOST_MIXED = 512
"""Most layers for which mixes of two policies are looked at: the table grows with their number."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan(RunPlan):
    """The cheapest plan of equal measured layers on one GPU, for one micro-batch.

    The keys are those of a run's plan; ``model`` says what was measured, ``framework`` which
    PyTorch ran it, and ``layout`` and ``workload`` are empty: the module brought its own sizes.
    """

    schema_name: ClassVar[str] = "actcalc/plan-layer/1"


class LayerPlanner:
    """Plans the recomputation of ``count`` equal measured layers for any memory budget.

    ``options`` replaces the ways to run a layer that the semantics has, by those of a target that
    can execute others. Raises ``SpecError`` for settings that exclude each other, and for a file
    without ops.
    """

    def __init__(
        self,
        layer: MeasuredLayer,
        count: int = 1,
        settings: PlanSettings | None = None,
        options: Callable[[MeasuredOps], OptionSet] | None = None,
    ) -> None:
        if not 1 <= count <= MAX_LAYERS:
            raise SpecError(f"layers is {count}", f"give 1 to {MAX_LAYERS}")
        self.settings = settings or PlanSettings()
        if self.settings.method != "optimal" and self.settings.semantics == "module":
            raise SpecError(
                f"--method {self.settings.method} chooses single ops, not modules",
                "drop --semantics module",
            )
        self.layer, self.count = layer, count
        self.ops = measured_ops(layer, count)
        self.special = options

    @property
    def costs(self) -> Costs:
        """What its whole numbers of cost stand for."""
        return self.ops.rates

    @property
    def peak_model(self) -> PeakModel:
        """The planner's name of the memory model; segments of layers are part of ``module``."""
        model = self.settings.memory_model
        segmented = self.settings.semantics == "module" and model == "stored+working"
        return "stored+working+segments" if segmented and self.special is None else model

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers with their options."""
        chain = None
        if self.special is not None:
            options = self.special(self.ops)
        elif self.settings.semantics == "minimal":
            options = layer_options(plan_layer_of(self.ops))
        else:
            options = OptionSet.of([module_option(self.ops, chosen) for chosen in self.modules])
            full = module_option(self.ops, ("",))
            if self.peak_model == "stored+working+segments":
                chain = Chain(full.stored, 0, full.working, full.cost, full.payload.recompute, ())
        return (LayerGroup(self.layer.name, options, self.count, chain=chain),)

    @cached_property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """Every set of wrapped modules that plans of whole modules choose from."""
        paths = [run.path for run in self.layer.modules if run.path.count(".") < _DEPTH]
        freed = {path: self._freed(path) for path in paths if path}
        useful = [path for path, bytes_freed in freed.items() if bytes_freed > 0]
        if len(useful) > _MOST_MODULES:
            most = sorted(useful, key=lambda path: -freed[path])[:_MOST_MODULES]
            useful = [path for path in useful if path in most]
        chosen = [s for n in range(len(useful) + 1) for s in combinations(useful, n)]
        return (*(s for s in chosen if not _nested(s)), ("",))

    def _freed(self, path: str) -> int:
        """Bytes saved inside a module that are none of its inputs: what wrapping it can free."""
        run = next(run for run in self.layer.modules if run.path == path)
        return sum(
            storage.bytes
            for storage in self.layer.storages
            if storage.id not in run.inputs
            and any(_inside(saver.module, path) for saver in storage.saved_by)
        )

    def plan(self, budget: int) -> Plan:
        """The plan within ``budget`` bytes for the activations."""
        if self.settings.method != "optimal":
            method = sqrt if self.settings.method == "sqrt" else greedy
            return method(self._problem(budget))
        return solve_groups(
            self.groups,
            inflight=1,
            const_bytes=0,
            budget_bytes=budget,
            peak_model=self.peak_model,
            max_segment=self.count,
        )

    def _problem(self, budget: int) -> Problem:
        layer = plan_layer_of(self.ops, input_stored=self.settings.method == "sqrt")
        return Problem(
            layer_types={self.layer.name: layer},
            stack=((self.layer.name, self.count),),
            inflight=1,
            const_bytes=0,
            budget_bytes=budget,
            peak_model=self.peak_model,
        )

    @cached_property
    def smallest(self) -> int:
        """The least memory in bytes with a plan, by the exact method."""
        return smallest_budget(
            self.groups,
            inflight=1,
            const_bytes=0,
            peak_model=self.peak_model,
            max_segment=self.count,
        )

    @cached_property
    def free(self) -> int:
        """The least memory in bytes found with the cheapest plan."""
        return self.plan(2**59).peak_bytes or 0


def _inside(path: str, module: str) -> bool:
    from actcalc.measure.layer import inside

    return inside(path, module)


def _nested(paths: Sequence[str]) -> bool:
    return any(_inside(one, other) for one, other in permutations(paths, 2))


def module_option(ops: MeasuredOps, modules: tuple[str, ...]) -> Option:
    """One layer with these modules wrapped in checkpoints, each re-run whole ("": all of it)."""
    stored = ops.layer.stored(modules)
    kept = {storage.id for storage in stored}
    again = [
        index
        for index, op in enumerate(ops.layer.ops)
        if any(_inside(op.module, path) for path in modules)
    ]
    name = "+".join(modules) if any(modules) else "full" if modules else "none"
    return Option(
        sum(storage.bytes for storage in stored),
        ops.bytes_of(ops.saved - kept),
        sum(ops.costs[index] for index in again),
        ModuleChoice(name, tuple(ops.names[index] for index in again), ()),
    )


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
    from actcalc.plan.emit.measured import emitted_layers

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
        layout={},
        workload={},
        device=None,
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
        run = Layers(columns(options), planner.count, 1)
        price_of, peak_of = mixes([run], len(options), planner.settings.memory_model)
        fitting = [
            (int(price_of[row, column]), int(peak_of[row, column]), row, column)
            for row, column in zip(*(peak_of <= budget).nonzero(), strict=True)
        ]
        if fitting:
            price, peak, row, column = min(fitting)
            first, second = list(permutations(range(len(options)), 2))[row]
            fits.append(Fit((names[first], names[second]), price, peak, (int(column),)))
    return tuple(rival_figure(fit, planner.costs, cost) for fit in fits)


def _peak(planner: LayerPlanner, options: Sequence[Option]) -> int:
    stored = [option.stored for option in options]
    working = [option.working for option in options]
    if planner.settings.memory_model == "timeline":
        return timeline_peak(stored, working, [1] * len(options))
    return sum(stored) + (0 if planner.settings.memory_model == "stored" else max(working))


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
