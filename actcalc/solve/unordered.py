"""Stacks whose order does not matter: stored bytes, and one largest working set on top."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from actcalc.errors import SpecError
from actcalc.solve.beside import Room
from actcalc.solve.knapsack import Found, Picks, mix_of
from actcalc.solve.layers import Answer, Stack
from actcalc.solve.levels import Relaxed, search_levels
from actcalc.solve.options import OptionSet
from actcalc.solve.segments import Step


def unordered(stack: Stack, room: Callable[[int], int], *, working: bool) -> Answer | None:
    """The cheapest plan with stored bytes within ``room(largest working set)``."""
    merged = stack.merged()
    parts = [(options, n, m) for _, options, n, m in merged]
    found = best_mix(parts, room, working=working)
    if found is None:
        return None
    solved, bound = found
    units = _spread(stack, merged, solved.picks)
    return Answer(solved.cost, units, bound, solved.states, "hull bound and core search")


_Merged = list[tuple[list[int], OptionSet, int, int]]


def _spread(stack: Stack, merged: _Merged, picked: Picks) -> list[Step]:
    """The options picked for merged layers, dealt out to the layers in stack order."""
    chosen: list[list[int]] = [[] for _ in stack.groups]
    for (members, options, _, _), picks in zip(merged, picked, strict=True):
        base = stack.groups[members[0]].options
        if stack.groups[members[0]].same:
            index = options.origin(picks[0][0])
            for i in members:
                chosen[i] = [index] * stack.groups[i].count
            continue
        # Less working memory toward the end of the stack: the order backward would choose.
        layers = sorted(
            (index for index, n in picks for _ in range(n)), key=lambda i: -base.working[i]
        )
        for i in members:
            chosen[i], layers = layers[: stack.groups[i].count], layers[stack.groups[i].count :]
    return [Step(1, i) for per_group in chosen for i in per_group]


def offloading(stack: Stack, budget: int) -> Answer | None:
    """As :func:`unordered`, and the most bytes any layer moves as one more level.

    The search over that level is the one over working sets again, around it.
    """
    merged = stack.merged()
    if any(stack.groups[members[0]].same for members, *_ in merged):
        raise SpecError("one option per kind cannot be planned with offload", "drop one of them")
    room = stack.room
    levels = moved_levels([options for _, options, _, _ in merged])
    states = 0

    def parts(limit: int) -> list[tuple[OptionSet, int, int]]:
        return [(options.moving(limit), n, m) for _, options, n, m in merged]

    def bounded(high: int, left: int) -> int | None:
        return mix_bound(parts(high), room(left), working=True)

    def relaxed(high: int, left: int, below: int | None) -> Relaxed[Picks] | None:
        nonlocal states
        within = parts(high)
        found = best_mix(within, room(left), working=True, cutoff=below)
        if found is None:
            return None
        states += found[0].states
        picks = tuple(
            tuple((i if options is base else options.origin(i), n) for i, n in chosen)
            for (options, _, _), (_, base, _, _), chosen in zip(
                within, merged, found[0].picks, strict=True
            )
        )
        every = [
            (options, m, i, n)
            for (_, options, _, m), chosen in zip(merged, picks, strict=True)
            for i, n in chosen
        ]
        stored = sum(m * n * options.stored[i] for options, m, i, n in every)
        working = max(options.working[i] for options, _, i, _ in every)
        moved = max(options.moved[i] for options, _, i, _ in every)
        return Relaxed(found[0].cost, stack.shared.peak(stored, working), moved, picks)

    grain = max(options.grain for _, options, _, _ in merged)
    searched = search_levels(levels, lambda moved: budget - moved, bounded, relaxed, grain=grain)
    if searched is None:
        return None
    units = _spread(stack, merged, searched.best.plan)
    method = "hull bound and core search for the bytes moved"
    return Answer(searched.best.cost, units, searched.bound, states, method)


def mix_bound(
    parts: Sequence[tuple[OptionSet, int, int]], room: Callable[[int], int], *, working: bool
) -> int | None:
    """A lower bound on what :func:`best_mix` finds; None if nothing fits."""
    levels = _levels(parts)
    common = math.gcd(*(m for _, _, m in parts))
    mix = mix_of([(options, n, m // common) for options, n, m in parts], levels[-1])
    least = levels[0] if working else 0
    return None if mix is None else mix.bound(room(least) // common)


def best_mix(
    parts: Sequence[tuple[OptionSet, int, int]],
    room: Callable[[int], int],
    *,
    working: bool,
    cutoff: int | None = None,
) -> tuple[Found, int] | None:
    """The cheapest mix with a sum of weights within ``room(largest working set)``, and a bound.

    Without ``working`` no working set counts. None if nothing fits, or nothing below ``cutoff``.

    The largest working set is found by :func:`actcalc.solve.levels.search_levels`.
    """
    levels = _levels(parts)
    # Stages that differ in micro-batches alone share everything derived from their layers.
    common = math.gcd(*(m for _, _, m in parts))
    light = [(options, n, m // common) for options, n, m in parts]
    if not working:
        mix = mix_of(light, levels[-1])
        bound = mix.bound(room(0) // common) if mix is not None else None
        if mix is None or bound is None:
            return None
        found = mix.solve(room(0) // common, cutoff)
        return None if found is None else (found, bound)
    states = 0

    def bounded(high: int, capacity: int) -> int | None:
        mix = mix_of(light, high)
        return None if mix is None else mix.bound(capacity // common)

    def relaxed(high: int, capacity: int, below: int | None) -> Relaxed[Picks] | None:
        nonlocal states
        mix = mix_of(light, high)
        found = None if mix is None else mix.solve(capacity // common, below)
        if found is None:
            return None
        states += found.states
        works = max(
            options.working[i]
            for (options, _, _), picks in zip(parts, found.picks, strict=True)
            for i, _ in picks
        )
        return Relaxed(found.cost, _weight(parts, found.picks), works, found.picks)

    grain = max(options.grain for options, _, _ in parts)
    searched = search_levels(levels, room, bounded, relaxed, cutoff, grain)
    if searched is None:
        return None
    best = searched.best
    return Found(best.cost, best.plan, states), searched.bound


def _weight(parts: Sequence[tuple[OptionSet, int, int]], picks: Picks) -> int:
    return sum(
        m * n * options.stored[i]
        for (options, _, m), chosen in zip(parts, picks, strict=True)
        for i, n in chosen
    )


def _levels(parts: Sequence[tuple[OptionSet, int, int]]) -> list[int]:
    sets = tuple({id(options): options for options, _, _ in parts}.values())
    cache = sets[0].scratch
    key = ("levels", tuple(id(s) for s in sets))
    if key not in cache:
        floor = max(s.levels[0] for s in sets)
        levels = sorted({w for s in sets for w in s.levels if w >= floor})
        # The sets are held beside their ids, so that no id is ever reused.
        cache[key] = (levels, sets)
    found: list[int] = cache[key][0]
    return found


def moved_levels(sets: Sequence[OptionSet]) -> list[int]:
    """The bytes that options offload, rising, from where every kind has an option."""
    floor = max(options.moved_levels[0] for options in sets)
    return sorted({x for options in sets for x in options.moved_levels if x >= floor})


def least_of(parts: Sequence[tuple[OptionSet, int, int]], shared: Room) -> int:
    """The lowest stored + largest working bytes of any mix, on the fullest GPU."""
    levels = np.array(_levels(parts))
    stored = np.zeros_like(levels)
    for options, n, m in parts:
        stored += n * m * options.least_stored(levels)
    return min(map(shared.peak, stored.tolist(), levels.tolist()))
