"""The cheapest recompute plan of a run within a memory budget, as a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.answers.plan_changes import UNTRIED, planned_changes
from actcalc.errors import SpecError
from actcalc.plan.figures import (
    NAMES,
    ChangeFigure,
    EmittedFigure,
    PointFigure,
    RivalFigure,
    StageFigure,
    certificate_lines,
    cost_fields,
    frontier_points,
    layers_figure,
    rival_figure,
)
from actcalc.plan.named import Fit, Rivals
from actcalc.plan.options import Costs
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings, default_model
from actcalc.plan.stages import Stage, units_of
from actcalc.solve.clock import limited
from actcalc.solve.plans import Plan, gap_of
from actcalc.solve.stage import Held, peak
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True, repr=False)
class RunPlan(RunAnswer):
    """The cheapest plan of one run; costs are sums over stages, for one micro-batch."""

    schema_name: ClassVar[str] = "actcalc/plan/1"

    memory_bytes: int
    """The budget of one GPU."""
    activations_only: bool
    """Whether it is for the layers' activations alone."""
    memory_model: str
    """stored, stored+working or timeline."""
    semantics: str
    """minimal (op by op) or module (whole wrapped modules)."""
    method: str
    """optimal, sqrt or greedy."""
    same_on_all_stages: bool
    """Whether one plan serves all stages."""
    offload: bool = False
    """Whether tensors may be offloaded to host memory."""
    feasible: bool
    """Whether every stage has a plan that fits."""
    optimal: bool
    """Whether no plan that fits costs less: the bound equals the cost."""
    cost_seconds: float | None
    """Forward seconds run again for one micro-batch, over all stages."""
    cost_flops: int | None
    """The same in FLOPs over all ranks, where no device is given."""
    lower_bound: float | int | None
    """No plan that fits costs less; in the unit of the cost."""
    gap_ratio: float | None
    """Share of the cost that is not proven: (cost - bound) / cost; 0: no plan costs less."""
    stored_bytes: int | None
    """Activations stored on the stage that stores most."""
    peak_bytes: int | None
    """Peak of the fullest stage."""
    smallest_memory_bytes: int | None
    """The least memory for which every stage has a plan; given where none fits."""
    forward_cost: float | int
    """One forward of all layers, in the unit of the cost: what re-running everything costs."""
    certificate: tuple[str, ...]
    """Why the bound holds."""
    stages: tuple[StageFigure, ...]
    """One entry per pipeline stage."""
    rivals: tuple[RivalFigure, ...]
    """Named policies with the same memory."""
    changes: tuple[ChangeFigure, ...]
    """What to change where nothing fits, most effective first."""
    frontier: tuple[PointFigure, ...]
    """Memory against cost, if asked for."""
    named: tuple[RivalFigure, ...] = ()
    """Beside the frontier: named policies with the memory that each takes, fitting or not."""
    emitted: EmittedFigure | None = None
    """Settings or code to paste, if asked for."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""

    def document(self) -> dict[str, Any]:
        """The result as plain data, with the one kind of cost that was minimised."""
        unused = "cost_flops" if self.device is not None else "cost_seconds"
        document: dict[str, Any] = _without(super().document(), unused)
        return document

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of ``document``, in which every cost has one unit."""
        schema = super().json_schema()
        units = tuple(NAMES.values())
        for part in (schema, *schema["$defs"].values()):
            if set(units) <= part.get("properties", {}).keys():
                part["required"] = [name for name in part["required"] if name not in units]
                part["oneOf"] = [{"required": [unit]} for unit in units]
        return schema


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, key) for k, v in value.items() if k != key}
    if isinstance(value, list | tuple):
        return [_without(v, key) for v in value]
    return value


def plan_run(
    run: Run,
    budget: int,
    settings: PlanSettings | None = None,
    *,
    points: int = 0,
    planner: RunPlanner | None = None,
) -> RunPlan:
    """Plan ``run`` within ``budget`` bytes of each GPU; ``points`` of the frontier besides.

    Raises ``SpecError`` for settings without meaning for the run.
    """
    planner = planner or RunPlanner(run, settings)
    settings = planner.settings
    with limited() as effort:
        plans = planner.plan(budget)
    feasible = all(plan.feasible for plan in plans)
    costs = planner.costs
    cost = planner.total(plan.cost for plan in plans) if feasible else None
    bound = planner.total(plan.lower_bound for plan in plans) if feasible else None
    rivals = _rivals(planner, budget, cost) if feasible else ()
    changes, whole = ((), True) if feasible else planned_changes(planner)
    return RunPlan(
        **header(planner.staged),
        memory_bytes=budget,
        activations_only=settings.activations_only,
        memory_model=settings.memory_model,
        semantics=settings.semantics,
        method=settings.method,
        same_on_all_stages=settings.same_on_all_stages,
        offload=settings.offload,
        feasible=feasible,
        optimal=feasible and cost == bound,
        **cost_fields(costs, cost),
        lower_bound=None if bound is None else costs.value(bound),
        gap_ratio=gap_of(cost, bound),
        stored_bytes=max(plan.stored_bytes or 0 for plan in plans) if feasible else None,
        peak_bytes=max(plan.peak_bytes or 0 for plan in plans) if feasible else None,
        smallest_memory_bytes=None if feasible else _smallest(planner, plans),
        forward_cost=costs.value(
            sum(run.count * sum(costs.ops(run.graph)) for run in planner.model.runs)
        ),
        certificate=certificate_lines(planner.costs, plans) if feasible else (),
        stages=tuple(
            _stage(stage, plan, costs) for stage, plan in zip(planner.stages, plans, strict=True)
        ),
        rivals=rivals,
        changes=changes,
        frontier=frontier(planner, points) if points else (),
        named=_named(planner, cost) if points else (),
        notes=(
            *_notes(planner, plans),
            *([] if feasible or effort.complete else [UNSURE]),
            *([] if whole else [UNTRIED]),
        ),
    )


UNSURE = (
    "The time limit ended the search before it was proven that nothing fits: a longer one may find "
    "a plan (--time-limit SECONDS)."
)
"""What is said of a run for which no plan was found in time."""


def _smallest(planner: RunPlanner, plans: Sequence[Plan]) -> int:
    if planner.settings.method == "optimal" and not planner.settings.same_on_all_stages:
        return planner.smallest
    return max(plan.smallest_budget_bytes or 0 for plan in plans if not plan.feasible)


def _stage(stage: Stage, plan: Plan, costs: Costs) -> StageFigure:
    smallest = plan.smallest_budget_bytes if not plan.feasible else None
    return StageFigure(
        stage=stage.index,
        feasible=plan.feasible,
        in_flight=stage.in_flight,
        stored_bytes=plan.stored_bytes,
        host_bytes=sum(unit.moved_bytes * m for unit, m in units_of(plan.groups, stage)),
        rest_bytes=_least_rest(stage) if plan.rest_bytes is None else plan.rest_bytes,
        forward_cost=costs.value(sum(run.count * sum(costs.ops(run.graph)) for run in stage.runs)),
        peak_bytes=plan.peak_bytes,
        smallest_memory_bytes=smallest,
        **cost_fields(costs, plan.cost),
        layers=tuple(layers_figure(group, costs) for group in plan.groups),
    )


def _least_rest(stage: Stage) -> int:
    """What a stage holds at its peak if its layers hold nothing."""
    nothing = [[Held(0, 0, 0)] * len(graphs) for graphs in stage.graphs]
    found: int = peak(stage.gpu, nothing)
    return found


def _rivals(planner: RunPlanner, budget: int, cost: int | None) -> tuple[RivalFigure, ...]:
    rivals = Rivals(planner)
    bare = _without_offload(planner, budget)
    singles = [rivals.single(name, budget) for name in rivals.names]
    figures = [rival_figure(fit, planner.costs, cost) for fit in (*bare, *singles)]
    figures.append(rival_figure(rivals.single("sqrt", budget), planner.costs, cost))
    pair = rivals.best_pair(budget)
    if pair is not None and not _is_single(planner, pair):
        figures.append(rival_figure(pair, planner.costs, cost))
    return tuple(figures)


def _is_single(planner: RunPlanner, pair: Fit) -> bool:
    # A mix with all layers on one of the two is that policy alone.
    whole = tuple(stage.layers for stage in planner.stages)
    return pair.counts in (whole, (0,) * len(whole))


def _without_offload(planner: RunPlanner, budget: int) -> tuple[Fit, ...]:
    """The cheapest plan that only re-runs, where the planner may also offload."""
    if not planner.settings.offload:
        return ()
    plans = RunPlanner(planner.run, replace(planner.settings, offload=False)).plan(budget)
    if not all(plan.feasible for plan in plans):
        return (Fit((NO_OFFLOAD,), None, None),)
    cost = planner.total(plan.cost for plan in plans)
    return (Fit((NO_OFFLOAD,), cost, max(plan.peak_bytes or 0 for plan in plans)),)


def _named(planner: RunPlanner, cost: int | None) -> tuple[RivalFigure, ...]:
    """Every named policy, whatever memory it takes."""
    rivals = Rivals(planner)
    found = [rivals.single(name, ANY) for name in dict.fromkeys((*rivals.names, "sqrt"))]
    return tuple(rival_figure(fit, planner.costs, cost) for fit in found)


ANY = 2**62
"""Bytes that no policy exceeds."""

NO_OFFLOAD = "cheapest plan without offload"
"""Name of the rival that may only re-run."""


def frontier(planner: RunPlanner, points: int) -> tuple[PointFigure, ...]:
    """Budgets from the smallest with a plan to the first that costs least, evenly spaced."""
    return frontier_points(planner.smallest, planner.free, points, planner.plan, planner.costs)


def _notes(planner: RunPlanner, plans: Sequence[Plan]) -> tuple[str, ...]:
    run = planner.run
    notes = [*run_notes(planner.staged), *_model_notes(planner)]
    if run.policies:
        notes.append(
            f"The policy {', '.join(run.policies)} has no effect here: the plan is what is looked "
            "for."
        )
    return tuple(dict.fromkeys(notes))


def _model_notes(planner: RunPlanner) -> list[str]:
    """What the memory model leaves out, and which plans are not looked for."""
    settings, notes = planner.settings, []
    if settings.memory_model == "stored":
        notes.append("Memory model stored: nothing that works is counted, a lower bound of memory.")
    if settings.memory_model == "stored+working" and not settings.activations_only:
        why = (
            "--offload is planned so"
            if settings.offload
            else f"--method {settings.method} is planned so"
            if settings.method != "optimal"
            else "timeline is exact"
        )
        notes.append(
            "Memory model stored+working: every layer is taken to work with all others stored, an "
            f"upper bound of memory ({why})."
        )
    if settings.semantics == "module" and planner.peak_model != "stored+working+segments":
        notes.append(
            "Segments of several layers are mixed with single layers under --memory-model "
            "stored+working, with one chunk a stage and without --offload; here they are plans of "
            "their own (sqrt, uniform:N)."
        )
    return notes


def plan_command(
    runs: Sequence[Run],
    memory: str | None,
    *,
    memory_model: Any,
    activations_only: bool,
    semantics: Any,
    method: Any,
    points: int,
    same_on_all_stages: bool,
    offload: bool = False,
    emit: str | None,
) -> RunPlan:
    """The plan the command line asks for; its defaults and refusals are here.

    Raises ``SpecError`` for a budget that is missing, unreadable or more than the device has.
    """
    if len(runs) > 1:
        raise SpecError("plan works on one framework profile at a time", "give one --framework")
    run = runs[0]
    settings = PlanSettings(
        memory_model=memory_model
        or default_model(method, offload=offload, activations_only=activations_only),
        semantics=semantics,
        method=method,
        same_on_all_stages=same_on_all_stages,
        offload=offload,
        activations_only=activations_only,
    )
    if offload and emit is not None:
        raise SpecError(
            f"--emit {emit} with --offload: the settings of no target express which single tensors "
            "go to the host",
            "drop one of them; torch.autograd.graph.saved_tensors_hooks can carry the plan out",
        )
    budget = budget_of(run, memory)
    planner = RunPlanner(run, settings)
    for name in run.policies:
        planner.staged.policy(name)
    if budget is None:
        if not points:
            raise SpecError("no memory to plan for", "give --memory 70GiB, or a --device")
        budget = planner.free
    result = plan_run(run, budget, points=points, planner=planner)
    if emit is not None:
        from actcalc.plan.emit.targets import emitted

        result = replace(result, emitted=emitted(emit, planner, budget))
    return result


def budget_of(run: Run, memory: str | None) -> int | None:
    """The budget of one GPU in bytes: as given, else the device's less the headroom, else None.

    Raises ``SpecError`` where ``memory`` is no amount, or more than the device has.
    """
    from actcalc.plan.budget import parse_bytes

    device = run.device
    if memory is None:
        return run.budget_bytes
    budget = parse_bytes(memory)
    if device is not None and budget > device.usable_bytes:
        raise SpecError(
            f"--memory {memory} is more than {device.name} has "
            f"({device.usable_bytes:,} bytes usable)",
            "lower --memory, drop it to plan for the whole device, or name another --device",
        )
    return budget
