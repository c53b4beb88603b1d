"""What stages need in each layout whatever their micro-batch and policy is: states, optimizer.

Both depend on how a stage's weights are split (sequence parallelism splits none), on the number of
replicas and on the ZeRO stage; of a pipeline it only matters that there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.optimizer import optimizer_time
from actcalc.cost.replicas import Reduction, reduces_each, reduction
from actcalc.layers.core.either import greatest
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.buffers import data_parallel, outside, workspaces
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION
from actcalc.memory.states import NO_GROUP, Group, Parameters, in_units, recipe, states
from actcalc.memory.update import step_bytes
from actcalc.search.family import Degrees, Family, Floats, Ints, at_layout
from actcalc.search.lanes import Lanes
from actcalc.search.space import Split
from actcalc.search.stages import Stage, graphs_of, needs


class Replicated(NamedTuple):
    """A split of the weights, and how many replicas there are."""

    weights: Split
    """The split without sequence parallelism."""
    dp: int


class Held(NamedTuple):
    """What a stage needs in every layout: figures by [layout, ZeRO stage]."""

    base: Ints
    """Bytes of weights, gradients, optimizer states and buffers beside them, in the allocator."""
    gradients: Ints
    """Those of gradients."""
    step: Ints
    """Temporaries of the optimizer step."""
    outside: Ints
    """Bytes outside the allocator."""
    optimizer: Floats
    """Seconds of the optimizer step."""
    trained: Ints
    """Trained parameters by [layout, (of all replicas, routed experts)]."""


class _Weights(NamedTuple):
    """What one stage has of weights, by split."""

    parameters: Ints
    """By [group of ``Parameters``, field of ``Group``, split]."""
    largest: Ints
    workspaces: Ints


class _Piece(NamedTuple):
    """Part of a stage, as far as its weights are gathered for it."""

    parameters: Parameters
    layers: int
    count: int  # type: ignore[assignment]  # no tuple's method


class Layouts:
    """Tables with a row for each layout of a search."""

    def __init__(
        self, lanes: Lanes, layouts: Sequence[Replicated], zeros: Sequence[int], *, together: bool
    ) -> None:
        self.lanes, self.layouts, self.zeros, self.together = lanes, layouts, zeros, together
        run = lanes.run
        self.training, self.device, self.rates = run.training, run.device, lanes.rates
        self.weights = list(dict.fromkeys(one.weights for one in layouts))
        place = {weights: at for at, weights in enumerate(self.weights)}
        self.own = np.array([place[one.weights] for one in layouts], np.int64)
        self._homes = self._found()
        self._weights: dict[Any, _Weights] = {}
        self._held: dict[Any, Held] = {}
        self._exchange: dict[Any, Reduction] = {}

    def _found(self) -> list[tuple[Family, list[tuple[int, int]]]]:
        """Families with those of their lanes that stand for a split: its number, and the lane's."""
        wanted = {weights: at for at, weights in enumerate(self.weights)}
        found = []
        for family in self.lanes.families:
            here = []
            for at, split in enumerate(family.splits):
                number = wanted.pop(split._replace(sp=False), None)
                if number is not None:
                    here.append((number, at))
            if here:
                found.append((family, here))
        return found

    def held(self, stage: Stage, *, piped: bool) -> Held:
        """What one stage needs."""
        # which layers follow each other matters to what is gathered for two at a time
        gathered = any(self._gathers(zero) for zero in self.zeros)
        key = stage if gathered else needs(stage), piped
        if key not in self._held:
            weights = self._of(stage)
            every = [self._figures(stage, weights, zero, piped=piped) for zero in self.zeros]
            columns = [np.stack(column, axis=1) for column in zip(*every, strict=True)]
            trained = np.stack(_parameters(weights.parameters[..., self.own]).reduced, axis=1)
            base, gradients, step, beside, optimizer = columns
            self._held[key] = Held(base, gradients, step, beside, optimizer, trained)
        return self._held[key]

    def exchange(self, stages: Sequence[Stage]) -> Reduction:
        """Seconds of the replicas' collectives by [layout, ZeRO stage]: of the busiest stage."""
        key = tuple(needs(stage) for stage in stages)
        if key not in self._exchange:
            trained = np.stack([self.held(stage, piped=True).trained for stage in stages])
            most = trained.sum(axis=2).argmax(axis=0)
            busiest = np.take_along_axis(trained, most[None, :, None], axis=0)[0]
            every = [
                np.stack(np.broadcast_arrays(
                    *reduction(model, self.training, tuple(numbers), self.rates)
                ))
                for zero in self.zeros
                for model, numbers in [(self._model(zero, piped=False), busiest.T)]
            ]  # fmt: skip
            reduced, gathered = (
                np.stack([np.broadcast_to(one[way], len(self.layouts)) for one in every], axis=1)
                for way in (0, 1)
            )
            self._exchange[key] = Reduction(reduced, gathered)  # type: ignore[arg-type]
        return self._exchange[key]

    def reduced_each(self, *, piped: bool) -> NDArray[np.bool_]:
        """For each ZeRO stage whether every micro-batch's gradients are reduced."""
        models = (self._model(zero, piped=piped) for zero in self.zeros)
        return np.array([reduces_each(model, self.training) for model in models])

    # --- one stage --------------------------------------------------------------------------------

    def _of(self, stage: Stage) -> _Weights:
        key = needs(stage)
        if key not in self._weights:
            count = len(self.weights)
            found = _Weights(
                np.zeros((len(Parameters._fields), len(NO_GROUP), count), np.int64),
                np.zeros(count, np.int64),
                np.zeros(count, np.int64),
            )
            for family, here in self._homes:
                into, lanes = (np.array(column) for column in zip(*here, strict=True))
                graphs = Counter(graphs_of(family, stage))
                for at, group in enumerate(family.parameters(graphs)):
                    for field, value in enumerate(group):
                        found.parameters[at, field, into] = family.column(value)[lanes]
                largest = greatest(family.largest(graphs))
                found.largest[into] = family.column(largest)[lanes]
                buffers = workspaces(
                    family.model, self.training, self.device, family.shapes(graphs)
                )
                size = sum(buffer.bytes for buffer in buffers)
                found.workspaces[into] = family.column(size)[lanes]
            self._weights[key] = found
        return self._weights[key]

    @cached_property
    def _lanes(self) -> Ints:
        """The lane that stands for each split."""
        found = np.zeros(len(self.weights), np.int64)
        for family, here in self._homes:
            into, lanes = (np.array(column) for column in zip(*here, strict=True))
            found[into] = self.lanes.places[family.lanes[0]] + lanes
        return found

    def _gathers(self, zero: int) -> bool:
        return zero == 3 or self.training.offload == "weights"

    def _pieces(self, stage: Stage, zero: int, lane: Any) -> list[_Piece]:
        """Parts of a stage whose weights are gathered, or fetched, for a layer at a time."""
        if not self._gathers(zero):
            return []

        def piece(what: int | str, count: int) -> _Piece:
            groups = np.moveaxis(self.lanes.weights(what).groups[lane], (-2, -1), (0, 1))
            each = groups if groups.ndim > 2 else groups.tolist()
            return _Piece(_parameters(each), int(isinstance(what, int)), count)

        found = []
        for chunk in stage:
            found += [piece(EMBEDDING, 1)] * chunk.first
            found += [piece(kind, count) for kind, count in chunk.layers]
            ends = [PREDICTION] * self.lanes.predictions + [HEAD] if chunk.last else []
            found += [piece(end, 1) for end in ends]
        return found

    def _figures(
        self, stage: Stage, weights: _Weights, zero: int, *, piped: bool
    ) -> tuple[Any, ...]:
        if self.together:
            model = self._model(zero, piped=piped)
            pieces = self._pieces(stage, zero, self._lanes[self.own])
            columns = (column[..., self.own] for column in weights)
            found = self._one(model, (), pieces, *columns)
            return tuple(np.broadcast_to(value, len(self.layouts)) for value in found)
        graphs = {
            number: (family, graphs_of(family, stage))
            for family, here in self._homes
            for number, _ in here
        }
        rows = []
        for one, own in zip(self.layouts, self.own.tolist(), strict=True):
            family, held = graphs[own]
            layout = one.weights.layout(dp=one.dp, zero=zero, pp=2 if piped else 1)
            sizes = (column[..., own].tolist() for column in weights)
            pieces = self._pieces(stage, zero, int(self._lanes[own]))
            rows.append(self._one(at_layout(family.model, layout), held, pieces, *sizes))
        return tuple(np.array(column) for column in zip(*rows, strict=True))

    def _one(
        self,
        model: ModelGraph,
        graphs: Sequence[Graph],
        pieces: Sequence[_Piece],
        numbers: Any,
        largest: Any,
        buffers: Any,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Base, gradients, step, outside and optimizer: of one layout, or of all."""
        training, parameters = self.training, _parameters(numbers)
        rules = recipe(model, training)
        state = states(model, training, parameters)
        units = in_units(model, rules)
        found = data_parallel(model, training, rules, pieces, state, gathers=units)
        beside = outside(model, self.device) if self.device else []
        return (
            state.weights + state.optimizer + state.gradients + buffers
            + sum(buffer.bytes for buffer in found),
            state.gradients,
            step_bytes(model.context.layout, training, rules, state, largest),
            sum(buffer.bytes for buffer in beside),
            optimizer_time(model, graphs, training, self.rates, parameters).total,
        )  # fmt: skip

    def model(self, zero: int, chosen: Ints, *, piped: bool) -> ModelGraph:
        """Graphs of the first family in some layouts at once, degrees as columns."""
        model = self._model(zero, piped=piped)
        degrees = cast(Degrees, model.context.layout)
        names = ("tp", "cp", "ep", "expert_tp", "dp")
        columns = {name: getattr(degrees, name)[chosen, None] for name in names}
        return at_layout(model, replace(degrees, **columns))

    def _model(self, zero: int, *, piped: bool) -> ModelGraph:
        """Graphs of the first family in every layout at once."""
        rows = [
            (one.weights.tp, one.weights.cp, one.weights.ep, one.weights.etp or one.weights.tp,
             one.dp)
            for one in self.layouts
        ]  # fmt: skip
        tp, cp, ep, etp, dp = np.array(rows, np.int64).T
        degrees = Degrees(tp, cp, ep, etp, dp, pp=2 if piped else 1, zero=zero)
        return at_layout(self.lanes.families[0].model, degrees)


def _parameters(numbers: Any) -> Parameters:
    return Parameters(*(Group(*group) for group in numbers))
