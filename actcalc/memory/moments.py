"""A pipeline stage as the solver sees it: its fixed parts, and what it holds beside its layers.

:mod:`actcalc.solve.stage` has the formula of the peak; here are the figures that go into it.
"""

from __future__ import annotations

from collections.abc import Sequence

from actcalc.memory.parts import Part
from actcalc.memory.stage import StageMemory
from actcalc.solve.stage import Ends, Gpu, Held, Moment


def stage_gpu(work: StageMemory, stage: int) -> Gpu:
    """What a GPU of a stage holds beside its layers under one policy, and when.

    Device context and communicators included: its peak is ``total_bytes`` of ``actcalc memory``.
    """
    held, _, found = work.beside(stage)
    gradient, persistent = work.gradient(stage, held)
    beside = sum(buffer.bytes for buffer in found)
    shared = work.shared(work.places[stage])
    return Gpu(
        moments=moments_of(work, stage),
        chunks=tuple(
            _ends(parts, () if persistent else made, gradient)
            for parts, made in zip(work.parts(stage), work.gradients_made(stage), strict=True)
        ),
        base=held.total + beside + shared,
        floor=held.total + beside + work.optimizer_step(held),
        absent_forward=0 if persistent else held.gradients,
    )


def moments_of(work: StageMemory, stage: int) -> tuple[Moment, ...]:
    """The different moments of a stage's schedule."""
    return tuple(dict.fromkeys(Moment(*each) for each in work.staged.work(stage)))


def layers_of(work: StageMemory, stage: int) -> list[list[Held]]:
    """The layers of every chunk of a stage, or the segments that re-run together, in order."""
    return [
        [held_of(part) for part in parts if part.first >= 0 for _ in range(part.count)]
        for parts in work.parts(stage)
    ]


def held_of(part: Part) -> Held:
    """One occurrence of a part."""
    return Held(part.stored, part.forward, part.backward, max(1, part.layers))


def _ends(parts: Sequence[Part], made: Sequence[tuple[int, int]], gradient: float) -> Ends:
    layers = [index for index, part in enumerate(parts) if part.first >= 0]
    first, last = (layers[0], layers[-1] + 1) if layers else (len(parts), len(parts))
    absent: list[int] = []
    lacking = 0
    for part, (own, shared) in zip(parts, made, strict=False):
        for index in range(part.count):
            lacking += own + (shared if index == part.count - 1 else 0)
            absent += [round(lacking * gradient)] * max(1, part.layers)
    return Ends(
        before=tuple(held_of(part) for part in parts[:first]),
        after=tuple(held_of(part) for part in parts[last:]),
        absent=tuple(absent),
    )
