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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actcalc.solve.clock import give_up, spent
from actcalc.solve.halves import Halves, make_halves, search_halves
from actcalc.solve.options import Menu, OptionSet

Ints = NDArray[np.int64]
Picks = tuple[tuple[tuple[int, int], ...], ...]
"""For each kind: (index of the option in its option set, how many layers)."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Moving one layer of kind ``part`` from hull vertex ``at`` to ``at + 1``."""

    part: int
    at: int
    weight: int
    saved: int
    count: int


@dataclass(frozen=True, slots=True)
class Core:
    """Everything about one break edge that does not depend on the capacity."""

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
        edges: list[tuple[int, Edge]] = []
        for g, (menu, n, m) in enumerate(parts):
            ks, cs, hull = menu.ks, menu.cs, menu.hull
            for at in range(len(hull) - 1):
                weight = (ks[hull[at + 1]] - ks[hull[at]]) * m
                saved = cs[hull[at]] - cs[hull[at + 1]]
                # Floors of slopes times 2^128 order fractions of 64-bit integers exactly.
                edges.append((-((saved << 128) // weight), Edge(g, at, weight, saved, n)))
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
        self._cores: dict[int, Core] = {}
        self._halves: dict[tuple[int, int], Halves] = {}

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
        return _Search(self, at, room, self._costs[at], cutoff).run(rough=rough)

    def core(self, at: int) -> Core:
        """Reduced costs of every option against break edge ``at`` that could matter; cached."""
        if at not in self._cores:
            self._cores[at] = self._make_core(at)
        return self._cores[at]

    def halves(self, at: int, core: Core, limit: int) -> tuple[Halves, int]:
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
        made = make_halves(self, edge, core, max(limit, math.ceil(most / 2 ** (step / 2))))
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

    def _make_core(self, at: int) -> Core:
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
        return Core(base, upper, tuple(lists))


_Trace = tuple[Any, int, int] | None


class _Search:
    """Close the gap around break edge ``at``; see the module's docstring, step 3.

    ``room`` is the capacity left when every layer sits at the base; values ``v`` below are
    scaled costs above the bound: edge.weight * (cost - bound) = reduced costs + lambda * unused.
    """

    def __init__(self, mix: Mix, at: int, room: int, base_cost: int, cutoff: int | None) -> None:
        self.mix, self.at, self.room, self.base_cost = mix, at, room, base_cost
        self.edge = edge = mix.edges[at]
        self.core = mix.core(at)
        self.step = mix.cost_lattice
        self.layers = sum(n for _, n, _ in mix.parts)
        self.floor = edge.weight * base_cost - edge.saved * room
        self.best_cost = cutoff
        self.best: tuple[int, _Trace] | None = None
        most = edge.saved * edge.weight
        self.limit = most if cutoff is None else edge.weight * (cutoff - 1) - self.floor
        self.states = 0

    def run(self, *, rough: bool) -> Found | None:
        """The optimum below the cutoff; None if there is none. ``rough`` stops at a good one."""
        self._visit(0, 0, self.edge.count, None)
        part = self.edge.part
        order = [g for g in range(len(self.mix.parts)) if g != part] + [part]
        for g in order:
            for rc, shift, i in self.core.deviations[g]:
                if rc > self.limit:
                    break
                self._visit(shift, rc, self.edge.count - (g == part), (None, g, i))
        if rough and self.best is not None:
            return self._found(0)
        if self.layers <= FEW_LAYERS or not self._deviate(order):
            return self._halved()
        return self._found(self.states)

    @property
    def _over(self) -> bool:
        """Whether the time is over, which leaves the best plan found without a proof."""
        if spent():
            give_up()
            return True
        return False

    def _visit(self, shift: int, rc: int, layers: int, trace: _Trace) -> None:
        left = self.room - shift
        if left < 0:
            return
        q, p = self.edge.weight, self.edge.saved
        moved = min(left // q, layers)
        cost = (self.floor + rc + p * (left - moved * q)) // q
        if self.best_cost is None or cost < self.best_cost:
            self.best_cost, self.best = cost, (moved, trace)
            # The next better plan costs at least one lattice step less.
            self.limit = min(self.limit, q * (cost - self.step) - self.floor)

    def _found(self, states: int) -> Found | None:
        if self.best is None or self.best_cost is None:
            return None
        return Found(self.best_cost, _picks(self.mix, self.core, self.edge, *self.best), states)

    def _halved(self) -> Found | None:
        base = self.base_cost
        below = None if self.best_cost is None else self.best_cost - base
        chosen: list[dict[int, int]] | None = None
        seen, left = self.states, self.limit
        fine = self.edge.saved // self.step >= FINE_COSTS and self.layers > FEW_LAYERS
        for part in DEEPENING if fine else (1,):
            if self._over:
                break
            depth = left // part
            found = search_halves(self.mix, self.at, self.core, self.room, below, depth)
            seen += found.states
            if found.counts is not None and found.gain is not None:
                chosen, below = found.counts, found.gain
                left = min(left, self.edge.weight * (base + below - self.step) - self.floor)
            if left <= depth:
                break
        if chosen is not None and below is not None:
            return Found(base + below, _counted(self.mix, chosen), seen)
        return self._found(seen)

    def _deviate(self, order: Sequence[int]) -> bool:
        """Add deviations one layer at a time; False if that takes too many states."""
        merged: dict[int, tuple[int, _Trace]] = {0: (0, None)}
        for g in order:
            deviations = self.core.deviations[g]
            if not deviations or deviations[0][0] > self.limit:
                continue
            level = {s: state for s, state in merged.items() if state[0] <= self.limit}
            merged = dict(level)
            for used in range(1, self.mix.parts[g][1] + 1):
                free = self.edge.count - used if g == self.edge.part else self.edge.count
                level = self._grown(g, level, merged, free)
                if self.states > MANY_STATES or spent():
                    return False
                if not level:
                    break
        return True

    def _grown(
        self,
        g: int,
        level: Mapping[int, tuple[int, _Trace]],
        merged: dict[int, tuple[int, _Trace]],
        free: int,
    ) -> dict[int, tuple[int, _Trace]]:
        """The states with one more deviating layer of kind ``g``, also put among ``merged``."""
        new: dict[int, tuple[int, _Trace]] = {}
        for shift, (rc, trace) in level.items():
            for more, dw, i in self.core.deviations[g]:
                total = rc + more
                if total > self.limit:
                    break
                to = shift + dw
                self.states += 1
                known = merged.get(to)
                if known is not None and known[0] <= total:
                    continue
                state = (total, (trace, g, i))
                merged[to] = new[to] = state
                self._visit(to, total, free, state[1])
        return new


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


def _counted(mix: Mix, counts: list[dict[int, int]]) -> Picks:
    return tuple(
        tuple((menu.index[i], c) for i, c in sorted(count.items()))
        for (menu, _, _), count in zip(mix.parts, counts, strict=True)
    )


def _picks(mix: Mix, core: Core, edge: Edge, moved: int, trace: _Trace) -> Picks:
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


_MOST_KEPT = 500_000
"""Options of all mixes that are kept for one set of options."""


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
        if sum(len(menu.index) for menu, _, _ in ready) * len(cache) > _MOST_KEPT:
            cache.clear()
        mix = cache[key] = Mix(ready)
    return mix
