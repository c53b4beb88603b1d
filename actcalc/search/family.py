"""Lanes that are worked out together: one split with one micro-batch each, of the same graphs.

The run of the first of them is laid out once; its sizes become arrays with an entry for each lane.
What the rules of memory and time then answer, they answer for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.flops import model_flops
from actcalc.cost.rates import Rates
from actcalc.cost.replicas import tied_seconds
from actcalc.cost.roofline import LayerTime, Roofline
from actcalc.cost.step import handover
from actcalc.layers.core.algebra import most
from actcalc.layers.core.context import sizes_of
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.buffers import of_inputs, passing
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION, Alive
from actcalc.memory.stage import StageMemory
from actcalc.memory.states import NO_GROUP, Group, Parameters, Trained, trained_of
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.search.space import Split
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

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
    zero: int = 0
    """The ZeRO stage, where its weights are gathered in units."""


@dataclass(frozen=True)
class Degrees:
    """A layout whose degrees are arrays, as rules of memory and time read one."""

    tp: Any
    cp: Any
    ep: Any
    expert_tp: Any
    dp: Any = 1
    pp: int = 1
    vpp: int = 1
    sp: bool = False
    zero: int = 0


def at_layout(model: ModelGraph, layout: Layout | Degrees) -> ModelGraph:
    """The graphs of a run in another layout of the same split."""
    context = replace(model.context, layout=cast(Layout, layout))
    return replace(model, context=context)


def laid(run: Run, lane: Lane) -> StagedRun:
    """One lane as a run of a single stage; raises ``SpecError`` where there is no such run."""
    layout = lane.split.layout()
    if not lane.alone:
        layout = replace(layout, pp=2, layers_per_stage=(run.model.depth, 0))
    size = lane.micro_batch
    replicas = 2 if lane.zero else 1
    if lane.zero:
        layout = layout.model_copy(update={"dp": replicas, "zero": lane.zero})
    batch = size * lane.rounds * replicas
    workload = run.workload.model_copy(update={"micro_batch": size, "global_batch": batch})
    return StagedRun(replace(run, layout=layout, workload=workload))


class Weights(NamedTuple):
    """What one graph has of weights, by lane."""

    groups: Ints
    """Parameters by [lane, group of ``Parameters``, field of ``Group``]."""
    own: Ints
    """Trained ones of no other graph."""
    shared: dict[str, Ints]
    """Trained ones of tables that other graphs may have, too, by the name of the scope."""
    largest: Ints
    """Elements of the largest trained weight."""

    @classmethod
    def joined(cls, every: Sequence[Weights]) -> Weights:
        """Those of several families, one after another."""
        scopes = every[0].shared
        return cls(
            np.concatenate([one.groups for one in every]),
            np.concatenate([one.own for one in every]),
            {scope: np.concatenate([one.shared[scope] for one in every]) for scope in scopes},
            np.concatenate([one.largest for one in every]),
        )

    def parameters(self, lanes: Ints) -> Parameters:
        """The parameters of some lanes, as columns."""
        groups = np.moveaxis(self.groups[lanes], 0, -1)[..., None]
        return Parameters(*(Group(*group) for group in groups))

    def trained(self, lanes: Ints) -> Trained:
        """Those of them that get a gradient, as columns."""
        shared = ((scope, counts[lanes, None]) for scope, counts in self.shared.items())
        return Trained(cast(int, self.own[lanes, None]), cast(Any, tuple(shared)))


class Family:
    """Lanes with the same graphs, and their stage's memory by policy."""

    def __init__(
        self, staged: StagedRun, lanes: Sequence[Lane], rates: Rates, policies: Sequence[str]
    ) -> None:
        """``staged`` is the first lane's, as :func:`laid` lays it out."""
        self.lanes = tuple(lanes)
        self.measured: list[tuple[Ints, Floats]] = []
        """Bytes and seconds of each kind of layer, once they are worked out."""
        self.rates = rates
        self.scalar = staged.graph
        if len(lanes) > 1:
            staged = staged.at(_arrays(staged.graph, lanes))
        self.staged = staged
        self.model: ModelGraph = staged.graph
        self.times = Roofline(staged, rates)
        self.plain = StageMemory(staged, NONE)
        self.memories = [
            self.plain if name == "none" else StageMemory(staged, policy, self.plain)
            for name, policy in ((name, staged.policy(name)) for name in policies)
        ]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """One layer of each kind."""
        return tuple(self.model.layers.index(kind.graph) for kind in self.staged.kinds)

    @cached_property
    def splits(self) -> Sequence[Split]:
        """The split of each lane."""
        return [lane.split for lane in self.lanes]

    # --- memory -----------------------------------------------------------------------------------

    def parts(self, kind: int) -> Ints:
        """Bytes of one layer by [lane, policy, (stored, forward, backward, casts)]."""
        layer = self.layers[kind]
        known: dict[Any, Ints] = {}
        found = []
        for memory in self.memories:
            outcome = memory.timeline.stages.outcome(self.model.layers[layer])
            again = tuple(op.name for op in outcome.rerun)
            key = (outcome.stored, outcome.restored, again, outcome.copies, memory.policy.whole,
                   outcome.detached, outcome.at_once)  # fmt: skip
            if key not in known:
                known[key] = self._bytes(memory.timeline.alive_alone(layer))
            found.append(known[key])
        return np.stack(found, axis=1)

    def end(self, name: str) -> Ints:
        """The same of an end, which no policy changes: bytes by [lane, ...]."""
        if name == PREDICTION and self.model.mtp is None:
            return np.zeros((len(self.lanes), 4), np.int64)
        return self._bytes(self.plain.timeline.end_alive(name))

    def rest(self, name: str) -> Ints:
        """The most alive in an end's backward without the loss, by lane."""
        if self.end_graph(name) is None:
            return np.zeros(len(self.lanes), np.int64)
        found, _ = self.plain.timeline.end_sizes(name)
        return self.column(most(found.stored, found.rest)).astype(np.int64)

    def weights(self, of: int | str) -> Weights:
        """What a kind of layer, or an end, has of weights."""
        graph = self.model.layers[self.layers[of]] if isinstance(of, int) else self.end_graph(of)
        if graph is None:
            nothing = np.zeros((len(self.lanes), len(Parameters._fields), len(NO_GROUP)), np.int64)
            return Weights(nothing, nothing[:, 0, 0], {}, nothing[:, 0, 0])
        timeline = self.plain.timeline
        groups = [np.stack([self.column(value) for value in group], axis=-1)
                  for group in timeline.parameters(graph)]  # fmt: skip
        trained = timeline.trained(graph)
        return Weights(
            np.stack(groups, axis=1).astype(np.int64),
            self.column(trained.own),
            {scope: self.column(count) for scope, count in trained.shared},
            self.column(timeline.largest(graph)),
        )

    def _bytes(self, alive: Alive) -> Ints:
        return np.stack([self.column(value) for value in alive], axis=-1).astype(np.int64)

    def column(self, value: Any) -> NDArray[Any]:
        """A figure of every lane as an array, also where all have the same."""
        return np.broadcast_to(np.asarray(value), (len(self.lanes),))

    def shared(self, kinds: Sequence[int], *, mixed: bool) -> Ints:
        """Bytes by [lane, policy] of what these kinds of layers hold of what all are given.

        ``mixed``: beside layers that re-run nothing.
        """
        graphs = [self.model.layers[self.layers[kind]] for kind in kinds]
        found = []
        for memory in self.memories:
            names: dict[str, Any] = {}
            for graph in graphs:
                names |= memory.shared_by(graph, memory.policy)
                if mixed:
                    names |= self.plain.shared_by(graph, NONE)
            found.append(self.column(sum(names.values())))
        return np.stack(found, axis=1).astype(np.int64)

    def waiting(self) -> Ints:
        """Bytes of a tied table's gradient that waits where one stage has both ends."""
        rule = self.plain.timeline.options.gradients
        shared = []
        for name in (EMBEDDING, HEAD):
            graph = self.end_graph(name)
            assert graph is not None
            shared.append(dict(trained_of(self.model, graph, self.staged.run.training).shared))
        both = [count for scope, count in shared[0].items() if scope in shared[1]]
        return self.column(sum(both) * rule.summed if rule.tied else 0)

    def passing(self, *, head: bool, interleaved: bool) -> Ints:
        """Bytes of buffers of what passes through a stage, and of its inputs."""
        model = self.model
        if interleaved:
            model = at_layout(model, replace(model.context.layout, pp=2, vpp=2,
                                             layers_per_stage=()))  # fmt: skip
        found = [*passing(model, self.staged.run.training, head=head), *of_inputs(model)]
        return self.column(sum(buffer.bytes for buffer in found))

    # --- time -------------------------------------------------------------------------------------

    def seconds(self, kind: int) -> Floats:
        """Seconds of one layer by [lane, policy, field of ``SECONDS``]."""
        graph = self.model.layers[self.layers[kind]]
        every = [self.times.layer(graph, memory.policy) for memory in self.memories]
        return np.stack([self._seconds(time) for time in every], axis=1)

    def end_graph(self, name: str) -> Graph | None:
        """The graph of an end."""
        if name == PREDICTION:
            return self.model.mtp.graph if self.model.mtp else None
        return self.model.embedding if name == EMBEDDING else self.model.head

    def end_seconds(self, name: str) -> Floats:
        """Seconds of an end by [lane, field]."""
        graph = self.end_graph(name)
        if graph is None:
            return np.zeros((len(self.lanes), len(SECONDS)))
        return self._seconds(self.times.ends(graph))

    def _seconds(self, time: LayerTime) -> Floats:
        columns = [self.column(getattr(time, name)) for name in SECONDS]
        return np.stack(columns, axis=-1).astype(np.float64)

    def handover(self, *, far: bool) -> Floats:
        """Seconds of handing a micro-batch to the next stage, in the node or outside of it."""
        sizes, sp = self.model.sizes, self.model.context.layout.sp
        degrees = Degrees(sizes["t"], sizes["c"], sizes["e"], sizes["x"], pp=2, sp=sp)
        stride = self.rates.node if far else 1
        return self.column(handover(at_layout(self.model, degrees), self.rates, stride))

    def tied(self, *, far: bool) -> Floats:
        """Seconds of summing a tied table's gradients of two stages in a node, or out of it."""
        stride = self.rates.node if far else 1
        return self.column(tied_seconds(self.model, self.staged.run.training, self.rates, stride))

    def flops(self) -> Floats:
        """Model FLOPs of one sequence, over all ranks, by lane."""
        vocabulary = self.column(self.model.sizes["v"]).tolist()
        each = {
            size: model_flops(replace(self.scalar, sizes={**self.scalar.sizes, "v": size}))
            / self.lanes[0].micro_batch
            for size in dict.fromkeys(vocabulary)
        }
        return np.array([each[size] for size in vocabulary])

    # --- what splits hold -------------------------------------------------------------------------

    def parameters(self, graphs: Mapping[Graph, int]) -> Parameters:
        """Parameters of one rank that holds so many of each graph."""
        return self.plain.parameters_of(Counter(graphs))

    def largest(self, graphs: Iterable[Graph]) -> Sequence[Any]:
        """Elements of the largest trained weight of each graph."""
        return [self.plain.timeline.largest(graph) for graph in graphs]

    def shapes(self, graphs: Iterable[Graph]) -> list[tuple[Any, ...]]:
        """Shapes of the trained weights of matrix products in some graphs."""
        return [shape for graph in graphs for shape in self.plain.timeline.weight_shapes(graph)]


def _arrays(model: ModelGraph, lanes: Sequence[Lane]) -> dict[str, Any]:
    """The size of every symbol, an array where it is not the same in all lanes."""
    context = model.context
    each: dict[Split, Mapping[str, int]] = {}
    for lane in lanes:
        if lane.split not in each:
            each[lane.split] = sizes_of(context.model, lane.split.layout(), context.workload)
    # a micro-batch of pairs is twice as many sequences
    sequences = context.workload.micro_batch // lanes[0].micro_batch
    found: dict[str, Any] = dict(model.sizes)
    for name in found:
        column = [each[lane.split][name] for lane in lanes]
        if name == "b":
            column = [lane.micro_batch * sequences for lane in lanes]
        if len(set(column)) > 1:
            found[name] = np.array(column, np.int64)
    return found
