"""Stages of a cut: which layers each holds, and which of them can be the fullest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.run.placement import ends, placement
from actcalc.search.family import Family
from actcalc.search.space import Cut
from actcalc.specs.layout import Layout
from actcalc.specs.schedules import SCHEDULES


class Chunk(NamedTuple):
    """What one chunk of a stage holds."""

    layers: tuple[tuple[int, int], ...]
    """Kinds of layers in order, each with how many in a row."""
    first: bool
    """It holds the embedding."""
    last: bool
    """It holds the head."""

    @property
    def each(self) -> Iterator[int]:
        """The kind of every layer in order."""
        return (kind for kind, count in self.layers for _ in range(count))

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of its layers, each once."""
        return tuple(sorted({kind for kind, _ in self.layers}))

    @property
    def depth(self) -> int:
        """Its layers."""
        return sum(count for _, count in self.layers)


Stage = tuple[Chunk, ...]


def stages_of(cut: Cut, kinds: Sequence[int]) -> list[Stage]:
    """The chunks of every stage of a cut; ``kinds`` has the kind of each layer of the model."""
    layout = Layout(**cut.fields())  # type: ignore[arg-type]
    places = placement(len(kinds), layout)
    return [
        tuple(
            Chunk(
                tuple(
                    (kind, sum(1 for _ in layers))
                    for kind, layers in groupby(kinds[chunk.start : chunk.stop])
                ),
                first,
                last,
            )
            for chunk, (first, last) in zip(chunks, sides, strict=True)
        )
        for chunks, sides in zip(places, ends(layout), strict=True)
    ]


def fullest_of(cut: Cut, stages: Sequence[Stage]) -> list[int]:
    """Stages of which one is the fullest whatever the layout is.

    Under a plain or interleaved schedule of one direction a later stage holds no more micro-batches
    of any chunk than an earlier one; of equal stages the first is taken then.
    """
    row = SCHEDULES[cut.schedule]
    if row.splits_backward or row.way != "straight":
        return list(range(len(stages)))
    return sorted({stage: index for index, stage in reversed(list(enumerate(stages)))}.values())


def needs(stage: Stage) -> tuple[object, ...]:
    """What a stage's states depend on: how many layers of each kind, and which ends."""
    layers = Counter[int]()
    for chunk in stage:
        for kind, count in chunk.layers:
            layers[kind] += count
    first, last = any(chunk.first for chunk in stage), any(chunk.last for chunk in stage)
    return (*sorted(layers.items()), first, last)


def graphs_of(family: Family, stage: Stage) -> list[Graph]:
    """Every graph of a stage in model order, as many times as it occurs."""
    found: list[Graph] = []
    if any(chunk.first for chunk in stage):
        found += [family.model.embedding]
    for chunk in stage:
        for kind, count in chunk.layers:
            found += [family.model.layers[family.layers[kind]]] * count
    if any(chunk.last for chunk in stage):
        if family.model.mtp:
            found += [family.model.mtp.graph] * family.model.mtp.count
        found += [family.model.head]
    return found
