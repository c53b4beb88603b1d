"""How long one step of a pipeline takes: its schedule's order of work, run by events.

No closed form is used for an answer, except that a periodic middle is run once instead of
thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.rounding import ROUNDING, difference
from actcalc.errors import SpecError
from actcalc.run.schedule.orders import COLUMN, KINDS, B, F, order_of, orders_of
from actcalc.run.schedule.shape import Shape, shape_of

Seconds = float | Sequence[float] | Sequence[Sequence[float]]
"""One duration for all, one per stage, or one per stage and chunk."""

_Floats = NDArray[np.float64]


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
    busy = tuple(float(shape.lane * (row[:, F] + row[:, B]).sum()) for row in durations)
    if total <= 0.0:
        raise SpecError("a step in which nothing takes time", "give durations above 0 seconds")
    return Makespan(total, max(0.0, difference(1.0, sum(busy) / (pp * total))), busy)


def _durations(
    shape: Shape, forward: Seconds, backward: Seconds, weight: Seconds, p2p: float
) -> _Floats:
    """Seconds by [stage, chunk, kind]."""
    tables = []
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight)):
        rows: Sequence[Sequence[float]]
        if isinstance(value, (int, float)):
            rows = [[value] * shape.chunks] * shape.pp
        else:
            rows = [[row] * shape.chunks if isinstance(row, (int, float)) else row for row in value]
        tables.append(np.array(shape.table(rows, f"{name}_seconds"), float))
    whole, part = tables[1], tables[2]
    bad = not all(np.all(np.isfinite(table)) and np.all(table >= 0) for table in tables)
    if bad or not (np.isfinite(p2p) and p2p >= 0):
        raise SpecError("a duration that is negative or not finite", "give seconds of 0 or more")
    if np.any(part > whole):
        raise SpecError(
            f"weight gradients take {part.max():g} s of a backward of "
            f"{whole[np.unravel_index(part.argmax(), part.shape)]:g} s",
            "backward_seconds is the whole backward, weight_seconds a part of it",
        )
    return np.stack([tables[0], whole, whole - part, part], axis=-1)


def _total_seconds(shape: Shape, durations: _Floats, p2p: float) -> float:
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


def _last(finish: _Floats) -> float:
    return float(finish.max())


def steady(shape: Shape, finish: _Floats) -> tuple[int, float] | None:
    """Microbatches (per direction) and seconds of one steady period of a run, if it has settled.

    An action depends on actions at most ``reach`` microbatches older. If all finish times of
    ``reach`` consecutive microbatches equal those ``period`` earlier plus a constant, then by
    induction along the dependences so do all later ones, until the cool-down.
    """
    end, reach, periods = windows(shape)
    tolerance = ROUNDING * float(finish.max())
    for period in periods:
        shifts = finish[..., end - reach : end] - finish[..., end - reach - period : end - period]
        shift = float(shifts.max())
        if shift - float(shifts.min()) <= tolerance:
            return period, shift
    return None


def windows(shape: Shape) -> tuple[int, int, range]:
    """Where the window of the last steady microbatches ends, its width, and periods to look for."""
    span, unit = shape.span, shape.unit if shape.row.grouped else 1
    reach = max(
        int(np.max(np.abs(np.diff(order.microbatch)), initial=unit)) for order in orders_of(shape)
    )
    end = shape.lane - span
    return end, reach, range(unit, end - span - reach + 1, unit)


def first_length(shape: Shape) -> int:
    """Microbatches after which a run is first looked at for its period."""
    directions = shape.microbatches // shape.lane
    return directions * (3 * shape.span + max(2 * shape.unit, shape.pp // 2))


def finish_times(shape: Shape, durations: _Floats, p2p: float) -> _Floats:
    """Finish times by [stage, chunk, forward | input gradient | weight gradient, microbatch].

    Durations of many runs of the same schedule, in a last axis, give a last axis of finish times.
    """
    pp, chunks, lane = shape.pp, shape.chunks, shape.lane
    size = pp * chunks * 3 * lane
    if durations.ndim > 3:
        ends = _walk_many(_sequence_of(shape), durations, p2p, size)
        finish = ends[:size].reshape(pp, chunks, 3, lane, -1)
    else:
        flat = [*durations.ravel().tolist(), 0.0]
        finish = np.array(_walk(_sequence_of(shape), flat, p2p, size)[:size])
        finish = finish.reshape(pp, chunks, 3, lane)
    whole = finish[:, :, 2] < 0
    finish[:, :, 2][whole] = finish[:, :, 1][whole]
    return finish


_Step = tuple[int, float, int, float, int, int, int, int, int]
"""One action of a stage, or a joined pair, which needs and fills two slots.

What it needs and with which delay, the same of the second one; the slots that it fills; its
durations; the slot of the stage's action before it. A slot is an index into the table of finish
times; beyond it come one that is always done and one that is never waited for. Delays are in
messages; durations are indices into a flat table. (A plain tuple: there are a million of them.)
"""


def _walk(steps: Sequence[_Step], seconds: Sequence[float], p2p: float, size: int) -> list[float]:
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


def _walk_many(steps: Sequence[_Step], durations: _Floats, p2p: float, size: int) -> _Floats:
    runs = durations.shape[-1]
    seconds = np.concatenate([durations.reshape(-1, runs), np.zeros((1, runs))])
    ends = np.full((size + 2, runs), -1.0)
    ends[size:] = 0.0
    now = np.empty(runs)
    nothing, origin = len(seconds) - 1, size
    for need, delay, other, other_delay, own, also, duration, more, before in steps:
        np.maximum(ends[before], ends[need] + delay * p2p if delay * p2p else ends[need], out=now)
        if other != origin:
            np.maximum(now, ends[other] + other_delay * p2p, out=now)
        now += seconds[duration]
        if more != nothing:
            now += seconds[more]
        ends[own] = now
        if also != origin + 1:
            ends[also] = now
    return ends


_KEPT_STEPS = 50_000  # orders of no more actions are kept for the next run of the same schedule


def _sequence_of(shape: Shape) -> tuple[_Step, ...]:
    if shape.pp * shape.chunks * shape.lane > _KEPT_STEPS:
        return _sequence(shape)
    return _kept_sequence(shape)


@lru_cache(maxsize=64)
def _kept_sequence(shape: Shape) -> tuple[_Step, ...]:
    return _sequence(shape)


def _sequence(shape: Shape) -> tuple[_Step, ...]:
    """The actions of all stages in an order in which what each needs has come before it."""
    size = shape.pp * shape.chunks * 3 * shape.lane
    programs = [_program(shape, stage, size) for stage in range(shape.pp)]
    done = [False] * size + [True, True]
    position = [0] * shape.pp
    waiting: dict[int, int] = {}
    ready = list(range(shape.pp))
    found: list[_Step] = []
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


def _program(shape: Shape, stage: int, size: int) -> list[_Step]:
    """The actions of a stage in order, their slots in a table of ``size``."""
    pp, chunks, lane = shape.pp, shape.chunks, shape.lane
    origin, nowhere, nothing = size, size + 1, pp * chunks * len(KINDS)
    order = order_of(shape, stage)
    slot = ((stage * chunks + order.chunk) * 3 + COLUMN[order.kind]) * lane + order.microbatch
    need = np.full(slot.shape, origin)
    delay = np.zeros(slot.shape)
    owner = {
        (_lane_of(shape, at, chunk), shape.place(at, chunk)): (at, chunk)
        for at in range(pp)
        for chunk in range(chunks)
    }
    for chunk in range(chunks):
        way = _lane_of(shape, stage, chunk)
        here = shape.place(stage, chunk)
        for filled, before in ((0, here - 1), (1, here + 1)):
            source = owner.get((way, before))
            if source is None:
                continue
            chosen = (order.chunk == chunk) & (COLUMN[order.kind] == filled)
            base = ((source[0] * chunks + source[1]) * 3 + filled) * lane
            need[chosen] = base + order.microbatch[chosen]
            delay[chosen] = source[0] != stage
    duration = (stage * chunks + order.chunk) * len(KINDS) + order.kind
    joined = order.joined
    columns = (
        need,
        delay,
        np.where(joined, np.roll(need, -1), origin),
        np.where(joined, np.roll(delay, -1), 0.0),
        slot,
        np.where(joined, np.roll(slot, -1), nowhere),
        duration,
        np.where(joined, np.roll(duration, -1), nothing),
    )
    kept = ~np.roll(joined, 1)
    earlier = [origin, *slot[kept][:-1].tolist()]
    return list(zip(*(column[kept].tolist() for column in columns), earlier, strict=True))


def _lane_of(shape: Shape, stage: int, chunk: int) -> int:
    """Which direction of traffic a chunk serves."""
    return chunk if shape.row.directions == 2 else 0
