"""Chains of consecutive layers re-run as one: a shortest path with a resource.

Nodes are positions in the stack; an edge is one layer with one of its options, or a chain of k
layers. Minimise cost with the summed stored bytes within a capacity. For a multiplier lambda,
shortest paths on cost + lambda * bytes give the Lagrangian bound and, from every node, the least
that the rest can cost; labels (bytes, cost) that cannot beat the best known plan are dropped, which
leaves few (Handler and Zang 1980; Dumitrescu and Boland 2003 on constrained shortest paths).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.solve.clock import give_up, spent
from actcalc.solve.knapsack import mix_of
from actcalc.solve.levels import Relaxed, search_levels
from actcalc.solve.options import Menu, OptionSet

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chain:
    """One layer's part in a chain of k layers that is stored by its first input and re-run whole.

    The chain stores ``head_bytes`` (the layer input) of its first layer and ``extra_bytes`` of
    each (what ops that must not be re-run leave behind; 0 if there are none). It works with
    ``working_bytes`` of each (saved tensors re-made) and ``head_bytes`` of all but the first, and
    costs ``cost`` of each. Without forbidden ops that is x, k A - x and k times all ops, A being
    every saved tensor of a layer with its input x.
    """

    head_bytes: int
    extra_bytes: int
    working_bytes: int
    cost: int
    recompute: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Step(NamedTuple):
    """The next ``layers`` layers of the stack: one with option ``option``, or (None) a chain."""

    layers: int
    option: int | None


@dataclass(frozen=True, slots=True)
class Position:
    """One layer of the stack: its options, weight of a stored byte, and part in chains."""

    options: OptionSet
    weight: int
    chain: Chain | None


class _Edge(NamedTuple):
    layers: int
    weight: int
    working: int
    cost: int


class _Dual(NamedTuple):
    # Best multiplier num/den at a level and capacity, its bound, a path that fits, and the best
    # path on the other side of the capacity.
    bound: int
    num: int
    den: int
    ahead: list[int]
    cost: int
    steps: list[Step]
    other: list[Step]


class ChainPath:
    """Exact plans with chains for one stack."""

    def __init__(self, positions: Sequence[Position], max_segment: int) -> None:
        self._at = list(positions)
        self._chains = [self._from(i, max_segment) for i in range(len(positions))]
        self._sets = sets = {id(p.options): p.options for p in positions}
        self.levels = sorted(
            {w for s in sets.values() for w in s.levels}
            | {e.working for edges in self._chains for e in edges}
        )
        self._allowed: dict[int, list[list[_Edge]]] = {}

    def solve(self, room: Callable[[int], int]) -> tuple[int, list[Step], int, int] | None:
        """Cost, steps, relaxation bound and states of the cheapest plan that fits.

        ``room`` says how much may be stored, by the largest working set. None if nothing fits.
        """
        states = 0

        def bounded(high: int, capacity: int) -> int | None:
            dual = self._dual(high, capacity)
            return None if dual is None else dual.bound

        def relaxed(high: int, capacity: int, below: int | None) -> Relaxed[list[Step]] | None:
            nonlocal states
            found, seen = self._exact(high, capacity, below)
            states += seen
            return None if found is None else Relaxed(found[0], *self._needs(found[1]), found[1])

        searched = search_levels(self.levels, room, bounded, relaxed)
        if searched is None:
            return None
        return searched.best.cost, searched.best.plan, searched.bound, states

    def _needs(self, steps: list[Step]) -> tuple[int, int]:
        # Stored and largest working bytes of a plan.
        at = stored = working = 0
        for step in steps:
            if step.option is None:
                edge = self._chains[at][step.layers - 2]
                stored, working = stored + edge.weight, max(working, edge.working)
            else:
                options, weight = self._at[at].options, self._at[at].weight
                stored += weight * options.stored[step.option]
                working = max(working, options.working[step.option])
            at += step.layers
        return stored, working

    def stored_bound(self, rest: int) -> int | None:
        """A lower bound on the cost with stored bytes within ``rest``; None if nothing fits."""
        dual = self._dual(self.levels[-1], rest)
        return None if dual is None else dual.bound

    def least_peak(self, peak: Callable[[int, int], int]) -> int:
        """The lowest ``peak`` of stored and largest working bytes that any plan reaches."""
        best: int | None = None
        heap: list[tuple[int, int, int]] = []

        def push(low: int, high: int) -> None:
            stored = self._lightest(self.levels[high])[0]
            if stored is not None:
                heappush(heap, (peak(stored, self.levels[low]), low, high))

        push(0, len(self.levels) - 1)
        while heap:
            bound, low, high = heappop(heap)
            if low == high or spent():
                if low != high:
                    give_up()
                    lightest = self._lightest(self.levels[high])[0]
                    assert lightest is not None
                    bound = peak(lightest, self.levels[high])
                best = bound
                break
            middle = (low + high) // 2
            push(low, middle)
            push(middle + 1, high)
        assert best is not None, "the largest level allows every option"
        return best

    def _from(self, start: int, longest: int) -> list[_Edge]:
        edges: list[_Edge] = []
        weight = working = cost = 0
        for k, position in enumerate(self._at[start : start + longest], 1):
            chain = position.chain
            if chain is None or position.weight != self._at[start].weight:
                break
            weight += chain.extra_bytes + (chain.head_bytes if k == 1 else 0)
            working += chain.working_bytes + (0 if k == 1 else chain.head_bytes)
            cost += chain.cost
            if k > 1:
                edges.append(_Edge(k, weight * position.weight, working, cost))
        return edges

    def _edges(self, working: int) -> list[list[_Edge]]:
        if working not in self._allowed:
            self._allowed[working] = [
                [e for e in edges if e.working <= working] for edges in self._chains
            ]
        return self._allowed[working]

    def _lightest(self, working: int) -> tuple[int | None, list[int | None]]:
        ahead = self._walk(working, 1, 0)[0]
        return ahead[0], ahead

    def _walk(self, working: int, num: int, den: int) -> tuple[list[int | None], list[Any]]:
        # Shortest distances to the end on den * cost + num * weight, and the first edge of each.
        length = len(self._at)
        single: dict[tuple[int, int], tuple[int, int, Menu] | None] = {}
        ahead: list[int | None] = [None] * length + [0]
        first: list[Any] = [None] * length
        allowed = self._edges(working)
        for i in range(length - 1, -1, -1):
            options, weight = self._at[i].options, self._at[i].weight
            key = (id(options), weight)
            if key not in single:
                menu = options.menu(working)
                single[key] = (
                    None
                    if menu is None
                    else (
                        *min((den * menu.cs[j] + num * weight * menu.ks[j], j) for j in menu.hull),
                        menu,
                    )
                )
            one, after = single[key], ahead[i + 1]
            best: int | None = None
            if one is not None and after is not None:
                best, first[i] = one[0] + after, (one[2], one[1], weight)
            for e in allowed[i]:
                after = ahead[i + e.layers]
                if after is not None:
                    value = den * e.cost + num * e.weight + after
                    if best is None or value < best:
                        best, first[i] = value, e
            ahead[i] = best
        return ahead, first

    def _path(self, first: list[Any]) -> tuple[int, int, list[Step]]:
        at = weight = cost = 0
        steps: list[Step] = []
        while at < len(self._at):
            edge = first[at]
            if isinstance(edge, _Edge):
                weight, cost = weight + edge.weight, cost + edge.cost
                steps.append(Step(edge.layers, None))
            else:
                menu, j, m = edge
                weight, cost = weight + m * menu.ks[j], cost + menu.cs[j]
                steps.append(Step(1, menu.index[j]))
            at += steps[-1].layers
        return weight, cost, steps

    def _dual(self, working: int, capacity: int) -> _Dual | None:
        ahead, first = self._walk(working, 1, 0)
        if ahead[0] is None or ahead[0] > capacity:
            return None
        light = self._path(first)
        ahead, first = self._walk(working, 0, 1)
        cheap = self._path(first)
        if cheap[0] <= capacity:
            return _Dual(cheap[1], 0, 1, _known(ahead), cheap[1], cheap[2], cheap[2])
        while light[1] > cheap[1]:
            num, den = light[1] - cheap[1], cheap[0] - light[0]
            ahead, first = self._walk(working, num, den)
            least = _known(ahead)
            if least[0] == den * light[1] + num * light[0]:
                bound = -((num * capacity - least[0]) // den)
                return _Dual(bound, num, den, least, light[1], light[2], cheap[2])
            between = self._path(first)
            if between[0] <= capacity:
                light = between
            else:
                cheap = between
        # The lightest path is as cheap as any.
        free = _known(self._walk(working, 0, 1)[0])
        return _Dual(light[1], 0, 1, free, light[1], light[2], light[2])

    def _exact(
        self, working: int, capacity: int, cutoff: int | None
    ) -> tuple[tuple[int, list[Step]] | None, int]:
        dual = self._dual(working, capacity)
        if dual is None:
            return None, 0
        best: tuple[int, list[Step]] | None = None
        for skeleton in (dual.steps, dual.other):
            filled = self._filled(skeleton, working, capacity, cutoff)
            if filled is not None:
                best, cutoff = filled, filled[0]
        if cutoff is None or dual.cost < cutoff:
            best, cutoff = (dual.cost, dual.steps), dual.cost
        if dual.bound >= cutoff:
            return best, 0
        return self._labels(working, capacity, cutoff, dual, best)

    def _filled(
        self, steps: list[Step], working: int, capacity: int, cutoff: int | None
    ) -> tuple[int, list[Step]] | None:
        # The cheapest plan with exactly the chains of ``steps``: a knapsack of the other layers.
        at = cost = 0
        alone: dict[tuple[int, int], list[int]] = {}
        for n, step in enumerate(steps):
            if step.option is None:
                edge = self._chains[at][step.layers - 2]
                cost, capacity = cost + edge.cost, capacity - edge.weight
            else:
                position = self._at[at]
                alone.setdefault((id(position.options), position.weight), []).append(n)
            at += step.layers
        if not alone:
            return None
        mix = mix_of([(self._sets[i], len(places), m) for (i, m), places in alone.items()], working)
        below = None if cutoff is None else cutoff - cost
        found = None if mix is None else mix.solve(capacity, below)
        if found is None:
            return None
        filled = list(steps)
        for places, picks in zip(alone.values(), found.picks, strict=True):
            options = (i for i, n in picks for _ in range(n))
            for place, option in zip(places, options, strict=True):
                filled[place] = Step(1, option)
        return cost + found.cost, filled

    def _labels(
        self,
        working: int,
        capacity: int,
        cutoff: int,
        dual: _Dual,
        best: tuple[int, list[Step]] | None,
    ) -> tuple[tuple[int, list[Step]] | None, int]:
        num, den, ahead = dual.num, dual.den, dual.ahead
        lightest = _known(self._lightest(working)[1])
        # In bounds, weights and costs count from each node's own shortest path: a label is a loss.
        limit = den * (cutoff - 1) + num * capacity - ahead[0]
        singles: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        arriving: list[list[_Labels]] = [[] for _ in range(len(self._at) + 1)]
        zero = np.zeros(1, dtype=np.int64)
        arriving[0].append(_Labels(zero, zero, np.zeros(1), zero, zero))
        settled: list[_Labels] = []
        states = 0
        for i in range(len(self._at) + 1):
            here = _undominated(arriving[i])
            settled.append(here)
            states += len(here.weight)
            if i == len(self._at) or not len(here.weight):
                continue
            if spent() or states > _MOST_LABELS:
                give_up()
                return best, states
            for number, (layers, loss, weight, cost) in self._losses(
                i, working, num, den, ahead, limit, singles
            ):
                to = i + layers
                # A margin far above rounding errors of the losses, so nothing good is dropped.
                alive = here.loss <= float(limit - loss) * (1 + 1e-9) + 1e-6
                alive &= here.weight <= capacity - lightest[to] - weight
                at = np.flatnonzero(alive)
                if len(at):
                    arriving[to].append(
                        _Labels(
                            here.weight[at] + weight,
                            here.cost[at] + cost,
                            here.loss[at] + float(loss),
                            at,
                            np.full(len(at), number),
                        )
                    )
            arriving[i] = []
        end = settled[-1]
        if not len(end.weight) or int(end.cost.min()) >= cutoff:
            return best, states
        label = int(np.argmin(end.cost))
        total = int(end.cost[label])
        steps: list[Step] = []
        at_node = len(self._at)
        while at_node:
            number = int(settled[at_node].edge[label])
            label = int(settled[at_node].parent[label])
            layers, option = divmod(number, _SHIFT)
            steps.append(Step(layers, option if layers == 1 else None))
            at_node -= layers
        return (total, steps[::-1]), states

    def _losses(
        self,
        i: int,
        working: int,
        num: int,
        den: int,
        ahead: list[int],
        limit: int,
        singles: dict[tuple[int, int], list[tuple[int, int, int, int]]],
    ) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        # Edges out of node i: a number to trace them by, and (layers, loss, weight, cost).
        position = self._at[i]
        key = (id(position.options), position.weight)
        if key not in singles:
            menu, m = position.options.menu(working), position.weight
            rows = () if menu is None else zip(menu.ks, menu.cs, menu.index, strict=True)
            singles[key] = sorted((den * c + num * m * k, m * k, c, at) for k, c, at in rows)
        for scaled, weight, cost, index in singles[key]:
            loss = scaled + ahead[i + 1] - ahead[i]
            if loss > limit:
                break
            yield _SHIFT + index, (1, loss, weight, cost)
        for e in self._edges(working)[i]:
            loss = den * e.cost + num * e.weight + ahead[i + e.layers] - ahead[i]
            if loss <= limit:
                yield e.layers * _SHIFT, (e.layers, loss, e.weight, e.cost)


class _Labels(NamedTuple):
    # Partial plans up to a node: bytes, cost, loss against the bound, and how they got here.
    weight: Ints
    cost: Ints
    loss: NDArray[np.float64]
    parent: Ints
    edge: Ints


_SHIFT = 1 << 32

_MOST_LABELS = 5_000_000
"""Partial plans after which a search gives up."""


def _undominated(arrived: list[_Labels]) -> _Labels:
    if not arrived:
        none = np.zeros(0, dtype=np.int64)
        return _Labels(none, none, np.zeros(0), none, none)
    weight = np.concatenate([a.weight for a in arrived])
    cost = np.concatenate([a.cost for a in arrived])
    order = np.lexsort((cost, weight))
    costs = cost[order]
    better = np.ones(len(order), dtype=bool)
    better[1:] = costs[1:] < np.minimum.accumulate(costs)[:-1]
    keep = order[better]
    return _Labels(
        weight[keep],
        cost[keep],
        np.concatenate([a.loss for a in arrived])[keep],
        np.concatenate([a.parent for a in arrived])[keep],
        np.concatenate([a.edge for a in arrived])[keep],
    )


def _known(ahead: list[int | None]) -> list[int]:
    # A node nothing leads on from is unreachable in any plan: infinitely far.
    return [_FAR if a is None else a for a in ahead]


_FAR = 1 << 200
