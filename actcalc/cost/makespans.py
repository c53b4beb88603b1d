"""The time of one step of a pipeline for many runs of one schedule at once.

The same run of the schedule by events as :func:`actcalc.cost.pipeline.makespan`, over arrays of
durations. Where the last stage is the slowest and the others wait for it, the time is known without
a run: the stages before it once, and the last one's whole work. Tests hold both to ``makespan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.pipeline import finish_times, first_length, windows
from actcalc.cost.rounding import ROUNDING
from actcalc.run.schedule.shape import Shape, shape_of
from actcalc.specs.schedules import SCHEDULES

Floats = NDArray[np.float64]


class Durations(NamedTuple):
    """Seconds of one micro-batch through one chunk, for many runs."""

    forward: Floats
    backward: Floats
    """The whole backward."""
    weight: Floats
    """Part of it that computes weight gradients."""

    @property
    def total(self) -> Floats:
        """Forward and backward."""
        return self.forward + self.backward


Table = Sequence[Sequence[Durations]]
"""Durations by [stage][chunk]; equal chunks are the same object."""


def makespans(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int,
    chunks: Table,
    *,
    group: int | None = None,
) -> Floats:
    """Seconds of one step of every run: ``makespan`` over arrays."""
    shape = shape_of(schedule, pp, microbatches, vpp, group)
    known = np.zeros(len(chunks[0][0].forward), bool)
    result = np.zeros(len(known))
    if not SCHEDULES[schedule].splits_backward:
        found = _last_is_slowest(shape, chunks)
        if found is not None:
            known, result = found
    if not known.all():
        rest = ~known
        result[rest] = _by_events(shape, _stacked(shape, chunks, rest))
    return result


def _last_is_slowest(shape: Shape, chunks: Table) -> tuple[NDArray[np.bool_], Floats] | None:
    """Which runs wait for their last stage alone, and their times; None where none can be told.

    Under 1F1B every path through the order gains at most one forward and one backward of one stage
    for each further micro-batch: if the last stage's are the longest, the path that stays there is
    the longest of all. Interleaved, with equal chunks but for what the first one and the last one
    have beside their layers, a path meets the first chunk's for one group, and the last chunk's for
    every micro-batch, as long as the last chunk's is not less.
    """
    count, pp = shape.microbatches, shape.pp
    if shape.schedule == "1f1b":
        stages = [stage[0] for stage in chunks]
        each = {id(stage): stage.total for stage in stages}
        longest = each[id(stages[-1])]
        slowest = np.all([longest >= other for other in each.values()], axis=0)
        total = sum((each[id(stage)] for stage in stages), np.zeros(len(longest)))
        return slowest, total + (count - 1) * longest
    if shape.schedule != "interleaved" or shape.group != pp or count % pp:
        return None
    flat = [chunk for stage in chunks for chunk in stage]
    first, last = chunks[0][0], chunks[-1][-1]
    middle = {id(chunk): chunk for chunk in flat[1:-1]}
    if len(middle) != 1:
        return None
    (plain,) = middle.values()
    more = [getattr(first, way) - getattr(plain, way) for way in ("forward", "backward")]
    most = [getattr(last, way) - getattr(plain, way) for way in ("forward", "backward")]
    known = np.all([extra >= 0 for extra in (*more, *most)], axis=0)
    known &= sum(most) >= sum(more)
    rounds = count * shape.chunks + pp - 1
    return known, rounds * plain.total + pp * sum(more) + count * sum(most)


def _stacked(shape: Shape, chunks: Table, chosen: NDArray[np.bool_]) -> Floats:
    """Seconds by [stage, chunk, kind of work, run]."""
    rows = [
        [
            (c.forward[chosen], c.backward[chosen], (c.backward - c.weight)[chosen],
             c.weight[chosen])
            for c in stage
        ]
        for stage in chunks
    ]  # fmt: skip
    return np.array(rows, float).reshape(shape.pp, shape.chunks, 4, -1)


def _by_events(shape: Shape, durations: Floats) -> Floats:
    if shape.row.phased:
        one = _last(finish_times(shape.resized(1), durations, 0.0))
        two = _last(finish_times(shape.resized(2), durations, 0.0))
        return one + (shape.microbatches - 1) * (two - one)
    result = np.zeros(durations.shape[-1])
    open_ = np.arange(len(result))
    limit = first_length(shape)
    directions = shape.microbatches // shape.lane
    while len(open_):
        short = shape.shortened(limit)
        now = durations[..., open_]
        finish = finish_times(short, now, 0.0)
        if short == shape:
            result[open_] = _last(finish)
            break
        periods, shifts = _steady(short, finish)
        for period in np.unique(periods[periods > 0]).tolist():
            own = periods == period
            missing = shape.lane - short.lane
            ended, extra = finish[..., own], missing % period
            if extra:
                longer = short.resized(directions * (short.lane + extra))
                ended = finish_times(longer, now[..., own], 0.0)
            result[open_[own]] = _last(ended) + missing // period * shifts[own]
        open_ = open_[periods == 0]
        limit *= 2
    return result


def _last(finish: Floats) -> Floats:
    found: Floats = finish.reshape(-1, finish.shape[-1]).max(axis=0)
    return found


def _steady(shape: Shape, finish: Floats) -> tuple[NDArray[np.int64], Floats]:
    """For each run its period and the seconds of one; period 0 where it has not settled."""
    end, reach, periods = windows(shape)
    runs = finish.shape[-1]
    tolerance = ROUNDING * _last(finish)
    found, seconds = np.zeros(runs, np.int64), np.zeros(runs)
    window = finish[..., end - reach : end, :]
    for period in periods:
        shifts = window - finish[..., end - reach - period : end - period, :]
        shifts = shifts.reshape(-1, runs)
        most = shifts.max(axis=0)
        settled = (found == 0) & (most - shifts.min(axis=0) <= tolerance)
        found[settled], seconds[settled] = period, most[settled]
        if found.all():
            break
    return found, seconds
