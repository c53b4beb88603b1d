"""Search over the largest working set of a plan, an axis that is one maximum and not a sum.

Fixing the largest value allowed makes the rest a knapsack: options above it are struck out, and it
is paid from the budget. An interval [low, high] of values that allows options up to high and pays
only for low is a relaxation of every value inside. Intervals are taken cheapest bound first; one
whose relaxed plan fits is finished, any other is cut at the working set of that plan, so that no
part allows the same plan again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from actcalc.solve.clock import give_up, spent

T = TypeVar("T")


class Relaxed(NamedTuple, Generic[T]):
    """The cheapest plan of an interval: its cost, stored bytes, largest working set, and itself."""

    cost: int
    stored: int
    working: int
    plan: T


class Searched(NamedTuple, Generic[T]):
    """The optimum, the bound its relaxation started from, and how many relaxations were solved."""

    best: Relaxed[T]
    bound: int
    solved: int


def search_levels(
    levels: Sequence[int],
    room: Callable[[int], int],
    bound: Callable[[int, int], int | None],
    solve: Callable[[int, int, int | None], Relaxed[T] | None],
    cutoff: int | None = None,
    grain: int = 1,
) -> Searched[T] | None:
    """The cheapest plan whose stored bytes are within ``room(largest working set)``.

    ``levels`` are the values the largest working set can take, rising; ``room`` never rises with
    them. ``bound(high, stored)`` is a lower bound on the cost with working sets up to ``high`` and
    at most ``stored`` bytes, None if there is none; ``solve(high, stored, cutoff)`` is the optimum,
    None if it is not below ``cutoff``. Returns None if nothing fits, or nothing below ``cutoff``.
    No other plan costs less by a whole ``grain``.
    """
    heap: list[tuple[int, int, int]] = []

    def push(low: int, high: int, floor: int) -> None:
        if low > high:
            return
        least = bound(levels[high], room(levels[low]))
        if least is not None and (cutoff is None or least < cutoff):
            heappush(heap, (max(least, floor), low, high))

    push(0, len(levels) - 1, 0)
    root = heap[0][0] if heap else 0
    best: Relaxed[T] | None = None
    solved = 0
    while heap:
        least, low, high = heappop(heap)
        if cutoff is not None and least >= cutoff:
            break
        if spent() and best is not None:
            give_up()
            break
        found = solve(levels[high], room(levels[low]), cutoff)
        solved += 1
        if found is None:
            continue
        if found.stored <= room(found.working):
            best, cutoff = found, found.cost // grain * grain
            continue
        cut = bisect_left(levels, found.working, low + 1)
        if best is None:
            # Paying for this plan's own level gives a plan that fits: the sooner, the more is cut.
            tried = solve(levels[cut], room(levels[cut]), cutoff)
            solved += 1
            if tried is not None:
                best, cutoff = tried, tried.cost // grain * grain
        middle = (low + cut) // 2
        push(low, middle, found.cost)
        push(middle + 1, cut - 1, found.cost)
        push(cut, high, found.cost)
    return None if best is None else Searched(best, root, solved)
