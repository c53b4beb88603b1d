"""The exact search over a stage: layer by layer from the last of every chunk, over what matters.

Of the layers decided so far, all that the others need to know is, for every limit (see
:class:`actcalc.solve.stage.Limit`), the highest it has reached if the layers still to come held
nothing (``high``), and, while its chunk is under way, what a layer of it that runs next finds held
(``held``). Adding a layer of another chunk adds n_c times its bytes to both. A layer of the chunk
itself makes ``high' = max(high + n_k stored, held + alive)`` and ``held' = held + (n_k - 1)
stored``. States that another one is at most equal to in all of them and in cost are dropped, and so
is what cannot beat the best known plan even if the layers to come were only limited by their bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.solve.frontier import pareto
from actcalc.solve.knapsack import Mix
from actcalc.solve.options import Menu
from actcalc.solve.stage import StageProblem, Ways

Ints = NDArray[np.int64]
Choice = list[list[int]]

_BLOCK = 1 << 20
"""States made at once, before any is dropped."""

MOST_STATES = 500_000
"""States kept at one layer; a search with more gives up."""

_MOST_MADE = 2_000_000
"""States made of one layer, before any is dropped, that memory has room for."""


class Found(NamedTuple):
    """The outcome of a search: the choice (None: there is none), and whether it is proven."""

    choice: Choice | None
    value: int
    states: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Aim:
    """What is looked for: the cheapest choice within ``budget`` bytes that costs less than
    ``below``, or, without a budget, the choice of the lowest peak, below ``below``.

    ``beam`` keeps only so many states at a layer; ``until`` is a time (``time.monotonic``).
    """

    budget: int | None
    below: int | None = None
    beam: int | None = None
    until: float = float("inf")


def search(problem: StageProblem, aim: Aim) -> Found:
    """The best choice for all layers; see :class:`Aim`. ``value`` is its cost, or its peak."""
    return _Search(problem, aim).run()


def menu_of(ways: Ways) -> Menu:
    """The ways by stored bytes and cost alone (cached)."""
    if "menu" not in ways.scratch:
        ways.scratch["menu"] = menu(ways.stored, ways.cost, ways.grain)
    found: Menu = ways.scratch["menu"]
    return found


def menu(stored: Ints, cost: Ints, grain: int) -> Menu:
    """The undominated pairs of stored bytes and cost, by rising bytes."""
    order = np.lexsort((cost, stored))
    costs = cost[order]
    better = np.ones(len(order), dtype=bool)
    better[1:] = costs[1:] < np.minimum.accumulate(costs)[:-1]
    chosen = order[better]
    return Menu(stored[chosen], cost[chosen], chosen.tolist(), grain)


class _Search:
    def __init__(self, problem: StageProblem, aim: Aim) -> None:
        self.problem, self.aim = problem, aim
        self.limits = problem.limits
        self.steps = [
            (chunk, layer)
            for chunk in reversed(range(len(problem.layers)))
            for layer in reversed(range(len(problem.layers[chunk])))
        ]
        self.states = 0
        self.complete = True
        self.back: list[tuple[Ints, Ints]] = []

    def run(self) -> Found:
        budget = self.aim.budget or 0
        high = np.array([[limit.whole - budget] for limit in self.limits], dtype=np.int64)
        held = np.array([[-budget] for _ in self.limits], dtype=np.int64)
        cost = np.zeros(1, dtype=np.int64)
        for index in self._empty():
            high[index] = np.maximum(high[index], held[index] + self.limits[index].gone)
        for at in range(len(self.steps)):
            made = self._step(at, high, held, cost)
            if made is None:
                return Found(None, 0, self.states, self.complete)
            high, held, cost = made
        return self._best(high, cost)

    def _empty(self) -> list[int]:
        return [
            i for i, one in enumerate(self.limits) if one.chunk >= 0 and not len(one.layers)
        ]  # fmt: skip

    def _best(self, high: Ints, cost: Ints) -> Found:
        most = high.max(axis=0)
        if self.aim.budget is None:
            value = most
        else:
            fits = most <= 0
            if not fits.any():
                return Found(None, 0, self.states, self.complete)
            value = np.where(fits, cost, np.iinfo(np.int64).max)
        best = int(np.argmin(value))
        if self.aim.below is not None and int(value[best]) >= self.aim.below:
            return Found(None, 0, self.states, self.complete)
        choice: Choice = [[0] * len(row) for row in self.problem.layers]
        total = int(value[best])
        for (chunk, layer), (parent, way) in zip(
            reversed(self.steps), reversed(self.back), strict=True
        ):
            choice[chunk][layer] = int(way[best])
            best = int(parent[best])
        return Found(choice, total, self.states, self.complete)

    def _step(self, at: int, high: Ints, held: Ints, cost: Ints) -> tuple[Ints, Ints, Ints] | None:
        ways = self.problem.layers[self.steps[at][0]][self.steps[at][1]]
        options = np.arange(len(ways)) if self.aim.budget is not None else ways.lean
        block = max(1, _BLOCK // len(options))
        made: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
        for start in range(0, len(cost), block):
            part = slice(start, start + block)
            made.append(self._grown(at, high[:, part], held[:, part], cost[part], options, start))
            over = sum(len(each[2]) for each in made) > _MOST_MADE
            if over or time.monotonic() > self.aim.until or self.states > 100 * MOST_STATES:
                self.complete = False
                return None
        new_high, new_held, new_cost, parent, way = (
            np.concatenate(columns, axis=-1) for columns in zip(*made, strict=True)
        )
        if not len(new_cost):
            return None
        keep = self._undominated(at, new_high, new_held, new_cost)
        if self.aim.beam is not None and len(keep) > self.aim.beam:
            self.complete = False
            ahead = self._ahead(at, new_high[:, keep], new_cost[keep])
            keep = keep[np.argsort(ahead, kind="stable")[: self.aim.beam]]
        elif len(keep) > MOST_STATES:
            self.complete = False
            return None
        self.back.append((parent[keep], way[keep]))
        return new_high[:, keep], new_held[:, keep], new_cost[keep]

    def _grown(
        self, at: int, high: Ints, held: Ints, cost: Ints, options: Ints, start: int
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """All states with one more layer that may still lead to something."""
        chunk, layer = self.steps[at]
        ways = self.problem.layers[chunk][layer]
        stored, width = ways.stored[options], len(options)
        if self.aim.budget is None:
            new_cost = np.zeros(len(cost) * width, dtype=np.int64)
        else:
            new_cost = (cost[:, None] + ways.cost[options]).ravel()
        rows = []
        for index, limit in enumerate(self.limits):
            grown = high[index][:, None] + limit.held[chunk] * stored
            if limit.chunk == chunk:
                alive = limit.alive(layer)[options]
                grown = np.maximum(grown, held[index][:, None] + alive)
                if layer == 0:
                    after = held[index][:, None] + (limit.held[chunk] - 1) * stored
                    grown = np.maximum(grown, after + limit.gone)
            rows.append(grown.ravel())
        new_high = np.stack(rows)
        alive_at = np.flatnonzero(self._promising(at, new_high, new_cost))
        self.states += len(alive_at)
        parent, option = alive_at // width, alive_at % width
        weights = np.array([one.held[chunk] - (one.chunk == chunk) for one in self.limits])
        new_held = held[:, parent] + weights[:, None] * stored[option]
        return new_high[:, alive_at], new_held, new_cost[alive_at], parent + start, options[option]

    def _promising(self, at: int, high: Ints, cost: Ints) -> NDArray[np.bool_]:
        aim = self.aim
        found = np.ones(len(cost), dtype=bool)
        for index in range(len(self.limits)):
            least = self._least(at, index)
            if aim.budget is None:
                if aim.below is not None:
                    found &= high[index] + least < aim.below
                continue
            found &= high[index] + least <= 0
            if aim.below is not None:
                found &= self._bound(at, index, high[index], cost) < aim.below
        return found

    def _ahead(self, at: int, high: Ints, cost: Ints) -> NDArray[np.float64]:
        # The least that each state can come to, as far as bytes alone say.
        rows = []
        for index in range(len(self.limits)):
            if self.aim.budget is None:
                rows.append((high[index] + self._least(at, index)).astype(np.float64))
            else:
                rows.append(self._bound(at, index, high[index], cost))
        found: NDArray[np.float64] = np.max(rows, axis=0)
        return found

    def _bound(self, at: int, index: int, high: Ints, cost: Ints) -> NDArray[np.float64]:
        mix = self._coming(at, index)
        now: NDArray[np.float64] = cost.astype(np.float64)
        if mix is None:
            return now
        weights, costs = mix.curve
        # Floating point may only ever make the bound looser: a margin far above its rounding error.
        now += np.interp((-high).astype(np.float64), weights, costs)
        now -= 1e-9 * (float(costs[0]) + 1.0)
        return now

    def _least(self, at: int, index: int) -> int:
        mix = self._coming(at, index)
        return 0 if mix is None else mix.least

    def _coming(self, at: int, index: int) -> Mix | None:
        """The layers after step ``at`` by the bytes that they weigh in a limit."""
        limit = self.limits[index]
        cache = self.problem.__dict__.setdefault("_coming", {})
        key = (at, index)
        if key not in cache:
            counts: dict[tuple[int, int], int] = {}
            kinds: dict[int, Ways] = {}
            for chunk, layer in self.steps[at + 1 :]:
                ways = self.problem.layers[chunk][layer]
                kinds[id(ways)] = ways
                place = (id(ways), limit.held[chunk])
                counts[place] = counts.get(place, 0) + 1
            parts = [(menu_of(kinds[i]), n, m) for (i, m), n in counts.items() if m]
            cache[key] = Mix(parts) if parts else None
        found: Mix | None = cache[key]
        return found

    def _undominated(self, at: int, high: Ints, held: Ints, cost: Ints) -> Ints:
        columns = list(high) + self._open(at, held)
        if len(columns) == 1:
            order = np.lexsort((cost, columns[0]))
            costs = cost[order]
            better = np.append(True, costs[1:] < np.minimum.accumulate(costs)[:-1])
            kept: Ints = order[better]
            return kept
        if len(columns) == 2:
            return pareto(columns[0], columns[1], cost)
        return _pareto([*columns, cost])

    def _open(self, at: int, held: Ints) -> list[Ints]:
        """``held`` of the limits whose chunk has layers to come, each different one once."""
        started = {chunk for chunk, _ in self.steps[: at + 1]}
        coming = {chunk for chunk, _ in self.steps[at + 1 :]}
        found: dict[tuple[float, ...], Ints] = {}
        for index, limit in enumerate(self.limits):
            if limit.chunk not in coming:
                continue
            weights = [
                n - (chunk == limit.chunk) for chunk, n in enumerate(limit.held) if chunk in started
            ]
            if any(weights):
                found.setdefault(tuple(w / max(weights) for w in weights), held[index])
        return list(found.values())


def _pareto(columns: Sequence[Ints]) -> Ints:
    """Indices of the points that no earlier kept one is at most equal to in all columns."""
    rows = np.stack(columns, axis=1)
    order = np.lexsort(tuple(rows.T))
    rows = rows[order]
    kept = np.empty((0, rows.shape[1]), dtype=np.int64)
    found: list[Ints] = []
    for start in range(0, len(rows), 128):
        part = rows[start : start + 128]
        alive = np.ones(len(part), dtype=bool)
        for place in range(0, len(kept), 4096):
            some = kept[place : place + 4096]
            left = np.flatnonzero(alive)
            if not len(left):
                break
            beaten = np.any(np.all(some[None] <= part[left][:, None], axis=2), axis=1)
            alive[left[beaten]] = False
        left = np.flatnonzero(alive)
        same = part[left]
        own = np.all(same[None] <= same[:, None], axis=2) & np.tri(len(same), k=-1, dtype=bool)
        left = left[~own.any(axis=1)]
        kept = np.concatenate([kept, part[left]])
        found.append(left + start)
    return order[np.concatenate(found)]
