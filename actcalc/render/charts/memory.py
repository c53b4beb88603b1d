"""Charts of a run's memory: each pipeline stage, and one stage through a step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from actcalc.answers.header import RunAnswer
from actcalc.answers.memory import MemoryReport
from actcalc.answers.step_memory import StepMemory, StepMoment
from actcalc.memory.figures import StageFigure
from actcalc.render.charts.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Chart,
    category,
    quantity,
    scale_of,
)
from actcalc.render.room import room, usable_bytes
from actcalc.render.units import scale, size

_Part = tuple[str, str, Callable[[StageFigure], int]]
_PARTS: tuple[_Part, ...] = (
    ("weights", BLUE, lambda stage: stage.weights_bytes),
    ("gradients", SKY, lambda stage: stage.gradients_bytes),
    ("optimizer", GREEN, lambda stage: stage.optimizer_bytes),
    ("activations kept", ORANGE, lambda stage: stage.activations_bytes),
    ("at work", PINK, lambda stage: stage.transient_bytes),
    ("buffers, context", GREY, lambda stage: stage.buffers_bytes + stage.overhead_bytes),
)


def stages_chart(result: MemoryReport, units: str) -> Chart:
    """Memory per pipeline stage at its highest moment, stacked, with the device's limit."""
    stages, limit = result.stages, _limit(result)
    most = max([stage.total_bytes for stage in stages] + [limit or 0])
    divisor, unit = scale(most, units)
    rows = [
        {
            "stage": stage.stage,
            "part": name,
            "bytes": get(stage),
            "value": get(stage) / divisor,
            "order": at,
            "about": f"stage {stage.stage}, {name}: {size(get(stage), units)}",
        }
        for stage in stages
        for at, (name, _, get) in enumerate(_PARTS)
        if get(stage)
    ]
    names = [name for name, _, _ in _PARTS if any(row["part"] == name for row in rows)]
    axis = {"labelAngle": 0, "labelOverlap": True} if len(stages) > 1 else None
    x = {**category("stage", axis=axis), "title": "pipeline stage", "type": "ordinal"}
    wide = {"band": 0.9 if len(stages) > 1 else 0.3}
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar", "width": wide, "stroke": "#ffffff", "strokeWidth": 0.4},
        "encoding": {
            "x": x,
            "y": quantity("value", f"{unit} of one GPU"),
            "color": category("part", scale=scale_of(names, {n: c for n, c, _ in _PARTS})),
            "order": {"field": "order"},
            "description": {"field": "about"},
        },
    }
    about = "; ".join(f"stage {s.stage} {size(s.total_bytes, units)}" for s in _told(stages))
    return Chart(
        name="stages",
        title=f"{result.title}: memory of one GPU"
        + (" per pipeline stage" if len(stages) > 1 else ""),
        about=about + _limit_words(result, units),
        body={"layer": [bars, *_limit_line(result, divisor, units)], "height": 320},
        lines=(f"At the highest moment of a step, policy {result.policy}.",),
    )


def _told(stages: tuple[StageFigure, ...]) -> list[StageFigure]:
    """One stage of each row of equal ones."""
    return [next(same) for _, same in groupby(stages, key=lambda stage: stage.total_bytes)]


def _limit(result: RunAnswer) -> int | None:
    """What a run may take of the device, its headroom left free; None without a device."""
    if result.device is None:
        return None
    return int(usable_bytes(result.device) * (1 - (result.headroom_ratio or 0.0)))


def _limit_words(result: RunAnswer, units: str) -> str:
    if result.device is None:
        return ""
    return f"; {result.device['name']} has {room(result.device, result.headroom_ratio, units)}"


def _limit_line(result: RunAnswer, divisor: float, units: str) -> list[dict[str, Any]]:
    """A line at what the device has room for, with its name; nothing without a device."""
    limit = _limit(result)
    if result.device is None or limit is None:
        return []
    name = f"{result.device['name']}: {room(result.device, result.headroom_ratio, units)}"
    data = {"values": [{"value": limit / divisor, "text": name, "about": name}]}
    y = quantity("value", "")
    line = {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 2, "color": VERMILION}
    words = {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "dy": -3}
    return [
        {"data": data, "mark": line, "encoding": {"y": y, "description": {"field": "about"}}},
        {"data": data, "mark": words, "encoding": {"y": y, "x": {"value": 0},
                                                    "text": {"field": "text"},
                                                    "description": {"field": "about"}}},
    ]  # fmt: skip


_LAYERS = (
    ("outside the allocator", GREY),
    ("buffers", SKY),
    ("weights, gradients, optimizer", BLUE),
    ("activations kept", ORANGE),
    ("at work", PINK),
)


def step_chart(result: StepMemory, units: str) -> Chart:
    """A stage's memory through one step: forward climbs, backward descends, the peak is marked."""
    top = max(result.moments, key=lambda moment: moment.total_bytes)
    most = max(top.total_bytes + result.overhead_bytes, _limit(result) or 0)
    divisor, unit = scale(most, units)
    rows = [_values(result, moment, divisor) for moment in (*result.moments, _closing(result))]
    names = [name for name, _ in _LAYERS if any(row[name] for row in rows)]
    axis = {"labels": False, "ticks": False, "grid": False}
    passes = "forward, backward, optimizer step"
    if result.schedule != "none":
        passes = "forward and backward passes of the stage, in order"
    x = quantity("at", passes, axis=axis, scale={"nice": False})
    areas = {
        "data": {"values": rows},
        "transform": [
            {"fold": names, "as": ["part", "value"]},
            {"calculate": f"indexof({names}, datum.part)", "as": "order"},
        ],
        "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.95},
        "encoding": {
            "x": x,
            "y": quantity("value", f"{unit} of one GPU"),
            "color": category("part", scale=scale_of(names, dict(_LAYERS))),
            "order": {"field": "order"},
        },
    }
    peaks = [_peak(result, list(same), divisor, units) for same in _works(result)]
    points = {
        "data": {"values": peaks},
        "mark": {"type": "point", "filled": True, "size": 26, "opacity": 0.9},
        "encoding": {
            "x": x,
            "y": quantity("value", ""),
            "color": {"value": "currentColor"},
            "description": {"field": "about"},
        },
    }
    whole = size(top.total_bytes + result.overhead_bytes, units)
    return Chart(
        name="step",
        title=f"{result.title}: memory through one step"
        + (f" on stage {result.stage}" if result.schedule != "none" else ""),
        about=f"It is highest {top.at}: {whole}" + _limit_words(result, units),
        body={
            "layer": [
                areas,
                points,
                *_limit_line(result, divisor, units),
            ],
            "height": 320,
        },
        lines=_step_lines(result),
    )


def _closing(result: StepMemory) -> StepMoment:
    """The optimizer step's end, so that it has a width."""
    from dataclasses import replace

    last = result.moments[-1]
    return replace(last, start=last.start + (0.25 if result.schedule == "none" else 1))


def _values(result: StepMemory, moment: StepMoment, divisor: float) -> dict[str, float]:
    sizes = (
        result.overhead_bytes,
        moment.buffers_bytes,
        moment.states_bytes,
        moment.activations_bytes,
        moment.working_bytes,
    )
    parts = {n: round(b / divisor, 4) for (n, _), b in zip(_LAYERS, sizes, strict=True)}
    return {"at": round(moment.start, 4), **parts}


def _works(result: StepMemory) -> list[list[StepMoment]]:
    return [list(same) for _, same in groupby(result.moments, key=lambda moment: moment.work)]


def _peak(
    result: StepMemory, moments: list[StepMoment], divisor: float, units: str
) -> dict[str, Any]:
    """The highest moment of one pass, as a point with its words."""
    top = max(moments, key=lambda moment: moment.total_bytes)
    whole = top.total_bytes + result.overhead_bytes
    held = f", {top.held} in flight" if result.schedule != "none" and top.held else ""
    return {
        "at": top.start,
        "value": whole / divisor,
        "about": f"{top.at}{held}: {size(whole, units)}",
    }


def _step_lines(result: StepMemory) -> tuple[str, ...]:
    if result.schedule == "none":
        return (
            f"Policy {result.policy}, one micro-batch; points are the highest moments of forward, "
            "backward and the optimizer step. Widths are not times.",
        )
    shown = (
        ""
        if result.microbatches_shown == result.microbatches
        else f", {result.microbatches_shown} of {result.microbatches} micro-batches drawn: the "
        "middle repeats itself"
    )
    return (
        f"Policy {result.policy}, schedule {result.schedule}{shown}. A point is the highest moment "
        "of one pass; widths are not times.",
    )
