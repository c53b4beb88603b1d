"""The search of a knapsack in two halves of its layers, each with its undominated sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.solve.clock import give_up, spent
from actcalc.solve.problem import LIMIT

if TYPE_CHECKING:
    from actcalc.solve.knapsack import Core, Edge, Mix

Ints = NDArray[np.int64]


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
class Halves:
    """Both halves' fronts around one break edge, up to some reduced cost."""

    choices: tuple[_Choices, ...]
    first: _Front
    second: _Front
    states: int


def search_halves(
    mix: Mix, at: int, core: Core, room: int, below: int | None, limit: int
) -> _Halved:
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


def make_halves(mix: Mix, edge: Edge, core: Core, limit: int) -> Halves:
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
            if spent() or len(found.shift) * len(own.shift) > _MOST_SUMS:
                give_up()
                own = _Choices(own.shift[:1], own.cost[:1], own.option[:1])
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
    return Halves(tuple(choices), first, second, states)


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

_MOST_SUMS = 4_000_000
"""Sums of a front and a layer's choices made at once; with more the search gives up."""


def _parted(own: _Choices, shifts: Ints, costs: Ints, shift: int, cost: int) -> int:
    # The choice that, added to an entry of a front, makes this sum.
    at = np.searchsorted(shifts, shift - own.shift)
    at = np.minimum(at, len(shifts) - 1)
    made = (shifts[at] + own.shift == shift) & (costs[at] + own.cost == cost)
    return int(np.argmax(made))
