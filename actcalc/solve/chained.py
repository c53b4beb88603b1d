"""Stacks with chains of layers that are re-run whole."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from actcalc.errors import SpecError
from actcalc.solve.knapsack import mix_of
from actcalc.solve.layers import Answer, Stack
from actcalc.solve.levels import Relaxed, search_levels
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.segments import Chain, ChainPath, Position, Step
from actcalc.solve.unordered import best_mix

MOST_SEGMENTS = 400_000
"""Segments, by first layer and length, of a stack of several kinds."""


def chain_path(stack: Stack) -> ChainPath:
    """The stack as a graph of layers and chains (cached)."""
    first = stack.groups[0].options
    parts = tuple((g.options, g.count, stack.weight(g), g.chain) for g in stack.groups)
    key = ("chains", tuple((id(o), n, m, c) for o, n, m, c in parts), stack.max_segment)
    if key not in first.scratch:
        layers = sum(g.count for g in stack.groups)
        if layers * min(stack.max_segment, layers) > MOST_SEGMENTS:
            raise SpecError(
                f"segments of up to {stack.max_segment} of {layers} layers of several kinds are "
                "too many",
                f"use a max_segment of at most {MOST_SEGMENTS // layers}",
            )
        positions = [Position(o, m, c) for o, n, m, c in parts for _ in range(n)]
        first.scratch[key] = ChainPath(positions, stack.max_segment)
    found: ChainPath = first.scratch[key]
    return found


def chained(stack: Stack, room: Callable[[int], int]) -> Answer | None:
    """The cheapest plan of single layers and chains, without regard to their order."""
    if any(g.same for g in stack.groups):
        return _uniform(stack, room)
    first = stack.groups[0]
    alike = all(
        (g.options, stack.weight(g), g.chain) == (first.options, stack.weight(first), first.chain)
        for g in stack.groups
    )
    if alike:
        return _OneKind(stack).solve(room)
    found = chain_path(stack).solve(room)
    if found is None:
        return None
    cost, steps, bound, states = found
    return Answer(cost, steps, bound, states, "constrained shortest path")


class _OneKind:
    """Chains in a stack of equal layers: how many layers to chain is all there is to choose.

    A chained layer costs the same in a chain of any length, so t chained layers make as few
    chains as the working set allows, ceil(t / k), of lengths as equal as can be; the other layers
    are a knapsack.
    """

    def __init__(self, stack: Stack) -> None:
        first = stack.groups[0]
        self.layers = sum(g.count for g in stack.groups)
        self.options, self.m = first.options, stack.weight(first)
        self.chain = first.chain or Chain(0, 0, 0, 0)
        longest = min(stack.max_segment, self.layers) if first.chain is not None else 0
        again, head = self.chain.working_bytes, self.chain.head_bytes
        self.works = [k * again + (k - 1) * head for k in range(longest + 1)]
        self.counts = np.arange(self.layers + 1, dtype=np.int64)
        self.states = 0

    def solve(self, room: Callable[[int], int]) -> Answer | None:
        levels = sorted({*self.options.levels, *self.works[2:]})
        searched = search_levels(levels, room, self._bounded, self._relaxed)
        if searched is None:
            return None
        lengths, picks = searched.best.plan
        ranked = sorted(
            (i for i, n in picks for _ in range(n)), key=lambda i: -self.options.working[i]
        )
        units = [Step(k, None) for k in lengths] + [Step(1, i) for i in ranked]
        method = "hull bound and core search for every number of chained layers"
        return Answer(searched.best.cost, units, searched.bound, self.states, method)

    def _stored_by(self, t: int, k: int) -> int:
        chain = self.chain
        return self.m * (-(-t // k) * chain.head_bytes + t * chain.extra_bytes) if t else 0

    def _reach(self, high: int) -> int:
        k = bisect_right(self.works, high) - 1 if len(self.works) > 2 else 0
        return k if k > 1 else 0

    def _bounds(self, high: int, capacity: int) -> tuple[NDArray[np.float64], int]:
        # Lower bounds for every number of chained layers; rounding may only loosen them.
        k, m, chain = self._reach(high), self.m, self.chain
        t = self.counts if k else self.counts[:1]
        left = capacity - m * (-(-t // max(k, 1)) * chain.head_bytes + t * chain.extra_bytes)
        single = self.layers - t
        menu = self.options.menu(high)
        costs = np.full(len(t), np.inf)
        if menu is not None:
            corners, values = menu.corners
            some = single > 0
            each = left[some].astype(np.float64) / (single[some] * m)
            value = np.interp(each, corners, values) * single[some]
            value[left[some] < single[some] * m * menu.ks[0]] = np.inf
            costs[some] = value
        if k and left[-1] >= 0:
            costs[-1] = 0.0
        costs += t * float(chain.cost)
        return costs * (1 - 1e-12) - 1e-6, k

    def _bounded(self, high: int, capacity: int) -> int | None:
        least = self._bounds(high, capacity)[0].min()
        return None if np.isinf(least) else max(0, math.ceil(least))

    def _relaxed(self, high: int, capacity: int, below: int | None) -> Relaxed[_Chained] | None:
        least, k = self._bounds(high, capacity)
        best: Relaxed[_Chained] | None = None
        for t in np.argsort(least, kind="stable").tolist():
            if np.isinf(least[t]) or (below is not None and math.ceil(least[t]) >= below):
                break
            found = self._with_chained(t, k, high, capacity, below)
            if found is not None:
                best, below = found, found.cost
        return best

    def _with_chained(
        self, t: int, k: int, high: int, capacity: int, below: int | None
    ) -> Relaxed[_Chained] | None:
        """The best plan of ``t`` chained layers, if it costs less than ``below``."""
        options, m = self.options, self.m
        held, cost, working = self._stored_by(t, k), t * self.chain.cost, 0
        picks: tuple[tuple[int, int], ...] = ()
        if t < self.layers:
            mix = mix_of([(options, self.layers - t, m)], high)
            left = None if below is None else below - cost
            found = None if mix is None else mix.solve(capacity - held, left)
            if found is None:
                return None
            self.states += found.states
            (picks,) = found.picks
            cost += found.cost
            held += m * sum(n * options.stored[i] for i, n in picks)
            working = max(options.working[i] for i, _ in picks)
        elif below is not None and cost >= below:
            return None
        lengths = _even(t, -(-t // k)) if t else []
        if lengths:
            working = max(working, self.works[lengths[0]])
        return Relaxed(cost, held, working, (lengths, picks))


_Chained = tuple[list[int], tuple[tuple[int, int], ...]]


def _even(layers: int, chains: int) -> list[int]:
    short, more = divmod(layers, chains)
    return [short + 1] * more + [short] * (chains - more)


def uniform_parts(stack: Stack) -> list[tuple[OptionSet, int, int]]:
    """Every kind of layer as one choice: an option, or a length of chains, for all of it."""
    if not all(g.same for g in stack.groups):
        raise SpecError(
            "with segments, the same option is asked for some layer kinds only",
            hint="ask it for all kinds or for none",
        )
    names = dict.fromkeys(g.name for g in stack.groups)
    return [(_uniform_options(stack, name), 1, 1) for name in names]


def _uniform_options(stack: Stack, name: str) -> OptionSet:
    runs = [(g, g.count, stack.weight(g)) for g in stack.groups if g.name == name]
    options, chain = runs[0][0].options, runs[0][0].chain
    weight, layers = sum(n * m for _, n, m in runs), sum(n for _, n, _ in runs)
    found = [
        Option(k * weight, w, c * layers, (1, i))
        for i, (k, w, c) in enumerate(
            zip(options.stored, options.working, options.cost, strict=True)
        )
    ]
    longest = min(stack.max_segment, max(n for _, n, _ in runs))
    for k in range(2, longest + 1) if chain is not None else ():
        assert chain is not None
        heads = sum(-(-n // k) * m for _, n, m in runs)
        found.append(
            Option(
                heads * chain.head_bytes + weight * chain.extra_bytes,
                k * chain.working_bytes + (k - 1) * chain.head_bytes,
                layers * chain.cost,
                (k, None),
            )
        )
    return OptionSet.of(found)


def _uniform(stack: Stack, room: Callable[[int], int]) -> Answer | None:
    parts = uniform_parts(stack)
    found = best_mix(parts, room, working=True)
    if found is None:
        return None
    solved, bound = found
    names = dict.fromkeys(g.name for g in stack.groups)
    chosen: dict[str, tuple[int, int | None]] = {}
    for name, (options, _, _), picks in zip(names, parts, solved.picks, strict=True):
        source = options.source(picks[0][0])
        assert isinstance(source, Option)
        chosen[name] = source.payload
    units: list[Step] = []
    for g in stack.groups:
        k, option = chosen[g.name]
        left = g.count
        while left:
            units.append(Step(min(k, left), option))
            left -= units[-1].layers
    return Answer(solved.cost, units, bound, solved.states, "hull bound and core search")
