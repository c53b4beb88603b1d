"""What a stage holds while it works: forwards whose gradients are still to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.run.schedule.orders import (
    COLUMN,
    KINDS,
    B,
    F,
    I,
    Kind,
    Order,
    W,
    order_of,
    orders_of,
)
from actcalc.run.schedule.shape import Shape, shape_of


class Held(NamedTuple):
    """What one stage holds at one moment, counted in microbatches per chunk."""

    activations: tuple[int, ...]
    """Per chunk: forwards run (or running) whose input gradient has not been computed."""
    stashes: tuple[int, ...]
    """Per chunk: input gradients computed whose weight gradient has not: the inputs and output
    gradients of linear layers are kept until then (zero-bubble schedules)."""

    @property
    def total(self) -> int:
        """Chunk activations held, an input kept only for its weight gradient counted whole."""
        return sum(self.activations) + sum(self.stashes)


class Moment(NamedTuple):
    """One kind of work a stage does, with what it holds meanwhile."""

    kind: Kind
    chunk: int
    held: Held


def in_flight(
    schedule: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None
) -> tuple[int, ...]:
    """Per stage: the most chunk activations held at once, by running the schedule.

    A chunk counts from the start of its forward to the end of its backward; where the backward
    is split, to the end of its weight gradient. Under 1F1B this is min(p - r, m); interleaved,
    min(2(p - r - 1) + (v - 1)g + 1, m·v) chunks. Raises ``SpecError`` as :func:`actions` does.
    """
    held = in_flight_by_chunk(schedule, pp, microbatches, vpp, group=group)
    return tuple(stage.total for stage in held)


def in_flight_by_chunk(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    group: int | None = None,
    activation_bytes: Sequence[Sequence[int]] | None = None,
    stash_bytes: Sequence[Sequence[int]] | None = None,
) -> tuple[Held, ...]:
    """Per stage: what is held at its fullest moment (the first of equals).

    Fullest is by bytes where ``activation_bytes[stage][chunk]`` and ``stash_bytes[stage][chunk]``
    give the size of one chunk's activations and of what is kept from input gradient to weight
    gradient; by default each counts one. Raises ``SpecError`` as :func:`actions` does.
    """
    shape = shape_of(schedule, pp, microbatches, vpp, group)
    ones = [[1] * shape.chunks] * pp
    activation = shape.table(activation_bytes if activation_bytes is not None else ones, "bytes")
    stash = shape.table(stash_bytes if stash_bytes is not None else ones, "bytes")
    result = []
    for stage, order in enumerate(orders_of(_memory_shape(shape))):
        most, at, total = -1.0, 0, 0.0
        for index, (kind, chunk, *_) in enumerate(order.rows()):
            size, kept = activation[stage][chunk], stash[stage][chunk]
            total += size if kind == F else 0
            if total > most:
                most, at = total, index
            total += {F: 0, B: -size, I: kept - size, W: -kept}[kind]
        result.append(_held(order, shape.chunks, at))
    return tuple(result)


@lru_cache(maxsize=512)
def moments(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    stage: int,
    group: int | None = None,
) -> tuple[Moment, ...]:
    """The distinct (work, held) pairs that occur on ``stage`` in one step, in order of occurrence.

    What is held includes the microbatch being worked on. A peak that depends on the work (the
    loss at the end of a forward, a re-run layer in a backward) is a maximum over these. Raises
    ``SpecError`` as :func:`actions` does.
    """
    found = sequence(schedule, pp, microbatches, vpp, stage=stage, group=group)
    return tuple(dict.fromkeys(found.moments))


class Worked(NamedTuple):
    """The work of a stage in order."""

    moments: tuple[Moment, ...]
    """Each forward and backward, with what is held meanwhile."""
    microbatches: int
    """Of how many micro-batches: fewer than a step has where its middle only repeats itself."""


def sequence(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    stage: int,
    group: int | None = None,
) -> Worked:
    """The work of ``stage`` in one step, its repeated middle shortened; raises as ``moments``."""
    shape = shape_of(schedule, pp, microbatches, vpp, group)
    if not 0 <= stage < pp:
        raise SpecError(f"no stage {stage} in a pipeline of {pp}", "stages count from 0")
    shorter = _memory_shape(shape)
    order = order_of(shorter, stage)
    activations, stashes = [0] * shape.chunks, [0] * shape.chunks
    found = []
    for kind, chunk, *_ in order.rows():
        activations[chunk] += kind == F
        found.append(Moment(KINDS[kind], chunk, Held(tuple(activations), tuple(stashes))))
        activations[chunk] -= COLUMN[kind] == 1
        stashes[chunk] += (kind == I) - (kind == W)
    return Worked(tuple(found), shorter.microbatches)


def steady_length(
    schedule: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None
) -> int:
    """Microbatches of the shortest step that holds at any time what one of ``microbatches`` does.

    Raises ``SpecError`` as :func:`actions` does.
    """
    return _memory_shape(shape_of(schedule, pp, microbatches, vpp, group)).microbatches


@lru_cache(maxsize=4096)
def fullest(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    stage: int,
    alike: tuple[int, ...],
    group: int | None = None,
) -> tuple[Moment, ...]:
    """The moments of :func:`moments` that can be the highest, where some chunks are of one size.

    ``alike`` names for each chunk of the stage its kind (0, 1, ...); chunks of one kind store the
    same. A moment's ``chunk`` is then the kind at work and ``held.activations`` counts all that is
    held of each kind, stashes too. Of equal work, what holds less of every kind is left out.
    """
    shape = shape_of(schedule, pp, microbatches, vpp, group)
    order = order_of(_memory_shape(shape), stage)
    held = [0] * (max(alike) + 1)
    every = set()
    for kind, chunk, *_ in order.rows():
        # a forward's own micro-batch is there while it runs; so is what a backward is about to end
        own = alike[chunk]
        held[own] += kind == F
        every.add((kind, own, tuple(held)))
        held[own] -= kind in (B, W)
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for kind, own, counts in sorted(every):
        found.setdefault((kind, own), []).append(counts)
    return tuple(
        Moment(KINDS[kind], own, Held(counts, ()))
        for (kind, own), every_count in found.items()
        for counts in _undominated(every_count)
    )


def _undominated(rows: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The rows that no other is at least as large as in every column."""
    kept: list[tuple[int, ...]] = []
    if len(rows[0]) <= 2:
        most = -1
        for row in sorted(rows, reverse=True):
            if row[-1] > most:
                most = row[-1]
                yield row
        return
    for row in sorted(rows, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, row, strict=True)) for other in kept):
            kept.append(row)
            yield row


def _memory_shape(shape: Shape) -> Shape:
    """A run long enough for warm-up, every steady moment and cool-down, and no longer."""
    directions = shape.microbatches // shape.lane
    return shape.shortened(directions * (2 * shape.span + 2 * shape.unit))


def _held(order: Order, chunks: int, index: int) -> Held:
    """What is held while action ``index`` runs."""

    activations, stashes = [0] * chunks, [0] * chunks
    for at, (kind, chunk, *_) in enumerate(order.rows()):
        if at >= index:
            activations[chunk] += kind == F
            break
        activations[chunk] += (kind == F) - (COLUMN[kind] == 1)
        stashes[chunk] += (kind == I) - (kind == W)
    return Held(tuple(activations), tuple(stashes))
