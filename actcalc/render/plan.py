"""A recompute plan as sheets: the plan, named policies with the same memory, the frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

from actcalc.answers.measured_plan import LayerPlan
from actcalc.answers.plan import NO_OFFLOAD, RunPlan
from actcalc.answers.plan_changes import PlanStates
from actcalc.plan.figures import LayersFigure, RivalFigure, StageFigure
from actcalc.render.compare import run_lines
from actcalc.render.sheet import (
    Column,
    Row,
    Sheet,
    bytes_column,
    fits_column,
    flops_column,
    ranked,
    rows_of,
    seconds_column,
    share_column,
    sizes_column,
)
from actcalc.render.training import training_lines
from actcalc.render.units import count, digits, flops, percent, seconds, size


def plan_sheets(
    result: RunPlan,
    units: str,
    states: PlanStates | None = None,
    advice: tuple[str, ...] = (),
) -> list[Sheet]:
    """The plan (or what would do), then its rivals, then the frontier if there is one.

    ``states`` is how weights are trained, where the whole GPU is planned, ``advice`` what to change
    where nothing fits. For machines the first
    table has the same columns whatever the run, one row per stage and run of equal layers.
    """
    if not result.feasible:
        sheets = [_unplanned(result, units), _infeasible(result, units, states, advice)]
    else:
        sheets = [_plan(result, units, states), _rivals(result, units)]
    if result.frontier:
        sheets.append(_frontier(result, units))
    return sheets


def amount_of(result: RunPlan) -> Callable[[Any], str]:
    """What shows a cost of a plan: seconds, or FLOPs where there is no device."""
    return seconds if result.device is not None else flops


def cost_of(result: RunPlan, figure: Any) -> float | int | None:
    """A figure's cost in the unit of the plan's; None where it has none."""
    value: float | int | None = (
        figure.cost_seconds if result.device is not None else figure.cost_flops
    )
    return value


def _title(result: RunPlan, units: str) -> str:
    what = "activations of one GPU" if result.activations_only else "one GPU"
    method = {"optimal": "cheapest recompute plan", "sqrt": "equal segments", "greedy": "greedy"}
    budget = size(result.memory_bytes, units)
    return f"{result.model['name']}: {method[result.method]}, {budget} for the {what}".replace(
        "for the one", "for one"
    )


def _above(result: RunPlan, states: PlanStates | None) -> tuple[str, ...]:
    cost = (
        f"cost: forward time re-run on {result.device['name']}, one micro-batch"
        if result.device is not None
        else "cost: forward FLOPs re-run over all ranks, one micro-batch (no --device)"
    )
    semantics = {
        "minimal": "minimal (op by op)",
        "module": "module (whole wrapped modules)",
    }
    if isinstance(result, LayerPlan):
        lines = layer_lines(result)
        cost = "cost: forward FLOPs re-run, one micro-batch"
    else:
        lines = run_lines(result.model, result.layout, result.workload, result.framework)
    if result.offload and result.device is not None:
        cost = (
            "cost: time of re-runs, of waits for copies and of the memory traffic of copies on "
            f"{result.device['name']}, one micro-batch"
        )
    return (
        *lines,
        *_trained(states),
        f"memory model: {result.memory_model}   semantics: {semantics[result.semantics]}",
        cost,
    )


def _trained(states: PlanStates | None) -> tuple[str, ...]:
    if states is None:
        return ()
    return training_lines(states.training, states.recipe, states.layout, states.workload)


def layer_lines(result: LayerPlan) -> tuple[str, ...]:
    """What was measured, in one line."""
    model = result.model
    layers = "1 layer" if model["layers"] == 1 else f"{model['layers']} layers"
    return (
        f"{layers} of {count(model['parameters'])} parameters  measured {model['class']}  "
        f"{model['precision']}  {result.framework}",
    )


def _folded(layers: Iterable[LayersFigure]) -> tuple[LayersFigure, ...]:
    """Layers that run alike as one row, wherever on the stage they are."""
    rows: dict[LayersFigure, int] = {}
    for one in layers:
        alike = replace(one, count=0)
        rows[alike] = rows.get(alike, 0) + one.count
    return tuple(replace(one, count=count) for one, count in rows.items())


def _layer_key(layers: Iterable[LayersFigure]) -> tuple[Any, ...]:
    return tuple(
        (one.kind, one.count, one.recompute, one.offloaded, one.segment, one.policy)
        for one in layers
    )


def _stage_name(stages: list[StageFigure]) -> str:
    first, last = stages[0].stage, stages[-1].stage
    return str(first) if first == last else f"{first}-{last}"


def _what(figure: LayersFigure) -> str:
    ops = ", ".join(figure.recompute)
    if figure.segment > 1:
        return f"all, in segments of {figure.segment} layers"
    if figure.policy is not None:
        return figure.policy if figure.policy in ("none", "full") else f"{figure.policy} ({ops})"
    return ops or "nothing"


def _cost_columns(result: RunPlan, title: str, things: Sequence[Any]) -> tuple[Column, Column]:
    """The cost in seconds and in FLOPs, of which people see the one there is."""
    timed = result.device is not None
    return (
        replace(seconds_column("cost_seconds", title, things), shown=timed, rank=1),
        replace(flops_column("cost_flops", title, things), shown=not timed, rank=1),
    )


def _costs(figure: Any) -> tuple[float | None, int | None]:
    return figure.cost_seconds, figure.cost_flops


def _plan_columns(result: RunPlan, units: str, *, shown: bool) -> tuple[Column, ...]:
    layers = [one for stage in result.stages for one in stage.layers]
    stored = [one.stored_bytes for one in layers]
    each = "a layer\nor segment" if any(one.segment > 1 for one in layers) else "each"
    columns = (
        Column("stage", "stage", align="left"),
        Column("kind", "kind", align="left", rank=2),
        Column("count", "layers"),
        Column("recompute", "re-run in backward", align="left", wrap=True),
        Column("offloaded", "offloaded to host", align="left", wrap=True, shown=result.offload),
        ranked(1, bytes_column("stored_bytes", f"stored\n{each}", stored, units)),
        *_cost_columns(result, f"cost\n{each}", layers),
        Column("segment", "segment", shown=False),
        Column("feasible", "feasible", shown=False),
        Column("stage_peak_bytes", "peak", shown=False),
        Column("stage_rest_bytes", "rest", shown=False),
        Column("smallest_memory_bytes", "smallest", shown=False),
    )
    return columns if shown else tuple(replace(column, shown=False) for column in columns)


def _layer_values(stage: StageFigure, name: str, one: LayersFigure | None) -> tuple[Any, ...]:
    of_stage = (stage.feasible, stage.peak_bytes, stage.rest_bytes, stage.smallest_memory_bytes)
    if one is None:
        return (name, *(None,) * 8, *of_stage)
    return (
        name,
        one.kind,
        one.count,
        _what(one),
        ", ".join(one.offloaded) or "nothing",
        one.stored_bytes,
        *_costs(one),
        one.segment,
        *of_stage,
    )


def _records(result: RunPlan) -> tuple[tuple[Any, ...], ...]:
    """Every stage's layers, stage by stage; a stage without a plan has one row."""
    return tuple(
        _layer_values(stage, str(stage.stage), one)
        for stage in result.stages
        for one in stage.layers or (None,)
    )


def _unplanned(result: RunPlan, units: str) -> Sheet:
    """The main table for machines where some stage has no plan."""
    columns = _plan_columns(result, units, shown=False)
    return Sheet(title="", columns=columns, rows=(), records=_records(result))


def _plan(result: RunPlan, units: str, states: PlanStates | None) -> Sheet:
    rows: list[Row] = []
    piped = len(result.stages) > 1
    for _, same in groupby(result.stages, key=lambda stage: _layer_key(_folded(stage.layers))):
        stages = list(same)
        layers = _folded(stages[0].layers)
        rows += [
            Row(
                _layer_values(stages[0], _stage_name(stages), one),
                rule_after=piped and one is layers[-1],
            )
            for one in layers
        ]
    return Sheet(
        title=_title(result, units),
        columns=_plan_columns(result, units, shown=True),
        rows=tuple(rows),
        answer=_answer(result, units),
        fits=True,
        above=_above(result, states),
        below=_totals(result, units),
        details=result.certificate,
        notes=result.notes,
        records=_records(result),
    )


def _answer(result: RunPlan, units: str) -> str:
    """Whether the plan fits, what it costs, and whether that is the least."""
    cost = cost_of(result, result) or 0
    share = cost / result.forward_cost if result.forward_cost else 0.0
    again = any(one.recompute for stage in result.stages for one in stage.layers)
    price = f"re-running {percent(share)} of a forward pass" if again else "nothing is re-run"
    if again and not cost:
        price = "re-running what has no products"
    least = "; no plan is cheaper" if result.optimal and again else ""
    return f"Fits in {size(result.memory_bytes, units)}: {price}{least}."


def _totals(result: RunPlan, units: str) -> tuple[str, ...]:
    cost = cost_of(result, result)
    stored, peak = result.stored_bytes, result.peak_bytes
    assert cost is not None
    assert stored is not None
    assert peak is not None
    share = cost / result.forward_cost if result.forward_cost else 0.0
    stage = max(result.stages, key=lambda one: one.peak_bytes or 0)
    where = f" on stage {stage.stage}" if len(result.stages) > 1 else ""
    return (
        f"stored {size(stored, units)}, peak {size(peak, units)}{where} of "
        f"{size(result.memory_bytes, units)}; cost {amount_of(result)(cost)}, "
        f"{percent(share)} of a forward pass.",
        *_busiest(result),
        *_rest(result, stage, units),
        *_host(result, units),
    )


def _busiest(result: RunPlan) -> tuple[str, ...]:
    """The stage that re-runs most: all others wait for it."""
    costs = [(cost_of(result, stage) or 0, stage) for stage in result.stages]
    most, stage = max(costs, key=lambda pair: pair[0])
    if len(costs) == 1 or not most or not stage.forward_cost:
        return ()
    return (
        f"Stage {stage.stage} re-runs most: {amount_of(result)(most)}, "
        f"{percent(most / stage.forward_cost)} of its forward.",
    )


def _host(result: RunPlan, units: str) -> tuple[str, ...]:
    if not result.offload:
        return ()
    most = max(result.stages, key=lambda one: one.host_bytes)
    if not most.host_bytes:
        return ("Nothing is offloaded.",)
    where = f" on stage {most.stage}" if len(result.stages) > 1 else ""
    return (f"{size(most.host_bytes, units)} of host memory a GPU{where} holds the offloaded.",)


def _rest(result: RunPlan, stage: StageFigure, units: str) -> tuple[str, ...]:
    if result.activations_only:
        return ()
    return (
        f"{size(stage.rest_bytes, units)} of that is the rest of the GPU: weights, gradients, "
        "optimizer, buffers, embedding, head.",
    )


def _rivals(result: RunPlan, units: str) -> Sheet:
    cost = cost_of(result, result)
    fitting = [r for r in result.rivals if r.peak_bytes is not None]
    peaks = [r.peak_bytes or 0 for r in fitting] + [result.peak_bytes or 0]
    label = {"optimal": "this plan", "sqrt": "equal segments", "greedy": "greedy"}[result.method]

    def row(name: str, peak: int | None, figure: Any) -> Row:
        price = cost_of(result, figure)
        share = None if price is None or not result.forward_cost else price / result.forward_cost
        ratio = None if price is None or not cost else price / cost
        return Row((name, peak, *_costs(figure), share, ratio))

    rows = [row(label, result.peak_bytes, result)]
    rows += [
        row(_rival_name(rival), rival.peak_bytes, rival)
        for rival in sorted(fitting, key=lambda r: cost_of(result, r) or 0)
    ]
    missing = [rival.name for rival in result.rivals if rival.peak_bytes is None]
    below = []
    if missing:
        below.append("do not fit: " + ", ".join(missing) + ".")
    below.append(_sentence(result))
    return Sheet(
        title="Named policies with the same memory",
        columns=(
            Column("policy", "plan", align="left", wrap=True),
            bytes_column("peak_bytes", "peak", peaks, units),
            *_cost_columns(result, "cost", [result, *fitting]),
            share_column("of_forward_ratio", "of a\nforward"),
            Column("cost_per_plan_cost_ratio", "times\nthe plan", digits, rank=2),
        ),
        rows=tuple(rows),
        below=tuple(below),
    )


def _rival_name(rival: RivalFigure) -> str:
    if not rival.counts:
        return rival.name
    first, second = rival.name.split(" and ")
    counts = list(dict.fromkeys(rival.counts))
    many = str(counts[0]) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{first} on {many} layers a stage, else {second}"


def _sentence(result: RunPlan) -> str:
    cost = cost_of(result, result)
    fitting = [r for r in result.rivals if r.peak_bytes is not None]
    singles = [r for r in fitting if not r.counts and r.name != NO_OFFLOAD]
    if not cost:
        again = any(one.recompute for stage in result.stages for one in stage.layers)
        what = "What is re-run has no products" if again else "Everything fits: nothing is re-run"
        return f"{what}, at no cost."
    best = min((cost_of(result, r) or 0 for r in singles), default=None)
    mixed = min((cost_of(result, r) or 0 for r in fitting if r.counts), default=None)
    if best is None and mixed is None:
        return "No named policy fits in this memory; this plan does."
    parts = []
    if best is not None:
        name = next(r.name for r in singles if (cost_of(result, r) or 0) == best)
        parts.append(f"the best single policy, {name}, costs {digits(best / cost)} times as much")
    else:
        parts.append("no single policy fits")
    if mixed is not None:
        parts.append(f"the best mix of two {digits(mixed / cost)} times")
    text = ", ".join(parts)
    return text[0].upper() + text[1:] + "."


def _infeasible(
    result: RunPlan, units: str, states: PlanStates | None, advice: tuple[str, ...]
) -> Sheet:
    least = result.smallest_memory_bytes or 0
    answer = (
        f"Does not fit: no plan needs less than {size(least, units)} ({least:,} bytes), of "
        f"{size(result.memory_bytes, units)}."
    )
    below = []
    rest = max((stage.rest_bytes for stage in result.stages), default=0)
    if not result.activations_only:
        below.append(
            f"Of it {size(rest, units)} is no activation of a layer: weights, gradients, "
            "optimizer, buffers, embedding, head."
        )
    if states is not None and 2 * states.total_bytes > least:
        below.append(
            f"States are the larger part: weights {size(states.weights_bytes, units)}, gradients "
            f"{size(states.gradients_bytes, units)}, optimizer "
            f"{size(states.optimizer_bytes, units)}. No recomputation lowers them."
        )
    sizes = [least, *(one.smallest_memory_bytes for one in result.changes)]
    shown = bool(result.changes)
    columns = (
        Column("change", "what to change", align="left", shown=shown),
        replace(bytes_column("smallest_memory_bytes", "then enough", sizes, units), shown=shown),
        fits_column(
            "fits", shown=shown, get=lambda one: one.smallest_memory_bytes <= result.memory_bytes
        ),
    )  # fmt: skip
    return Sheet(
        answer=answer,
        fits=False,
        advice=advice,
        title=_title(result, units),
        columns=columns,
        rows=rows_of(columns, result.changes),
        above=(*_above(result, states), *below),
        notes=(*_of_changes(result), *result.notes),
    )


def _of_changes(result: RunPlan) -> tuple[str, ...]:
    """What the changes take beside memory."""
    flags = {word for one in result.changes for word in one.change.split() if word[:2] == "--"}
    layout = result.layout
    gpus = prod(layout.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    more = [f"{one.change} ({one.gpus})" for one in result.changes if one.gpus > gpus]
    notes = []
    if more:
        notes.append(f"More GPUs than the run's {gpus}: {', '.join(more)}.")
    if "--lora-rank" in flags:
        notes.append("--lora-rank trains adapters alone; the model's own weights stay as they are.")
    return tuple(notes)


def _frontier(result: RunPlan, units: str) -> Sheet:
    points = result.frontier
    forward = result.forward_cost
    columns = (
        sizes_column("memory_bytes", "memory", points, units),
        sizes_column("peak_bytes", "peak", points, units),
        *_cost_columns(result, "cost", points),
        share_column(
            "of_forward_ratio", "of a\nforward",
            get=lambda point: (cost_of(result, point) or 0) / forward if forward else None,
        ),
    )  # fmt: skip
    return Sheet(
        title="Frontier: the cheapest plan at each memory",
        columns=columns,
        rows=rows_of(columns, points),
        below=(
            f"From {size(points[0].memory_bytes, units)}, the least any plan needs, to "
            f"{size(points[-1].memory_bytes, units)}, where nothing more is gained.",
        )
        if points
        else (),
    )
