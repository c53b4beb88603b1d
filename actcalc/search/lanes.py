"""What a layer, the embedding and the head need under each split, micro-batch and policy.

A *lane* is one split with one micro-batch. Everything here is worked out by the same objects that
answer for a single run, once for each lane and policy, and kept as arrays: rows of a search are
sums and maxima of these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.flops import model_flops
from actcalc.cost.rates import Rates
from actcalc.cost.roofline import LayerTime, Roofline
from actcalc.cost.step import handover
from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.buffers import of_inputs, passing
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION, Part
from actcalc.memory.stage import StageMemory
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.search.space import Split
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ENDS = (EMBEDDING, PREDICTION, HEAD)
SECONDS = (
    "forward", "backward", "weight_gradient", "host_forward", "host_backward", "stalled",
)  # fmt: skip
"""The fields of a layer's time that a step depends on."""


class Lane(NamedTuple):
    """What makes lanes different."""

    split: Split
    micro_batch: int
    rounds: int
    """Micro-batches of a step as far as ops depend on them: 1, or 2 for more."""
    alone: bool
    """The whole model is one stage (where that changes a layer)."""


class Measured:
    """One lane, measured: the run of a single stage, and its stages' memory by policy."""

    def __init__(self, run: Run, lane: Lane, rates: Rates, policies: Sequence[str]) -> None:
        layout = lane.split.layout()
        if not lane.alone:
            layout = replace(layout, pp=2, layers_per_stage=(run.model.depth, 0))
        workload = run.workload.model_copy(
            update={
                "micro_batch": lane.micro_batch,
                "global_batch": lane.micro_batch * lane.rounds,
            }
        )
        self.lane = lane
        self.staged = StagedRun(replace(run, layout=layout, workload=workload))
        self.model: ModelGraph = self.staged.graph
        self.rates = rates
        self.times = Roofline(self.staged, rates)
        self.plain = StageMemory(self.staged, NONE)
        self.memories = [
            self.plain if name == "none" else StageMemory(self.staged, policy, self.plain)
            for name, policy in ((name, self.staged.policy(name)) for name in policies)
        ]

        self._parts: dict[int, list[Part]] = {}
        self.weights: Split = lane.split._replace(sp=False)
        """What its weights depend on: sequence parallelism splits none."""

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """One layer of each kind."""
        return tuple(self.model.layers.index(kind.graph) for kind in self.staged.kinds)

    def parts(self, layer: int) -> list[Part]:
        """One layer under each policy (cached)."""
        if layer not in self._parts:
            self._parts[layer] = [memory.timeline.alone(layer) for memory in self.memories]
        return self._parts[layer]

    def end(self, name: str) -> Part | None:
        """Embedding, prediction layer or head; None for a prediction layer that there is not."""
        if name == PREDICTION and self.model.mtp is None:
            return None
        return self.plain.timeline.end(name)

    def end_graph(self, name: str) -> Graph | None:
        """The graph of an end."""
        if name == PREDICTION:
            return self.model.mtp.graph if self.model.mtp else None
        return self.model.embedding if name == EMBEDDING else self.model.head

    def seconds(self, layer: int) -> list[list[float]]:
        """Times of one layer under each policy."""
        graph = self.model.layers[layer]
        every = [self.times.layer(graph, memory.policy) for memory in self.memories]
        return [_seconds(time) for time in every]

    def end_seconds(self, name: str) -> list[float]:
        """Times of an end."""
        graph = self.end_graph(name)
        return [0.0] * len(SECONDS) if graph is None else _seconds(self.times.ends(graph))

    def shared(self, layers: Sequence[int], *, mixed: bool) -> list[int]:
        """Bytes of what these kinds of layers hold of what all are given, under each policy.

        ``mixed``: beside layers that re-run nothing.
        """
        graphs = [self.model.layers[layer] for layer in layers]
        found = []
        for memory in self.memories:
            names: dict[str, int] = {}
            for graph in graphs:
                names |= memory.shared_by(graph, memory.policy)
                if mixed:
                    names |= self.plain.shared_by(graph, NONE)
            found.append(sum(names.values()))
        return found

    @cached_property
    def waiting(self) -> int:
        """Bytes of a tied table's gradient that waits where one stage has both ends."""
        ends = [part for part in map(self.end, ENDS) if part is not None]
        return self.plain.waiting(ends)

    def of(self, layout: Layout) -> ModelGraph:
        """The lane's graphs in another layout of the same split."""
        return replace(self.model, context=replace(self.model.context, layout=layout))

    def passing(self, *, head: bool, interleaved: bool) -> int:
        """Bytes of buffers of what passes through a stage, and of its inputs."""
        model = self.model
        if interleaved:
            model = self.of(replace(model.context.layout, pp=2, vpp=2, layers_per_stage=()))
        found = [*passing(model, self.staged.run.training, head=head), *of_inputs(model)]
        return sum(buffer.bytes for buffer in found)

    def handover(self, *, far: bool) -> float:
        """Seconds of handing a micro-batch to the next stage, in the node or outside of it."""
        layout = self.model.context.layout
        where = layout.tp * layout.cp >= self.rates.node
        if far == where:
            dp = 1
        elif far:
            dp = self.rates.node
        else:
            return 0.0  # with so many ranks to a replica the next stage is never in the node
        piped = replace(layout, pp=2, dp=dp, layers_per_stage=())
        return handover(self.of(piped), self.rates)

    @property
    def flops(self) -> int:
        """Model FLOPs of one micro-batch over all ranks."""
        return model_flops(self.model)


def _seconds(time: LayerTime) -> list[float]:
    return [getattr(time, name) for name in SECONDS]


class Lanes:
    """The tables of all lanes of a search; a lane is measured when it is first asked for."""

    def __init__(self, run: Run, rates: Rates, policies: Sequence[str]) -> None:
        self.run = run
        self.rates = rates
        self.policies = tuple(policies)
        self.measured: list[Measured] = []
        self._places: dict[Lane, int | None] = {}
        self._tables: dict[Any, Any] = {}
        self.held: dict[Any, Any] = {}
        """What stages need whatever their micro-batch is, by what it depends on."""
        self.parameters: dict[Any, Any] = {}
        """Parameters of stages, likewise."""
        self._layouts: dict[Any, Layout] = {}

    def layout(self, split: Split, dp: int, zero: int, piped: bool) -> Layout:
        """A layout for what depends on no more of a pipeline than that there is one."""
        key = split, dp, zero, piped
        if key not in self._layouts:
            self._layouts[key] = split.layout(dp=dp, zero=zero, pp=2 if piped else 1)
        return self._layouts[key]

    def place(self, lane: Lane) -> int | None:
        """The row of a lane in every table; None where the framework cannot run it."""
        if lane not in self._places:
            try:
                found = Measured(self.run, lane, self.rates, self.policies)
                for layer in found.layers:
                    found.parts(layer)
                    found.seconds(layer)
            except SpecError:
                self._places[lane] = None
            else:
                self._places[lane] = len(self.measured)
                self.measured.append(found)
        return self._places[lane]

    def _table(self, key: Any, make: Any) -> Any:
        """A table by lane, made once all lanes are known."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    @property
    def splits(self) -> Ints:
        """For each lane the first one with the same split."""
        first: dict[Split, int] = {}

        def make() -> Ints:
            return np.array(
                [first.setdefault(one.lane.split, at) for at, one in enumerate(self.measured)]
            )

        found: Ints = self._table("splits", make)
        return found

    def part(self, kind: int) -> Ints:
        """Bytes by [lane, policy, (stored, forward, backward, casts)]."""

        def make() -> Ints:
            return np.array([[_bytes(p) for p in m.parts(m.layers[kind])] for m in self.measured])

        found: Ints = self._table(("part", kind), make)
        return found

    def end(self, name: str) -> Ints:
        """The same of an end, which no policy changes: bytes by [lane, ...]."""

        def make() -> Ints:
            return np.array([_bytes(m.end(name)) for m in self.measured])

        found: Ints = self._table(("end", name), make)
        return found

    def seconds(self, kind: int) -> Floats:
        """Seconds of a layer by [lane, policy, field of ``SECONDS``]."""

        def make() -> Floats:
            return np.array([m.seconds(m.layers[kind]) for m in self.measured])

        found: Floats = self._table(("seconds", kind), make)
        return found

    def end_seconds(self, name: str) -> Floats:
        """The same of an end: seconds by [lane, field]."""

        def make() -> Floats:
            return np.array([m.end_seconds(name) for m in self.measured])

        found: Floats = self._table(("end seconds", name), make)
        return found

    def shared(self, kinds: tuple[int, ...], *, mixed: bool) -> Ints:
        """Bytes by [lane, policy] of what a stage with these kinds holds once for all layers."""

        def make() -> Ints:
            return np.array(
                [m.shared([m.layers[kind] for kind in kinds], mixed=mixed) for m in self.measured]
            )

        found: Ints = self._table(("shared", kinds, mixed), make)
        return found

    def waiting(self) -> Ints:
        """Bytes by lane of a tied table's gradient that waits for the look-up's."""
        found: Ints = self._table(
            "waiting", lambda: np.array([m.waiting for m in self.measured], np.int64)
        )
        return found

    def passing(self, *, head: bool, interleaved: bool) -> Ints:
        """Bytes by lane of buffers of what passes through a stage."""

        def make() -> Ints:
            every = [m.passing(head=head, interleaved=interleaved) for m in self.measured]
            return np.array(every, np.int64)

        found: Ints = self._table(("passing", head, interleaved), make)
        return found

    def handover(self, *, far: bool) -> Floats:
        """Seconds by lane of handing a micro-batch on."""
        found: Floats = self._table(
            ("handover", far), lambda: np.array([m.handover(far=far) for m in self.measured])
        )
        return found


def _bytes(part: Part | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if part is None else (part.stored, part.forward, part.backward, part.casts)
