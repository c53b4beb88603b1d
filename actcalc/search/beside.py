"""Rows whose gradients and gathered weights come and go: they belong to moments of a step.

Weights sharded in units (FSDP) are gathered layer by layer, or stay whole through a pipeline's
step; gradients of a step with one micro-batch come to exist as its backward goes. What is there
beside each layer is worked out by the rules of :mod:`actcalc.memory.around`, over arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from actcalc.cost.roofline import NOTHING, LayerTime
from actcalc.cost.step import Shards, outermost, sharded, shards_of, unhidden
from actcalc.memory.around import Sharding, Units, chunks_around, sharding_like
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION, Part
from actcalc.memory.peaks import chunk_moments, made_by_chunk
from actcalc.memory.states import Parameters, Trained, in_units, recipe, replicas
from actcalc.search.batches import Batches
from actcalc.search.choices import NO_POLICY, Tried
from actcalc.search.family import Ints
from actcalc.search.lanes import Lanes
from actcalc.search.layouts import Held, Layouts
from actcalc.search.rows import CutRows, Picked, Sizes
from actcalc.search.space import Cut
from actcalc.search.stages import Chunk, Stage


class PartRows(CutRows):
    """Evaluates the rows of one cut under one ZeRO stage, part by part of its chunks.

    What they have in common is worked out for each pair of lane and layout, as the lanes of
    :class:`CutRows` are. All batches have one micro-batch, or all have more.
    """

    def __init__(
        self,
        lanes: Lanes,
        layouts: Layouts,
        cut: Cut,
        stages: Sequence[Stage],
        batches: Batches,
        tried: Tried,
    ) -> None:
        super().__init__(lanes, layouts, cut, stages, batches, tried)
        (self.zero,) = layouts.zeros
        many = len(layouts.layouts)
        keys = batches.lane * many + batches.layout
        pairs, self.own, _ = np.unique(keys, return_inverse=True, return_counts=True)
        self.used, self.layout = pairs // many, pairs % many
        self.model = layouts.model(self.zero, self.layout, piped=cut.pp > 1)
        self.rules = recipe(self.model, lanes.run.training)
        self.persistent = self.rules.persistent or int(batches.rounds[0]) > 1
        self._stage: dict[Stage, dict[Chunk, Sizes]] = {}
        self._units: dict[Chunk, Any] = {}
        self._shards: dict[int | str, Shards] = {}
        self._known: dict[int | str, tuple[Parameters, Trained, Any]] = {}

    @cached_property
    def _sharding(self) -> Sharding | None:
        """How weights are sharded in units, if they are."""
        if not in_units(self.model, self.rules):
            return None
        run, layout = self.lanes.run, self.model.context.layout
        ranks = replicas(layout, run.training, expert=False)
        return sharding_like(
            self.rules, run.training, ranks, root=run.framework.ends_in_root, zero=self.zero,
            piped=self.cut.pp > 1, experts=layout.ep > 1,
        )  # fmt: skip

    # --- memory -----------------------------------------------------------------------------------

    def _states(self, held: Held) -> tuple[Ints, Ints]:
        """Gradients are part of moments."""
        return held.base - held.gradients, held.step + held.gradients

    def _held(self, index: int) -> Held:
        return self.layouts.held(self.stages[index], piped=self.cut.pp > 1)

    def _waits(self, index: int) -> Ints:
        found: Ints = self._held(index).gradients[self.layout]
        return found

    def _stage_sizes(self, index: int, chunks: Sequence[Chunk]) -> list[Sizes]:
        stage = self.stages[index]
        if self._sharding is not None and self._sharding.whole:
            more = sum(self._whole(chunk) for chunk in stage)
            plainly = super()._stage_sizes(index, chunks)
            return [Sizes(one.stored, one.forward + more, one.backward + more) for one in plainly]
        if stage not in self._stage:
            self._stage[stage] = dict(zip(stage, self._together(index), strict=True))
        return [self._stage[stage][chunk] for chunk in chunks]

    def _whole(self, chunk: Chunk) -> Any:
        """Weights and gradients of a chunk that are there whole whatever is at work."""
        if chunk not in self._units:
            assert self._sharding is not None
            ends = [self._end(name) for name in self._ends(chunk)]
            kinds = [self._part(kind, np.zeros(1, np.int64), many) for kind, many in chunk.layers]
            units = Units([*ends, *kinds], self._sharding)
            self._units[chunk] = units.all_gathered + units.all_summed
        return self._units[chunk]

    def _ends(self, chunk: Chunk) -> list[str]:
        last = [PREDICTION] * self.lanes.predictions + [HEAD] if chunk.last else []
        return [EMBEDDING] * chunk.first + last

    def _together(self, index: int) -> Iterator[Sizes]:
        """Bytes of each chunk of a stage, with what is beside its parts."""
        sharding = self._sharding
        parts = [tuple(self._listed(chunk)) for chunk in self.stages[index]]
        if sharding is not None:
            parts = [Units(each, sharding).reducing() for each in parts]
        held = self._held(index)
        full, trained = held.gradients[self.layout], held.trained[self.layout].sum(axis=1)
        gradient = full / np.maximum(trained, 1)[:, None]
        summed = self.rules.reduced if sharding is None else self.rules.gathered
        around = chunks_around(
            parts, made_by_chunk(parts, range(len(parts))), gradient, full, sharding,
            persistent=self.persistent, waiting=summed if self.cut.pp == 1 else 0,
        )  # fmt: skip
        shape = len(self.used), len(self.tried.policy)
        for each, beside in zip(parts, around, strict=True):
            found = chunk_moments(each, beside)
            yield Sizes(*(np.broadcast_to(size, shape) for size in (found.stored, *found.most)))

    def _listed(self, chunk: Chunk) -> Iterator[Part]:
        """The parts of a chunk, with columns for numbers."""
        policy = self.tried.policy
        ends = [self._end(name) for name in self._ends(chunk)]
        yield from ends[: chunk.first]
        if self.tried.partial.any():
            for at, kind in enumerate(chunk.each, 1):
                yield self._part(kind, np.where(self._reruns(at), policy, NO_POLICY), 1)
        else:
            for kind, count in chunk.layers:
                yield self._part(kind, policy, count)
        yield from ends[chunk.first :]

    def _part(self, kind: int, policy: Ints, count: int) -> Part:
        bytes_ = self.lanes.part(kind)[self.used][:, policy]
        return self._of(kind, bytes_, count, name="layer", first=0, layers=1)

    def _end(self, name: str) -> Part:
        bytes_ = self.lanes.end(name)[self.used][:, None]
        rest = self.lanes.rest(name)[self.used, None]
        return self._of(name, bytes_, 1, name=name, first=-1, layers=0, backward_rest=rest)

    def _of(self, what: int | str, bytes_: Ints, count: int, **more: Any) -> Part:
        parameters, trained, largest = self._weights(what)
        stored, forward, backward, casts = np.moveaxis(bytes_, -1, 0)
        return Part(
            count=count, stored=stored, forward=forward, backward=backward, casts=casts,
            parameters=parameters, trained=trained, largest=largest,
            reruns=False, forward_at="", backward_at="", shapes=frozenset(), **more,
        )  # fmt: skip

    def _weights(self, what: int | str) -> tuple[Parameters, Trained, Any]:
        """Parameters of a kind of layer, or of an end, those with gradients, the largest weight."""
        if what not in self._known:
            found = self.lanes.weights(what)
            own, largest = found.trained(self.used), found.largest[self.used, None]
            self._known[what] = found.parameters(self.used), own, largest
        return self._known[what]

    # --- time -------------------------------------------------------------------------------------

    def _of_weights(self, what: int | str) -> Shards:
        """Collectives of a kind of layer, or of an end."""
        if what not in self._shards:
            parameters, _, _ = self._weights(what)
            run, rates = self.lanes.run, self.lanes.rates
            self._shards[what] = shards_of(self.model, run.training, parameters, rates)
        return self._shards[what]

    @property
    def _fetches(self) -> bool:
        """Layers wait for their weights."""
        return self.zero == 3 or self.lanes.run.training.offload == "weights"

    def _layer(self, kind: int, time: LayerTime) -> LayerTime:
        if not self._fetches:
            return time
        return sharded(time, self._of_weights(kind), self.lanes.rates)

    def _first(self) -> LayerTime:
        if not self._fetches:
            return NOTHING
        first = next(kind for stage in self.stages for kind in stage[0].each)
        model = self.lanes.families[0].model
        ends = [EMBEDDING, HEAD][: len(outermost(model))]
        return unhidden(self._of_weights(first), [self._of_weights(end) for end in ends])

    def _exposed(self, rows: Picked, different: Sequence[Stage], busiest: LayerTime) -> Any:
        if self.zero == 3:  # done layer by layer
            return 0.0
        return super()._exposed(rows, different, busiest)
