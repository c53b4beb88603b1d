"""The cheapest combination of remedies that fits: exact, by branch and bound over their axes.

With some axes decided, no completion is faster than the one with the fastest option of every other
axis, and none is leaner than the one with the leanest. That holds because options act alike beside
others: what is faster alone is not slower beside them, what is leaner not larger; a test
enumerates all combinations of small runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any

from actcalc.plan.changes import Change
from actcalc.plan.remedies import Remedy
from actcalc.plan.trials import Trials

_FEW = 4  # options that are looked at one by one; of more, which are in order, halves are left out
POLICY = "policy"
"""The axis of recomputation, whose remedies are long lists of options, mildest first."""


def merged(parts: Sequence[Change]) -> dict[str, Any]:
    """Several changes as one; later ones win."""
    return {path: value for part in parts for path, value in part.items()}


class Axes:
    """Options of remedies on a run, mildest first, and the budget it must fit."""

    def __init__(self, trials: Trials, budget: int) -> None:
        self.trials = trials
        self.budget = budget
        self._options: dict[str, tuple[Change, ...]] = {}

    def options(self, remedy: Remedy) -> tuple[Change, ...]:
        """Options of one remedy on the run as it is, without those that cannot be."""
        if remedy.name not in self._options:
            own = self.trials.policy({})
            every = remedy.options(self.trials.staged)
            found = tuple(one for one in every if one.get(POLICY) != own)
            if len(found) <= _FEW:
                found = tuple(one for one in found if self.trials.need(one) is not None)
            self._options[remedy.name] = found if remedy.ordered else self._front(found)
        return self._options[remedy.name]

    def _front(self, options: Sequence[Change]) -> tuple[Change, ...]:
        """Options none of which is both slower and larger than another, fastest first."""
        sizes = [(self.trials.seconds(one) or 0.0, self.size(one), one) for one in options]
        front: list[Change] = []
        least = inf
        for _, size, change in sorted(sizes, key=lambda one: one[:2]):
            if size < least:
                front.append(change)
                least = size
        return tuple(front)

    def size(self, change: Change) -> float:
        """Bytes that a changed run needs; infinite where there is no such run."""
        need = self.trials.need(change)
        return inf if need is None else need.total_bytes

    def mildest(self, remedy: Remedy) -> Change | None:
        """The mildest option that is enough alone, else the leanest; None where there is none."""
        options = self.options(remedy)
        found = self.first_that_fits({}, options)
        if found is not None or not options:
            return found
        return min(options[-_FEW:], key=self.size)

    def first_that_fits(self, chosen: Change, options: Sequence[Change]) -> Change | None:
        """The first of ``options`` with which a run changed by ``chosen`` fits."""

        def fits(index: int) -> bool:
            return self.size({**chosen, **options[index]}) <= self.budget

        if len(options) <= _FEW:
            return next((options[i] for i in range(len(options)) if fits(i)), None)
        low, high = 0, len(options) - 1
        if not fits(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return options[low]


class Cheapest:
    """One search: the remedies that may be used, beside changes that are made in any case."""

    def __init__(self, axes: Axes, remedies: Sequence[Remedy], base: Change) -> None:
        self.axes, self.trials, self.base = axes, axes.trials, base
        self._timed = self.trials.seconds({}) is not None
        self._ranks: dict[int, int] = {}
        self._families: list[tuple[Change, ...]] = []
        grouped: dict[str, list[Change]] = {}
        for rank, remedy in enumerate(remedies, 1):
            options = tuple(one for one in axes.options(remedy) if not base.keys() & one.keys())
            self._ranks |= {id(change): rank for change in options}
            if remedy.axis == POLICY:
                self._families += [options] if options else []
            elif options:
                grouped.setdefault(remedy.axis, [{}]).extend(options)
        self._all = list(grouped.values())
        self._best: tuple[float, tuple[Change, ...]] | None = None

    def _size(self, parts: Sequence[Change]) -> float:
        return self.axes.size(merged((self.base, *parts)))

    def _cost(self, parts: Sequence[Change]) -> float:
        """Seconds of a step; where no time can be derived, how late its remedies come."""
        if not self._timed:
            return float(sum(self._ranks.get(id(part), 0) for part in parts))
        seconds = self.trials.seconds(merged((self.base, *parts)))
        return inf if seconds is None else seconds

    def _alone(self, change: Change) -> tuple[float, int]:
        return self._cost((change,)), self._ranks.get(id(change), 0)

    def _spread(self, row: Sequence[Change]) -> float:
        """How much the options of an axis differ in time: those that do are decided first."""
        costs = [self._cost((change,)) for change in row]
        return max(costs) - min(costs)

    @cached_property
    def _leanest(self) -> tuple[list[Change], Change]:
        """The option of every axis with which a run needs least, beside those of the others."""
        ends = [{}, *(family[-1] for family in self._families)]

        def leanest(options: Sequence[Change], others: Sequence[Change]) -> Change:
            """Of those that are as lean beside ``others`` the one that is leanest alone."""
            return min(options, key=lambda one: (self._size((*others, one)), self._size((one,))))

        least = [leanest(row, ()) for row in self._all]
        policy = leanest(ends, ())
        for _ in range(2):
            before = [*least, policy]
            for index, row in enumerate(self._all):
                least[index] = leanest(row, [*least[:index], *least[index + 1 :], policy])
            policy = leanest(ends, least)
            if before == [*least, policy]:
                break
        return least, policy

    @property
    def leanest(self) -> tuple[Change, ...]:
        """The changes with which a run needs least of all combinations."""
        least, policy = self._leanest
        return tuple(part for part in (*least, policy) if part)

    @cached_property
    def rows(self) -> list[list[Change]]:
        """Options by axis, as it is among them, fastest first, those axes first whose options
        differ most in time; without options that free nothing. Recomputation is apart."""
        found = [sorted(self._useful(i, row), key=self._alone) for i, row in enumerate(self._all)]
        return sorted(found, key=self._spread, reverse=True)

    def _useful(self, index: int, row: Sequence[Change]) -> list[Change]:
        """As it is, and options that free something, alone or beside the leanest of the others."""
        least, policy = self._leanest
        others = [*least[:index], *least[index + 1 :], policy]
        alone, beside = self._size(()), self._size(others)
        return [
            one
            for one in row
            if not one or self._size((one,)) < alone or self._size((*others, one)) < beside
        ]

    @property
    def possible(self) -> bool:
        """Whether the leanest of all combinations fits."""
        return self._size(self.leanest) <= self.axes.budget

    @cached_property
    def _fastest(self) -> tuple[list[Change], Change]:
        """The option of every axis that is fastest alone."""
        policies = [{}, *self._none, *(family[0] for family in self._families)]
        return [row[0] for row in self.rows], min(policies, key=self._alone)

    @cached_property
    def _lean_rows(self) -> list[Change]:
        """The leanest option of each of ``rows``."""
        known = {id(change) for change in self._leanest[0]}
        return [next(one for one in row if id(one) in known) for row in self.rows]

    @property
    def _none(self) -> tuple[Change, ...]:
        """Nothing re-run, where something is."""
        return ({POLICY: "none"},) if self.trials.policy({}) != "none" else ()

    def parts(self) -> tuple[Change, ...] | None:
        """The cheapest combination that fits, a change for each remedy in their order; None where
        none fits."""
        if self.possible:
            self._search(0, ())
        if self._best is None:
            return None
        parts = [part for part in self._best[1] if part]
        return tuple(sorted(parts, key=lambda part: self._ranks.get(id(part), 0)))

    def _search(self, index: int, chosen: tuple[Change, ...]) -> None:
        lean = (*chosen, *self._lean_rows[index:], self._leanest[1])
        if self._exists(lean) and self._size(lean) > self.axes.budget:
            return
        rows, policy = self._fastest
        fast = (*chosen, *rows[index:], policy)
        if self._exists(fast):
            cost = self._cost(fast)
            if self._best is not None and cost >= self._best[0]:
                return
            if self._size(fast) <= self.axes.budget:
                self._best = (cost, fast)
                return
        if index == len(self.rows):
            self._decide_policy(chosen)
            return
        for option in self.rows[index]:
            self._search(index + 1, (*chosen, option))

    def _exists(self, parts: Sequence[Change]) -> bool:
        """Whether there is such a run: one that cannot be bounds nothing."""
        return self.trials.made(merged((self.base, *parts))) is not None

    def _decide_policy(self, chosen: tuple[Change, ...]) -> None:
        """The cheapest policy beside what is ``chosen``."""
        change = merged((self.base, *chosen))
        for family in (({},), self._none, *self._families):
            policy = self.axes.first_that_fits(change, family)
            if policy is None:
                continue
            cost = self._cost((*chosen, policy))
            if self._best is None or cost < self._best[0]:
                self._best = (cost, (*chosen, policy))
