"""The memory of every stage as sheets: one row per stage, equal neighbours folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from actcalc.answers.memory import MemoryReport
from actcalc.memory.figures import StageFigure
from actcalc.memory.limits import LimitFigure
from actcalc.render.compare import run_lines
from actcalc.render.room import room
from actcalc.render.sheet import Column, Row, Sheet, bytes_column, rows_of, sizes_column
from actcalc.render.training import training_lines
from actcalc.render.units import count, digits, scale, size
from actcalc.specs.schedules import SCHEDULES

PARTS = (
    Column("weights_bytes", "weights", rank=2),
    Column("gradients_bytes", "grads", rank=2),
    Column("optimizer_bytes", "optim", rank=2),
    Column("activations_bytes", "activ", rank=1),
    Column("transient_bytes", "trans", rank=4),
    Column(
        "other_bytes", "other", rank=5, get=lambda stage: stage.buffers_bytes + stage.overhead_bytes
    ),
)  # fmt: skip
"""What the memory of a stage is made of."""


def _key(stage: StageFigure) -> tuple[object, ...]:
    return (stage.layers, *(part.of(stage) for part in PARTS), stage.total_bytes)


def _named(stages: list[StageFigure]) -> str:
    first, last = stages[0].stage, stages[-1].stage
    return f"{first}" if first == last else f"{first}-{last}"


def memory_sheets(result: MemoryReport, units: str, advice: tuple[str, ...] = ()) -> list[Sheet]:
    """Stages with their parts, the peak in words, what fits, and the limits if asked for.

    ``advice`` is what to change, where it does not fit.
    """
    stages = result.stages
    total = max(stage.total_bytes for stage in stages)
    many, judged = len(stages) > 1, result.fits is not None
    divisor, unit = scale(total, units)
    columns = (
        Column("stage", "stage\n", align="left", shown=many),
        Column("layers", "layers\n", shown=many, rank=6),
        Column("in_flight", "held\n", shown=many, rank=3),
        *(
            replace(
                bytes_column(part.key, part.title, [total], units),
                shown=any(part.of(stage) for stage in stages),
                get=part.get,
                rank=part.rank,
            )
            for part in PARTS
        ),
        bytes_column("total_bytes", "total", [total], units),
        Column(
            "margin_bytes",
            f"left\n{unit}",
            lambda value: digits(value / divisor),
            shown=judged,
            style=lambda value: "red" if value < 0 else "",
        ),
    )

    def record(stage: StageFigure, name: object) -> tuple[object, ...]:
        return (name, *(column.of(stage) for column in columns[1:]))

    folded = [list(same) for _, same in groupby(stages, key=lambda s: (_key(s), s.in_flight))]
    rows = [Row(record(same[0], _named(same))) for same in folded]
    return [
        Sheet(
            title=f"{result.title}: memory of one GPU per pipeline stage"
            if many
            else f"{result.title}: memory of one GPU",
            columns=columns,
            rows=tuple(rows),
            records=tuple(record(stage, stage.stage) for stage in stages),
            answer=_answer(result, units),
            fits=result.fits,
            advice=advice,
            above=input_lines(result),
            below=_below(result, units),
            notes=result.notes,
        ),
        *([_buffers(result, units)] if any(stage.buffers for stage in stages) else []),
        *[_moments(stage, units, many=many) for stage in stages if stage.moments],
        *([limits_sheet(result.limits, units)] if result.limits else []),
    ]


_KINDS = (
    ("weights_bytes", "weights"),
    ("gathered_bytes", "gathered"),
    ("gradients_bytes", "grads"),
    ("unreduced_bytes", "unreduced"),
    ("optimizer_bytes", "optim"),
    ("activations_bytes", "activ"),
    ("working_bytes", "working"),
    ("loss_bytes", "loss"),
    ("buffers_bytes", "buffers"),
)


def _moments(stage: StageFigure, units: str, *, many: bool) -> Sheet:
    """The moments of a step on one stage; equal neighbours are folded for people."""
    moments = stage.moments
    totals = [moment.total_bytes for moment in moments]
    columns = (
        Column("step", "step\n", align="left"),
        Column("at", "moment\n", _shortly, align="left"),
        *(
            replace(
                bytes_column(key, title, totals, units),
                rank=1,
                shown=any(getattr(moment, key) for moment in moments),
            )
            for key, title in _KINDS
        ),
        bytes_column("total_bytes", "total", totals, units),
    )
    records = rows_of(columns, moments)
    top = max(moment.total_bytes for moment in moments if moment.step == "later")
    rows = [
        Row(
            row.values,
            "strong" if moment.total_bytes == top and moment.step == "later" else "plain",
        )
        for moment, row in zip(moments, records, strict=True)
    ]
    return Sheet(
        title="moments of a step" + (f" on stage {stage.stage}" if many else ""),
        columns=columns,
        rows=tuple(rows[i] for i in _steady(stage)),
        records=tuple(row.values for row in records),
    )


def _shortly(at: str) -> str:
    """A moment in few words: backward, layer 3."""
    words = at.partition(":")[0].removeprefix("in ").removeprefix("at the end of ")
    return words.replace(" of ", ", ").replace("forward, in ", "forward, ")


def _steady(stage: StageFigure) -> list[int]:
    """Indices of moments worth a line: a layer between two of its kind, as high or higher, is not.

    Layers of one kind follow in a straight line: the first and the last of each run are shown.
    """
    kept = []
    for index, moment in enumerate(stage.moments):
        near = stage.moments[max(0, index - 1) : index + 2]
        plain = len(near) == 3 and all(
            " of layer " in one.at and one.working_bytes == moment.working_bytes for one in near
        )
        if not plain:
            kept.append(index)
    return kept


def input_lines(result: MemoryReport) -> tuple[str, ...]:
    """The inputs of a run: model, work, states, policy."""
    lines = run_lines(result.model, result.layout, result.workload, result.framework)
    schedule = f"  {result.schedule}, {result.microbatches} micro-batches"
    return (
        f"{count(result.parameters)} parameters  {lines[0]}",
        *lines[1:],
        *training_lines(result.training, result.recipe, result.layout, result.workload),
        f"policy {result.policy}{schedule if result.layout['pp'] > 1 else ''}",
    )


def _below(result: MemoryReport, units: str) -> tuple[str, ...]:
    top = result.stages[result.peak_stage]
    where = f"on stage {top.stage}, " if len(result.stages) > 1 else ""
    lines = [
        f"Peak {where}{top.peak_at}: {size(top.peak_bytes, units)} allocated, "
        f"{size(top.static_bytes, units)} of it stay between steps.",
        *_reserved(top, units, outside=result.device is not None),
        *([_held(result)] if len(result.stages) > 1 else []),
    ]
    return tuple(lines)


def _answer(result: MemoryReport, units: str) -> str:
    """Whether the run fits its device; without one, what the fullest GPU needs."""
    if result.device is not None:
        return _fitting(result, units)
    top = result.stages[result.peak_stage]
    where = f"The fullest GPU, of stage {top.stage}," if len(result.stages) > 1 else "One GPU"
    return f"{where} needs {size(top.total_bytes, units)} under {result.policy}."


def _reserved(top: StageFigure, units: str, *, outside: bool) -> tuple[str, ...]:
    """What the allocator reserves, and the driver shows."""
    most, expandable = top.reserved_bytes, top.reserved_expandable_bytes
    if most is None or expandable is None:
        return ()
    shown = f"; the driver shows {size(most + top.overhead_bytes, units)}" if outside else ""
    return (
        f"PyTorch reserves {size(most, units)} for that ({size(expandable, units)} with "
        f"expandable_segments){shown}.",
    )


def _held(result: MemoryReport) -> str:
    """What the column of held activations counts."""
    row = SCHEDULES.get(result.schedule)  # none without a pipeline
    chunks = row.chunk_count(result.layout["vpp"]) if row else 1
    if chunks == 1:
        return "held: micro-batches in flight."
    return f"held: activations in flight, of one micro-batch on one of the stage's {chunks} chunks."


def _fitting(result: MemoryReport, units: str) -> str:
    """Whether the run fits its device, in one sentence; empty without a device."""
    if result.device is None:
        return ""
    top, name = result.stages[result.peak_stage], result.device["title"]
    many = len(result.stages) > 1
    usable = room(result.device, result.headroom_ratio, units)
    if result.fits:
        where = "left on the fullest stage" if many else "left"
        return f"Fits {name}: {size(top.margin_bytes or 0, units)} of {usable} are {where}."
    over = f"{size(-(top.margin_bytes or 0), units)} over"
    short = sum(not stage.fits for stage in result.stages)
    which = f"{short} of {len(result.stages)} stages do not fit, the fullest is " if many else ""
    return f"Does not fit {name}, {usable}: {which}{over}."


def _buffers(result: MemoryReport, units: str) -> Sheet:
    """Buffers of the fullest stage, line by line."""
    top = result.stages[result.peak_stage]
    allocated = Column(
        "allocated", "in the allocator", align="left",
        get=lambda line: "yes" if line.allocated else "no",
    )  # fmt: skip
    columns = (
        Column("buffer", "buffer", align="left", get=lambda line: line.name),
        sizes_column("bytes", "size", top.buffers, units),
        allocated,
        Column("about", "what for", align="left", wrap=True),
    )
    return Sheet(
        detail=True,
        title="buffers and context" + (f" of stage {top.stage}" if len(result.stages) > 1 else ""),
        columns=columns,
        rows=rows_of(columns, top.buffers),
    )


def limits_sheet(limits: Sequence[LimitFigure], units: str, of: str = "") -> Sheet:
    """The largest sizes that fit, a row for each policy and quantity."""
    columns = (
        Column("policy", "policy", align="left"),
        Column("quantity", "quantity", align="left"),
        Column("largest", "largest", lambda value: f"{value:,}"),
        Column("tokens", "tokens per\nmicro-batch", lambda value: f"{value:,}"),
        sizes_column("total_bytes", "total", limits, units),
    )
    return Sheet(
        title=f"{of}: the most that fits the device" if of else "the most that fits the device",
        columns=columns,
        rows=rows_of(columns, limits),
    )
