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

from actcalc.answers.compare import default_policies
from actcalc.layers.core.graph import Graph
from actcalc.plan.options import policy_option, wrapped_modules
from actcalc.plan.planner import RunPlanner, Stage
from actcalc.policy.rules import NONE, Policy
from actcalc.solve.knapsack import Option
from actcalc.solve.rest import Rest
from actcalc.solve.timeline import NO_REST, timeline_peak

Ints = NDArray[np.int64]


class Layers(NamedTuple):
    """Equal layers in a row: each policy's (stored, working, cost), how many, and in flight."""

    policies: tuple[Ints, Ints, Ints]
    layers: int
    inflight: int


def mixes(
    runs: Sequence[Layers], policies: int, memory_model: str, rest: Rest = NO_REST
) -> tuple[Ints, Ints]:
    """Cost and peak bytes of every ordered pair of policies (as ``permutations`` lists them).

    One row per pair, one column per number of layers that take the first policy of the pair.
    """
    first, second = (np.array(c) for c in zip(*permutations(range(policies), 2), strict=True))
    layers = sum(run.layers for run in runs)
    cost = np.zeros((len(first), layers + 1), dtype=np.int64)
    held, most = np.zeros_like(cost), np.zeros_like(cost)
    high, excess = np.full_like(cost, rest.head), np.zeros_like(cost)
    beside = rest.of_layers(layers)
    counts = np.arange(layers + 1)
    at = layers
    for run in reversed(runs):
        m = run.inflight
        for _ in range(run.layers):
            at -= 1
            takes = (counts > at)[None, :]
            k, w, c = (
                np.where(takes, column[first][:, None], column[second][:, None])
                for column in run.policies
            )
            cost += c
            held += m * k
            most = np.maximum(most, w)
            high = m * k + np.maximum(high, excess + w + beside[at])
            excess += (m - 1) * k
    if memory_model == "timeline":
        peak = np.maximum(high, excess + rest.tail)
    else:
        peak = rest.head + held
        if memory_model != "stored":
            peak = np.maximum(peak, rest.work + held + most)
    return cost, np.maximum(peak, rest.floor)


def columns(options: Sequence[Option]) -> tuple[Ints, Ints, Ints]:
    """Stored bytes, working bytes and cost of some options."""
    rows = np.array([(o.stored, o.working, o.cost) for o in options], dtype=np.int64)
    return rows[:, 0], rows[:, 1], rows[:, 2]


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


class Layered(NamedTuple):
    """A stage under one policy: its cost, and for each layer or segment, in order, the bytes
    stored and worked with, micro-batches in flight, and how many layers it is."""

    cost: int
    stored: list[int]
    working: list[int]
    flights: list[int]
    sizes: list[int]


class Rivals:
    """Named policies on the stages of a planner; build once, ask for many budgets."""

    def __init__(self, planner: RunPlanner) -> None:
        self.planner = planner
        self._options: dict[tuple[int, str], Option] = {}

    def option(self, graph: Graph, policy: Policy) -> Option:
        """One layer under one policy (cached)."""
        key = (id(graph), policy.name)
        if key not in self._options:
            self._options[key] = policy_option(
                self.planner.model, graph, self.planner.costs, policy
            )
        return self._options[key]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Policies that decide for one layer at a time, as ``compare`` lists them.

        Beside a plan of whole modules only those that wrap modules the framework can wrap.
        """
        skipped = ("full-sharded", "sqrt")
        found = [n for n in default_policies(self.planner.staged) if n not in skipped]
        if self.planner.run.framework.per_op_policy:
            found.insert(found.index("full"), "op")
        if self.planner.settings.semantics == "module":
            found = [name for name in found if self._wraps(name)]
        return tuple(found)

    def _wraps(self, name: str) -> bool:
        policy = self.policy(name, self.planner.stages[0])
        known = {
            module
            for run in self.planner.staged.kinds
            for module in wrapped_modules(self.planner.model, run.graph)
        }
        return not policy.per_op and set(policy.modules) <= known

    def policy(self, name: str, stage: Stage) -> Policy:
        """The policy called ``name`` for one stage."""
        return self.planner.staged.policy(name)

    def single(self, name: str, budget: int) -> Fit:
        """One policy on every layer of every stage; segments and blocks of layers are allowed."""
        total, peak = 0, 0
        for stage in self.planner.stages:
            cost, high = self.measured(stage, self.policy(name, stage))
            if high > budget:
                return Fit((name,), None, None)
            total, peak = total + cost, max(peak, high)
        return Fit((name,), total, peak)

    def measured(
        self, stage: Stage, policy: Policy, *, skip: Callable[[int], bool] | None = None
    ) -> tuple[int, int]:
        """Cost and peak bytes of one stage under one policy.

        ``skip`` tells by its position on the stage which layer stores everything instead.
        """
        each = self.layered(stage, policy, skip=skip)
        return each.cost, self._peak(stage, each.stored, each.working, each.flights, each.sizes)

    def layered(
        self, stage: Stage, policy: Policy, *, skip: Callable[[int], bool] | None = None
    ) -> Layered:
        """One stage under one policy, unit by unit; see :meth:`measured`."""
        found = Layered(0, [], [], [], [])
        cost = at = 0
        graphs = [g for g, group in zip(stage.graphs, stage.groups, strict=True)
                  for _ in range(group.count)]  # fmt: skip
        for chunk, flight in zip(self.planner.chunks[stage.index], stage.in_flight, strict=True):
            members = graphs[at : at + len(chunk)]
            at += len(chunk)
            for segment in policy.segments(range(len(members))):
                start, part = segment.start, members[segment.start : segment.stop]
                chosen = [policy.of_layer(start + i) for i in range(len(part))]
                if skip is not None and skip(at - len(chunk) + start):
                    chosen = [NONE] * len(part)
                options = [self.option(g, p) for g, p in zip(part, chosen, strict=True)]
                cost += sum(o.cost for o in options)
                found.flights.append(max(1, flight))
                found.stored.append(options[0].stored)
                found.sizes.append(len(part))
                inner = sum(o.stored for o in options[1:])
                found.working.append(sum(o.working for o in options) + inner)
        return found._replace(cost=cost)

    def uniform(self, name: str, option: Callable[[Graph], Option], budget: int) -> Fit:
        """Every layer run as ``option`` says, within ``budget``; ``name`` names that."""
        total = peak = 0
        for stage in self.planner.stages:
            options = [
                (option(graph), group.inflight or 1)
                for graph, group in zip(stage.graphs, stage.groups, strict=True)
                for _ in range(group.count)
            ]
            high = self._peak(
                stage,
                [o.stored for o, _ in options],
                [o.working for o, _ in options],
                [flight for _, flight in options],
            )
            if high > budget:
                return Fit((name,), None, None)
            total, peak = total + sum(o.cost for o, _ in options), max(peak, high)
        return Fit((name,), total, peak)

    def _peak(
        self,
        stage: Stage,
        stored: list[int],
        working: list[int],
        flights: list[int],
        sizes: Sequence[int] = (),
    ) -> int:
        model = self.planner.settings.memory_model
        if model == "timeline" and stored:
            return timeline_peak(stored, working, flights, stage.rest, layers=sizes)
        held = sum(k * m for k, m in zip(stored, flights, strict=True))
        rest = stage.rest.of_chains() if any(n > 1 for n in sizes) else stage.rest
        return rest.peak(held, None if model == "stored" else max(working, default=0))

    def best_single(self, budget: int) -> Fit | None:
        """The cheapest single policy that fits everywhere; None if none does."""
        names = list(self.names)
        if self.planner.settings.memory_model != "stored":
            names.append("sqrt")
        return self.best_of(names, budget)

    def best_pair(self, budget: int) -> Fit | None:
        """The cheapest mix of two policies that fits everywhere; None if none does."""
        pairs = list(permutations(range(len(self.names)), 2))
        if not pairs:
            return None
        totals = np.zeros(len(pairs), dtype=np.float64)
        prices: list[NDArray[np.float64]] = []
        found: list[tuple[Ints, Ints]] = []
        for stage in self.planner.stages:
            cost, peak = self._mixes(stage)
            fits = peak <= budget
            prices.append(np.where(fits, cost.astype(np.float64), np.inf))
            found.append((cost, peak))
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
        costs = sum(int(cost[best, n]) for n, (cost, _) in zip(counts, found, strict=True))
        high = max(int(peak[best, n]) for n, (_, peak) in zip(counts, found, strict=True))
        names = tuple(self.names[i] for i in pairs[best])
        return Fit(names, costs, high, counts)

    def _mixes(self, stage: Stage) -> tuple[Ints, Ints]:
        if stage.key not in self._mixed:
            self._mixed[stage.key] = self._mix(stage)
        return self._mixed[stage.key]

    @cached_property
    def _mixed(self) -> dict[object, tuple[Ints, Ints]]:
        return {}

    def _mix(self, stage: Stage) -> tuple[Ints, Ints]:
        # Cost and peak of every ordered pair of policies, by how many layers take the first.
        runs = [
            Layers(self._table(graph, stage), group.count, group.inflight or 1)
            for graph, group in zip(stage.graphs, stage.groups, strict=True)
        ]
        return mixes(runs, len(self.names), self.planner.settings.memory_model, stage.rest)

    def _table(self, graph: Graph, stage: Stage) -> tuple[Ints, Ints, Ints]:
        return columns([self.option(graph, self.policy(name, stage)) for name in self.names])

    def best_of(self, names: Sequence[str], budget: int) -> Fit | None:
        """The cheapest of some policies that fits on every stage; None if none does."""
        fits = [fit for fit in (self.single(name, budget) for name in names) if fit.fits]
        return min(fits, key=lambda fit: (fit.cost or 0, fit.peak_bytes or 0), default=None)
