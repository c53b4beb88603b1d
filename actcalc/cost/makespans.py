"""The time of one step of a pipeline for many runs of one schedule at once.

The same run of the schedule by events as :func:`actcalc.cost.pipeline.makespan`, over arrays of
durations. Where the last stage is the slowest and the others wait for it, the time is known without
a run: the stages before it once, and the last one's whole work. Tests hold both to ``makespan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.pipeline import Step, first_length, steps_of, windows
from actcalc.cost.rounding import ROUNDING
from actcalc.run.schedule.shape import Shape, shape_of
from actcalc.specs.schedules import SCHEDULES

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


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
    microbatches: Counts,
    vpp: int,
    chunks: Table,
    which: Counts,
    *,
    group: int | None = None,
) -> Floats:
    """Seconds of one step of every run: ``makespan`` over arrays.

    A run has so many ``microbatches``, and the durations at ``which`` place of ``chunks``: several
    runs may have the same.
    """
    shapes = {count: shape_of(schedule, pp, count, vpp, group) for count in _values(microbatches)}
    known, result = np.zeros(len(which), bool), np.zeros(len(which))
    line = None if SCHEDULES[schedule].splits_backward else _last_is_slowest(shapes, chunks)
    if line is not None:
        known = line.known[which] & np.isin(microbatches, line.counts)
        result = line.start[which] + microbatches * line.each[which]
    rest = np.flatnonzero(~known)
    if len(rest):
        result[rest] = _by_events(shapes, microbatches[rest], chunks, which[rest])
    return result


def _values(numbers: Counts) -> list[int]:
    """The different numbers, ascending (asked so, NumPy loads nothing for masked arrays)."""
    found: list[int] = np.unique(numbers, return_counts=True)[0].tolist()
    return found


class _Line(NamedTuple):
    """Times that are known without a run: linear in the micro-batches."""

    known: NDArray[np.bool_]
    """For which durations they are."""
    start: Floats
    each: Floats
    """Seconds of one more micro-batch."""
    counts: Sequence[int]
    """For which numbers of micro-batches."""


def _last_is_slowest(shapes: Mapping[int, Shape], chunks: Table) -> _Line | None:
    """Which runs wait for their last stage alone, and their times; None where none can be told.

    Under 1F1B every path through the order gains at most one forward and one backward of one stage
    for each further micro-batch: if the last stage's are the longest, the path that stays there is
    the longest of all. Interleaved, with equal chunks but for what the first one and the last one
    have beside their layers, a path meets the first chunk's for one group, and the last chunk's for
    every micro-batch, as long as the last chunk's is not less.
    """
    shape = next(iter(shapes.values()))
    if shape.schedule == "1f1b":
        stages = [stage[0] for stage in chunks]
        each = {id(stage): stage.total for stage in stages}
        longest = each[id(stages[-1])]
        slowest = np.all([longest >= other for other in each.values()], axis=0)
        total = sum((each[id(stage)] for stage in stages), np.zeros(len(longest)))
        return _Line(slowest, total - longest, longest, tuple(shapes))
    pp = shape.pp
    if shape.schedule != "interleaved" or shape.group != pp:
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
    start = (pp - 1) * plain.total + pp * sum(more)
    whole = tuple(count for count in shapes if count % pp == 0)
    return _Line(known, start, shape.chunks * plain.total + sum(most), whole)


def _stacked(shape: Shape, chunks: Table, chosen: Counts) -> Floats:
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


def _by_events(shapes: Mapping[int, Shape], counts: Counts, chunks: Table, which: Counts) -> Floats:
    """Runs of their schedule: what different numbers of micro-batches begin with is run once."""
    result = np.zeros(len(which))
    some = next(iter(shapes.values()))
    if some.row.phased:
        durations, own = _distinct(some, chunks, which)
        one, two = (_last(_finish_times(some.resized(n), durations)) for n in (1, 2))
        phased: Floats = one[own] + (counts - 1) * (two - one)[own]
        return phased
    open_ = np.arange(len(which))
    factor = 1
    while len(open_):
        left = []
        alike: dict[Shape, list[int]] = {}
        for count in _values(counts[open_]):
            short = shapes[count].shortened(factor * first_length(shapes[count]))
            alike.setdefault(short, []).append(count)
        for short, every in alike.items():
            here = open_[np.isin(counts[open_], every)]
            result[here], settled = _extended(short, counts[here], chunks, which[here])
            left.append(here[~settled])
        open_ = np.concatenate(left)
        factor *= 2
    return result


def _extended(
    short: Shape, counts: Counts, chunks: Table, which: Counts
) -> tuple[Floats, NDArray[np.bool_]]:
    """Times of runs that begin like ``short``, and for which of them it tells them."""
    directions = short.microbatches // short.lane
    durations, own = _distinct(short, chunks, which)
    finish = _finish_times(short, durations)
    missing = counts // directions - short.lane
    result = _last(finish)[own]
    if not missing.any():
        return result, np.ones(len(own), bool)
    periods, shifts = _steady(short, finish)
    period = periods[own]
    settled = (missing == 0) | (period > 0)
    extra = np.where(period > 0, missing % np.maximum(period, 1), 0)
    for more in _values(extra[extra > 0]):
        here = np.flatnonzero(extra == more)
        longer = short.resized(directions * (short.lane + more))
        again, place = _distinct(longer, chunks, which[here])
        result[here] = _last(_finish_times(longer, again))[place]
    result += np.where(period > 0, missing // np.maximum(period, 1), 0) * shifts[own]
    return result, settled


def _distinct(shape: Shape, chunks: Table, which: Counts) -> tuple[Floats, Counts]:
    """The different durations of some runs, and the place of each run's."""
    different, own, _ = np.unique(which, return_inverse=True, return_counts=True)
    return _stacked(shape, chunks, different), own


def _finish_times(shape: Shape, durations: Floats) -> Floats:
    """Finish times by [stage, chunk, what is complete, micro-batch, run]."""
    runs = durations.shape[-1]
    seconds = np.concatenate([durations.reshape(-1, runs), np.zeros((1, runs))])
    size = shape.pp * shape.chunks * 3 * shape.lane
    finish = _walked(steps_of(shape), seconds, size)
    finish = finish.reshape(shape.pp, shape.chunks, 3, shape.lane, -1)
    whole = finish[:, :, 2] < 0
    finish[:, :, 2][whole] = finish[:, :, 1][whole]
    return finish


def _walked(steps: Sequence[Step], seconds: Floats, size: int) -> Floats:
    runs = seconds.shape[-1]
    ends = np.full((size + 2, runs), -1.0)
    ends[size:] = 0.0
    now = np.empty(runs)
    nothing, origin = len(seconds) - 1, size
    for need, _, other, _, own, also, duration, more, before in steps:
        np.maximum(ends[before], ends[need], out=now)
        if other != origin:
            np.maximum(now, ends[other], out=now)
        now += seconds[duration]
        if more != nothing:
            now += seconds[more]
        ends[own] = now
        if also != origin + 1:
            ends[also] = now
    return ends[:size]


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
