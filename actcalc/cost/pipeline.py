"""How long one step of a pipeline takes: its schedule's order of work, run by events.

No closed form is used for an answer, except that a periodic middle is run once instead of
thousands of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from math import isfinite
from typing import NamedTuple

from actcalc.cost.rounding import ROUNDING, difference
from actcalc.errors import SpecError
from actcalc.layers.core.algebra import added
from actcalc.run.schedule.orders import COLUMN, KINDS, B, F, order_of, orders_of
from actcalc.run.schedule.shape import Shape, shape_of

Seconds = float | Sequence[float] | Sequence[Sequence[float]]
"""One duration for all, one per stage, or one per stage and chunk."""

Durations = Sequence[float]
"""Seconds of each kind of work, by stage and chunk, one after the other."""

Finish = Sequence[Sequence[float]]
"""Finish times of each micro-batch, by stage, chunk and what an action completes (a forward, an
input gradient, a weight gradient), one after the other."""


class Makespan(NamedTuple):
    """How long one step takes."""

    total_seconds: float
    """From the first forward to the last action of any stage."""
    bubble_ratio: float
    """Idle share of the devices' time: 1 - sum(busy) / (stages * total)."""
    busy_seconds: tuple[float, ...]
    """Per stage: the sum of the durations of its actions."""

    @property
    def overhead_ratio(self) -> float:
        """Time lost over the busiest stage: total / max(busy) - 1.

        For equal stages this is the bubble of Narayanan et al. 2021: (p - 1)/m under 1F1B and
        GPipe, (p - 1)/(m v) interleaved.
        """
        return self.total_seconds / max(self.busy_seconds) - 1


def makespan(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    forward_seconds: Seconds,
    backward_seconds: Seconds,
    weight_seconds: Seconds = 0.0,
    p2p_seconds: float = 0.0,
    group: int | None = None,
) -> Makespan:
    """Time of one step by event simulation, without the optimizer step.

    Durations are those of one microbatch through one chunk: a number, one per stage, or one per
    stage and chunk. ``backward_seconds`` is the whole backward, of which ``weight_seconds`` is
    spent on weight gradients; only schedules that split the backward use the latter.
    ``p2p_seconds`` is the delay of a message between neighbouring stages; it delays the receiver
    and occupies nobody (add it to the durations where sends block). Raises ``SpecError`` as
    :func:`actions` does, or for durations that are negative, not finite or of the wrong shape.

    A long run is not simulated whole: once the finish times of a window of microbatches, as wide
    as any dependence reaches, repeat with a constant shift, every later one does too, and the
    rest is that shift times a count. If they never do, the whole run is simulated.
    """
    shape = shape_of(schedule, pp, microbatches, vpp, group)
    durations = _durations(shape, forward_seconds, backward_seconds, weight_seconds, p2p_seconds)
    total = _total_seconds(shape, durations, p2p_seconds)
    busy = tuple(_busy(shape, durations))
    if total <= 0.0:
        raise SpecError("a step in which nothing takes time", "give durations above 0 seconds")
    return Makespan(total, max(0.0, difference(1.0, sum(busy) / (pp * total))), busy)


def _busy(shape: Shape, durations: Durations) -> Iterator[float]:
    """Seconds of each stage's actions."""
    each = shape.chunks * len(KINDS)
    for start in range(0, len(durations), each):
        own = durations[start : start + each]
        pairs = zip(own[F :: len(KINDS)], own[B :: len(KINDS)], strict=True)
        yield shape.lane * added(forward + backward for forward, backward in pairs)


def _durations(
    shape: Shape, forward: Seconds, backward: Seconds, weight: Seconds, p2p: float
) -> Durations:
    tables = []
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight)):
        rows: Sequence[Sequence[float]]
        if isinstance(value, (int, float)):
            rows = [[value] * shape.chunks] * shape.pp
        else:
            rows = [[row] * shape.chunks if isinstance(row, (int, float)) else row for row in value]
        table = shape.table(rows, f"{name}_seconds")
        tables.append([float(seconds) for row in table for seconds in row])
    if not all(isfinite(seconds) and seconds >= 0 for seconds in chain(*tables, [p2p])):
        raise SpecError("a duration that is negative or not finite", "give seconds of 0 or more")
    found: list[float] = []
    for ahead, whole, part in zip(*tables, strict=True):
        if part > whole:
            raise SpecError(
                f"weight gradients take {part:g} s of a backward of {whole:g} s",
                "backward_seconds is the whole backward, weight_seconds a part of it",
            )
        found += (ahead, whole, whole - part, part)
    return found


def _total_seconds(shape: Shape, durations: Durations, p2p: float) -> float:
    if shape.row.phased:
        # two flow shops of identical jobs, one after the other: linear in their number
        one = _last(finish_times(shape.resized(1), durations, p2p))
        two = _last(finish_times(shape.resized(2), durations, p2p))
        return one + (shape.microbatches - 1) * (two - one)
    directions = shape.microbatches // shape.lane
    limit = first_length(shape)
    while True:
        short = shape.shortened(limit)
        finish = finish_times(short, durations, p2p)
        if short == shape:
            return _last(finish)
        found = steady(short, finish)
        if found is not None:
            period, shift = found
            missing = shape.lane - short.lane
            extra = missing % period
            if extra:
                longer = short.resized(directions * (short.lane + extra))
                finish = finish_times(longer, durations, p2p)
            return _last(finish) + missing // period * shift
        limit *= 2


def _last(finish: Finish) -> float:
    return max(map(max, finish))


def steady(shape: Shape, finish: Finish) -> tuple[int, float] | None:
    """Microbatches (per direction) and seconds of one steady period of a run, if it has settled.

    An action depends on actions at most ``reach`` microbatches older. If all finish times of
    ``reach`` consecutive microbatches equal those ``period`` earlier plus a constant, then by
    induction along the dependences so do all later ones, until the cool-down.
    """
    end, reach, periods = windows(shape)
    tolerance = ROUNDING * _last(finish)
    for period in periods:
        low, high = float("inf"), float("-inf")
        for row in finish:
            earlier = row[end - reach - period : end - period]
            shifts = [b - a for a, b in zip(earlier, row[end - reach : end], strict=True)]
            low, high = min(low, *shifts), max(high, *shifts)
            if high - low > tolerance:
                break
        else:
            return period, high
    return None


def windows(shape: Shape) -> tuple[int, int, range]:
    """Where the window of the last steady microbatches ends, its width, and periods to look for."""
    span, unit = shape.span, shape.unit if shape.row.grouped else 1
    reach = max(
        max((abs(b - a) for a, b in pairwise(order.microbatch)), default=unit)
        for order in orders_of(shape)
    )
    reach = max(reach, unit)
    end = shape.lane - span
    return end, reach, range(unit, end - span - reach + 1, unit)


def first_length(shape: Shape) -> int:
    """Microbatches after which a run is first looked at for its period."""
    directions = shape.microbatches // shape.lane
    return directions * (3 * shape.span + max(2 * shape.unit, shape.pp // 2))


def finish_times(shape: Shape, durations: Durations, p2p: float) -> Finish:
    """When every action of a step ends."""
    lane = shape.lane
    size = shape.pp * shape.chunks * 3 * lane
    ends = _walk(steps_of(shape), [*durations, 0.0], p2p, size)
    rows = [ends[at : at + lane] for at in range(0, size, lane)]
    for weights in range(2, len(rows), 3):
        # whole backwards have both gradients at once
        rows[weights] = [
            both if own < 0 else own
            for own, both in zip(rows[weights], rows[weights - 1], strict=True)
        ]
    return rows


Step = tuple[int, float, int, float, int, int, int, int, int]
"""One action of a stage, or a joined pair, which needs and fills two slots.

What it needs and with which delay, the same of the second one; the slots that it fills; its
durations; the slot of the stage's action before it. A slot is an index into the table of finish
times; beyond it come one that is always done and one that is never waited for. Delays are in
messages; durations are indices into a flat table. (A plain tuple: there are a million of them.)
"""


def _walk(steps: Sequence[Step], seconds: Sequence[float], p2p: float, size: int) -> list[float]:
    ends = [-1.0] * size + [0.0, 0.0]
    for need, delay, other, other_delay, own, also, duration, more, before in steps:
        now = ends[before]
        arrival = ends[need] + delay * p2p
        if arrival > now:
            now = arrival
        arrival = ends[other] + other_delay * p2p
        if arrival > now:
            now = arrival
        now += seconds[duration] + seconds[more]
        ends[own] = now
        ends[also] = now
    return ends


_KEPT_STEPS = 50_000  # orders of no more actions are kept for the next run of the same schedule


def steps_of(shape: Shape) -> tuple[Step, ...]:
    """The actions of all stages in an order in which what each needs has come before it."""
    if shape.pp * shape.chunks * shape.lane > _KEPT_STEPS:
        return _sequence(shape)
    return _kept_sequence(shape)


@lru_cache(maxsize=64)
def _kept_sequence(shape: Shape) -> tuple[Step, ...]:
    return _sequence(shape)


def _sequence(shape: Shape) -> tuple[Step, ...]:
    size = shape.pp * shape.chunks * 3 * shape.lane
    programs = [_program(shape, stage, size) for stage in range(shape.pp)]
    done = [False] * size + [True, True]
    position = [0] * shape.pp
    waiting: dict[int, int] = {}
    ready = list(range(shape.pp))
    found: list[Step] = []
    while ready:
        stage = ready.pop()
        program = programs[stage]
        for index in range(position[stage], len(program)):
            step = program[index]
            need, _, other, _, own, also, *_ = step
            if not (done[need] and done[other]):
                waiting[other if done[need] else need] = stage
                position[stage] = index
                break
            found.append(step)
            for slot in (own, also):
                done[slot] = True
                if slot in waiting:
                    ready.append(waiting.pop(slot))
        else:
            position[stage] = len(program)
    if any(at < len(program) for at, program in zip(position, programs, strict=True)):
        raise RuntimeError(f"the order of {shape} cannot be executed")
    return tuple(found)


def _program(shape: Shape, stage: int, size: int) -> list[Step]:
    """The actions of a stage in order, their slots in a table of ``size``."""
    pp, chunks, lane = shape.pp, shape.chunks, shape.lane
    origin, nowhere, nothing = size, size + 1, pp * chunks * len(KINDS)
    owner = {
        (_lane_of(shape, at, chunk), shape.place(at, chunk)): (at, chunk)
        for at in range(pp)
        for chunk in range(chunks)
    }
    # what a forward waits for comes from the place before its own, a backward's from the one after
    sources = {
        (chunk, column): owner.get((_lane_of(shape, stage, chunk), shape.place(stage, chunk) + way))
        for chunk in range(chunks)
        for column, way in ((0, -1), (1, 1))
    }
    rows = []
    for kind, chunk, microbatch, joined in order_of(shape, stage).rows():
        column = COLUMN[kind]
        need, delay = origin, 0.0
        source = sources.get((chunk, column))
        if source is not None:
            at, other = source
            need, delay = ((at * chunks + other) * 3 + column) * lane + microbatch, at != stage
        own = ((stage * chunks + chunk) * 3 + column) * lane + microbatch
        rows.append((need, delay, own, (stage * chunks + chunk) * len(KINDS) + kind, joined))
    steps, before, at = [], origin, 0
    while at < len(rows):
        need, delay, own, duration, joined = rows[at]
        other, other_delay, also, more = origin, 0.0, nowhere, nothing
        if joined:
            at += 1
            other, other_delay, also, more, _ = rows[at]
        steps.append((need, delay, other, other_delay, own, also, duration, more, before))
        before = own
        at += 1
    return steps


def _lane_of(shape: Shape, stage: int, chunk: int) -> int:
    """Which direction of traffic a chunk serves."""
    return chunk if shape.row.directions == 2 else 0
