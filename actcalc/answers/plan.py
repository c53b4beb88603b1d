"""The cheapest recompute plan of a run within a memory budget, as a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from actcalc.errors import SpecError
from actcalc.plan.named import Fit, Rivals
from actcalc.plan.options import ARRIVAL, Costs, ModuleChoice
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings, default_model
from actcalc.plan.stages import Stage, units_of
from actcalc.solve.plans import Plan, PlanGroup
from actcalc.solve.problem import Problem
from actcalc.solve.stage import Held, peak
from actcalc.specs.check import check
from actcalc.specs.result import Result
from actcalc.specs.run import Run

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


@dataclass(frozen=True, kw_only=True)
class RunPlan(Result):
    """The cheapest plan of one run; costs are sums over stages, for one micro-batch."""

    schema_name: ClassVar[str] = "actcalc/plan/1"

    model: dict[str, Any]
    """The model's fields."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    device: dict[str, Any] | None
    """The device's fields, or null."""
    framework: str
    """The framework profile that chose the kernels."""
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
    plans = planner.plan(budget)
    feasible = all(plan.feasible for plan in plans)
    costs = planner.costs
    cost = planner.total(plan.cost for plan in plans) if feasible else None
    bound = planner.total(plan.lower_bound for plan in plans) if feasible else None
    rivals = _rivals(planner, budget, cost) if feasible else ()
    return RunPlan(
        model=run.model.model_dump(),
        layout=run.layout.model_dump(),
        workload=run.workload.model_dump(),
        device=run.device.model_dump() if run.device else None,
        framework=run.framework.name,
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
        changes=() if feasible else _changes(planner),
        frontier=frontier(planner, points) if points else (),
        notes=_notes(planner, plans),
    )


def cost_fields(costs: Costs, cost: int | None) -> dict[str, Any]:
    """``cost_seconds`` and ``cost_flops`` of a cost in the planner's units; one of them null."""
    value = None if cost is None else costs.value(cost)
    return {name: value if unit == costs.unit else None for unit, name in NAMES.items()}


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
        head = f"Not proven best: the bound is {bound / total:.1%} of the cost."
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


NO_OFFLOAD = "cheapest plan without offload"
"""Name of the rival that may only re-run."""


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


def frontier(planner: RunPlanner, points: int) -> tuple[PointFigure, ...]:
    """Budgets from the smallest with a plan to the first that costs least, evenly spaced."""
    return frontier_points(planner.smallest, planner.free, points, planner.plan, planner.costs)


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


def _changes(planner: RunPlanner) -> tuple[ChangeFigure, ...]:
    """What each change alone would bring the smallest memory to, smallest first."""
    settings, run = planner.settings, planner.run
    found: list[ChangeFigure] = []
    least = planner.smallest

    def note(change: str, changed: RunPlanner) -> None:
        if changed.smallest < least:
            found.append(ChangeFigure(change=change, smallest_memory_bytes=changed.smallest))

    if settings.method != "optimal":
        # What a comparison method needs is not what the exact one needs: nothing else is planned.
        note("--method optimal", RunPlanner(run, replace(settings, method="optimal")))
        return tuple(found)
    if settings.semantics == "module":
        note("--semantics minimal", RunPlanner(run, replace(settings, semantics="minimal")))
    plain = replace(settings, method="optimal", same_on_all_stages=False)
    if not settings.offload:
        with suppress(SpecError):
            moved = default_model("optimal", offload=True, activations_only=False)
            note("--offload", RunPlanner(run, replace(plain, offload=True, memory_model=moved)))
    for change, changed in _changed_runs(planner):
        try:
            note(change, RunPlanner(changed, plain))
        except SpecError:
            continue
    return tuple(sorted(found, key=lambda figure: figure.smallest_memory_bytes))


def _changed_runs(planner: RunPlanner) -> list[tuple[str, Run]]:
    """Runs that differ in one option, as it is written on the command line."""
    run = planner.run
    layout, work = run.layout, run.workload
    splits = run.framework.model_parallel
    grids: list[dict[str, Any]] = []
    if layout.tp > 1 and not layout.sp:
        grids.append({"sp": True})
    if splits and layout.tp < 8:
        grids.append({"tp": 2 * layout.tp, "sp": True})
    if splits:
        grids.append({"cp": 2 * layout.cp})
    if not planner.settings.activations_only and layout.dp * layout.cp > 1 and layout.zero < 3:
        grids.append({"zero": layout.zero + 1})
    works: list[dict[str, Any]] = []
    if work.micro_batch > 1:
        works.append({"micro_batch": work.micro_batch // 2})
    if work.attention == "eager":
        works.append({"attention": "flash"})
    found = [(grid, replace(run, layout=layout.model_copy(update=grid))) for grid in grids]
    found += [(each, replace(run, workload=work.model_copy(update=each))) for each in works]
    valid = []
    for fields, changed in found:
        try:
            check(changed.model, changed.layout, changed.workload)
        except SpecError:
            continue
        valid.append((" ".join(_flag(key, value) for key, value in fields.items()), changed))
    return valid


def _flag(key: str, value: Any) -> str:
    name = "--" + key.replace("_", "-")
    return name if value is True else f"{name} {value}"


def _notes(planner: RunPlanner, plans: Sequence[Plan]) -> tuple[str, ...]:
    run = planner.run
    notes = list(run.warnings)
    notes += [note for kind in planner.model.kinds for note in kind.graph.notes]
    notes += _model_notes(planner)
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


@dataclass(frozen=True, kw_only=True)
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
    """The budget of one GPU in bytes: as given, else what the device has; None without either.

    Raises ``SpecError`` where ``memory`` is no amount, or more than the device has.
    """
    from actcalc.plan.budget import parse_bytes

    device = run.device
    if memory is None:
        return None if device is None else device.usable_bytes
    budget = parse_bytes(memory)
    if device is not None and budget > device.usable_bytes:
        raise SpecError(
            f"--memory {memory} is more than {device.name} has "
            f"({device.usable_bytes:,} bytes usable)",
            "lower --memory, drop it to plan for the whole device, or name another --device",
        )
    return budget
