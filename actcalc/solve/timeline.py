"""The timeline model: order matters, because layers later in the stack are freed first.

Going from the last layer backward, all that earlier layers need to know of the suffix is

- ``E`` = sum of (m - 1) K over the suffix: held by other micro-batches all along;
- ``H`` = the highest the suffix ever reaches, counting only its own bytes.

Adding a layer (K, W, m) in front gives ``E' = E + (m - 1) K`` and ``H' = m K + max(H, E + W)``:
while that layer runs backward the oldest micro-batch holds its K and nothing later, and while a
later layer does, its K is held by all m. The peak is H of the whole stack. What else the GPU holds
is added to W layer by layer; H starts from what it holds with all layers stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from actcalc.solve.frontier import pareto
from actcalc.solve.knapsack import OptionSet, mix_of
from actcalc.solve.rest import Rest

Ints = NDArray[np.int64]

NO_REST = Rest()


def timeline_peak(
    stored: Sequence[int],
    working: Sequence[int],
    inflight: Sequence[int],
    rest: Rest = NO_REST,
    *,
    layers: Sequence[int] = (),
) -> int:
    """Highest bytes held by a stack (in forward order) with m micro-batches in flight per layer.

    ``layers`` says how many layers each entry stands for, where some run backward as one.
    """
    excess, high = 0, rest.head
    beside = _beside(rest, len(stored), layers)
    rows = zip(stored, working, inflight, beside, strict=True)
    for k, w, m, more in reversed(list(rows)):
        high = m * k + max(high, excess + w + more + (rest.again if w else 0))
        excess += (m - 1) * k
    return max(high, excess + rest.tail, rest.floor)


def at_timeline_peak(
    stored: Sequence[int],
    working: Sequence[int],
    inflight: Sequence[int],
    rest: Rest,
    *,
    layers: Sequence[int] = (),
) -> int:
    """How much of :func:`timeline_peak` is the rest, at that moment."""
    held = sum(m * k for k, m in zip(stored, inflight, strict=True))
    others = held - sum(stored)
    moments = [(rest.head + held, rest.head), (rest.tail + others, rest.tail)]
    before = 0
    for k, w, more in zip(stored, working, _beside(rest, len(stored), layers), strict=True):
        before += k
        beside = more + (rest.again if w else 0)
        moments.append((beside + others + before + w, beside))
    return max([*moments, (rest.floor, rest.floor)])[1]


def _beside(rest: Rest, count: int, layers: Sequence[int]) -> list[int]:
    # The rest while each entry runs backward: of several layers, whatever is most.
    if not rest.layers:
        return [rest.work] * count
    sizes = layers or (1,) * count
    ends = list(accumulate(sizes))
    return [max(rest.layers[end - n : end]) for n, end in zip(sizes, ends, strict=True)]


def least_peak(sets: Sequence[OptionSet], inflight: Sequence[int], rest: Rest = NO_REST) -> int:
    """The lowest timeline peak any choice of options reaches."""
    excess = np.zeros(1, dtype=np.int64)
    high = np.full(1, rest.head, dtype=np.int64)
    beside = rest.of_layers(len(sets))
    rows = zip(sets, inflight, beside, strict=True)
    for options, m, more in reversed(list(rows)):
        k, w, _ = options.columns
        w = w + more + np.where(w > 0, rest.again, 0)
        lean = pareto(k, k + w, np.zeros_like(k))
        k, w = k[lean], w[lean]
        high = (m * k + np.maximum(high[:, None], excess[:, None] + w)).ravel()
        excess = (excess[:, None] + (m - 1) * k).ravel()
        keep = pareto(high, excess, np.zeros_like(high))
        excess, high = excess[keep], high[keep]
    return max(int(np.maximum(high, excess + rest.tail).min()), rest.floor)


def solve_in_order(
    sets: Sequence[OptionSet],
    inflight: Sequence[int],
    budget: int,
    cutoff: int | None,
    rest: Rest = NO_REST,
) -> tuple[int, list[int], int] | None:
    """The cheapest options (one per layer) with a timeline peak within ``budget``.

    Dynamic programming from the last layer backward over (H, E, cost), dropping what is dominated,
    what cannot fit any more, and what the relaxed cost of the layers still to come puts at
    ``cutoff`` or above. Returns cost, option of each layer and states seen; None if there is none.
    """
    curves = _curves(sets, inflight)
    excess = cost = np.zeros(1, dtype=np.int64)
    high = np.full(1, rest.head, dtype=np.int64)
    beside = rest.of_layers(len(sets))
    back: list[tuple[Ints, Ints]] = []
    states = 0
    for at in range(len(sets) - 1, -1, -1):
        m = inflight[at]
        k, w, c = sets[at].columns
        w = w + beside[at] + np.where(w > 0, rest.again, 0)
        width = len(k)
        new_high = (m * k + np.maximum(high[:, None], excess[:, None] + w)).ravel()
        new_cost = (cost[:, None] + c).ravel()
        alive = np.flatnonzero(_promising(new_high, new_cost, budget, cutoff, curves[at]))
        if not len(alive):
            return None
        new_excess = excess[alive // width] + (m - 1) * k[alive % width]
        states += len(alive)
        keep = pareto(new_high[alive], new_excess, new_cost[alive])
        excess = new_excess[keep]
        alive = alive[keep]
        high, cost = new_high[alive], new_cost[alive]
        back.append((alive // width, alive % width))
    fits = np.flatnonzero((excess + rest.tail <= budget) & (high <= budget))
    if not len(fits) or rest.floor > budget:
        return None
    best = int(fits[np.argmin(cost[fits])])
    total = int(cost[best])
    picks: list[int] = []
    for parent, option in reversed(back):
        picks.append(int(option[best]))
        best = int(parent[best])
    return total, picks, states


_Curve = tuple[NDArray[np.float64], NDArray[np.float64]] | None


def _curves(sets: Sequence[OptionSet], inflight: Sequence[int]) -> list[_Curve]:
    # For each layer, the relaxed cost of everything before it, against the bytes left for that.
    curves: list[_Curve] = []
    counts: dict[tuple[int, int], list[int]] = {}
    kinds: dict[tuple[int, int], OptionSet] = {}
    for options, m in zip(sets, inflight, strict=True):
        parts = [(kinds[key], n[0], key[1]) for key, n in counts.items()]
        mix = mix_of(parts, max(max(o.levels) for o, _, _ in parts)) if parts else None
        curves.append(None if mix is None else mix.curve)
        key = (id(options), m)
        kinds[key] = options
        counts.setdefault(key, [0])[0] += 1
    return curves


def _promising(
    high: Ints, cost: Ints, budget: int, cutoff: int | None, curve: _Curve
) -> NDArray[np.bool_]:
    room = budget - high
    if curve is None:
        fits = room >= 0
        return fits if cutoff is None else fits & (cost < cutoff)
    weights, costs = curve
    fits = room >= int(weights[0])
    if cutoff is None:
        return fits
    # Floating point may only ever make the bound looser: a margin far above its rounding error.
    ahead = np.interp(room.astype(np.float64), weights, costs)
    ahead -= 1e-9 * (float(costs[0]) + 1.0)
    return fits & (cost + ahead < cutoff)
