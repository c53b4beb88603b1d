"""Stages of a cut: which layers each holds, and what they need whatever the micro-batch is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from actcalc.cost.optimizer import optimizer_time
from actcalc.layers.core.graph import Graph
from actcalc.memory.buffers import data_parallel, outside, workspaces
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION
from actcalc.memory.states import Parameters, recipe, states, step_bytes
from actcalc.run.placement import ends, placement
from actcalc.search.lanes import Measured
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


class Held(NamedTuple):
    """What a stage needs in one layout whatever its micro-batch and policy are."""

    base: int
    """Bytes of weights, gradients, optimizer states and buffers beside them, in the allocator."""
    step: int
    """Temporaries of the optimizer step."""
    outside: int
    """Bytes outside the allocator."""
    optimizer: float
    """Seconds of the optimizer step."""
    trained: tuple[int, int]
    """Trained parameters: of all replicas, and routed experts."""


def needs(stage: Stage) -> tuple[object, ...]:
    """What a stage's states depend on: how many layers of each kind, and which ends."""
    layers = Counter[int]()
    for chunk in stage:
        for kind, count in chunk.layers:
            layers[kind] += count
    first, last = any(chunk.first for chunk in stage), any(chunk.last for chunk in stage)
    return (*sorted(layers.items()), first, last)


def graphs_of(measured: Measured, stage: Stage) -> list[Graph]:
    """Every graph of a stage in model order, as many times as it occurs."""
    found: list[Graph] = []
    if any(chunk.first for chunk in stage):
        found += [measured.model.embedding]
    for chunk in stage:
        for kind, count in chunk.layers:
            found += [measured.model.layers[measured.layers[kind]]] * count
    if any(chunk.last for chunk in stage):
        if measured.model.mtp:
            found += [measured.model.mtp.graph] * measured.model.mtp.count
        found += [measured.model.head]
    return found


def parameters_of(measured: Measured, stage: Stage) -> Parameters:
    """Parameters of one rank of a stage."""
    return measured.plain.parameters_of(Counter(graphs_of(measured, stage)))


def held(measured: Measured, layout: Layout, stage: Stage, parameters: Parameters) -> Held:
    """What one stage of a layout needs beside what its layers store."""
    run, model = measured.staged.run, measured.of(layout)
    training = run.training
    graphs = graphs_of(measured, stage)
    rules = recipe(model, training)
    state = states(model, training, parameters)
    parts = [measured.parts(measured.layers[kind])[0] for chunk in stage for kind in chunk.kinds]
    names = [EMBEDDING] * any(c.first for c in stage)
    names += [PREDICTION, HEAD] * any(c.last for c in stage)
    parts += [part for part in map(measured.end, names) if part is not None]
    found = [
        *workspaces(model, training, run.device, parts),
        *data_parallel(model, training, rules, parts, state, gathers=False),
    ]
    largest = max((part.largest for part in parts), default=0)
    beside = outside(model, run.device) if run.device else []
    return Held(
        base=state.weights + state.optimizer + state.gradients + sum(b.bytes for b in found),
        step=step_bytes(training, rules, state, largest) + state.step_gradients,
        outside=sum(buffer.bytes for buffer in beside),
        optimizer=optimizer_time(model, graphs, training, measured.rates, parameters).total,
        trained=parameters.reduced,
    )
