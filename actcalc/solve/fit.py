"""The cheapest choice for a stage within a budget, with a proof; and the least budget with one.

1. **One moment at a time.** Counting memory at one moment alone (while one layer runs, or with all
   layers of a chunk stored) leaves a knapsack with one constraint: its optimum is a lower bound.
   Its plan, laid out with the largest working sets first, is measured in full; where it fits, it is
   the optimum. Else the moment it exceeds most is tried next.
2. **A plan to beat.** The same knapsacks with as much less room as their plans exceed.
3. **Search.** :func:`actcalc.solve.order.search` rules out, or finds, everything in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from actcalc.solve.clock import give_up, limited, until
from actcalc.solve.knapsack import Mix
from actcalc.solve.order import Aim, Choice, menu, menu_of, search
from actcalc.solve.stage import GONE, WHOLE, StageProblem, Ways

SECONDS = 5.0
"""How long the search for a proof may take, by default."""

_MOMENTS = 6
_TRIES = 6
_BEAM = 400


class Solved(NamedTuple):
    """The cheapest choice found (None: nothing below the cutoff), and what is proven.

    No choice that fits costs less than ``bound`` by a whole grain. ``relaxed`` is what single
    moments alone prove, ``states`` how many partial choices the search looked at.
    """

    choice: Choice | None
    cost: int
    bound: int
    relaxed: int
    states: int


def solve_stage(
    problem: StageProblem, budget: int, *, below: int | None = None, seconds: float = SECONDS
) -> Solved | None:
    """The cheapest choice within ``budget`` bytes of every GPU, if it costs less than ``below``.

    None where it is proven that nothing fits (without ``below``). A search that takes longer than
    ``seconds`` ends with the best choice found and the bound known by then.
    """
    with limited(seconds) as effort:
        fit = _Fit(problem, budget, below)
        found = fit.solve()
    if found is None or effort.complete:
        return found
    # Some knapsack is not proven: only its relaxation is.
    return found._replace(bound=min(found.bound, fit.sure), relaxed=min(found.relaxed, fit.sure))


def least_peak(problem: StageProblem, *, seconds: float = SECONDS) -> tuple[int, Choice]:
    """The lowest peak of any choice, and the choice (the lowest found within ``seconds``)."""
    if not any(problem.layers):
        empty: Choice = [[] for _ in problem.layers]
        return problem.peak(empty), empty
    kinds = {id(ways): ways for row in problem.layers for ways in row}
    starts = [{key: int(ways.lean[0]) for key, ways in kinds.items()}]
    if len(kinds) == 1:
        (key, only), = kinds.items()  # fmt: skip
        starts = [{key: int(i)} for i in only.lean]
    best, choice = min(
        (problem.peak(one), one)
        for one in ([[start[id(w)] for w in row] for row in problem.layers] for start in starts)
    )
    end = min(time.monotonic() + seconds, until())
    for beam in (_BEAM, None):
        found = search(problem, Aim(None, best, beam, end))
        if found.choice is not None:
            best, choice = problem.peak(found.choice), found.choice
        if found.complete:
            break
    return best, choice


class _Fit:
    def __init__(self, problem: StageProblem, budget: int, below: int | None) -> None:
        self.problem, self.budget = problem, budget
        self.grain = problem.grain
        self.below = below
        self.sure = 0
        """What relaxations alone prove: no knapsack has to be solved for it."""
        self.best: tuple[int, Choice] | None = None
        self.bound = 0
        self.states = 0

    def solve(self) -> Solved | None:
        if max(gpu.floor for gpu in self.problem.gpus) > self.budget:
            return self._nothing()
        cheapest: Choice = [[ways.cheapest for ways in row] for row in self.problem.layers]
        self.bound = self.sure = self.problem.cost(cheapest)
        if self.below is not None and self.bound >= self.below:
            return self._nothing()
        if self._fits(cheapest):
            return self._done()
        if not any(self.problem.layers):
            return self._nothing()
        moments = self._moments(cheapest)
        if moments is None:
            return self._nothing() if self.best is None else self._done()
        if self._proven:
            return self._done()
        self._tighten(moments)
        relaxed = self.bound
        if not self._proven:
            self._search()
        return self._ended(relaxed)

    @property
    def _proven(self) -> bool:
        if self.best is None:
            return False
        return self.best[0] // self.grain <= self.bound // self.grain

    @property
    def _cutoff(self) -> int | None:
        """Plans from this cost on are of no use."""
        if self.best is None:
            return self.below
        return self.best[0] // self.grain * self.grain

    def _nothing(self) -> Solved | None:
        if self.below is None:
            return None
        return Solved(None, self.below, self.below, self.below, self.states)

    def _done(self) -> Solved:
        assert self.best is not None
        cost, choice = self.best
        return Solved(choice, cost, cost, min(self.bound, cost), self.states)

    def _ended(self, relaxed: int) -> Solved | None:
        if self.best is not None:
            cost, choice = self.best
            bound = cost if self._proven else self.bound
            return Solved(choice, cost, bound, min(relaxed, cost), self.states)
        if self.below is not None:
            bound = min(self.bound, self.below)
            return Solved(None, self.below, bound, min(relaxed, bound), self.states)
        return None

    def _fits(self, choice: Choice) -> bool:
        if self.problem.peak(choice) > self.budget:
            return False
        cost = self.problem.cost(choice)
        if self.best is None or cost < self.best[0]:
            self.best = cost, choice
        return True

    def _worst(self, choice: Choice) -> tuple[int, int]:
        """The moment that holds most: its limit, and where."""
        every = [
            (*limit.highest(choice, self.problem), index)
            for index, limit in enumerate(self.problem.limits)
        ]
        _, where, index = max(every, key=lambda one: one[0])
        return index, where

    def _moments(self, choice: Choice) -> list[tuple[int, tuple[int, int]]] | None:
        """Bounds of single moments, most first; None if they settle it."""
        tried: dict[tuple[int, int], int] = {}
        at = self._worst(choice)
        while at not in tried and len(tried) < _MOMENTS:
            found = self._relaxed(at, self.budget)
            if found is None:
                return None
            cost, choice, states = found
            self.states += states
            tried[at] = cost
            self.bound = max(self.bound, cost)
            if self._fits(choice):
                break
            at = self._worst(choice)
        return sorted(((cost, at) for at, cost in tried.items()), reverse=True)

    def _tighten(self, moments: Sequence[tuple[int, tuple[int, int]]]) -> None:
        """Plans that fit, from single moments with less room."""
        for _, at in moments:
            room = self.budget
            choice: Choice | None = None
            for _ in range(_TRIES):
                found = self._relaxed(at, room)
                if found is None:
                    break
                choice = found[1]
                self.states += found[2]
                over = self.problem.peak(choice) - self.budget
                if over <= 0:
                    self._fits(choice)
                    break
                room -= over
            if self._proven:
                return

    def _search(self) -> None:
        for beam in (_BEAM, None) if self.best is None else (None,):
            found = search(self.problem, Aim(self.budget, self._cutoff, beam, until()))
            self.states += found.states
            if found.choice is not None:
                self._fits(found.choice)
            if found.complete:
                # Nothing below the cutoff is left.
                if self.best is not None:
                    self.bound = max(self.bound, self.best[0])
                elif self.below is not None:
                    self.bound = max(self.bound, self.below)
                return
        if self.best is None and not self._fits(least_peak(self.problem)[1]):
            give_up()  # that nothing fits is not proven

    def _relaxed(self, at: tuple[int, int], room: int) -> tuple[int, Choice, int] | None:
        """The optimum when memory is counted at one moment alone; None if none is below the
        cutoff."""
        knapsack = _knapsack(self.problem, at)
        cutoff = self._cutoff
        below = None if cutoff is None else cutoff - knapsack.free
        picks: tuple[tuple[tuple[int, int], ...], ...] = ()
        states = cost = 0
        left = (room - knapsack.constant) // knapsack.common
        if knapsack.mix is None:
            if left < 0:
                return None
        else:
            least = knapsack.mix.bound(left)
            if least is not None and room == self.budget:
                self.sure = max(self.sure, least + knapsack.free)
            found = knapsack.mix.solve(left, below)
            if found is None:
                return None
            picks, states, cost = found.picks, found.states, found.cost
        choice: Choice = [[ways.cheapest for ways in row] for row in self.problem.layers]
        for slots, chosen in zip(knapsack.slots, picks, strict=True):
            ways = self.problem.layers[slots[0][0]][slots[0][1]]
            ranked = sorted((i for i, n in chosen for _ in range(n)), key=lambda i: -_more(ways, i))
            for (chunk, layer), i in zip(slots, ranked, strict=True):
                choice[chunk][layer] = i
        return cost + knapsack.free, choice, states


def _more(ways: Ways, index: int) -> int:
    way = ways.ways[index]
    return max(way.forward, way.backward) - way.stored


class _Knapsack(NamedTuple):
    mix: Mix | None
    slots: tuple[tuple[tuple[int, int], ...], ...]
    constant: int
    common: int
    free: int


def _knapsack(problem: StageProblem, at: tuple[int, int]) -> _Knapsack:
    """What is left of a problem at one moment (cached): layers by kind and weight."""
    cache: dict[Any, _Knapsack] = problem.__dict__.setdefault("_knapsacks", {})
    if at in cache:
        return cache[at]
    limit = problem.limits[at[0]]
    where = at[1]
    slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
    free = 0
    for chunk, row in enumerate(problem.layers):
        for layer, ways in enumerate(row):
            weight = limit.held[chunk]
            if chunk == limit.chunk and where != WHOLE:
                if layer == where:
                    continue
                weight -= where == GONE or layer > where
            if weight:
                slots.setdefault((id(ways), weight), []).append((chunk, layer))
            else:
                free += int(ways.cost[ways.cheapest])
    places = [tuple(sorted(s, key=lambda one: one[1])) for s in slots.values()]
    kinds = [problem.layers[s[0][0]][s[0][1]] for s in places]
    weights = [weight for _, weight in slots]
    constant = limit.whole if where == WHOLE else limit.gone if where == GONE else 0
    common = gcd(*weights) if where < 0 and weights else 1
    parts = [
        (menu_of(ways), len(s), weight // common)
        for ways, s, weight in zip(kinds, places, weights, strict=True)
    ]
    if where >= 0:
        ways = limit.layers[where]
        parts.append((menu(limit.alive(where), ways.cost, ways.grain), 1, 1))
        places.append(((limit.chunk, where),))
    mix = _shared(parts) if parts else None
    cache[at] = _Knapsack(mix, tuple(places), constant, common, free)
    return cache[at]


def _shared(parts: Sequence[tuple[Any, int, int]]) -> Mix:
    # Stages that differ in micro-batches alone share what is derived from their layers.
    cache: dict[Any, Mix] = parts[0][0].__dict__.setdefault("shared", {})
    key = tuple((id(one), n, m) for one, n, m in parts)
    if key not in cache:
        cache[key] = Mix(parts)
    return cache[key]
