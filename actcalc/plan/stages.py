"""A pipeline stage as it is planned: its layers, what else it holds, and one choice laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.solve.plans import PlanGroup
from actcalc.solve.stage import Gpu, Held


@dataclass(frozen=True, eq=False, slots=True)
class Layers:
    """A run of equal layers of a stage, the chunk it is of, and micro-batches that chunk holds."""

    graph: Graph
    name: str
    count: int
    chunk: int
    inflight: int


@dataclass(frozen=True, eq=False)
class Stage:
    """One pipeline stage: its runs of equal layers in forward order, and what else it holds."""

    index: int
    runs: tuple[Layers, ...]
    in_flight: tuple[int, ...]
    """Micro-batches each of its chunks holds."""
    gpu: Gpu

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return sum(run.count for run in self.runs)

    @property
    def shape(self) -> tuple[tuple[str, int, int], ...]:
        """Kinds, counts and chunks of its layers, in order."""
        return tuple((run.name, run.count, run.chunk) for run in self.runs)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for stages with equal plans."""
        return (self.shape, self.in_flight, self.gpu)

    @property
    def graphs(self) -> tuple[tuple[Graph, ...], ...]:
        """The graph of every layer, chunk by chunk."""
        return tuple(
            tuple(r.graph for r in self.runs if r.chunk == chunk for _ in range(r.count))
            for chunk in range(len(self.in_flight))
        )

    @cached_property
    def most_held(self) -> tuple[int, ...]:
        """The most micro-batches of each chunk at any moment."""
        counts = zip(*(moment.held for moment in self.gpu.moments), strict=True)
        return tuple(max(each) for each in counts)


class Unit(NamedTuple):
    """A layer, or a segment that re-runs as one, in a plan, and as memory sees it."""

    group: PlanGroup
    held: Held


class Laid(NamedTuple):
    """All layers of a stage under one choice, chunk by chunk, with its cost and peak."""

    units: tuple[tuple[Unit, ...], ...]
    gpu: Gpu
    """What the stage holds beside; without segments of layers, :attr:`Stage.gpu`."""
    cost: int
    peak: int


def units_of(groups: Sequence[PlanGroup], stage: Stage) -> list[tuple[PlanGroup, int]]:
    """A plan's single layers and segments, each with its micro-batches in flight on ``stage``."""
    flights = [run.inflight for run in stage.runs for _ in range(run.count)]
    units: list[tuple[PlanGroup, int]] = []
    at = 0
    for group in groups:
        unit = replace(group, count=group.segment, segments=1)
        for _ in range(group.segments):
            units.append((unit, flights[at]))
            at += group.segment
    return units
