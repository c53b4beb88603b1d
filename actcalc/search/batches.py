"""Batches: one split, number of replicas and micro-batch of a pipeline, whatever cuts it.

A row of a search is a batch under one cut, one ZeRO stage and one policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from actcalc.errors import SpecError
from actcalc.run.schedule.shape import shape_of
from actcalc.search.family import Ints, Lane
from actcalc.search.lanes import Lanes
from actcalc.search.layouts import Replicated
from actcalc.search.space import Cut, Space, Split, micro_batches
from actcalc.specs.schedules import SCHEDULES


class Sized(NamedTuple):
    """One batch."""

    lane: Lane
    layout: Replicated
    rounds: int
    """Micro-batches of a replica in a step."""

    def gathered(self, zero: int) -> Sized:
        """The same where a ZeRO stage gathers its weights."""
        return self._replace(lane=self.lane._replace(zero=zero))

    @property
    def sharded(self) -> bool:
        """Whether there are replicas over which ZeRO can shard."""
        return self.layout.dp * self.lane.split.cp > 1


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches as columns, with the rows of each in the tables of lanes and layouts."""

    lane: Ints
    layout: Ints
    dp: Ints
    rounds: Ints
    inside: Ints
    """Devices of a stage: tp · cp · dp."""
    sharded: Ints
    """1 where there are replicas over which ZeRO can shard, else 0."""

    def __len__(self) -> int:
        return len(self.lane)

    def take(self, chosen: Ints) -> Batches:
        """Some of them."""
        return Batches(*(column[chosen] for column in vars(self).values()))


def sized(
    space: Space, splits: Iterable[Split], batch: int, pp: int, *, by_rounds: bool, alone: bool
) -> list[Sized]:
    """Every batch of some splits on pipelines of ``pp`` stages.

    ``by_rounds``: ops depend on how many micro-batches a step has. ``alone``: as for a whole model
    on one stage.
    """
    steps = sorted({(space.gpus, batch), *space.more})
    found = []
    for split in splits:
        inside, experts = split.tp * split.cp, split.ep * (split.etp or split.tp)
        weights = split._replace(sp=False)
        for gpus, sequences in steps:
            dp, rest = divmod(gpus, inside * pp)
            if rest or not dp or sequences % dp or (inside * dp) % experts:
                continue
            if space.dp is not None and dp not in space.dp:
                continue
            layout = Replicated(weights, dp)
            for size in micro_batches(space, sequences // dp):
                rounds = sequences // dp // size
                lane = Lane(split, size, rounds if by_rounds else min(rounds, 2), alone)
                found.append(Sized(lane, layout, rounds))
    return found


def columns(every: Sequence[Sized], lanes: Lanes, layouts: dict[Replicated, int]) -> Batches:
    """Batches whose lanes the framework can run, as columns."""
    kept = [one for one in every if one.lane in lanes.places]
    rows = [
        (
            lanes.places[one.lane], layouts[one.layout], one.layout.dp, one.rounds,
            one.layout.dp * one.lane.split.tp * one.lane.split.cp, one.sharded,
        )
        for one in kept
    ]  # fmt: skip
    table = np.array(rows, np.int64).reshape(-1, 6)
    return Batches(*table.T.copy())


def runnable(cut: Cut, batches: Batches) -> Batches:
    """Those that a cut's schedule can run."""
    if cut.pp == 1:
        return batches
    counts, own = np.unique(batches.rounds, return_inverse=True)
    runs = np.array([_runs(cut.schedule, cut.pp, cut.vpp, count) for count in counts.tolist()])
    return batches.take(np.flatnonzero(runs[own]) if len(counts) else own)


@lru_cache(maxsize=65536)
def _runs(schedule: str, pp: int, vpp: int, rounds: int) -> bool:
    """Whether a schedule can run so many micro-batches."""
    row = SCHEDULES[schedule]
    if not (row.grouped or row.least or row.directions > 1):
        return True
    try:
        shape_of(schedule, pp, rounds, vpp, None)
    except SpecError:
        return False
    return True
