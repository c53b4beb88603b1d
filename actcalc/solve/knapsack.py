"""Exact multiple-choice knapsack with multiplicities: one option for each of n equal layers.

Minimise the summed cost of ``n_g`` layers of each kind g, each taking one option (weight, cost),
with total weight within a capacity. All arithmetic that decides anything is on Python integers.

1. **Bound.** Relaxed to fractions, every kind uses only the lower convex hull of its options, and
   hull edges are taken in order of cost saved per byte until the capacity is spent (Sinha and
   Zoltners 1979). One edge, the *break*, is taken partly: its slope is the multiplier lambda.
2. **Core.** With lambda every option has a reduced cost ``rc >= 0``, the loss against the hull. Any
   solution costs the bound plus its reduced costs plus lambda times unused capacity; so only
   layers that deviate from the base with a total ``rc`` below the gap to the best known plan
   matter (Pisinger 1995, "A minimal algorithm for the multiple-choice knapsack problem").
3. **Search.** Deviations are added one layer at a time, states with equal weight merged; for each
   state the number of layers moved along the break edge follows in closed form. The gap shrinks
   as better plans are found, and an empty search proves the best one optimal.

Weights lie on a lattice (sizes share large factors), so capacity is first rounded down to it,
and costs are compared on theirs; both make the bound tight in practice.

Costs with a grain (FLOPs, and bytes moved where they tie) are solved in whole grains, exactly; the
finer part is then lowered among plans with as many layers of each whole cost, without a proof.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.errors import SpecError
from actcalc.solve.frontier import LayerFrontier, LayerOption, pareto
from actcalc.solve.problem import LIMIT, check_int

Ints = NDArray[np.int64]
Picks = tuple[tuple[tuple[int, int], ...], ...]
"""For each kind: (index of the option in its option set, how many layers)."""


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
        return cls(frontier.stored, frontier.working, paid, source, frontier.moved, grain)

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

    def as_last(self, weight: int, again: int = 0) -> OptionSet:
        """The options with their working set counted as stored (a layer whose backward is next).

        ``again`` comes on top where there is one.
        """
        stored = self._k * weight + self._w + np.where(self._w > 0, again, 0)
        return self._derived(("last", weight, again), stored, np.zeros_like(stored), self._c)

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


@dataclass(frozen=True, slots=True)
class _Edge:
    # Moving one layer of kind ``part`` from hull vertex ``at`` to ``at + 1``.
    part: int
    at: int
    weight: int
    saved: int
    count: int


@dataclass(frozen=True, slots=True)
class _Core:
    # Everything about one break edge that does not depend on the capacity.
    base: tuple[int, ...]
    upper: int
    deviations: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A solved knapsack: its cost, the picks, and how many states the proof looked at."""

    cost: int
    picks: Picks
    states: int


class Mix:
    """Menus with how many layers use each and the weight of a stored byte (micro-batches)."""

    def __init__(self, parts: Sequence[tuple[Menu, int, int]]) -> None:
        self.parts = tuple(parts)
        self.grain = max(menu.grain for menu, _, _ in parts)
        self.least = sum(n * m * menu.ks[0] for menu, n, m in parts)
        edges: list[tuple[int, _Edge]] = []
        for g, (menu, n, m) in enumerate(parts):
            ks, cs, hull = menu.ks, menu.cs, menu.hull
            for at in range(len(hull) - 1):
                weight = (ks[hull[at + 1]] - ks[hull[at]]) * m
                saved = cs[hull[at]] - cs[hull[at + 1]]
                # Floors of slopes times 2^128 order fractions of 64-bit integers exactly.
                edges.append((-((saved << 128) // weight), _Edge(g, at, weight, saved, n)))
        edges.sort(key=lambda e: e[0])
        self.edges = [e for _, e in edges]
        weight, cost = self.least, sum(n * menu.cs[0] for menu, n, _ in parts)
        self._weights, self._costs = [weight], [cost]
        for e in self.edges:
            weight += e.weight * e.count
            cost -= e.saved * e.count
            self._weights.append(weight)
            self._costs.append(cost)
        self.lattice = math.gcd(*(m * menu.lattice[0] for menu, _, m in parts))
        self.cost_lattice = math.gcd(*(menu.lattice[1] for menu, _, _ in parts)) or 1
        self._cores: dict[int, _Core] = {}
        self._halves: dict[tuple[int, int], _Halves] = {}

    @property
    def cheapest(self) -> int:
        """Cost with unlimited capacity."""
        return self._costs[-1]

    @cached_property
    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Corners (capacity, cost) of the relaxed cost, which is convex and falls between them."""
        return np.array(self._weights, dtype=np.float64), np.array(self._costs, dtype=np.float64)

    def bound(self, capacity: int) -> int | None:
        """A lower bound on the cost within ``capacity``; None if nothing fits."""
        if capacity < self.least:
            return None
        if capacity >= self._weights[-1]:
            return self._costs[-1]
        capacity = self._round(capacity)
        at = bisect_right(self._weights, capacity) - 1
        edge = self.edges[at]
        least = self._costs[at] - edge.saved * (capacity - self._weights[at]) // edge.weight
        whole = self._coarse.bound(capacity) if self.grain > 1 else None
        return least if whole is None else max(least, whole * self.grain)

    @cached_property
    def _coarse(self) -> Mix:
        return Mix([(menu.coarse, n, m) for menu, n, m in self.parts])

    def _in_grains(self, capacity: int, cutoff: int | None) -> Found | None:
        below = None if cutoff is None else -(-cutoff // self.grain)
        whole = self._coarse.solve(capacity, below)
        if whole is None:
            return None
        owners = [(g, cost, n) for g, picks in enumerate(whole.picks) for cost, n in picks]
        rows = [(self.parts[g][0].within(cost), n, self.parts[g][2]) for g, cost, n in owners]
        fine = Mix(rows).solve(capacity, rough=True)
        assert fine is not None, "the leanest options of these costs fit"
        picks: list[tuple[tuple[int, int], ...]] = [()] * len(self.parts)
        for (g, _, _), picked in zip(owners, fine.picks, strict=True):
            picks[g] += picked
        cost = whole.cost * self.grain + fine.cost
        return Found(cost, tuple(picks), whole.states + fine.states)

    def solve(
        self, capacity: int, cutoff: int | None = None, *, rough: bool = False
    ) -> Found | None:
        """The cheapest choice within ``capacity``; None if none costs less than ``cutoff``.

        No other costs less by a whole grain. ``rough`` is content with a good one.
        """
        if capacity < self.least:
            return None
        if capacity >= self._weights[-1]:
            if cutoff is not None and self._costs[-1] >= cutoff:
                return None
            full = self._base(len(self.edges))
            picks = tuple(
                ((menu.index[b], n),) for (menu, n, _), b in zip(self.parts, full, strict=True)
            )
            return Found(self._costs[-1], picks, 0)
        if self.grain > 1:
            return self._in_grains(capacity, cutoff)
        capacity = self._round(capacity)
        at = bisect_right(self._weights, capacity) - 1
        room = capacity - self._weights[at]
        return _search(self, at, room, self._costs[at], cutoff, rough=rough)

    def core(self, at: int) -> _Core:
        """Reduced costs of every option against break edge ``at`` that could matter; cached."""
        if at not in self._cores:
            self._cores[at] = self._make_core(at)
        return self._cores[at]

    def halves(self, at: int, core: _Core, limit: int) -> tuple[_Halves, int]:
        """Fronts of both halves up to ``limit`` or a little more, cached; and states looked at.

        Limits are rounded up to the next of a row of steps, so that other capacities around the
        same break edge find their fronts made.
        """
        edge = self.edges[at]
        most = edge.saved * edge.weight
        step = math.floor(2 * math.log2(most / max(1, limit)))
        key = (at, step)
        if key in self._halves:
            return self._halves[key], 0
        if len(self._halves) >= MANY_HALVES:
            self._halves.clear()
        made = _make_halves(self, edge, core, max(limit, math.ceil(most / 2 ** (step / 2))))
        self._halves[key] = made
        return made, made.states

    def _round(self, capacity: int) -> int:
        if not self.lattice:
            return capacity
        return capacity - (capacity - self.least) % self.lattice

    def _base(self, taken: int) -> tuple[int, ...]:
        vertex = [0] * len(self.parts)
        for e in self.edges[:taken]:
            vertex[e.part] = e.at + 1
        return tuple(menu.hull[v] for (menu, _, _), v in zip(self.parts, vertex, strict=True))

    def _make_core(self, at: int) -> _Core:
        edge = self.edges[at]
        base = self._base(at)
        upper = self.parts[edge.part][0].hull[edge.at + 1]
        q, p = edge.weight, edge.saved
        lists: list[tuple[tuple[int, int, int], ...]] = []
        for g, (menu, _, m) in enumerate(self.parts):
            k0, c0 = menu.ks[base[g]], menu.cs[base[g]]
            # The greedy plan leaves less than one edge unused: nothing above p * q can matter.
            more = (menu.stored - k0).astype(np.float64) * m
            cost = (menu.cost - c0).astype(np.float64)
            slack = (abs(more) * p + abs(cost) * q + float(p) * q) * 1e-12
            near = np.flatnonzero(cost * q + more * p <= float(p) * q + slack)
            found: list[tuple[int, int, int]] = []
            for i in near.tolist():
                if i == base[g] or (g == edge.part and i == upper):
                    continue
                dw = (menu.ks[i] - k0) * m
                rc = q * (menu.cs[i] - c0) + p * dw
                if rc <= p * q:
                    found.append((rc, dw, i))
            lists.append(tuple(sorted(found)))
        return _Core(base, upper, tuple(lists))


_Trace = tuple[Any, int, int] | None


def _search(
    mix: Mix, at: int, room: int, base_cost: int, cutoff: int | None, *, rough: bool
) -> Found | None:
    """Close the gap around break edge ``at``; see the module's docstring, step 3.

    ``room`` is the capacity left when every layer sits at the base; values ``v`` below are
    scaled costs above the bound: edge.weight * (cost - bound) = reduced costs + lambda * unused.
    """
    edge = mix.edges[at]
    core = mix.core(at)
    q, p, step = edge.weight, edge.saved, mix.cost_lattice
    layers = sum(n for _, n, _ in mix.parts)
    floor = q * base_cost - p * room
    best_cost = cutoff
    best: tuple[int, _Trace] | None = None
    limit = q * (best_cost - 1) - floor if best_cost is not None else p * q
    states = 0

    def visit(shift: int, rc: int, layers: int, trace: _Trace) -> None:
        nonlocal best_cost, best, limit
        left = room - shift
        if left < 0:
            return
        moved = min(left // q, layers)
        cost = (floor + rc + p * (left - moved * q)) // q
        if best_cost is None or cost < best_cost:
            best_cost, best = cost, (moved, trace)
            # The next better plan costs at least one lattice step less.
            limit = min(limit, q * (cost - step) - floor)

    visit(0, 0, edge.count, None)
    order = [g for g in range(len(mix.parts)) if g != edge.part] + [edge.part]
    for g in order:
        for rc, shift, i in core.deviations[g]:
            if rc > limit:
                break
            visit(shift, rc, edge.count - (g == edge.part), (None, g, i))

    def halved() -> Found | None:
        below = None if best_cost is None else best_cost - base_cost
        chosen: list[dict[int, int]] | None = None
        seen, left = states, limit
        fine = p // step >= FINE_COSTS and layers > FEW_LAYERS
        for part in DEEPENING if fine else (1,):
            depth = left // part
            found = _halves(mix, at, core, room, below, depth)
            seen += found.states
            if found.counts is not None and found.gain is not None:
                chosen, below = found.counts, found.gain
                left = min(left, q * (base_cost + below - step) - floor)
            if left <= depth:
                break
        if chosen is not None and below is not None:
            return Found(base_cost + below, _counted(mix, chosen), seen)
        if best is None or best_cost is None:
            return None
        return Found(best_cost, _picks(mix, core, edge, *best), seen)

    if rough and best is not None and best_cost is not None:
        return Found(best_cost, _picks(mix, core, edge, *best), 0)
    if layers <= FEW_LAYERS:
        return halved()
    merged: dict[int, tuple[int, _Trace]] = {0: (0, None)}
    for g in order:
        deviations = core.deviations[g]
        if not deviations or deviations[0][0] > limit:
            continue
        last = g == edge.part
        level = {s: state for s, state in merged.items() if state[0] <= limit}
        merged = dict(level)
        for used in range(1, mix.parts[g][1] + 1):
            new: dict[int, tuple[int, _Trace]] = {}
            free = edge.count - used if last else edge.count
            for shift, (rc, trace) in level.items():
                for more, dw, i in deviations:
                    total = rc + more
                    if total > limit:
                        break
                    to = shift + dw
                    states += 1
                    known = merged.get(to)
                    if known is not None and known[0] <= total:
                        continue
                    state = (total, (trace, g, i))
                    merged[to] = new[to] = state
                    visit(to, total, free, state[1])
            if states > MANY_STATES:
                return halved()
            if not new:
                break
            level = new
    if best is None or best_cost is None:
        return None
    return Found(best_cost, _picks(mix, core, edge, *best), states)


FEW_LAYERS = 12
"""Up to so many layers a mix is searched in two halves from the start: with few layers the gap is
wide, the core large, and sums of single deviations too many."""

DEEPENING = (16, 4, 1)
"""Of many layers the halves are searched to these parts of the limit, one after another: a plan
found within a small limit lowers the limit, and where the gap is small that is the proof."""

FINE_COSTS = 1 << 16
"""Cost steps of the break edge from which on that is tried: with few, ties fill any limit."""

MANY_STATES = 30_000
"""States of the search by single deviations after which the two halves take over."""


MANY_HALVES = 64
"""Fronts of halves kept for one mix."""


class _Choices(NamedTuple):
    # What one layer of a kind may take: its option, and bytes and cost against the base.
    shift: Ints
    cost: Ints
    option: list[int]


class _Front(NamedTuple):
    # Undominated sums of some layers by rising shift, and the fronts they grew through.
    shift: Ints
    cost: Ints
    grown: tuple[tuple[int, Ints, Ints], ...]


@dataclass(frozen=True, slots=True)
class _Halved:
    gain: int | None
    counts: list[dict[int, int]] | None
    states: int


@dataclass(frozen=True, slots=True)
class _Halves:
    # Both halves' fronts around one break edge, up to some reduced cost.
    choices: tuple[_Choices, ...]
    first: _Front
    second: _Front
    states: int


def _halves(mix: Mix, at: int, core: _Core, room: int, below: int | None, limit: int) -> _Halved:
    """The cheapest plan costing less than ``below`` above the base, from two halves of the layers.

    Every layer takes the base, the upper end of the break edge, or a deviation; a plan that beats
    the best known one has reduced costs of at most ``limit`` in all. The undominated sums of each
    half are few; for each of the first, the best second that still fits is a binary search
    (Horowitz and Sahni 1974, "Computing partitions with applications to the knapsack problem").
    """
    if limit < 0:
        return _Halved(None, None, 0)
    known, states = mix.halves(at, core, limit)
    unit, price = mix.lattice or 1, mix.cost_lattice
    first, second = known.first, known.second
    place = np.searchsorted(second.shift, room // unit - first.shift, side="right") - 1
    fits = np.flatnonzero(place >= 0)
    if not len(fits):
        return _Halved(None, None, states)
    sums = first.cost[fits] + second.cost[place[fits]]
    best = int(np.argmin(sums))
    gain = int(sums[best]) * price
    if below is not None and gain >= below:
        return _Halved(None, None, states)
    counts: list[dict[int, int]] = [{} for _ in mix.parts]
    for half, entry in ((first, int(fits[best])), (second, int(place[fits[best]]))):
        weight, paid = int(half.shift[entry]), int(half.cost[entry])
        for g, shifts, costs in reversed(half.grown):
            own = known.choices[g]
            option = _parted(own, shifts, costs, weight, paid)
            weight -= int(own.shift[option])
            paid -= int(own.cost[option])
            i = own.option[option]
            counts[g][i] = counts[g].get(i, 0) + 1
    return _Halved(gain, counts, states)


def _make_halves(mix: Mix, edge: _Edge, core: _Core, limit: int) -> _Halves:
    """The undominated sums of each half of the layers with reduced costs of at most ``limit``.

    Shifts and costs are counted in steps of their lattices.
    """
    unit, price = mix.lattice or 1, mix.cost_lattice
    choices: list[_Choices] = []
    for g, (menu, _, m) in enumerate(mix.parts):
        base = core.base[g]
        index = [base, core.upper] if g == edge.part else [base]
        index += [i for rc, _, i in core.deviations[g] if rc <= limit]
        shift = (menu.stored[index] - menu.ks[base]) * m // unit
        choices.append(_Choices(shift, (menu.cost[index] - menu.cs[base]) // price, index))
    owners = [g for g, (_, n, _) in enumerate(mix.parts) for _ in range(n)]
    # A reduced cost is p * shift + q * cost; floating point may only ever make the limit looser.
    per_shift, per_cost = float(edge.saved) * unit, float(edge.weight) * price
    loosest = float(limit) * (1 + 1e-9) + 1e-9 * (per_shift + per_cost)
    states = 0

    def front(members: list[int]) -> _Front:
        nonlocal states
        zero = np.zeros(1, dtype=np.int64)
        found = _Front(zero, zero, ())
        for g in members:
            own = choices[g]
            loss = found.shift * per_shift + found.cost * per_cost
            more = own.shift * per_shift + own.cost * per_cost
            alive = np.flatnonzero((loss[:, None] + more).ravel() <= loosest)
            states += len(alive)
            shift = (found.shift[:, None] + own.shift).ravel()[alive]
            cost = (found.cost[:, None] + own.cost).ravel()[alive]
            grown = (*found.grown, (g, found.shift, found.cost))
            found = _Front(*_undominated(shift, cost), grown)
        return found

    middle = len(owners) // 2
    first = front(owners[:middle])
    second = first if owners[:middle] == owners[middle:] else front(owners[middle:])
    return _Halves(tuple(choices), first, second, states)


def _undominated(shift: Ints, cost: Ints) -> tuple[Ints, Ints]:
    """The pairs that no other is at most equal to in both, by rising shift and falling cost.

    Sorting is what takes time. So most are dropped before it, those that something in a lighter
    bucket of shifts is as cheap as; and the rest is sorted as one number where both fit 62 bits.
    """
    if not len(shift):
        return shift, cost
    low, cheap = int(shift.min()), int(cost.min())
    wide = (int(shift.max()) - low).bit_length()
    if len(shift) > 1 << _BUCKET_BITS:
        bucket = shift - low
        bucket >>= max(0, wide - _BUCKET_BITS)
        least = np.full((1 << _BUCKET_BITS) + 1, LIMIT)
        np.minimum.at(least[1:], bucket, cost)
        near = np.flatnonzero(cost < np.minimum.accumulate(least)[bucket])
        shift, cost = shift[near], cost[near]
    bits = (int(cost.max()) - cheap).bit_length()
    if wide + bits <= 62:
        both = ((shift - low) << bits) + (cost - cheap)
        both.sort()
        shift, cost = (both >> bits) + low, (both & ((1 << bits) - 1)) + cheap
    else:
        order = np.lexsort((cost, shift))
        shift, cost = shift[order], cost[order]
    better = np.ones(len(cost), dtype=bool)
    better[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    return shift[better], cost[better]


_BUCKET_BITS = 11


def _parted(own: _Choices, shifts: Ints, costs: Ints, shift: int, cost: int) -> int:
    # The choice that, added to an entry of a front, makes this sum.
    at = np.searchsorted(shifts, shift - own.shift)
    at = np.minimum(at, len(shifts) - 1)
    made = (shifts[at] + own.shift == shift) & (costs[at] + own.cost == cost)
    return int(np.argmax(made))


def _counted(mix: Mix, counts: list[dict[int, int]]) -> Picks:
    return tuple(
        tuple((menu.index[i], c) for i, c in sorted(count.items()))
        for (menu, _, _), count in zip(mix.parts, counts, strict=True)
    )


def _picks(mix: Mix, core: _Core, edge: _Edge, moved: int, trace: _Trace) -> Picks:
    counts: list[dict[int, int]] = [{} for _ in mix.parts]
    while trace is not None:
        trace, g, i = trace
        counts[g][i] = counts[g].get(i, 0) + 1
    if moved:
        counts[edge.part][core.upper] = moved
    picks: list[tuple[tuple[int, int], ...]] = []
    for (menu, n, _), base, count in zip(mix.parts, core.base, counts, strict=True):
        rest = n - sum(count.values())
        if rest:
            count[base] = rest
        picks.append(tuple((menu.index[i], c) for i, c in sorted(count.items())))
    return tuple(picks)


def mix_of(parts: Sequence[tuple[OptionSet, int, int]], working: int) -> Mix | None:
    """The mix of option sets under a working-set limit, cached; None if a kind has no option.

    ``parts`` are (options, layers, weight of a stored byte).
    """
    menus = [options.menu(working) for options, _, _ in parts]
    key = tuple((id(menu), n, m) for menu, (_, n, m) in zip(menus, parts, strict=True))
    cache = parts[0][0].mixes
    mix = cache.get(key)
    if mix is None:
        ready = [
            (menu, n, m) for menu, (_, n, m) in zip(menus, parts, strict=True) if menu is not None
        ]
        if len(ready) < len(parts):
            return None
        mix = cache[key] = Mix(ready)
    return mix
