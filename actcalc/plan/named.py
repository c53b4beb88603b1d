"""What named policies reach with the same memory: every single one, and the best mix of two.

A mix of two gives the first layers of each pipeline stage one policy and the others another, as
many of each as fits best (Megatron-LM's ``block`` method is such a mix of full and none). All
mixes are evaluated, in exact integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.layers.core.graph import Graph
from actcalc.plan.planner import RunPlanner
from actcalc.plan.stages import Laid, Stage, Unit
from actcalc.plan.ways import Measured
from actcalc.policy.rules import Policy
from actcalc.solve.beside import Beside
from actcalc.solve.stage import Gpu, Held, Way, peak

Ints = NDArray[np.int64]


class Row(NamedTuple):
    """Equal layers in a row: each policy's way and what it makes again, and the layers' chunk."""

    ways: Sequence[Way]
    working: Sequence[int]
    layers: int
    chunk: int = 0


def mixes(
    rows: Sequence[Row], policies: int, gpu: Gpu, beside: Beside | None, inflight: Sequence[int]
) -> tuple[Ints, Ints]:
    """Cost and peak bytes of every ordered pair of policies (as ``permutations`` lists them).

    One row per pair, one column per number of layers that take the first policy of the pair. With
    ``beside`` the order of layers is not looked at, and ``inflight`` micro-batches of each chunk
    are held.
    """
    first, second = (np.array(c) for c in zip(*permutations(range(policies), 2), strict=True))
    layers = sum(row.layers for row in rows)
    counts = np.arange(layers + 1)
    cost = np.zeros((len(first), layers + 1), dtype=np.int64)
    stored, most = np.zeros_like(cost), np.zeros_like(cost)
    chunks: list[list[Held]] = [[] for _ in gpu.chunks]
    at = 0
    for row in rows:
        table = np.array(
            [(*way[:4], w) for way, w in zip(row.ways, row.working, strict=True)], dtype=np.int64
        )
        for _ in range(row.layers):
            takes = (counts > at)[None, :]
            k, f, b, c, w = (
                np.where(takes, column[first][:, None], column[second][:, None])
                for column in table.T
            )
            chunks[row.chunk].append(Held(k, f, b))
            cost += c
            stored += inflight[row.chunk] * k
            most = np.maximum(most, w)
            at += 1
    if beside is None:
        return cost, np.broadcast_to(peak(gpu, chunks, np.maximum), cost.shape)
    high = np.maximum(beside.head + stored, beside.work + stored + most)
    return cost, np.maximum(high, beside.floor)


@dataclass(frozen=True)
class Fit:
    """One policy, or mix of policies, on all stages within a budget (costs in the planner's units).

    ``cost`` and ``peak_bytes`` are None where it does not fit; ``counts`` says, for a mix, how many
    layers of each stage take the first policy.
    """

    names: tuple[str, ...]
    cost: int | None
    peak_bytes: int | None
    counts: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return self.cost is not None


class Rivals:
    """Named policies on the stages of a planner; build once, ask for many budgets."""

    def __init__(self, planner: RunPlanner) -> None:
        self.planner = planner
        self._mixed: dict[object, tuple[Ints, Ints]] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Policies that decide for one layer at a time."""
        return tuple(policy.name for policy in self.planner.policies)

    def policy(self, name: str) -> Policy:
        """The policy called ``name``, for the run."""
        return self.planner.staged.policy(name)

    def single(self, name: str, budget: int) -> Fit:
        """One policy on every layer of every stage; segments and blocks of layers are allowed."""
        policy = self.policy(name)
        return self._fit(name, budget, lambda stage: self.planner.laid(stage, policy))

    def skipping(self, name: str, policy: Policy, skip: Callable[[int], bool], budget: int) -> Fit:
        """One policy, but where ``skip`` says so of a layer's place on its stage."""
        return self._fit(name, budget, lambda stage: self.planner.laid(stage, policy, skip))

    def uniform(self, name: str, way: Callable[[Graph], Measured], budget: int) -> Fit:
        """Every layer run as ``way`` says, within ``budget``; ``name`` names that."""
        planner = self.planner
        units: dict[int, Unit] = {}

        def unit(graph: Graph) -> Unit:
            if id(graph) not in units:
                row = way(graph)
                units[id(graph)] = planner.unit(graph, row.option, planner.ways.way(row))
            return units[id(graph)]

        def laid(stage: Stage) -> Laid:
            chunks = [[unit(graph) for graph in graphs] for graphs in stage.graphs]
            return planner.laid_out(stage, chunks, stage.gpu)

        return self._fit(name, budget, laid)

    def _fit(self, name: str, budget: int, laid: Callable[[Stage], Laid]) -> Fit:
        every = [laid(stage) for stage in self.planner.stages]
        high = max(each.peak for each in every)
        if high > budget:
            return Fit((name,), None, None)
        return Fit((name,), self.planner.total(each.cost for each in every), high)

    def best_pair(self, budget: int) -> Fit | None:
        """The cheapest mix of two policies that fits everywhere; None if none does."""
        pairs = list(permutations(range(len(self.names)), 2))
        if not pairs:
            return None
        totals = np.zeros(len(pairs), dtype=np.float64)
        prices: list[NDArray[np.float64]] = []
        found: list[tuple[Ints, Ints]] = []
        for stage in self.planner.stages:
            cost, high = self._mixes(stage)
            fits = high <= budget
            prices.append(np.where(fits, cost.astype(np.float64), np.inf))
            found.append((cost, high))
        if self.planner.settings.same_on_all_stages:
            if len({price.shape for price in prices}) > 1:
                return None
            prices = [sum(prices, np.zeros_like(prices[0]))] * len(prices)
        places = [price.argmin(axis=1) for price in prices]
        for price, at in zip(prices, places, strict=True):
            totals += price[np.arange(len(pairs)), at]
        best = int(totals.argmin())
        if np.isinf(totals[best]):
            return None
        counts = tuple(int(at[best]) for at in places)
        every = zip(counts, found, strict=True)
        costs = self.planner.total(int(cost[best, n]) for n, (cost, _) in every)
        most = max(int(high[best, n]) for n, (_, high) in zip(counts, found, strict=True))
        names = tuple(self.names[i] for i in pairs[best])
        return Fit(names, costs, most, counts)

    def _mixes(self, stage: Stage) -> tuple[Ints, Ints]:
        if stage.key not in self._mixed:
            self._mixed[stage.key] = self._mix(stage)
        return self._mixed[stage.key]

    def _mix(self, stage: Stage) -> tuple[Ints, Ints]:
        # Cost and peak of every ordered pair of policies, by how many layers take the first.
        planner = self.planner
        rows = []
        for run in stage.runs:
            pairs = [planner.ways.named(run.graph, policy) for policy in planner.policies]
            ways = [planner.seen(way) for _, way in pairs]
            rows.append(Row(ways, [option.working for option, _ in pairs], run.count, run.chunk))
        unordered = planner.settings.memory_model == "stored+working"
        beside = planner.beside(stage) if unordered else None
        return mixes(rows, len(self.names), stage.gpu, beside, planner.weights(stage))

    def best_of(self, names: Sequence[str], budget: int) -> Fit | None:
        """The cheapest of some policies that fits on every stage; None if none does."""
        fits = [fit for fit in (self.single(name, budget) for name in names) if fit.fits]
        return min(fits, key=lambda fit: (fit.cost or 0, fit.peak_bytes or 0), default=None)
