"""A pipeline stage as the solver sees it: its fixed parts, and what it holds beside its layers.

:mod:`actcalc.solve.stage` has the formula of the peak; here are the figures that go into it.
"""

from __future__ import annotations

from collections.abc import Sequence

from actcalc.memory.around import Both
from actcalc.memory.parts import Part
from actcalc.memory.stage import StageMemory
from actcalc.solve.stage import Ends, Gpu, Held, Moment


def stage_gpu(work: StageMemory, stage: int) -> Gpu:
    """What a GPU of a stage holds beside its layers under one policy, and when.

    Device context and communicators included: its peak is ``total_bytes`` of ``actcalc memory``.
    """
    held, _, found = work.beside(stage)
    beside = sum(buffer.bytes for buffer in found)
    chunks = zip(work.parts(stage), work.around(stage, held), strict=True)
    return Gpu(
        moments=moments_of(work, stage),
        chunks=tuple(_ends(parts, around, held.gradients) for parts, around in chunks),
        base=held.total + beside + work.shared(work.places[stage]),
        floor=held.total
        + beside
        - held.gradients
        + max(one.gradients + sum(one.blocks) for one in work.optimizer_step(stage, held)),
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


def _ends(parts: Sequence[Part], around: Sequence[Both], gradients: int) -> Ends:
    layers = [index for index, part in enumerate(parts) if part.first >= 0]
    first, last = (layers[0], layers[-1] + 1) if layers else (len(parts), len(parts))
    each = [max(1, part.layers) for part in parts for _ in range(part.count)]
    pairs = zip(each, around, strict=True)
    both = [beside for times, beside in pairs for _ in range(times)]
    forward = tuple(gradients - beside.forward.total for beside in both)
    backward = tuple(gradients - beside.backward.total for beside in both)
    return Ends(
        before=tuple(held_of(part) for part in parts[:first]),
        after=tuple(held_of(part) for part in parts[last:]),
        absent=backward if any(backward) else (),
        absent_forward=forward if any(forward) else (),
    )
