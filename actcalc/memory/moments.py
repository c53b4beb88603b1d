"""What a stage holds at each moment of a step, for a planner that changes what layers store.

:mod:`actcalc.memory.stage` looks for the highest moment under one policy. A plan over policies
must know them all: with which layers stored, and how high beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actcalc.memory.parts import Part
from actcalc.memory.stage import StageMemory


@dataclass(frozen=True)
class StageMoments:
    """The highest totals of one GPU of a stage, device context and communicators included.

    ``idle``: with no activations, the optimizer step included. ``forward``: in any forward, or in
    the head's backward, with all layers of the stage stored; ``running``: in forward of layers.
    ``backward``: in any backward.
    ``layers``: in backward of each layer in order, where the stage is one chunk (else empty).
    ``tail``: in backward of the embedding (0 where there is none).
    """

    idle: int
    forward: int
    running: int
    backward: int
    layers: tuple[int, ...]
    tail: int


def stage_moments(work: StageMemory, stage: int) -> StageMoments:
    """The moments of one stage under the evaluation's policy, in bytes."""
    held, _, found = work.beside(stage)
    chunks = work.places[stage]
    gradient, persistent = work.gradient(stage, held)
    always = held.total + sum(buffer.bytes for buffer in found) + work.shared(chunks)
    parts = work.parts(stage)
    made = work.gradients_made(stage)
    wholes = [sum(part.stored * part.count for part in each) for each in parts]
    absent_forward = 0 if persistent else held.gradients
    forward = running = backward = tail = 0
    layers = [0] * (len(chunks[0]) if len(chunks) == 1 else 0)
    for kind, chunk, counts in work.staged.work(stage):
        stored = always + sum(n * whole for n, whole in zip(counts, wholes, strict=True))
        if kind == "W":
            forward = max(forward, stored)
            continue
        for part, index, prefix, absent in _occurrences(parts[chunk], made[chunk], gradient):
            rest = stored + prefix - wholes[chunk]
            if kind == "F":
                now = rest + part.forward - absent_forward
                forward = max(forward, now)
                running = max(running, now if part.first >= 0 else 0)
                continue
            total = rest + part.backward - (0 if persistent else absent)
            backward = max(backward, total)
            if part.name == "embedding":
                tail = max(tail, total)
            elif part.first < 0:
                forward = max(forward, total)
            elif layers:
                for layer in range(part.first + index, part.first + index + part.layers):
                    at = layer - chunks[0].start
                    layers[at] = max(layers[at], total)
    idle = always + work.optimizer_step(held)
    return StageMoments(idle, forward, running, backward, tuple(layers), tail)


def _occurrences(
    parts: Sequence[Part], made: Sequence[tuple[int, int]], gradient: float
) -> Iterator[tuple[Part, int, int, int]]:
    # Each part in order with what is stored before it and the gradients its backward still lacks.
    before, lacking = 0, 0
    for part, (own, shared) in zip(parts, made, strict=True):
        for index in range(part.count):
            lacking += own + (shared if index == part.count - 1 else 0)
            yield part, index, before + part.stored * index, round(lacking * gradient)
        before += part.stored * part.count
