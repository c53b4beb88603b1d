"""The ways to run one kind of layer, and those that matter under a limit on working sets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actcalc.errors import SpecError
from actcalc.solve.frontier import LayerFrontier, LayerOption, pareto
from actcalc.solve.problem import check_int

if TYPE_CHECKING:
    from actcalc.solve.knapsack import Mix

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a layer: bytes stored and working, cost, and whatever it stands for.

    ``moved`` bytes are offloaded to host memory; they are among ``working``, not ``stored``.
    """

    stored: int
    working: int
    cost: int
    payload: Any = None
    moved: int = 0


class OptionSet:
    """The undominated options of one kind of layer, by (stored, stored + working, cost).

    Build it from ready-made options (named policies) or from an exact layer frontier; keep it and
    pass it again, since everything derived from it is cached on it.
    """

    def __init__(
        self,
        stored: Ints,
        working: Ints,
        cost: Ints,
        source: Sequence[Any],
        moved: Ints | None = None,
        grain: int = 1,
    ) -> None:
        keep = pareto(stored, stored + working, cost, moved)
        self.stored: list[int] = stored[keep].tolist()
        self.working: list[int] = working[keep].tolist()
        self.cost: list[int] = cost[keep].tolist()
        self.grain = grain
        self._source = source
        self._index: list[int] = keep.tolist()
        self._k, self._w, self._c = stored[keep], working[keep], cost[keep]
        self._x = np.zeros_like(self._k) if moved is None else moved[keep]
        self.levels: list[int] = np.unique(self._w).tolist()
        self._menus: dict[int, Menu] = {}
        self.mixes: dict[tuple[tuple[int, int, int], ...], Mix] = {}
        self.scratch: dict[Any, Any] = {}
        self.loose: tuple[tuple[Ints, Ints], ...] = ()
        """See :attr:`actcalc.solve.frontier.LayerFrontier.loose`."""

    @cached_property
    def moved(self) -> list[int]:
        """Bytes of every option that are offloaded to host memory."""
        found: list[int] = self._x.tolist()
        return found

    @cached_property
    def moved_levels(self) -> list[int]:
        """The different bytes that options offload, rising."""
        found: list[int] = np.unique(self._x).tolist()
        return found

    @classmethod
    def of(cls, options: Sequence[Option]) -> OptionSet:
        """The undominated ones of ``options``.

        Raises:
            SpecError: there is none, or a number is not a whole number in range.
        """
        if not options:
            raise SpecError("an option set without options", hint="give at least one option")
        for option in options:
            for name in ("stored", "working", "cost", "moved"):
                check_int(getattr(option, name), f"{name} of option {option.payload!r}")
        rows = [(o.stored, o.working, o.cost, o.moved) for o in options]
        stored, working, cost, moved = np.array(rows, dtype=np.int64).T
        return cls(stored, working, cost, options, moved)

    @classmethod
    def from_frontier(cls, frontier: LayerFrontier, cost: Ints | None = None) -> OptionSet:
        """The options of an exact layer frontier; ``cost`` replaces what it counts."""
        source = _Lazy(frontier.__getitem__, len(frontier))
        paid = frontier.cost if cost is None else cost
        grain = frontier.layer.grain
        found = cls(frontier.stored, frontier.working, paid, source, frontier.moved, grain)
        found.loose = frontier.loose
        return found

    def joined(self, options: Sequence[Option]) -> OptionSet:
        """These and ``options``, the undominated ones of both."""
        rows = np.array([(o.stored, o.working, o.cost, o.moved) for o in options], dtype=np.int64)
        own = (self._k, self._w, self._c, self._x)
        stored, working, cost, moved = (
            np.concatenate(pair) for pair in zip(own, rows.T, strict=True)
        )
        count = len(self)
        source = _Lazy(
            lambda i: self.source(i) if i < count else options[i - count], count + len(options)
        )
        found = OptionSet(stored, working, cost, source, moved, self.grain)
        found.loose = self.loose
        return found

    def __len__(self) -> int:
        return len(self.stored)

    @cached_property
    def cheapest(self) -> int:
        """Index of the cheapest option, the one with least working bytes among equals."""
        return min(range(len(self)), key=lambda i: (self.cost[i], self.working[i]))

    def source(self, index: int) -> Option | LayerOption:
        """What option ``index`` was built from: an :class:`Option` or a :class:`LayerOption`."""
        found: Option | LayerOption = self._source[self._index[index]]
        return found

    def menu(self, working: int) -> Menu | None:
        """The options that matter when no layer may work with more than ``working`` bytes.

        They are undominated by (stored, cost), cheapest last; None if no option is that small.
        """
        at = bisect_right(self.levels, working) - 1
        if at < 0:
            return None
        menu = self._menus.get(at)
        if menu is None:
            allowed = np.flatnonzero(self._w <= self.levels[at])
            costs = self._c[allowed]
            best = np.minimum.accumulate(costs)
            better = np.ones(len(allowed), dtype=bool)
            better[1:] = costs[1:] < best[:-1]
            # Options with equal stored bytes come by falling cost: the last one counts.
            chosen = allowed[better]
            chosen = chosen[np.append(np.diff(self._k[chosen]) > 0, True)]
            columns = (self._k[chosen], self._c[chosen])
            if len(self._menus) * len(self) > _MOST_KEPT:
                self._menus.clear()
            menu = self._menus[at] = Menu(*columns, chosen.tolist(), self.grain)
        return menu

    def moving(self, limit: int) -> OptionSet:
        """An option set of those that offload at most ``limit`` bytes."""
        if limit >= self.moved_levels[-1] == 0:
            return self
        at = bisect_right(self.moved_levels, limit)
        key = ("moving", at)
        if key not in self.scratch:
            place = np.flatnonzero(self._x <= self.moved_levels[at - 1])
            source = _Lazy(lambda i: self.source(int(place[i])), len(place))
            columns = (self._k[place], self._w[place], self._c[place])
            made = OptionSet(*columns, source, grain=self.grain)
            made._index = place[made._index].tolist()
            made._source = _Lazy(self.source, len(self))
            self.scratch[key] = made
        found: OptionSet = self.scratch[key]
        return found

    def only(self, index: int) -> OptionSet:
        """An option set of option ``index`` alone."""
        at = np.array([index])
        return self._derived(("only", index), self._k[at], self._w[at], self._c[at])

    def together(self, layers: int, weight: int) -> OptionSet:
        """One choice for ``layers`` layers at once, a stored byte weighing ``weight`` in all."""
        return self._derived(
            ("together", layers, weight), self._k * weight, self._w, self._c * layers
        )

    def origin(self, index: int) -> int:
        """For a derived set: the index, in the set it came from, of option ``index``."""
        return self._index[index]

    def least_stored(self, working: Ints) -> Ints:
        """Fewest stored bytes with at most each of these working bytes; all must be reachable."""
        order = np.argsort(self._w, kind="stable")
        least = np.minimum.accumulate(self._k[order])
        at = np.searchsorted(self._w[order], working, side="right") - 1
        found: Ints = least[at]
        return found

    @property
    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Stored bytes, working bytes and cost of every option."""
        return self._k, self._w, self._c

    def _derived(self, key: tuple[Any, ...], stored: Ints, working: Ints, cost: Ints) -> OptionSet:
        if key not in self.scratch:
            source: Sequence[Any] = _Lazy(self.source, len(self))
            made = OptionSet(stored, working, cost, source, grain=self.grain)
            if key[0] == "only":
                made._source, made._index = source, [key[1]]
            self.scratch[key] = made
        found: OptionSet = self.scratch[key]
        return found


_MOST_KEPT = 500_000
"""Options of all menus that are kept for one set of options."""


class _Lazy(Sequence[Any]):
    # Rebuilds only the options asked for.
    def __init__(self, get: Callable[[int], Any], length: int) -> None:
        self._get, self._length = get, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._get(index)


@dataclass(eq=False)
class Menu:
    """Options sorted by rising stored bytes and falling cost, with their lower convex hull."""

    stored: Ints
    cost: Ints
    index: list[int]
    grain: int = 1
    hull: list[int] = field(init=False)

    def __post_init__(self) -> None:
        ks, cs = self.ks, self.cs
        hull: list[int] = []
        for i in range(len(ks)):
            while len(hull) > 1:
                a, b = hull[-2], hull[-1]
                # b stays only if it lies strictly below the line from a to i.
                if (cs[a] - cs[b]) * (ks[i] - ks[b]) > (cs[b] - cs[i]) * (ks[b] - ks[a]):
                    break
                hull.pop()
            hull.append(i)
        self.hull = hull

    @cached_property
    def ks(self) -> list[int]:
        """Stored bytes as Python integers."""
        found: list[int] = self.stored.tolist()
        return found

    @cached_property
    def cs(self) -> list[int]:
        """Costs as Python integers."""
        found: list[int] = self.cost.tolist()
        return found

    @cached_property
    def corners(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Stored bytes and cost of the hull's corners, as floats for looser bounds only."""
        return self.stored[self.hull].astype(np.float64), self.cost[self.hull].astype(np.float64)

    @cached_property
    def lattice(self) -> tuple[int, int]:
        """Greatest common divisors of the differences of stored bytes and of costs."""
        return (
            int(np.gcd.reduce(self.stored - self.stored[0])),
            int(np.gcd.reduce(self.cost - self.cost[0])),
        )

    @cached_property
    def coarse(self) -> Menu:
        """The leanest option of each whole cost, costs in grains; indices are those costs."""
        whole = self.cost // self.grain
        first = np.append(True, np.diff(whole) < 0)
        return Menu(self.stored[first], whole[first], whole[first].tolist())

    def within(self, whole: int) -> Menu:
        """The options of one whole cost, with what their costs have above it."""
        if whole not in self._within:
            at = np.flatnonzero(self.cost // self.grain == whole)
            cost = self.cost[at] - whole * self.grain
            self._within[whole] = Menu(self.stored[at], cost, [self.index[i] for i in at.tolist()])
        return self._within[whole]

    @cached_property
    def _within(self) -> dict[int, Menu]:
        return {}
