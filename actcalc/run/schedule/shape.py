"""The question to a schedule, checked: which one, of how many stages, micro-batches and chunks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actcalc.errors import SpecError
from actcalc.specs.schedules import SCHEDULES, PipelineSchedule


@dataclass(frozen=True)
class Shape:
    """A checked question: which schedule, and its sizes."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int
    group: int
    """Micro-batches that pass one chunk before the next; pp where they are not grouped."""

    @property
    def row(self) -> PipelineSchedule:
        """The schedule's row."""
        return SCHEDULES[self.schedule]

    @property
    def lane(self) -> int:
        """Microbatches that pass one chunk: half of them go each way where there are two."""
        return self.microbatches // self.row.directions

    @property
    def unit(self) -> int:
        """Microbatches by which the order can be lengthened without changing its ends."""
        return self.group if self.row.grouped else self.row.directions

    @property
    def span(self) -> int:
        """An upper bound of the microbatches, per direction, in the warm-up or in the cool-down."""
        rest = self.lane % self.group if self.row.grouped else 0
        return self.row.depth * self.group + rest

    def shortened(self, limit: int) -> Shape:
        """The same schedule with at most ``limit`` + unit microbatches, equal to it modulo unit."""
        if self.row.phased or self.microbatches <= limit + self.unit:
            return self
        return self.resized(limit + (self.microbatches - limit) % self.unit)

    def resized(self, microbatches: int) -> Shape:
        """The same schedule with another number of microbatches."""
        return replace(self, microbatches=microbatches)

    def place(self, stage: int, chunk: int) -> int:
        """Where on its way a microbatch meets this chunk, from 0."""
        return self.row.place(self.pp, stage, chunk)

    def table(self, values: Sequence[Sequence[float]], what: str) -> tuple[tuple[float, ...], ...]:
        """``values`` by [stage][chunk]; ``SpecError`` if they are of another shape."""
        table = tuple(tuple(row) for row in values)
        if len(table) != self.pp or any(len(row) != self.chunks for row in table):
            raise SpecError(
                f"{what} for {len(table)} stages of {sorted({len(row) for row in table})} chunks, "
                f"but the {self.schedule} schedule has {self.pp} stages of {self.chunks}",
                f"give {self.pp} rows of {self.chunks}",
            )
        return table


def row_of(schedule: str) -> PipelineSchedule:
    """The row of a schedule; ``SpecError`` with a did-you-mean for an unknown name."""
    if schedule not in SCHEDULES:
        close = difflib.get_close_matches(str(schedule).lower(), SCHEDULES, n=1)
        known = "the schedules are " + ", ".join(SCHEDULES)
        raise SpecError(
            f"unknown pipeline schedule {schedule!r}",
            f"did you mean {close[0]}?" if close else known,
        )
    return SCHEDULES[schedule]


def shape_of(schedule: str, pp: int, microbatches: int, vpp: int, group: int | None) -> Shape:
    """The question as a :class:`Shape`; ``SpecError`` for sizes the schedule cannot run."""
    row = row_of(schedule)
    chunks = row.chunk_count(vpp)
    if pp < 1:
        raise SpecError(f"pp {pp} is not a number of pipeline stages", "use pp 1 or more")
    if microbatches < 1:
        raise SpecError(
            f"{microbatches} microbatches per step", "use a global batch of one microbatch or more"
        )
    if group is not None and not row.grouped:
        raise SpecError(
            f"the {schedule} schedule has no microbatch groups, but the group size is {group}",
            "leave the group size out, or use the interleaved schedule",
        )
    shape = Shape(schedule, pp, microbatches, chunks, pp if group is None else group)
    if row.directions == 2 and pp % 2:
        raise SpecError(
            f"{schedule} pairs the stages of two directions, but pp is {pp}", "use an even pp"
        )
    if row.grouped and pp == 1:
        raise SpecError(
            f"the {schedule} schedule needs more than one pipeline stage, but pp is 1",
            "add --pp 2 or more, or drop --vpp",
        )
    _check_count(shape)
    if row.grouped:
        _check_groups(shape)
    return shape


def _check_count(shape: Shape) -> None:
    row, count = shape.row, shape.microbatches
    least = row.least * shape.pp
    if count >= least and count % row.directions == 0:
        return
    even = "an even number of " if row.directions == 2 else ""
    times = f"{row.least}·" if row.least > 1 else ""
    raise SpecError(
        f"the {row.name} schedule needs {even}at least {times}pp = {least} microbatches, but a "
        f"step has {count}",
        f"change the global batch, or use the {row.instead} schedule",
    )


def _check_groups(shape: Shape) -> None:
    """What Megatron-Core's ``forward_backward_pipelining_with_interleaving`` refuses."""
    pp, count, group = shape.pp, shape.microbatches, shape.group
    if not pp <= group <= count:
        raise SpecError(
            f"the microbatch group size {group} is outside [pp, microbatches] = [{pp}, {count}]",
            f"use a group size of {pp}",
        )
    rest = count % group
    if 0 < rest < pp:
        fitting = next(size for size in range(group, count + 1) if not 0 < count % size < pp)
        raise SpecError(
            f"{count} microbatches in groups of {group} leave a last group of {rest}, smaller "
            f"than the {pp} pipeline stages",
            f"use {count - rest} or {count - rest + group} microbatches, or a microbatch group "
            f"size of {fitting}",
        )
